// The adjoint dW of the memory before each part of the tokens but the first, for delta_backward.cu, whose blocks then take the parts
// side by side. With the names there, from the last chunk on,
//
//     dU = A^T dY + end (K dW_C),   dR = (I + e E)^-T dU,   dW_0 = start_C dW_C + Q^T (start dY) - K^T (e start dR)
//
// A block owns FW_V columns of dW, and takes FW_SPAN tokens at a time, as in delta.cu.
#define FW_NO_GATE 1e-30f  // as in the backward
#define FW_WALK 1
#include "delta.cuh"

struct __align__(16) Stage {
    Row q[FW_SPAN * ROW], k[FW_SPAN * ROW];
    Op dy[FW_SPAN * VALUE_ROW];
    Gates g;
};

struct __align__(16) BackwardShared {
    Stage stage[2];
#if FW_MAP
    Op q[FW_SPAN * KEY_ROW], k[FW_SPAN * KEY_ROW];
#endif
    float inverse[CHUNKS][C * SOLVE_ROW];
    Op scores[CHUNKS][C * PAIR_ROW];
    float4 sums[FW_KSPLIT > 1 ? 2 * WARPS * 2 * 32 : 1];
#if FW_PRECISION == F16
    Exponents exponents[CHUNKS];
#endif
};
static_assert(sizeof(BackwardShared) == FW_SHARED, "the host computes the same");

struct Part {
    const Op *q, *k;
    Stage& in;
    BackwardShared& s;

    __device__ __forceinline__ Chunk chunk(int c) const { return chunk_of(q, k, nullptr, in.g, s, c); }
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
    float dw[TILES][4];
    int turn = 0, exponent = 0;
    load_memory(dw, p.dfinal, at, p);
    load_stage(s.stage[0], p, at, last);
    for (int t0 = last, now = 0; t0 >= p.part; t0 -= FW_SPAN, now ^= 1) {
        Stage& in = s.stage[now];
        cp_async_wait<0>();
        bound_gates(in.g);
        __syncthreads();
        if (t0 > p.part) load_stage(s.stage[now ^ 1], p, at, t0 - FW_SPAN);
#if FW_MAP
        map_rows<FW_SPAN>(s.q, s.k, in.q, in.k, p.T - t0);
        __syncthreads();
        const Part part = {s.q, s.k, in, s};
#else
        const Part part = {in.q, in.k, in, s};
#endif
        compare_all(in.g, part.q, part.k, s.scores, nullptr, s.inverse, exponents_of(s));
        __syncthreads();
        invert_all(in.g.e, s.inverse, s.inverse);
        __syncthreads();
#if FW_PRECISION == F16
#pragma unroll 2  // others are better off without
#endif
        for (int c = CHUNKS - 1; c >= 0; c--) {
            const float total = scale_of(in.g.start + c * C + C - 1);
            value_side(part, at, c, dw, turn, exponent, [&](float (&x)[TILES][4]) { multiply_all(x, total); });
        }
        if (t0 % p.part == 0) {
            if (any_exponent(exponent)) scale_by(dw, power(-exponent));
            exponent = 0;
            store_memory(dw, adjoint_of(p.adjoints, p.K * p.V, t0 / p.part - 1), at, p);
        }
    }
}
