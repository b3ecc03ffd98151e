// A block's slice of the memory in the accumulators of its warps, and what a chunk of tokens does to it.
#pragma once
#include "delta.cuh"

// Every warp has all rows of its columns, so that addresses and branches need not ask; in fp32 sm_120 has no registers for that.
constexpr bool ALL_ROWS = FW_KSPLIT == 1 && P == BF16;

struct Place {
    int b, h, bh, lane, warp, column, row;  // column: the warp's first of V; row: its first of K
    __device__ Place(const Params& p)
        : bh(blockIdx.x), lane(threadIdx.x & 31), warp(threadIdx.x >> 5), column(blockIdx.y * FW_V + local()),
          row(ALL_ROWS ? 0 : warp / VALUE_WARPS * WARP_ROWS) {
        b = bh / p.H, h = bh % p.H;
    }
    __device__ int first_row() const { return row; }
    __device__ int first_column() const { return column; }
    __device__ int local() const { return (ALL_ROWS ? warp : warp % VALUE_WARPS) * 16; }
    __device__ bool has_first_rows() const { return ALL_ROWS || warp < VALUE_WARPS; }
};

// The warp's slice of a memory to a transposed one in shared memory, rows of KEY_ROW.
__device__ __forceinline__ void keep_memory(const Place& at, Op* shared, const float (&x)[TILES][4]) {
#pragma unroll
    for (int n = 0; n < TILES; n += 2) put_square<false>(shared + at.local() * KEY_ROW + at.row + n * 8, KEY_ROW, x[n], x[n + 1]);
}

// The warp's 16 columns of a chunk, transposed in its accumulators: f(i, token, column in the block, x).
template <class F>
__device__ __forceinline__ void each_token(const Place& at, float (&x)[2][4], F f) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        f(i, lane_column() + (i & 1) + (i >> 2) * 8, at.local() + lane_row() + (i >> 1 & 1) * 8, x[i >> 2][i & 3]);
    }
}

// A warp's memory at the start of part s, as its lanes hold it, in the operands' type: what is read from it is no different. A lane
// has UNITS of 16 bytes, 32 apart.
constexpr int UNITS = TILES * 4 * (int)sizeof(Op) / 16;

__device__ __forceinline__ uint4* border(const Params& p, const Place& at, int s) {
    const int64_t parts = (p.T + FW_PART - 1) / FW_PART, block = (at.bh * parts + s) * gridDim.y + blockIdx.y;
    return (uint4*)p.borders + ((block * WARPS + at.warp) * UNITS) * 32 + at.lane;
}

__device__ __forceinline__ void save_border(const float (&w)[TILES][4], uint4* saved) {
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
#if FW_PRECISION == BF16
        const Left<P> x = left_of<P>(w[2 * i], w[2 * i + 1]);
        saved[i * 32] = make_uint4(x.x[0], x.x[1], x.x[2], x.x[3]);
#else
        *(float4*)(saved + i * 32) = make_float4(w[i][0], w[i][1], w[i][2], w[i][3]);
#endif
    }
}

__device__ __forceinline__ void load_border(float (&w)[TILES][4], const uint4* saved) {
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
#if FW_PRECISION == BF16
        const uint4 all = saved[i * 32];
        const unsigned x[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            w[2 * i + j / 2][j % 2 * 2] = __uint_as_float(x[j] << 16);
            w[2 * i + j / 2][j % 2 * 2 + 1] = __uint_as_float(x[j] & 0xFFFF0000u);
        }
#else
        const float4 all = *(const float4*)(saved + i * 32);
        w[i][0] = all.x, w[i][1] = all.y, w[i][2] = all.z, w[i][3] = all.w;
#endif
    }
}

// Chunk c of a span in shared memory.
struct Chunk {
    const Op *q, *k;
    const In* v;
    const Op* scores;
    const float *inverse, *w, *start, *erasing, *end;
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
    const Four w_t = four_of(c.w), erasing = four_of(c.erasing), start = READ && FW_F ? four_of(c.start) : Four{{1.f, 1.f, 1.f, 1.f}};
    load_transposed(source, c.v + at.local(), INPUT_ROW);
    sum_split(x, shared, turn);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int n = i >> 2, m = i & 3, t = 2 * n + (i & 1);
        source[n][m] = w_t.x[t] * source[n][m] - erasing.x[t] * x[n][m];
        u[n][m] = 0.f;
        if constexpr (READ) y[n][m] = start.x[t] * x[2 + n][m];
    }
    multiply_from<SOLVE, false, true>(u, left_of<SOLVE, true>(source[0], source[1]), c.inverse, SOLVE_ROW);
    if constexpr (READ) multiply_from<P, false>(y, left_of<P>(u[0], u[1]), c.scores, PAIR_ROW);
}

// x += k^T r over a chunk, x and r transposed.
__device__ __forceinline__ void write(const Place& at, float (&x)[TILES][4], const Left<P>& a, const Op* k) {
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
    write(at, w, left_of<P>(u[0], u[1]), c.k);
}
