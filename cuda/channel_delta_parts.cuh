// What a block of channel_delta_backward.cu has in shared memory, and how it comes there.
#pragma once
#include "channel_delta.cuh"

static_assert(FW_SPAN == FW_PART, "a part at a time");

// A smaller gate makes a part far. The gradient of a near gate is divided by it, and so is the rounding of the sums that it is made of.
constexpr float LEAST_GATE = P == EXACT ? 1.f / 16 : 1e-3f;

struct __align__(16) Stage {
    Op q[FW_SPAN * KEY_ROW], k[FW_SPAN * KEY_ROW];
    In v[FW_SPAN * INPUT_ROW];  // dv takes its place
    float f[FW_SPAN * FLOAT_ROW], e[CHANNELS];
    Gates g;
    Op dy[FW_SPAN * VALUE_ROW];
};

constexpr int SUM_ROW = tile_stride<float>(C);

// Of a warp's 16 channels, as sums over columns of V: of q, p and k, each with its scale, and of k over pairs where a part is near.
struct __align__(16) Sums {
    float q[C * SUM_ROW], p[C * SUM_ROW], k[C * SUM_ROW], pairs[C * SUM_ROW];
    float passing[C];  // W_0 times its adjoint
};

struct __align__(16) BackwardShared {
    Stage in;
    Op p[FW_SPAN * KEY_ROW];
    Op memory[CHUNKS][FW_V * KEY_ROW];  // W_0, transposed
    Op dmemory[1][FW_V * KEY_ROW];      // dW_C, transposed; near, F_C dW_C
    Op u[CHUNKS][FW_V * PAIR_ROW], dr[1][FW_V * PAIR_ROW];        // transposed
    Op scores[CHUNKS][C * PAIR_ROW], dkeys[1][C * PAIR_ROW];      // A, then dA; X
    float inverse[CHUNKS][C * SOLVE_ROW], erase[CHUNKS][C * SOLVE_ROW];
    float totals[CHUNKS][FW_K];
    Sums columns[WARPS];
    float de[CHUNKS][C], dw[CHUNKS][WARPS][C], erased[CHUNKS][WARPS][C];
    float4 sums[FW_KSPLIT > 1 ? 2 * WARPS * 2 * 32 : 1];
};
static_assert(sizeof(BackwardShared) == FW_SHARED, "the host computes the same");

__device__ __forceinline__ int grouped(int) { return 0; }

// The part at hand.
struct Part {
    Stage& in;
    BackwardShared& s;
    bool near;

    __device__ __forceinline__ Chunk chunk(int c) const {
        const int t = c * C, row = t * KEY_ROW;
        return {in.q + row, s.p + row, in.k + row,   in.v + t * INPUT_ROW, s.scores[c], s.inverse[c],
                in.g.w + t, nullptr,   in.g.e + t, nullptr};
    }
};

__device__ __forceinline__ void load_part(Stage& s, const Params& p, const Place& at, int t0) {
    const int column = blockIdx.y * FW_V;
    load_rows<FW_SPAN>(s.q, s.k, p, at.b, at.h, t0);
    load_tile<In, In, FW_SPAN, FW_V>(s.v, p.v, at.b, at.h, t0, p.T, column, p.V);
    load_tile<In, Op, FW_SPAN, FW_V>(s.dy, p.dy, at.b, at.h, t0, p.T, column, p.V);
    load_gates(s.f, s.e, s.g, p, at.b, at.h, t0);
    cp_async_commit();
}

// Brings the next part into the L2 cache.
__device__ __forceinline__ void prefetch_part(const Params& p, const Place& at, int t0) {
    const int column = blockIdx.y * FW_V;
    prefetch_tile<In, FW_SPAN, FW_K>(p.q, at.b, at.h, t0, p.T, 0, p.K);
    prefetch_tile<In, FW_SPAN, FW_K>(p.k, at.b, at.h, t0, p.T, 0, p.K);
    prefetch_tile<float, FW_SPAN, FW_K>(p.f, at.b, at.h, t0, p.T, 0, p.K);
    if (FW_E == 2) prefetch_tile<float, FW_SPAN, FW_K>(p.e, at.b, at.h, t0, p.T, 0, p.K);
    prefetch_tile<In, FW_SPAN, FW_V>(p.v, at.b, at.h, t0, p.T, column, p.V);
    prefetch_tile<In, FW_SPAN, FW_V>(p.dy, at.b, at.h, t0, p.T, column, p.V);
    if (at.lane % 8 == 0) {
#pragma unroll 1
        for (int i = 0; i < UNITS; i++) prefetch_l2(border(p, at, t0 / FW_PART) + i * 32);
    }
}

// A part's dv, and the gradients of its strengths per token; all threads, behind a barrier.
__device__ __forceinline__ void store_part(BackwardShared& s, const Params& p, const Place& at, int t0) {
    const int rows = min(FW_SPAN, p.T - t0), column = blockIdx.y * FW_V;
    store_tile<FW_SPAN, FW_V, WARPS>(s.in.v, ::at<In>(p.dv, at.b, at.h, t0) + column, p.dv.t, rows, p.V - column, at.warp);
    for (int i = threadIdx.x; i < rows && (FW_E == 1 || FW_W); i += THREADS) {
        const int c = i / C, t = i % C;
        if (FW_E == 1) {
            float de = s.de[c][t];
            for (int n = 0; n < WARPS; n++) de -= s.erased[c][n][t];
            ::at<float>(p.de, at.b, at.h, t0 + i)[blockIdx.y * p.de.tile] = de;
        }
        float dw = 0.f;
        for (int n = 0; FW_W && n < VALUE_WARPS; n++) dw += s.dw[c][n][lane_of_column(t)];
        if (FW_W) ::at<float>(p.dw, at.b, at.h, t0 + i)[blockIdx.y * p.dw.tile] = dw;
    }
}
