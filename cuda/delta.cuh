// The code that the forward and the backward of delta.cu share: parameters, tiles, and what a chunk needs from q, k and the gates
// alone.
//
// Macros: FW_IN type of q, k, v, y; FW_K, FW_V padded widths of a block's memory, multiples of 16; FW_F, FW_W 1 where there is a
// decay f, a write strength w; FW_PRECISION of the products; FW_KSPLIT warps share the rows of one column of the memory;
// FW_SPAN tokens are in shared memory at a time, FW_PART between two saved memories; FW_ALIGNED rows start at 16 bytes;
// FW_PARTIAL there are several tiles of V, each with its share of the sums over V; FW_SHARED bytes of shared memory; those of
// row_map.cuh where q and k are rows to map.
#pragma once
#include "pairs.cuh"

constexpr int C = 16;  // tokens of a chunk
constexpr int CHUNKS = FW_SPAN / C;
constexpr int VALUE_WARPS = FW_V / 16;
constexpr int WARPS = VALUE_WARPS * FW_KSPLIT;
constexpr int THREADS = WARPS * 32;
constexpr int WARP_ROWS = FW_K / FW_KSPLIT;  // rows of the memory that a warp holds
constexpr int TILES = WARP_ROWS / 8;         // its accumulators
constexpr int INVERTERS = (CHUNKS + 1) / 2;  // warps that have work in invert_all
constexpr float SMALLEST = FW_NO_GATE;  // a smaller f counts as this: 0 in the forward, where nothing divides by it
#include "rows.cuh"

constexpr int SOLVE = P == BF16 ? TF32 : EXACT;  // products with the inverse: bf16 there is what breaks
constexpr int INPUT_ROW = tile_stride<In>(FW_V);
constexpr int PAIR_ROW = tile_stride<Op>(C);  // of (C,C) operands
constexpr int SOLVE_ROW = tile_stride<float>(C);

// The gates of a span and their products. D_ts is the product of the gates after s up to t, 1 for t = s, 0 for t < s.
struct Gates {
    float f[FW_SPAN], e[FW_SPAN], w[FW_SPAN];
    float start[FW_SPAN];    // what is left at t of the chunk's initial memory
    float erasing[FW_SPAN];  // e start
    float end[FW_SPAN];      // what is left at the chunk's end of what t wrote
};

// f(i) for i from first in steps of STEP below END; where that is one turn for every first, no loop is left.
template <int STEP, int END, class F>
__device__ __forceinline__ void each_turn(int first, F f) {
    if constexpr (STEP == END) f(first);
    else for (int i = first; i < END; i += STEP) f(i);
}

// Complete after cp_async_wait. Beyond T nothing is erased or written, and f is 1.
__device__ __forceinline__ void load_gates(Gates& g, const Params& p, int b, int h, int t0) {
    for (int i = threadIdx.x; i < FW_SPAN; i += THREADS) {
        const bool inside = t0 + i < p.T;
        const int t = inside ? t0 + i : 0, bytes = inside ? 4 : 0;
        cp_async4(g.e + i, at<float>(p.e, b, h, t), bytes);
        if (FW_W) cp_async4(g.w + i, at<float>(p.w, b, h, t), bytes);
        else g.w[i] = 1.f;
        if (FW_F && inside) cp_async4(g.f + i, at<float>(p.f, b, h, t));
        if (FW_F && !inside) g.f[i] = 1.f;
    }
}

// What stands for a smaller gate takes its place, by the thread that loaded it, after its cp_async_wait.
__device__ __forceinline__ void bound_gates(Gates& g) {
    for (int i = threadIdx.x; FW_F && i < FW_SPAN; i += THREADS) g.f[i] = fmaxf(g.f[i], SMALLEST);
}

// Run by one warp, between barriers: from q, k and f of chunk c what does not depend on the memory. scores = tril(D q k^T), start,
// erasing and end of the gates, D where there is a place for pairs, and erase = strict tril(D k k^T). SPLIT: of these erase alone, or
// all but erase, as `reads` says; the two are one code.
template <bool SPLIT>
__device__ __forceinline__ void compare(Gates& g, int c, const Op* q, const Op* k, Op* scores, float* pairs, float* erase,
                                        bool reads = true) {
    float read[2][4] = {}, keys[2][4] = {}, d[2][4];
    const Op* left = SPLIT && !reads ? k : q;
    for (int i = 0; i < FW_K; i += 16) {
        const Left<P> rows = left_from<P, false>(k + i, KEY_ROW), a = left_from<P, false>(left + i, KEY_ROW);
        Right<P> columns[2];
        right_of(columns, rows);
        multiply<P>(read[0], a, columns[0]);
        multiply<P>(read[1], a, columns[1]);
        if constexpr (!SPLIT) {
            multiply<P>(keys[0], rows, columns[0]);
            multiply<P>(keys[1], rows, columns[1]);
        }
    }
    if (FW_F) decay_pairs(d, g.f + c * C);
    const auto keep_erase = [&](float (&x)[2][4]) {
        keep_lower<false>(x);
#pragma unroll
        for (int i = 0; FW_F && i < 8; i++) x[i >> 2][i & 3] *= d[i >> 2][i & 3];
        each_two(x, [&](int t, int s, float x, float y) { put_couple(erase + t * SOLVE_ROW + s, x, y); });
    };
    if (SPLIT && !reads) return keep_erase(read);
    if constexpr (!SPLIT) keep_erase(keys);
    keep_lower<true>(read);
#pragma unroll
    for (int i = 0; FW_F && i < 8; i++) read[i >> 2][i & 3] *= d[i >> 2][i & 3];
    put_square<false>(scores, PAIR_ROW, read[0], read[1]);
    if (!FW_F) return;
    if (pairs) each_two(d, [&](int t, int s, float x, float y) { put_couple(pairs + t * SOLVE_ROW + s, x, y); });
    const int t = c * C + lane_row(), s = c * C + lane_column();
    if (lane_column() == 0) {
        const float first = g.f[c * C], low = d[0][0] * first, high = d[0][2] * first;
        g.start[t] = low, g.start[t + 8] = high;
        g.erasing[t] = g.e[t] * low, g.erasing[t + 8] = g.e[t + 8] * high;
    }
    if (lane_row() == 7) put_couple(g.end + s, d[0][2], d[0][3]), put_couple(g.end + s + 8, d[1][2], d[1][3]);
}

// The same for all chunks of a span, by all warps; two take a chunk where there are as many.
__device__ __forceinline__ void compare_all(Gates& g, const Op* q, const Op* k, Op (*scores)[C * PAIR_ROW],
                                            float (*pairs)[C * SOLVE_ROW], float (*erase)[C * SOLVE_ROW]) {
    constexpr bool SPLIT = WARPS >= 2 * CHUNKS;
    constexpr int COUNT = SPLIT ? 2 * CHUNKS : CHUNKS;
    each_turn<WARPS, COUNT>(threadIdx.x >> 5, [&](int job) {
        const int c = SPLIT ? job >> 1 : job, t = c * C * KEY_ROW;
        compare<SPLIT>(g, c, q + t, k + t, scores[c], pairs ? pairs[c] : nullptr, erase[c], job % 2 == 0);
    });
}

// Behind a barrier: inverse = (I + e erase)^-1 of all chunks, by forward substitution, which keeps its digits whatever the keys; a
// product of powers of the strict triangle would lose 4 of them where keys repeat. A warp takes two chunks, a lane one column. erase
// and inverse may be the same memory.
__device__ __forceinline__ void invert_all(const Gates& g, const float (*erases)[C * SOLVE_ROW], float (*inverses)[C * SOLVE_ROW]) {
    const int lane = threadIdx.x & 31, column = lane & 15;
    for (int first = (threadIdx.x >> 5) * 2; first < CHUNKS; first += 2 * WARPS) {
        const int c = min(first + (lane >> 4), CHUNKS - 1);
        const float *erase = erases[c], *e = g.e + c * C;
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
                if (t < s + 4) x[t] = (t == column ? 1.f : 0.f) - e[t] * x[t];
            }
        }
        __syncwarp();
        if (first + (lane >> 4) < CHUNKS) {
            float* inverse = inverses[c] + column;
#pragma unroll
            for (int t = 0; t < C; t++) inverse[t * SOLVE_ROW] = SOLVE == TF32 ? __uint_as_float(to_tf32(x[t])) : x[t];
        }
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
