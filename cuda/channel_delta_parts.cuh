// What a block of channel_delta_backward.cu has in shared memory, and how it comes there.
#pragma once
#include "channel_delta.cuh"
#include "erase_parts.cuh"

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
    __align__(16) Firsts first;
    __align__(16) Op p[FW_SPAN * KEY_ROW];
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

    __device__ __forceinline__ Chunk chunk(int c) const { return chunk_of(in, in.v + c * C * INPUT_ROW, s, c); }
};

// Parts that copy_tile and store_whole take, but for the end of a sequence.
constexpr bool EVEN_PART = EVEN_TILE<In, Op, FW_SPAN, FW_K> && EVEN_TILE<In, Op, FW_SPAN, FW_V> &&
                           EVEN_TILE<float, float, FW_SPAN, FW_K> && WHOLE_ROWS<In, FW_V>;

__device__ __forceinline__ void load_part(Stage& s, const Params& p, const Firsts& first, int t0) {
    Params here = p;
    here.q = view_from(first.q, p.q), here.k = view_from(first.k, p.k);
    here.f = view_from(first.f, p.f), here.e = view_from(first.e, p.e), here.w = view_from(first.w, p.w);
    const int columns = p.V - blockIdx.y * FW_V;
    if constexpr (EVEN_PART) {
        if (whole_part(p, t0)) {
            copy_tile<Op, FW_SPAN, FW_K>(s.q, (const Op*)first.q, p.q.t, t0);
            copy_tile<Op, FW_SPAN, FW_K>(s.k, (const Op*)first.k, p.k.t, t0);
            copy_tile<In, FW_SPAN, FW_V>(s.v, (const In*)first.v, p.v.t, t0);
            copy_tile<Op, FW_SPAN, FW_V>(s.dy, (const Op*)first.dy, p.dy.t, t0);
            copy_tile<float, FW_SPAN, FW_K>(s.f, (const float*)first.f, p.f.t, t0);
            if constexpr (FW_E == 2) copy_tile<float, FW_SPAN, FW_K>(s.e, (const float*)first.e, p.e.t, t0);
            load_strengths(s.g, here, 0, 0, t0);
            return cp_async_commit();
        }
    }
    load_rows<FW_SPAN>(s.q, s.k, here, 0, 0, t0);
    load_tile<In, In, FW_SPAN, FW_V>(s.v, view_from(first.v, p.v), 0, 0, t0, p.T, 0, columns);
    load_tile<In, Op, FW_SPAN, FW_V>(s.dy, view_from(first.dy, p.dy), 0, 0, t0, p.T, 0, columns);
    load_gates(s.f, s.e, s.g, here, 0, 0, t0);
    cp_async_commit();
}

// Brings the next part into the L2 cache.
__device__ __forceinline__ void prefetch_part(const Params& p, const Firsts& first, const Place& at, int t0) {
    const int columns = p.V - blockIdx.y * FW_V;
    prefetch_tile<In, FW_SPAN, FW_K>(view_from(first.q, p.q), 0, 0, t0, p.T, 0, p.K);
    prefetch_tile<In, FW_SPAN, FW_K>(view_from(first.k, p.k), 0, 0, t0, p.T, 0, p.K);
    prefetch_tile<float, FW_SPAN, FW_K>(view_from(first.f, p.f), 0, 0, t0, p.T, 0, p.K);
    if (FW_E == 2) prefetch_tile<float, FW_SPAN, FW_K>(view_from(first.e, p.e), 0, 0, t0, p.T, 0, p.K);
    prefetch_tile<In, FW_SPAN, FW_V>(view_from(first.v, p.v), 0, 0, t0, p.T, 0, columns);
    prefetch_tile<In, FW_SPAN, FW_V>(view_from(first.dy, p.dy), 0, 0, t0, p.T, 0, columns);
    if (at.lane % 8 == 0) {
        const uint4* saved = border(p, at, t0 / FW_PART);
#pragma unroll 1
        for (int i = 0; i < UNITS; i++) prefetch_l2(saved + i * 32);
    }
}

// A part's dv, and the gradients of its strengths per token; all threads, behind a barrier.
__device__ __forceinline__ void store_part(BackwardShared& s, const Params& p, const Place& at, int t0) {
    const int rows = min(FW_SPAN, p.T - t0);
    In* dv = (In*)s.first.dv;
    bool stored = false;
    if constexpr (EVEN_PART) {
        stored = whole_part(p, t0);
        if (stored) store_whole<FW_SPAN, FW_V, WARPS>(s.in.v, dv, p.dv.t, t0, at.warp);
    }
    if (!stored) {
        store_tile<FW_SPAN, FW_V, WARPS>(s.in.v, dv + t0 * p.dv.t, p.dv.t, rows, p.V - blockIdx.y * FW_V, at.warp);
    }
    for (int i = threadIdx.x; i < rows && (FW_E == 1 || FW_W); i += THREADS) {
        const int c = i / C, t = i % C;
        if (FW_E == 1) {
            float de = s.de[c][t];
#pragma unroll
            for (int n = 0; n < WARPS; n++) de -= s.erased[c][n][t];
            *::at<float>(view_from(s.first.de, p.de), 0, 0, t0 + i) = de;
        }
        float dw = 0.f;
#pragma unroll
        for (int n = 0; FW_W && n < VALUE_WARPS; n++) dw += s.dw[c][n][lane_of_column(t)];
        if (FW_W) *::at<float>(view_from(s.first.dw, p.dw), 0, 0, t0 + i) = dw;
    }
}
