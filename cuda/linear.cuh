// The code that the forward and the backward of linear.cu share: a warp's share of the memory and of the tokens, and products of
// gates.
//
// Macros: FW_IN type of q, k, v, y; FW_K, FW_V padded widths of a block's memory, multiples of 16; FW_F, FW_W 1 where there is a
// decay f, a write strength w; FW_PRECISION of the products; FW_WARPS of a block; FW_CHUNK tokens at a time, 16, 32 or 64;
// FW_ALIGNED rows start at 16 bytes; FW_PARTIAL there are several tiles of V, each with its share of the sums over V; FW_SUMS 1
// where reads are divided; FW_SHARED bytes of shared memory; those of row_map.cuh where q and k are rows to map.
#pragma once
#include "pairs.cuh"
#include "range.cuh"

constexpr int C = FW_CHUNK;
constexpr int BLOCKS = C / 16;  // of 16 tokens
constexpr int WARPS = FW_WARPS;
constexpr int THREADS = WARPS * 32;
constexpr float SMALLEST = FW_NO_GATE;  // a smaller f counts as this: 0 in the forward, where nothing divides by it
#include "rows.cuh"

constexpr int VALUE_SLICES = FW_V / 16, KEY_SLICES = WARPS / VALUE_SLICES;
constexpr int SLICE = FW_K / KEY_SLICES, TILES = SLICE / 8;
static_assert(WARPS % VALUE_SLICES == 0 && SLICE % 16 == 0, "every warp has 16 columns of the memory and some of their rows");

// Warps that share 16 tokens, each with some columns of what is computed for them.
__host__ __device__ constexpr int groups(int width) {
    int n = 1;
    while (2 * n * BLOCKS <= WARPS && width % (32 * n) == 0) n *= 2;
    return n;
}

struct Place {
    int bh, b, h, lane, warp, value, key;  // value, key: the first column and row of the warp's slice of the memory
    __device__ Place(const Params& p)
        : bh(blockIdx.x), lane(threadIdx.x & 31), warp(threadIdx.x >> 5), value(warp % VALUE_SLICES * 16),
          key(warp / VALUE_SLICES * SLICE) {
        b = bh / p.H, h = bh % p.H;
    }
    __device__ int first_row() const { return key; }
    __device__ int first_column() const { return blockIdx.y * FW_V + value; }
};

// The slice to its place in shared memory, rows of KEY_ROW for columns of the memory.
__device__ __forceinline__ void share_memory(Op* shared, const float (&x)[TILES][4], const Place& at) {
    Op* first = shared + (at.value + lane_row()) * KEY_ROW + at.key + lane_column();
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        put_couple(first + n * 8, x[n][0], x[n][1]);
        put_couple(first + 8 * KEY_ROW + n * 8, x[n][2], x[n][3]);
    }
}

// What a block's memory is multiplied by in shared memory, a power of 2: in fp16 not 1 where the memory leaves the range.
struct Scale {
    int exponent = 0;

    // acc, a product with the memory, as it would be without.
    template <int N>
    __device__ __forceinline__ void undo(float (&acc)[N][4]) const {
        if (P != F16 || __builtin_expect(exponent == 0, 1)) return;
        const float back = power(-exponent);
#pragma unroll
        for (int i = 0; i < N * 4; i++) acc[i / 4][i % 4] *= back;
    }
};

// share_memory and a barrier, all threads: in fp16 with the scale that the memory takes, before and behind it.
template <class S>
__device__ __forceinline__ void share_in_range(Op* shared, const float (&x)[TILES][4], const Place& at, Scale& scale, S& s) {
    if constexpr (P != F16) {
        share_memory(shared, x, at);
        __syncthreads();
    } else {
        unsigned* first = (unsigned*)(shared + (at.value + lane_row()) * KEY_ROW + at.key + lane_column());
        const auto put = [&](float up) {
            unsigned most = 0;
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const unsigned low = pack<P>(x[n][0] * up, x[n][1] * up), high = pack<P>(x[n][2] * up, x[n][3] * up);
                first[n * 4] = low, first[4 * KEY_ROW + n * 4] = high;
                most = larger(most, larger(low, high));
            }
            return most;
        };
        unsigned most;
        if (__builtin_expect(scale.exponent == 0, 1)) most = put(1.f);
        else most = put(power(scale.exponent));
        // One thread of a warp for medium numbers and all others for large ones: the sum tells both.
        const bool large = __any_sync(~0u, has_large(most)), medium = __any_sync(~0u, has_medium(most));
        const int votes = __syncthreads_count(at.lane == 0 ? medium : large);
        if (__builtin_expect(votes < 31 && votes != 0, 1)) return;
        const float own = warp_largest(largest_of(x));
        if (at.lane == 0) s.largest[at.warp] = own;
        __syncthreads();
        float all = 0.f;
        for (int i = 0; i < WARPS; i++) all = fmaxf(all, s.largest[i]);
        scale.exponent = range_exponent(all);
        put(power(scale.exponent));
        __syncthreads();
    }
}

// The memory before a part of the sequence in device memory: FW_K wide rows, of V rounded up to 16.
__device__ __forceinline__ Op* border(const Params& p, const Place& at, int part, int parts) {
    return (Op*)p.borders + (((int64_t)at.bh * parts + part) * ((p.V + 15) / 16 * 16) + blockIdx.y * FW_V) * FW_K;
}

// In fp16 the exponent of its scale, for each 16 columns.
__device__ __forceinline__ int* border_scale(const Params& p, const Place& at, int part, int parts) {
    return p.scales + ((int64_t)at.bh * parts + part) * ((p.V + 15) / 16) + blockIdx.y * (FW_V / 16);
}

__device__ __forceinline__ int border_rows(const Params& p) { return min(FW_V, (p.V + 15) / 16 * 16 - (int)blockIdx.y * FW_V); }

// Complete after cp_async_wait. Beyond `tokens`: 0.
__device__ __forceinline__ void load_numbers(float* to, const View& x, const Place& at, int t0, int tokens) {
#pragma unroll 1
    for (int i = threadIdx.x; i < C; i += THREADS) {
        const bool inside = t0 + i < tokens;
        cp_async4(to + i, ::at<float>(x, at.b, at.h, inside ? t0 + i : 0), inside ? 4 : 0);
    }
}

// Complete after cp_async_wait. Beyond T: 0.
__device__ __forceinline__ void load_gates(float* f, float* w, const Params& p, const Place& at, int t0) {
    for (int i = threadIdx.x; (FW_F || FW_W) && i < C; i += THREADS) {
        const bool inside = t0 + i < p.T;
        const int t = inside ? t0 + i : 0, bytes = inside ? 4 : 0;
        if (FW_F) cp_async4(f + i, ::at<float>(p.f, at.b, at.h, t), bytes);
        if (FW_W) cp_async4(w + i, ::at<float>(p.w, at.b, at.h, t), bytes);
    }
}

// Products of the gates of a chunk. A block is 16 tokens; within one the products start at its first token.
struct __align__(16) Products {
    float gate[C];      // f, 1 beyond T
    float start[C];     // of the block's gates up to t
    float end[C];       // of the block's gates after t
    float total[BLOCKS];
    float before[BLOCKS], after[BLOCKS];  // of the chunk's blocks before and after this one
};

// Run by one warp. `tokens` of the chunk exist.
__device__ __forceinline__ void multiply_gates(Products& to, const float* f, int tokens) {
    constexpr int EACH = C == 64 ? 2 : 1, LANES = 16 / EACH;
    const int lane = threadIdx.x & 31, first = lane * EACH;
    float g[EACH], up = 1.f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        g[i] = first + i < min(tokens, C) ? f[first + i] : 1.f;
        g[i] = g[i] < SMALLEST ? SMALLEST : g[i];  // which leaves NaN as it is
        up *= g[i];
    }
    float down = up;
#pragma unroll
    for (int o = 1; o < LANES; o <<= 1) {
        const float earlier = __shfl_up_sync(~0u, up, o, LANES), later = __shfl_down_sync(~0u, down, o, LANES);
        if ((lane & (LANES - 1)) >= o) up *= earlier;
        if ((lane & (LANES - 1)) + o < LANES) down *= later;
    }
    float total[BLOCKS];
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) total[b] = __shfl_sync(~0u, up, b * LANES + LANES - 1);
    float start = __shfl_up_sync(~0u, up, 1, LANES), end = __shfl_down_sync(~0u, down, 1, LANES);
    if ((lane & (LANES - 1)) == 0) start = 1.f;
    if ((lane & (LANES - 1)) == LANES - 1) end = 1.f;
    if (first < C) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            to.gate[first + i] = g[i];
            to.start[first + i] = start = start * g[i];
            to.end[first + EACH - 1 - i] = end;
            end *= g[EACH - 1 - i];
        }
    }
    if (lane < BLOCKS) {
        float before = 1.f, after = 1.f, own = 1.f;
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            if (b < lane) before *= total[b];
            if (b == lane) own = total[b];
            if (b > lane) after *= total[b];
        }
        to.total[lane] = own, to.before[lane] = before, to.after[lane] = after;
    }
    __syncwarp();
}

// x (16 x 16) += the products of 16 rows with 16 others, both WIDTH wide.
template <int WIDTH, int STRIDE>
__device__ __forceinline__ void compare_rows(float (&x)[2][4], const Op* rows, const Op* others) {
#pragma unroll(WIDTH * (P == EXACT ? 4 : 1) <= 128 ? WIDTH / 16 : 1)
    for (int i = 0; i < WIDTH; i += 16) multiply_from<P, false>(x, left_from<P, false>(rows + i, STRIDE), others + i, STRIDE);
}

// acc (16 rows, N * 8 columns) += a times the right operand at p.
template <bool ACROSS, int N, int STRIDE>
__device__ __forceinline__ void multiply_wide(float (&acc)[N][4], const Left<P>& a, const Op* p) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        Right<P> b[2];
        right_from<P, ACROSS>(b, p + n * 8 * (ACROSS ? 1 : STRIDE), STRIDE);
        multiply<P>(acc[n], a, b[0]);
        multiply<P>(acc[n + 1], a, b[1]);
    }
}

// The same with 16 x 16 numbers in place of a; with CAREFUL in fp16 whatever they are.
template <bool CAREFUL, bool ACROSS, int N, int STRIDE>
__device__ __forceinline__ Left<P> multiply_pairs(float (&acc)[N][4], const float (&x)[2][4], const Op* p, Most& most) {
    const Left<P> a = left_of<P>(x[0], x[1]);
    if constexpr (CAREFUL) {
        multiply_beyond<P, ACROSS, N, STRIDE>(acc, x, p);
    } else {
        most.see(a);
        multiply_wide<ACROSS, N, STRIDE>(acc, a, p);
    }
    return a;
}

// Scales rows g and g + 8.
template <int N>
__device__ __forceinline__ void scale_rows(float (&acc)[N][4], float low, float high) {
#pragma unroll
    for (int n = 0; n < N; n++) acc[n][0] *= low, acc[n][1] *= low, acc[n][2] *= high, acc[n][3] *= high;
}

// The sum of the keys, n_t = f_t n_{t-1} + w_t k_t, that reads are divided by: a column of the memory whose value is always 1 and
// which no tensor has. The warps with the same rows of the memory share those of n; all rows of an accumulator are the same.
constexpr int SUM_TILES = (TILES / 2 + VALUE_SLICES - 1) / VALUE_SLICES * 2;

struct KeySums {
    float x[SUM_TILES][4];
    int first, tiles;  // its first among all rows, and how many of SUM_TILES there are

    __device__ __forceinline__ KeySums(const Place& at) {
        const int done = at.value / 16 * SUM_TILES;
        first = at.key + done * 8, tiles = min(SUM_TILES, TILES - done);
    }

    __device__ __forceinline__ void load(const float* sums, const Params& p, const Place& at) {
#pragma unroll
        for (int i = 0; i < SUM_TILES * 4; i++) {
            const int k = first + i / 4 * 8 + lane_column() + (i & 1);
            x[i / 4][i & 3] = sums && i / 4 < tiles && k < p.K ? sums[(int64_t)at.bh * p.K + k] : 0.f;
        }
    }

    __device__ __forceinline__ void store(float* sums, const Params& p, const Place& at) const {
        if (lane_row() || blockIdx.y) return;
#pragma unroll
        for (int i = 0; i < SUM_TILES * 2; i++) {
            const int k = first + i / 2 * 8 + lane_column() + (i & 1);
            if (i / 2 < tiles && k < p.K) sums[(int64_t)at.bh * p.K + k] = x[i / 2][i & 1];
        }
    }

    // To their places among all of n.
    __device__ __forceinline__ void share(Op* all) const {
        if (lane_row()) return;
#pragma unroll
        for (int i = 0; i < SUM_TILES; i++) {
            if (i < tiles) put_couple(all + first + i * 8 + lane_column(), x[i][0], x[i][1]);
        }
    }

    // The products with `all`, in all lanes.
    __device__ __forceinline__ float multiply_with(const Op* all) const {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < SUM_TILES; i++) {
            if (lane_row() || i >= tiles) continue;
            const float2 other = couple(all + first + i * 8 + lane_column());
            sum += x[i][0] * other.x + x[i][1] * other.y;
        }
        return warp_sum(sum);
    }

    // Over a chunk: decays, then takes up its keys times scale(block, token).
    template <class F>
    __device__ __forceinline__ void write(const Op* keys, float total, F scale) {
#pragma unroll
        for (int i = 0; FW_F && i < SUM_TILES * 4; i++) x[i / 4][i & 3] *= total;
#pragma unroll(P == EXACT ? 1 : BLOCKS)
        for (int b = 0; b < BLOCKS; b++) {
            const int t = b * 16 + lane_column();
            const float low[2] = {scale(b, t), scale(b, t + 1)}, high[2] = {scale(b, t + 8), scale(b, t + 9)};
            const Left<P> a = left_of<P>({low[0], low[1], low[0], low[1]}, {high[0], high[1], high[0], high[1]});
#pragma unroll
            for (int i = 0; i < SUM_TILES; i += 2) {
                if (i < tiles) accumulate_from<P, true>(x[i], x[i + 1], a, keys + b * 16 * KEY_ROW + first + i * 8, KEY_ROW);
            }
        }
    }
};

// acc (16 rows, any column) += a times a vector of 16 numbers.
template <class T>
__device__ __forceinline__ void multiply_vector(float (&acc)[4], const Left<P>& a, const T* vector) {
    Right<P> b[2];
    right_from<P, false>(b, vector, 0);
    multiply<P>(acc, a, b[0]);
}

// acc (16 rows, any column) += the sums of the rows of a.
template <int Q>
__device__ __forceinline__ void add_rows(float (&acc)[4], const Left<Q>& a) {
    Right<Q> ones = {};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if constexpr (SHORT<Q>) ones.x[i] = Q == F16 ? 0x3C003C00u : 0x3F803F80u;
        else ones.x[i][0] = ones.x[i][1] = 0x3F800000u;
    }
    multiply<Q>(acc, a, ones);
}

// The memory over a chunk, transposed: decays, then takes up what the tokens write, values scaled by scale(token), which may be of any
// size if STRONG, else a product of gates.
template <bool SCALED, bool STRONG, class F>
__device__ __forceinline__ void write_tokens(float (&w)[TILES][4], const Op* values, const Op* keys, float total, const Place& at,
                                             F scale) {
    if (FW_F) {
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) w[n][i] *= total;
        }
    }
    const auto factors = [&](int b) {
        const int t = b * 16 + lane_column();
        return Four{{scale(b, t), scale(b, t + 1), scale(b, t + 8), scale(b, t + 9)}};
    };
    const auto scaled = [&](int b) { return left_scaled<P>(values + b * 16 * VALUE_ROW + at.value, VALUE_ROW, factors(b)); };
    constexpr bool KEPT = SCALED && P == F16;  // all of them are looked at before one is written
    Left<P> kept[KEPT ? BLOCKS : 1];
    Most most;
    if constexpr (KEPT) {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) most.see(kept[b] = scaled(b));
    }
    if (KEPT && most.leaves_range<P, STRONG>()) {
#pragma unroll 1
        for (int b = 0; b < BLOCKS; b++) {
            const Four factor = factors(b);
            float x[2][4];
            load_transposed(x, values + b * 16 * VALUE_ROW + at.value, VALUE_ROW);
#pragma unroll
            for (int i = 0; i < 8; i++) x[i >> 2][i & 3] *= factor.x[(i >> 2) * 2 + (i & 1)];
            multiply_beyond<P, true, TILES, KEY_ROW>(w, x, keys + b * 16 * KEY_ROW + at.key);
        }
        return;
    }
#pragma unroll(P == EXACT ? 1 : BLOCKS)
    for (int b = 0; b < BLOCKS; b++) {
        const Op* key = keys + b * 16 * KEY_ROW + at.key;
        Left<P> a;
        if constexpr (KEPT) a = kept[b];
        else if constexpr (SCALED) a = scaled(b);
        else a = left_from<P, true>(values + b * 16 * VALUE_ROW + at.value, VALUE_ROW);
#pragma unroll
        for (int n = 0; n < TILES; n += 2) accumulate_from<P, true>(w[n], w[n + 1], a, key + n * 8, KEY_ROW);
    }
}
