// The adjoint dW of the memory before each part of the tokens but the first, for channel_delta_backward.cu, whose blocks then take the
// parts side by side. Of scaled rows and with the names there, near, where Z = F_C dW_C, from the last chunk on,
//
//     dU = A^T dY + K Z,   dR = (I + e E)^-T dU,   dW_0 = Z + Q^T dY - P^T (e dR)
//
// and far Z is dW_C, and dW_0 has F_C Z in its place. A block owns FW_V columns of dW, and takes FW_SPAN tokens at a time, as in
// channel_delta.cu.
#define FW_WALK 1
#include "channel_delta.cuh"

struct __align__(16) Stage {
    Op q[FW_SPAN * KEY_ROW], k[FW_SPAN * KEY_ROW];
    Op dy[FW_SPAN * VALUE_ROW];
    float f[FW_SPAN * FLOAT_ROW], e[CHANNELS];
    Gates g;
};

struct __align__(16) BackwardShared {
    Stage stage[2];
    Prepared prepared;
    float4 sums[FW_KSPLIT > 1 ? 2 * WARPS * 2 * 32 : 1];
};
static_assert(sizeof(BackwardShared) == FW_SHARED, "the host computes the same");

struct Part {
    Stage& in;
    BackwardShared& s;

    __device__ __forceinline__ Chunk chunk(int c) const { return chunk_of(in, nullptr, s.prepared, c); }
};
#include "erase_adjoint.cuh"

__device__ __forceinline__ void load_stage(Stage& s, const Params& p, const Place& at, int t0) {
    load_rows<FW_SPAN>(s.q, s.k, p, at.b, at.h, t0);
    load_tile<In, Op, FW_SPAN, FW_V>(s.dy, p.dy, at.b, at.h, t0, p.T, blockIdx.y * FW_V, p.V);
    load_gates(s.f, s.e, s.g, p, at.b, at.h, t0);
    cp_async_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) channel_delta_adjoint(const Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    BackwardShared& s = *(BackwardShared*)bytes;
    const Place at(p);
    const int last = (p.T - 1) / FW_SPAN * FW_SPAN;
    Border<true> border(p);
    float dw[TILES][4];
    int turn = 0, exponent = 0;  // of products in fp16
    load_memory(dw, p.dfinal, at, p);
    load_stage(s.stage[0], p, at, last);
    for (int t0 = last, now = 0; t0 >= p.part; t0 -= FW_SPAN, now ^= 1) {
        Stage& in = s.stage[now];
        cp_async_wait<0>();
        __syncthreads();
        if (t0 > p.part) load_stage(s.stage[now ^ 1], p, at, t0 - FW_SPAN);
        const bool near = prepare(span_of(in, s.prepared), p.T - t0, p.K, 0.f);
        const Part part = {in, s};
        for (int c = CHUNKS - 1; c >= 0; c--) {
            if (near) decay(at, dw, s.prepared.totals[c]);
            value_side(part, at, c, dw, turn, exponent, [&](float (&x)[TILES][4]) {
                if (!near) decay(at, x, s.prepared.totals[c]);
            });
        }
        if (t0 == border.token) {
            store_memory(dw, adjoint_of(p.adjoints, p.K * p.V, border.place), at, p);
            border.go_on(p);
        }
    }
}
