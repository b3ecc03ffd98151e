// The code that the forward and the backward of delta.cu share: parameters, tiles, and what a chunk needs from q, k and the gates
// alone.
//
// Macros: FW_IN type of q, k, v, y; FW_K, FW_V padded widths of a block's memory, multiples of 16; FW_F, FW_W 1 where there is a
// decay f, a write strength w; FW_PRECISION of the products; FW_KSPLIT warps share the rows of one column of the memory;
// FW_SPAN tokens are in shared memory at a time, FW_PART between two saved memories; FW_ALIGNED rows start at 16 bytes;
// FW_PARTIAL there are several tiles of V, each with its share of the sums over V; FW_SHARED bytes of shared memory; those of
// row_map.cuh where q and k are rows to map.
#pragma once
#include "delta_tile.cuh"
#include "row_map.cuh"

constexpr int C = 16;  // tokens of a chunk
constexpr int P = FW_PRECISION;
constexpr int SOLVE = P == BF16 ? TF32 : EXACT;  // products with the inverse: bf16 there is what breaks
constexpr int CHUNKS = FW_SPAN / C;
constexpr int VALUE_WARPS = FW_V / 16;
constexpr int WARPS = VALUE_WARPS * FW_KSPLIT;
constexpr int THREADS = WARPS * 32;
constexpr int WARP_ROWS = FW_K / FW_KSPLIT;  // rows of the memory that a warp holds
constexpr int TILES = WARP_ROWS / 8;         // its accumulators
constexpr float SMALLEST = FW_NO_GATE;  // a smaller f counts as this: 0 in the forward, where nothing divides by it

using In = FW_IN;
using Op = OperandOf<P>::type;
constexpr int KEY_ROW = tile_stride<Op>(FW_K);
constexpr int VALUE_ROW = tile_stride<Op>(FW_V);
constexpr int INPUT_ROW = tile_stride<In>(FW_V);
constexpr int PAIR_ROW = tile_stride<Op>(C);  // of (C,C) operands
constexpr int SOLVE_ROW = tile_stride<float>(C);

// Rows of q and k as they are in memory: x where there is a feature map.
#if FW_MAP
using Row = In;
constexpr int ROW_WIDTH = (FW_D + 16 / (int)sizeof(In) - 1) / (16 / (int)sizeof(In)) * (16 / (int)sizeof(In));
#else
using Row = Op;
constexpr int ROW_WIDTH = FW_K;
#endif
constexpr int ROW = tile_stride<Row>(ROW_WIDTH);

template <class A, class B>
constexpr bool same_type = false;
template <class A>
constexpr bool same_type<A, A> = true;

struct View {  // (B,H,T) or (B,H,T,X) with X contiguous; strides in elements
    void* p;
    int64_t b, h, t;
    int64_t tile;  // from one value tile's share of a sum to the next
};

struct Params {
    View q, k, v, f, e, w, y, dy, dq, dk, dv, df, de, dw;
    float *memory, *final;  // (B,H,K,V); memory and dfinal may be null, for 0
    void* borders;
    float *dfinal, *dmemory;
    int32_t H, T, K, V;
};

template <class T>
__device__ __forceinline__ T* at(const View& x, int b, int h, int t) {
    return (T*)x.p + b * x.b + h * x.h + t * x.t;
}

// Rows [t0, t0+ROWS) and columns [c0, c0+WIDTH) of x into a tile, 0 beyond T and beyond `columns`. Complete after cp_async_wait.
template <class From, class To, int ROWS, int WIDTH>
__device__ __forceinline__ void load_tile(To* tile, const View& x, int b, int h, int t0, int T, int c0, int columns) {
    constexpr int STRIDE = tile_stride<To>(WIDTH);
    const From* base = at<From>(x, b, h, 0);
#if FW_ALIGNED
    constexpr int N = 16 / sizeof(From), PER_ROW = WIDTH / N;
    constexpr bool COPIED = same_type<From, To>;
#pragma unroll(COPIED ? 1 : 4)
    for (int i = threadIdx.x; i < ROWS * PER_ROW; i += THREADS) {
        const int row = i / PER_ROW, column = i % PER_ROW * N;
        const bool inside = t0 + row < T && c0 + column < columns;
        const From* from = inside ? base + (t0 + row) * x.t + c0 + column : base;
        To* to = tile + row * STRIDE + column;
        if constexpr (COPIED) {
            cp_async16(to, from, inside ? 16 : 0);
        } else {
            const uint4 raw = inside ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
            const From* values = (const From*)&raw;
#pragma unroll
            for (int j = 0; j < N; j++) to[j] = from_float<To>(to_float(values[j]));
        }
    }
#else
    for (int i = threadIdx.x; i < ROWS * WIDTH; i += THREADS) {
        const int row = i / WIDTH, column = i % WIDTH;
        const bool inside = t0 + row < T && c0 + column < columns;
        tile[row * STRIDE + column] = from_float<To>(inside ? to_float(base[(t0 + row) * x.t + c0 + column]) : 0.f);
    }
#endif
}

__device__ __forceinline__ int row_width(const Params& p) {
#if FW_MAP
    return FW_D;
#else
    return p.K;
#endif
}

__device__ __forceinline__ void load_rows(Row* q, Row* k, const Params& p, int b, int h, int t0) {
    load_tile<In, Row, FW_SPAN, ROW_WIDTH>(q, p.q, b, h, t0, p.T, 0, row_width(p));
    load_tile<In, Row, FW_SPAN, ROW_WIDTH>(k, p.k, b, h, t0, p.T, 0, row_width(p));
}

#if FW_MAP
// The features of a span; all threads.
__device__ __forceinline__ void map_span(Op* q, Op* k, const In* rows_q, const In* rows_k, int tokens) {
    for (int i = threadIdx.x >> 5; i < 2 * FW_SPAN; i += WARPS) {
        const int t = i % FW_SPAN;
        map_row<FW_K>((i < FW_SPAN ? q : k) + t * KEY_ROW, (i < FW_SPAN ? rows_q : rows_k) + t * ROW, t < tokens);
    }
}
#endif

// Brings the rows that load_tile will read into the L2 cache.
template <class From, int ROWS, int WIDTH>
__device__ __forceinline__ void prefetch_tile(const View& x, int b, int h, int t0, int T, int c0, int columns) {
    constexpr int N = 128 / sizeof(From), PER_ROW = (WIDTH + N - 1) / N;
#pragma unroll 1
    for (int i = threadIdx.x; i < ROWS * PER_ROW; i += THREADS) {
        const int row = i / PER_ROW, column = i % PER_ROW * N;
        if (t0 + row < T && c0 + column < columns) prefetch_l2(at<From>(x, b, h, t0 + row) + c0 + column);
    }
}

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
    each_pair(read, [&](int i, int t, int s, float& x) {
        const float d = FW_F ? pairs[t * SOLVE_ROW + s] : 1.f;
        scores[t * PAIR_ROW + s] = from_float<Op>(s <= t ? x * d : 0.f);
        keys[i >> 2][i & 3] = s < t ? keys[i >> 2][i & 3] * d : 0.f;
    });
    __syncwarp();
    each_pair(keys, [&](int, int t, int s, float& x) { erase[t * SOLVE_ROW + s] = x; });
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
        for (int t = 0; t < C; t++) inverse[t * SOLVE_ROW + column] = x[t];
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
