// The adjoint dW of the memory before each part of the tokens but the first, for delta_backward.cu, whose blocks then take the parts
// side by side. With the names there, from the last chunk on,
//
//     dU = A^T dY + end (K dW_C),   dR = (I + e E)^-T dU,   dW_0 = start_C dW_C + Q^T (start dY) - K^T (e start dR)
//
// A block owns FW_V columns of dW, and takes FW_SPAN tokens at a time, as in delta.cu.
#define FW_NO_GATE 1e-30f  // as in the backward
#define FW_WALK 1
#include "delta.cuh"

constexpr int STAGES = 2 + FW_AHEAD;

struct __align__(16) Stage {
    Row q[FW_SPAN * ROW], k[FW_SPAN * ROW];
    Op dy[FW_SPAN * VALUE_ROW];
    Gates g;
};

struct __align__(16) BackwardShared {
    Stage stage[STAGES];
#if FW_MAP
    Op q[FW_SPAN * KEY_ROW], k[FW_SPAN * KEY_ROW];
#endif
    Prepared prepared[1 + FW_AHEAD];
    float4 sums[FW_KSPLIT > 1 ? 2 * WARPS * 2 * 32 : 1];
};
static_assert(sizeof(BackwardShared) == FW_SHARED, "the host computes the same");

struct Part {
    const Op *q, *k;
    Stage& in;
    BackwardShared& s;
    Prepared& prepared;

    __device__ __forceinline__ Chunk chunk(int c) const { return chunk_of(q, k, nullptr, in.g, prepared, c); }
};
#include "erase_adjoint.cuh"

__device__ __forceinline__ void load_stage(Stage& s, const Params& p, const Place& at, int t0) {
    load_rows<FW_SPAN>(s.q, s.k, p, at.b, at.h, t0);
    load_tile<In, Op, FW_SPAN, FW_V>(s.dy, p.dy, at.b, at.h, t0, p.T, blockIdx.y * FW_V, p.V);
    load_gates(s.g, p, at.b, at.h, t0);
    cp_async_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) delta_adjoint(const Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    BackwardShared& s = *(BackwardShared*)bytes;
    const Place at(p);
    const int last = (p.T - 1) / FW_SPAN * FW_SPAN;
    Border<true> border(p);
    float dw[TILES][4];
    int turn = 0, exponent = 0;
    if (!at.is_ahead()) load_memory(dw, p.dfinal, at, p);
    load_stage(s.stage[0], p, at, last);
    // as in delta.cu
    for (int t0 = last + FW_AHEAD * FW_SPAN, now = FW_AHEAD ? 2 : 0; t0 >= p.part; t0 -= FW_SPAN, now = (now + 1) % STAGES) {
        Stage& in = s.stage[now];
        const int turn_of_two = t0 / FW_SPAN & FW_AHEAD;
        cp_async_wait<0>();
        bound_gates(s.stage[(now + FW_AHEAD) % STAGES].g);
        __syncthreads();
        const int coming = t0 - FW_SPAN * (1 + FW_AHEAD);
        if (coming >= p.part) load_stage(s.stage[(now + 1 + FW_AHEAD) % STAGES], p, at, coming);
#if FW_AHEAD
        if (at.is_ahead()) {
            Stage& next = s.stage[(now + 1) % STAGES];
            if (t0 - FW_SPAN >= p.part) prepare_ahead(next.g, next.q, next.k, s.prepared[turn_of_two ^ 1]);
            continue;
        }
        if (t0 > last) continue;
#endif
        Prepared& prepared = s.prepared[turn_of_two];
#if FW_MAP
        map_rows<FW_SPAN>(s.q, s.k, in.q, in.k, p.T - t0);
        __syncthreads();
        const Part part = {s.q, s.k, in, s, prepared};
#else
        const Part part = {in.q, in.k, in, s, prepared};
#endif
        if (!FW_AHEAD) prepare(in.g, part.q, part.k, prepared);
#if FW_AHEAD
#pragma unroll
#elif FW_PRECISION == F16
#pragma unroll 2  // others are better off without
#endif
        for (int c = CHUNKS - 1; c >= 0; c--) {
            const float total = scale_of(in.g.start + c * C + C - 1);
            value_side(part, at, c, dw, turn, exponent, [&](float (&x)[TILES][4]) { multiply_all(x, total); });
        }
        if (t0 == border.token) {
            if (any_exponent(exponent)) scale_by(dw, power(-exponent));
            exponent = 0;
            store_memory(dw, adjoint_of(p.adjoints, p.K * p.V, border.place), at, p);
            border.go_on(p);
        }
    }
}
