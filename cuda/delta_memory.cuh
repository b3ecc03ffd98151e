// A block's slice of the memory in the accumulators of its warps, and what a chunk of tokens does to it.
#pragma once
#include "delta.cuh"

struct Place {
    int b, h, bh, lane, warp, column, row;  // column: the warp's first of V; row: its first of K
    __device__ Place(const Params& p)
        : bh(blockIdx.x), lane(threadIdx.x & 31), warp(threadIdx.x >> 5), column(blockIdx.y * FW_V + warp % VALUE_WARPS * 16),
          row(warp / VALUE_WARPS * WARP_ROWS) {
        b = bh / p.H, h = bh % p.H;
    }
    __device__ int first_row() const { return row; }
    __device__ int first_column() const { return column; }
    __device__ int local() const { return warp % VALUE_WARPS * 16; }
    __device__ bool has_first_rows() const { return warp < VALUE_WARPS; }
};

// The warp's slice of a transposed memory in shared memory, rows of KEY_ROW: f(two neighbours there, x, y).
template <class F>
__device__ __forceinline__ void each_couple(const Place& at, Op* shared, float (&x)[TILES][4], F f) {
    Op* first = shared + (at.local() + lane_row()) * KEY_ROW + at.row + lane_column();
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        f(first + n * 8, x[n][0], x[n][1]);
        f(first + 8 * KEY_ROW + n * 8, x[n][2], x[n][3]);
    }
}

// The warp's 16 columns of a chunk, transposed in its accumulators: f(i, token, column in the block, x).
template <class F>
__device__ __forceinline__ void each_token(const Place& at, float (&x)[2][4], F f) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        f(i, lane_column() + (i & 1) + (i >> 2) * 8, at.local() + lane_row() + (i >> 1 & 1) * 8, x[i >> 2][i & 3]);
    }
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
    return x;
}

// A warp's memory at the start of part s, as its lanes hold it, in the operands' type: what is read from it is no different.
struct __align__(4 * sizeof(Op)) Quad {
    Op x[4];
};

__device__ __forceinline__ Quad* border(const Params& p, const Place& at, int s) {
    const int64_t parts = (p.T + FW_PART - 1) / FW_PART, block = (at.bh * parts + s) * gridDim.y + blockIdx.y;
    return (Quad*)p.borders + ((block * WARPS + at.warp) * TILES) * 32 + at.lane;
}

__device__ __forceinline__ void save_border(const float (&w)[TILES][4], Quad* saved) {
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        saved[n * 32] = {from_float<Op>(w[n][0]), from_float<Op>(w[n][1]), from_float<Op>(w[n][2]), from_float<Op>(w[n][3])};
    }
}

__device__ __forceinline__ void load_border(float (&w)[TILES][4], const Quad* saved) {
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        const Quad q = saved[n * 32];
#pragma unroll
        for (int i = 0; i < 4; i++) w[n][i] = to_float(q.x[i]);
    }
}

// Chunk c of a span in shared memory.
struct Chunk {
    const Op *q, *k;
    const In* v;
    const Op* scores;
    const float *inverse, *e, *w, *start, *end;
};

__device__ __forceinline__ float scale_of(const float* gate) { return FW_F ? *gate : 1.f; }

// Reads chunk c with the warp's slice of W_0: y, if READ, and u, what is written.
template <bool READ>
__device__ __forceinline__ void recall(const Place& at, const Chunk& c, float (&w)[TILES][4], float (&u)[2][4], float (&y)[2][4],
                                       float4* shared, int& turn) {
    float x[READ ? 4 : 2][4] = {};  // (K W_0)^T and (Q W_0)^T
#pragma unroll
    for (int n = 0; n < TILES; n += 2) {
        const Left<P> a = left_of<P>(w[n], w[n + 1]);
        Right<P> b[2];
        right_from<P, false>(b, c.k + at.row + n * 8, KEY_ROW);
        multiply<P>(x[0], a, b[0]);
        multiply<P>(x[1], a, b[1]);
        if constexpr (READ) {
            right_from<P, false>(b, c.q + at.row + n * 8, KEY_ROW);
            multiply<P>(x[2], a, b[0]);
            multiply<P>(x[3], a, b[1]);
        }
    }
    float source[2][4];
    const Four w_t = four_of(c.w), e_t = four_of(c.e), start = FW_F ? four_of(c.start) : Four{{1.f, 1.f, 1.f, 1.f}};
    load_transposed(source, c.v + at.local(), INPUT_ROW);
    sum_split(x, shared, turn);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int n = i >> 2, m = i & 3, t = 2 * n + (i & 1);
        source[n][m] = w_t.x[t] * source[n][m] - e_t.x[t] * start.x[t] * x[n][m];
        u[n][m] = 0.f;
        if constexpr (READ) y[n][m] = start.x[t] * x[2 + n][m];
    }
    multiply_from<SOLVE, false, true>(u, left_of<SOLVE>(source[0], source[1]), c.inverse, SOLVE_ROW);
    if constexpr (READ) multiply_from<P, false>(y, left_of<P>(u[0], u[1]), c.scores, PAIR_ROW);
}

// x += k^T r over a chunk, x and r transposed.
__device__ __forceinline__ void write(const Place& at, float (&x)[TILES][4], const float (&r)[2][4], const Op* k) {
    const Left<P> a = left_of<P>(r[0], r[1]);
#pragma unroll
    for (int n = 0; n < TILES; n += 2) accumulate_from<P, true>(x[n], x[n + 1], a, k + at.row + n * 8, KEY_ROW);
}

__device__ __forceinline__ void advance(const Place& at, const Chunk& c, float (&w)[TILES][4], float (&u)[2][4]) {
    if (FW_F) {
        const Four end = four_of(c.end);
        each_token(at, u, [&](int i, int, int, float& x) { x *= end.x[(i >> 2) * 2 + (i & 1)]; });
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) w[n][i] *= c.start[C - 1];
        }
    }
    write(at, w, u, c.k);
}
