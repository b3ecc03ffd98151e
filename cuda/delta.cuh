// The code that the forward and the backward of delta.cu share: parameters, tiles, and what a chunk needs from q, k and the gates
// alone.
//
// Macros: FW_IN type of q, k, v, y; FW_K, FW_V padded widths of a block's memory, multiples of 16; FW_F, FW_W 1 where there is a
// decay f, a write strength w; FW_PRECISION of the products; FW_KSPLIT warps share the rows of one column of the memory;
// FW_SPAN tokens are in shared memory at a time, FW_PART between two saved memories; FW_ALIGNED rows start at 16 bytes;
// FW_PARTIAL there are several tiles of V, each with its share of the sums over V; FW_SHARED bytes of shared memory; those of
// row_map.cuh where q and k are rows to map.
#pragma once
#include "tile.cuh"

constexpr int C = 16;  // tokens of a chunk
constexpr int CHUNKS = FW_SPAN / C;
constexpr int VALUE_WARPS = FW_V / 16;
constexpr int WARPS = VALUE_WARPS * FW_KSPLIT;
constexpr int THREADS = WARPS * 32;
constexpr int WARP_ROWS = FW_K / FW_KSPLIT;  // rows of the memory that a warp holds
constexpr int TILES = WARP_ROWS / 8;         // its accumulators
constexpr float SMALLEST = FW_NO_GATE;  // a smaller f counts as this: 0 in the forward, where nothing divides by it
#include "rows.cuh"

constexpr int SOLVE = P == BF16 ? TF32 : EXACT;  // products with the inverse: bf16 there is what breaks
constexpr int INPUT_ROW = tile_stride<In>(FW_V);
constexpr int PAIR_ROW = tile_stride<Op>(C);  // of (C,C) operands
constexpr int SOLVE_ROW = tile_stride<float>(C);

// A warp's 16 columns of a tile of inputs, ROWS rows, to x.
template <int ROWS>
__device__ __forceinline__ void store_columns(const In* tile, const View& x, int b, int h, int t0, int T, int c0, int columns) {
    In* base = at<In>(x, b, h, 0);
    constexpr int N = FW_ALIGNED ? 16 / sizeof(In) : 1;
    for (int i = threadIdx.x & 31; i < ROWS * 16 / N; i += 32) {
        const int row = i / (16 / N), column = i % (16 / N) * N;
        if (t0 + row >= T || c0 + column >= columns) continue;
        const In* from = tile + row * INPUT_ROW + column;
        In* to = base + (t0 + row) * x.t + c0 + column;
        if constexpr (FW_ALIGNED) *(uint4*)to = *(const uint4*)from;
        else *to = *from;
    }
}

// The gates of a span and their products. D_ts is the product of the gates after s up to t, 1 for t = s, 0 for t < s.
struct Gates {
    float f[FW_SPAN], e[FW_SPAN], w[FW_SPAN];
    float start[FW_SPAN];  // what is left at t of the chunk's initial memory
    float end[FW_SPAN];    // what is left at the chunk's end of what t wrote
};

// Complete after cp_async_wait. Beyond T: 0.
__device__ __forceinline__ void load_gates(Gates& g, const Params& p, int b, int h, int t0) {
    for (int i = threadIdx.x; i < FW_SPAN; i += THREADS) {
        const bool inside = t0 + i < p.T;
        const int t = inside ? t0 + i : 0, bytes = inside ? 4 : 0;
        cp_async4(g.e + i, at<float>(p.e, b, h, t), bytes);
        if (FW_W) cp_async4(g.w + i, at<float>(p.w, b, h, t), bytes);
        else g.w[i] = 1.f;
        if (FW_F) cp_async4(g.f + i, at<float>(p.f, b, h, t), bytes);
    }
}

// Run by one warp: bounds f of chunk c from below by SMALLEST, and fills pairs (with D), start and end. `tokens` of the span exist.
__device__ __forceinline__ void decay_pairs(Gates& g, int c, int tokens, float* pairs) {
    const int t = threadIdx.x & 31;
    if (t < C) g.f[c * C + t] = c * C + t < tokens ? fmaxf(g.f[c * C + t], SMALLEST) : 1.f;
    __syncwarp();
    if (t < C) {
        float left = 1.f;
#pragma unroll
        for (int s = C - 1; s >= 0; s--) {
            pairs[t * SOLVE_ROW + s] = s > t ? 0.f : left;
            if (s <= t) left *= g.f[c * C + s];
        }
        g.start[c * C + t] = left;
    }
    __syncwarp();
    if (t < C) g.end[c * C + t] = pairs[(C - 1) * SOLVE_ROW + t];
}

// Run by one warp for chunk c of the span: scores = tril(D q k^T), erase = strict tril(D k k^T), inverse = (I + e erase)^-1.
// By forward substitution, which keeps its digits whatever the keys; a product of powers of the strict triangle would lose 4 of
// them where keys repeat. pairs, erase and inverse may be the same memory.
__device__ __forceinline__ void solve(Gates& g, int c, int tokens, const Op* q, const Op* k, Op* scores, float* pairs,
                                      float* erase, float* inverse) {
    float read[2][4] = {}, keys[2][4] = {};
    for (int i = 0; i < FW_K; i += 16) {
        multiply_from<P, false>(read, left_from<P, false>(q + i, KEY_ROW), k + i, KEY_ROW);
        multiply_from<P, false>(keys, left_from<P, false>(k + i, KEY_ROW), k + i, KEY_ROW);
    }
    if (FW_F) decay_pairs(g, c, tokens, pairs);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int t = lane_row() + (i & 1) * 8, s = lane_column() + (i >> 1) * 8;
        const float2 d = FW_F ? couple(pairs + t * SOLVE_ROW + s) : make_float2(1.f, 1.f);
        const float* both = read[i >> 1] + (i & 1) * 2;
        float* key = keys[i >> 1] + (i & 1) * 2;
        put_couple(scores + t * PAIR_ROW + s, s <= t ? both[0] * d.x : 0.f, s < t ? both[1] * d.y : 0.f);
        key[0] = s < t ? key[0] * d.x : 0.f, key[1] = s + 1 < t ? key[1] * d.y : 0.f;
    }
    __syncwarp();
    each_two(keys, [&](int t, int s, float& x, float& y) { put_couple(erase + t * SOLVE_ROW + s, x, y); });
    __syncwarp();
    const int column = threadIdx.x & 15;
    float x[C] = {};  // row by row the sum over the rows above, then the solution
#pragma unroll
    for (int s = 0; s < C; s += 4) {
#pragma unroll
        for (int t = s; t < C; t++) {
            const float4 row = *(const float4*)(erase + t * SOLVE_ROW + s);
            if (t > s) x[t] = fmaf(row.x, x[s], x[t]);
            if (t > s + 1) x[t] = fmaf(row.y, x[s + 1], x[t]);
            if (t > s + 2) x[t] = fmaf(row.z, x[s + 2], x[t]);
            if (t > s + 3) x[t] = fmaf(row.w, x[s + 3], x[t]);
            if (t < s + 4) x[t] = (t == column ? 1.f : 0.f) - g.e[c * C + t] * x[t];
        }
    }
    __syncwarp();
    if ((threadIdx.x & 31) < C) {
#pragma unroll
        for (int t = 0; t < C; t++) inverse[t * SOLVE_ROW + column] = SOLVE == TF32 ? __uint_as_float(to_tf32(x[t])) : x[t];
    }
}

// Sums x over the FW_KSPLIT warps that hold slices of the same columns; every one of them gets the sum. All threads take part;
// `turn` alternates, so that one barrier is enough.
template <int N>
__device__ __forceinline__ void sum_split(float (&x)[N][4], float4* shared, int& turn) {
#if FW_KSPLIT > 1
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float4* all = shared + turn * WARPS * N * 32;
    turn ^= 1;
#pragma unroll
    for (int n = 0; n < N; n++) all[(warp * N + n) * 32 + lane] = make_float4(x[n][0], x[n][1], x[n][2], x[n][3]);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; n++) {
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int split = 0; split < FW_KSPLIT; split++) {
            const float4 one = all[((split * VALUE_WARPS + warp % VALUE_WARPS) * N + n) * 32 + lane];
            sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
        }
        x[n][0] = sum.x, x[n][1] = sum.y, x[n][2] = sum.z, x[n][3] = sum.w;
    }
#endif
}
