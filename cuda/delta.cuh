// The gates of the rules delta and gated_delta, at most one decay per token, and what a chunk needs from q, k and the gates alone.
#pragma once
#include "erase.cuh"

constexpr float SMALLEST = FW_NO_GATE;  // a smaller f counts as this: 0 in the forward, where nothing divides by it

// The gates of a span and their products. D_ts is the product of the gates after s up to t, 1 for t = s, 0 for t < s.
struct Gates {
    float f[FW_SPAN], e[FW_SPAN], w[FW_SPAN];
    float start[FW_SPAN];    // what is left at t of the chunk's initial memory
    float erasing[FW_SPAN];  // e start
    float end[FW_SPAN];      // what is left at the chunk's end of what t wrote
};

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
                                        Exponents* exponents, bool reads = true) {
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
    put_pairs<&Exponents::scores>(scores, read, exponents);
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
                                            float (*pairs)[C * SOLVE_ROW], float (*erase)[C * SOLVE_ROW], Exponents* exponents) {
    constexpr bool SPLIT = WARPS >= 2 * CHUNKS;
    constexpr int COUNT = SPLIT ? 2 * CHUNKS : CHUNKS;
    each_turn<WARPS, COUNT>(threadIdx.x >> 5, [&](int job) {
        const int c = SPLIT ? job >> 1 : job, t = c * C * KEY_ROW;
        compare<SPLIT>(g, c, q + t, k + t, scores[c], pairs ? pairs[c] : nullptr, erase[c], exponents + c, job % 2 == 0);
    });
}

// What chunks need that does not depend on the memory; with FW_AHEAD of two spans in turns.
struct Prepared {
    float inverse[CHUNKS][C * SOLVE_ROW];
    Op scores[CHUNKS][C * PAIR_ROW];
#if FW_PRECISION == F16
    Exponents exponents[CHUNKS];
#endif
};

// From a span's rows and gates in shared memory, behind a barrier, by all warps.
__device__ __forceinline__ void prepare(Gates& g, const Op* q, const Op* k, Prepared& s) {
    compare_all(g, q, k, s.scores, nullptr, s.inverse, exponents_of(s));
    __syncthreads();
    invert_all(g.e, s.inverse, s.inverse);
    __syncthreads();
}

// The same by the warps that are a span ahead.
__device__ __forceinline__ void prepare_ahead(Gates& g, const Op* q, const Op* k, Prepared& s) {
    const int c = (threadIdx.x >> 5) - WARPS, t = c * C;
    compare<false>(g, c, q + t * KEY_ROW, k + t * KEY_ROW, s.scores[c], nullptr, s.inverse[c], exponents_of(s) + c);
    __syncwarp();
    invert(g.e + t, s.inverse[c], s.inverse[c], (threadIdx.x & 31) < C);
}

// Chunk c of a span: v is the chunk's own, q and k are the span's.
template <class S>
__device__ __forceinline__ Chunk chunk_of(const Op* q, const Op* k, const In* v, const Gates& g, S& s, int c) {
    const int t = c * C;
    const Op* keys = k + t * KEY_ROW;
    return {q + t * KEY_ROW, keys, keys, v, s.scores[c], s.inverse[c], g.w + t, g.start + t, (FW_F ? g.erasing : g.e) + t, g.end + t,
            exponents_of(s) + c};
}

__device__ __forceinline__ float scale_of(const float* gate) { return FW_F ? *gate : 1.f; }

// What a chunk leaves of a memory or its adjoint.
__device__ __forceinline__ void multiply_all(float (&x)[TILES][4], float total) {
#pragma unroll
    for (int n = 0; n < TILES; n++) {
#pragma unroll
        for (int i = 0; FW_F && i < 4; i++) x[n][i] *= total;
    }
}

__device__ __forceinline__ void advance(const Place& at, const Chunk& c, float (&w)[TILES][4], float (&u)[2][4], Left<P> written) {
    if (FW_F) {
        const Four end = four_of(c.end);
        each_token(at, u, [&](int i, int, int, float& x) { x *= end.x[(i >> 2) * 2 + (i & 1)]; });
        multiply_all(w, c.start[C - 1]);
        written = left_of<P>(u[0], u[1]);
    }
    write(at, w, written, c.k);
}
