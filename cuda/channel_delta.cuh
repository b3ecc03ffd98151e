// What a chunk needs from q, k and the gates alone, where decay is per channel.
//
// With F_t the products of f from the chunk's start up to token t, rows are scaled once, channel by channel, on their way:
//
//     near    Q F, P F, K / F    W_C = F_C (W_0 + K^T U)      pairs are one product of what was scaled
//     far     Q F, P F, K end    W_C = F_C W_0 + K^T U        pairs are summed up in fp32, channel by channel
//
// and in these rows everything else is the delta rule. A span is near where every F_C is at least LEAST_PRODUCT. No factor of the
// other way exceeds 1 and nothing is divided, so that it is right for every gate, 0 included. It is slow.
//
// Macros beside those of erase.cuh: FW_E 1 for a strength per token of an erase that reads with k, so that P = K; 2 for the rows P
// in place of strengths. FW_F is 0.
#pragma once
#include "erase.cuh"

constexpr int FLOAT_ROW = tile_stride<float>(FW_K);
constexpr int CHANNELS = FW_E == 2 ? FW_SPAN * FLOAT_ROW : 4;
constexpr float LEAST_PRODUCT = 1e-24f;  // of a chunk's gates; what is divided by it is in the range of fp32

struct Gates {
    float e[FW_SPAN], w[FW_SPAN];
};

// Complete after cp_async_wait. Beyond T nothing is erased or written.
__device__ __forceinline__ void load_strengths(Gates& g, const Params& p, int b, int h, int t0) {
    for (int i = threadIdx.x; i < FW_SPAN; i += THREADS) {
        const bool inside = t0 + i < p.T;
        const int t = inside ? t0 + i : 0, bytes = inside ? 4 : 0;
        if (FW_E == 1) cp_async4(g.e + i, at<float>(p.e, b, h, t), bytes);
        else g.e[i] = 1.f;
        if (FW_W) cp_async4(g.w + i, at<float>(p.w, b, h, t), bytes);
        else g.w[i] = 1.f;
    }
}

// The same with the rows of f and of the key that an erase reads with.
__device__ __forceinline__ void load_gates(float* f, float* e, Gates& g, const Params& p, int b, int h, int t0) {
    load_tile<float, float, FW_SPAN, FW_K>(f, p.f, b, h, t0, p.T, 0, p.K);
    if constexpr (FW_E == 2) load_tile<float, float, FW_SPAN, FW_K>(e, p.e, b, h, t0, p.T, 0, p.K);
    load_strengths(g, p, b, h, t0);
}

// Behind a barrier: a gate of no token or no channel is 1.
__device__ __forceinline__ void complete_gates(float* f, int tokens, int width) {
    if (tokens >= FW_SPAN && width == FW_K) return;
    for (int i = threadIdx.x; i < FW_SPAN * FW_K; i += THREADS) {
        const int t = i / FW_K, channel = i % FW_K;
        if (t >= tokens || channel >= width) f[t * FLOAT_ROW + channel] = 1.f;
    }
    __syncthreads();
}

// A lane has two channels over half of a chunk; the lane 16 away has the other half.
struct Column {
    int chunk, channel, late;
    bool active;
    __device__ __forceinline__ int token() const { return chunk * C + late * 8; }
};

template <class F>
__device__ __forceinline__ void each_column(F f) {
    constexpr int GROUPS = (FW_K + 31) / 32;
    const int lane = threadIdx.x & 31;
    each_turn<WARPS, CHUNKS * GROUPS>(threadIdx.x >> 5, [&](int job) {
        const int channel = job % GROUPS * 32 + 2 * (lane & 15);
        f(Column{job / GROUPS, channel, lane >> 4, channel < FW_K});
    });
}

__device__ __forceinline__ float2 product(float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); }
__device__ __forceinline__ float2 ones() { return make_float2(1.f, 1.f); }

__device__ __forceinline__ float2 exchange(float2 x, int distance) {
    return make_float2(__shfl_xor_sync(~0u, x.x, distance), __shfl_xor_sync(~0u, x.y, distance));
}

// Whether all chunks of the span are near, and no gate is below `least`. A barrier.
__device__ __forceinline__ bool vote_near(const float* f, float least) {
    bool near = true;
    each_column([&](const Column& at) {
        float2 whole = ones();
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 gate = at.active ? couple(f + (at.token() + j) * FLOAT_ROW + at.channel) : ones();
            near = near && fminf(gate.x, gate.y) >= least;
            whole = product(whole, gate);
        }
        whole = product(whole, exchange(whole, 16));
        near = near && fminf(whole.x, whole.y) >= LEAST_PRODUCT;
    });
    return __syncthreads_and(near);
}

// As the products take them, so that what is multiplied by them elsewhere is the same number.
__device__ __forceinline__ void put_rounded(Op* to, float x, float y) {
    if constexpr (P == TF32) x = __uint_as_float(to_tf32(x)), y = __uint_as_float(to_tf32(y));
    put_couple(to, x, y);
}

// The rows and gates of a span in shared memory, and the places of what is made of them: of each chunk the scores, the erase and its
// inverse, which may be one memory, and the products of the gates.
struct Span {
    Op *q, *k, *p;
    float* f;
    const float *e, *strengths;
    Op (*scores)[C * PAIR_ROW];
    float (*erase)[C * SOLVE_ROW], (*inverse)[C * SOLVE_ROW], (*totals)[FW_K];
};

// What is made of a span in the kernels that keep no erase.
struct Prepared {
    Op p[FW_SPAN * KEY_ROW];
    float inverse[CHUNKS][C * SOLVE_ROW];
    Op scores[CHUNKS][C * PAIR_ROW];
    float totals[CHUNKS][FW_K];
};

template <class Stage>
__device__ __forceinline__ Span span_of(Stage& in, Prepared& s) {
    return {in.q, in.k, s.p, in.f, in.e, in.g.e, s.scores, s.inverse, s.inverse, s.totals};
}

// Chunk c of a span: v is the chunk's own.
template <class Stage, class S>
__device__ __forceinline__ Chunk chunk_of(const Stage& in, const In* v, const S& s, int c) {
    const int t = c * C, row = t * KEY_ROW;
    return {in.q + row, s.p + row, in.k + row, v, s.scores[c], s.inverse[c], in.g.w + t, nullptr, in.g.e + t, nullptr, nullptr};
}

// The rows of q and k in place, those of P from k or e, and the products of the gates of each chunk.
template <bool NEAR>
__device__ __forceinline__ void scale_rows(const Span& s) {
    each_column([&](const Column& at) {
        float2 gates[8], start[8], whole = ones();
#pragma unroll
        for (int j = 0; j < 8; j++) {
            gates[j] = at.active ? couple(s.f + (at.token() + j) * FLOAT_ROW + at.channel) : ones();
            start[j] = whole = product(whole, gates[j]);
        }
        const float2 other = exchange(whole, 16), before = at.late ? other : ones();
        float2 after = at.late ? ones() : other;
        if (!at.active) return;
        if (at.late) put_couple(s.totals[at.chunk] + at.channel, whole.x * other.x, whole.y * other.y);
#pragma unroll
        for (int j = 7; j >= 0; j--) {
            const int t = at.token() + j, i = t * KEY_ROW + at.channel;
            const float2 scale = product(before, start[j]), query = product(couple(s.q + i), scale), key = couple(s.k + i);
            const float2 reader = product(FW_E == 2 ? couple(s.e + t * FLOAT_ROW + at.channel) : key, scale);
            const float2 back = NEAR ? make_float2(reciprocal(scale.x), reciprocal(scale.y)) : after;
            put_rounded(s.q + i, query.x, query.y);
            put_rounded(s.p + i, reader.x, reader.y);
            put_rounded(s.k + i, key.x * back.x, key.y * back.y);
            if (!NEAR) after = product(after, gates[j]);
        }
    });
}

// Run by one warp, of scaled rows: tril(Q K^T), or for ERASE the strict triangle of P K^T.
template <bool ERASE, class T>
__device__ __forceinline__ void compare_near(T* to, const Op* left, const Op* k) {
    float x[2][4] = {};
#pragma unroll
    for (int i = 0; i < FW_K; i += 16) multiply_from<P, false>(x, left_from<P, false>(left + i, KEY_ROW), k + i, KEY_ROW);
    keep_lower<!ERASE>(x);
    put_square<false>(to, tile_stride<T>(C), x[0], x[1]);
}

// The same of rows that are not scaled. A lane has the pairs of one key, in half of the channels.
template <bool ERASE, class T, class Row>
__device__ __forceinline__ void compare_far(T* to, const Row* left, int stride, const Op* k, const float* f) {
    const int lane = threadIdx.x & 31, s = lane & 15;
    float sum[C] = {};
#pragma unroll 1
    for (int i = (lane >> 4) * FW_K / 2; i < ((lane >> 4) + 1) * FW_K / 2; i++) {
        float x = to_float(k[s * KEY_ROW + i]);
#pragma unroll
        for (int t = 0; t < C; t++) {
            if (t > s) x *= f[t * FLOAT_ROW + i];
            if (ERASE ? t > s : t >= s) sum[t] = fmaf(to_float(left[t * stride + i]), x, sum[t]);
        }
    }
#pragma unroll
    for (int t = 0; t < C; t++) {
        const float whole = sum[t] + __shfl_xor_sync(~0u, sum[t], 16);
        if (lane < C) to[t * tile_stride<T>(C) + s] = from_float<T>(whole);
    }
}

// Run by all threads behind a barrier, and with one at its end: scales the rows of a span of so many tokens and channels, and compares
// them. Returns whether the span is near, for which no gate may be below `least`.
__device__ __forceinline__ bool prepare(const Span& s, int tokens, int width, float least) {
    const int warp = threadIdx.x >> 5;
    complete_gates(s.f, tokens, width);
    const bool near = vote_near(s.f, least);
    if (near) {
        scale_rows<true>(s);
        __syncthreads();
        each_turn<WARPS, 2 * CHUNKS>(warp, [&](int job) {
            const int c = job / 2, row = c * C * KEY_ROW;
            if (job % 2 == 0) compare_near<false>(s.scores[c], s.q + row, s.k + row);
            else compare_near<true>(s.erase[c], s.p + row, s.k + row);
        });
    } else {
        each_turn<WARPS, 2 * CHUNKS>(warp, [&](int job) {
            const int c = job / 2, row = c * C * KEY_ROW, gates = c * C * FLOAT_ROW;
            const Op* k = s.k + row;
            if (job % 2 == 0) compare_far<false>(s.scores[c], s.q + row, KEY_ROW, k, s.f + gates);
            else if constexpr (FW_E == 2) compare_far<true>(s.erase[c], s.e + gates, FLOAT_ROW, k, s.f + gates);
            else compare_far<true>(s.erase[c], k, KEY_ROW, k, s.f + gates);
        });
        __syncthreads();
        scale_rows<false>(s);
    }
    __syncthreads();
    invert_all(s.strengths, s.erase, s.inverse);
    __syncthreads();
    return near;
}

// A memory or its adjoint times the products of a chunk's gates.
__device__ __forceinline__ void decay(const Place& at, float (&x)[TILES][4], const float* totals) {
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        const float2 total = couple(totals + at.row + n * 8 + lane_column());
        x[n][0] *= total.x, x[n][1] *= total.y, x[n][2] *= total.x, x[n][3] *= total.y;
    }
}

// The memory after a chunk.
__device__ __forceinline__ void advance(const Place& at, const Chunk& c, float (&w)[TILES][4], const Left<P>& written, bool near,
                                        const float* totals) {
    if (!near) decay(at, w, totals);
    write(at, w, written, c.k);
    if (near) decay(at, w, totals);
}
