// Tensors as kernels see them, and the ways of their rows: to shared memory, to the L2 cache, through a feature map, back.
//
// The file that includes this one has FW_PRECISION, FW_IN, FW_ALIGNED (rows start at 16 bytes) and the macros of row_map.cuh, and
// has defined THREADS.
#pragma once
#include "tile.cuh"
#include "row_map.cuh"

constexpr int P = FW_PRECISION;
using In = FW_IN;
using Op = OperandOf<P>::type;

struct View {  // (B,H,T) or (B,H,T,X) with X contiguous; strides in elements
    void* p;
    int64_t b, h, t;
    int64_t tile;  // from one value tile's share of a sum to the next
};

struct Params {
    View q, k, v, f, e, w, y, dy, dq, dk, dv, df, de, dw;
    View divisors, ddivisors;  // of y; divisors may be null
    float *memory, *final;     // (B,H,K,V); memory and dfinal may be null, for 0, and dmemory where nobody asks for it
    void* borders;
    float *dfinal, *dmemory;
    float *sums, *final_sums, *dfinal_sums, *dsums;  // (B,H,K), where reads are divided; null likewise
    void* sums_borders;
    int32_t* scales;  // of borders in fp16, exponents of 2 (B,H,parts,V/16)
    float *adjoints, *adjoint_sums;  // of memory and sums before each part of the tokens but the first (parts,B,H,...)
    int32_t H, T, K, V;
    int32_t part;  // tokens that a block of the backward takes, where there are adjoints
    float eps, least;  // what is added to a divisor; and what stands for one of 0
};

template <class T>
__device__ __forceinline__ T* at(const View& x, int b, int h, int t) {
    return (T*)x.p + b * x.b + h * x.h + t * x.t;
}

// Where the adjoints at the end of a part are, `size` numbers for each sequence and head.
__device__ __forceinline__ float* adjoint_of(float* all, int size, int part = blockIdx.z) {
    return all + (int64_t)part * gridDim.x * size;
}

#ifndef FW_SIDES
#define FW_SIDES 0  // 1 where blocks along the third dimension take p.part tokens each
#endif

// Whether there is a memory before token t: zeros are neither saved nor read.
__device__ __forceinline__ bool has_memory(const Params& p, int t) { return t > 0 || p.memory; }

// The token at which a part begins, and its place among all parts but the first; the last one with LAST, without a division.
template <bool LAST>
struct Border {
    int token, place = 0;
    __device__ __forceinline__ Border(const Params& p) : token(p.part) {
        while (LAST && token + p.part < p.T) token += p.part, place++;
    }
    __device__ __forceinline__ void go_on(const Params& p) { token += LAST ? -p.part : p.part, place += LAST ? -1 : 1; }
    __device__ __forceinline__ bool is_there(const Params& p) const { return LAST ? place >= 0 : token < p.T; }
};

// The tokens that a block of the backward takes.
struct OwnTokens {
    bool final;
    int begin, end;
    __device__ __forceinline__ OwnTokens(const Params& p) : final(!FW_SIDES || blockIdx.z + 1 == gridDim.z) {
        begin = FW_SIDES ? blockIdx.z * p.part : 0, end = final ? p.T : begin + p.part;
    }
};

// dq and dk are whole sums, or a value tile's share of them.
template <bool PARTIAL>
struct KeyGradient {
    using type = In;
};
template <>
struct KeyGradient<true> {
    using type = float;
};

// Whether every thread copies units of one column, as copy_tile does.
template <class From, class To, int ROWS, int WIDTH>
constexpr bool EVEN_TILE = FW_ALIGNED && same_type<From, To> && THREADS % (WIDTH * (int)sizeof(From) / 16) == 0 &&
                           ROWS * (WIDTH * (int)sizeof(From) / 16) % THREADS == 0;

// Whether the units of 16 bytes that a warp moves at a time are whole rows, as store_whole needs.
template <class T, int WIDTH>
constexpr bool WHOLE_ROWS = 32 % (WIDTH * (int)sizeof(T) / 16) == 0;

// A whole tile: rows [t0, t0+ROWS) of those that begin at `from`.
template <class T, int ROWS, int WIDTH>
__device__ __forceinline__ void copy_tile(T* tile, const T* from, int64_t stride, unsigned t0 = 0) {
    constexpr int N = 16 / sizeof(T), PER_ROW = WIDTH / N, STEP = THREADS / PER_ROW;
    const unsigned row = threadIdx.x / PER_ROW, column = threadIdx.x % PER_ROW * N;
    T* to = tile + row * tile_stride<T>(WIDTH) + column;
    from += (t0 + row) * stride + column;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP, from += STEP * stride) cp_async16(to + i * tile_stride<T>(WIDTH), from);
}

// Rows [t0, t0+ROWS) and columns [c0, c0+WIDTH) of x into a tile, 0 beyond T and beyond `columns`. Complete after cp_async_wait.
template <class From, class To, int ROWS, int WIDTH>
__device__ __forceinline__ void load_tile(To* tile, const View& x, int b, int h, int t0, int T, int c0, int columns) {
    constexpr int STRIDE = tile_stride<To>(WIDTH);
    const From* base = at<From>(x, b, h, 0);
#if FW_ALIGNED
    constexpr int N = 16 / sizeof(From), PER_ROW = WIDTH / N;
    constexpr bool COPIED = same_type<From, To>;
    if constexpr (EVEN_TILE<From, To, ROWS, WIDTH>) {
        if (t0 + ROWS <= T && c0 + WIDTH <= columns) return copy_tile<To, ROWS, WIDTH>(tile, base + c0, x.t, t0);
    }
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

template <class T>
__device__ __forceinline__ void store_couple(T* to, float x, float y) {
#if FW_ALIGNED
    struct __align__(2 * sizeof(T)) Pair {
        T x, y;
    };
    *(Pair*)to = {from_float<T>(x), from_float<T>(y)};
#else
    to[0] = from_float<T>(x), to[1] = from_float<T>(y);
#endif
}

// 16 tokens from t on and the columns from `column` on, of which `columns` are there, to x.
template <class T, int N>
__device__ __forceinline__ void store_rows(const View& x, int b, int h, const float (&acc)[N][4], int t, int T_, int column,
                                           int columns) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = t + lane_row() + half * 8;
        if (row >= T_) continue;
        T* to = at<T>(x, b, h, row) + column + lane_column();
#pragma unroll
        for (int n = 0; n < N; n++) {
#if FW_ALIGNED
            if (n * 8 + lane_column() < columns) store_couple(to + n * 8, acc[n][half * 2], acc[n][half * 2 + 1]);
#else
            if (n * 8 + lane_column() < columns) to[n * 8] = from_float<T>(acc[n][half * 2]);
            if (n * 8 + lane_column() + 1 < columns) to[n * 8 + 1] = from_float<T>(acc[n][half * 2 + 1]);
#endif
        }
    }
}

// Rows of q and k as they are in memory: x where there is a feature map.
#if FW_MAP
using Row = In;
constexpr int ROW_WIDTH = (FW_D + 16 / (int)sizeof(In) - 1) / (16 / (int)sizeof(In)) * (16 / (int)sizeof(In));
#else
using Row = Op;
constexpr int ROW_WIDTH = FW_K;
#endif
constexpr int ROW = tile_stride<Row>(ROW_WIDTH);
constexpr int KEY_ROW = tile_stride<Op>(FW_K);
constexpr int VALUE_ROW = tile_stride<Op>(FW_V);

__device__ __forceinline__ int row_width(const Params& p) {
#if FW_MAP
    return FW_D;
#else
    return p.K;
#endif
}

template <int ROWS>
__device__ __forceinline__ void load_rows(Row* q, Row* k, const Params& p, int b, int h, int t0) {
    load_tile<In, Row, ROWS, ROW_WIDTH>(q, p.q, b, h, t0, p.T, 0, row_width(p));
    load_tile<In, Row, ROWS, ROW_WIDTH>(k, p.k, b, h, t0, p.T, 0, row_width(p));
}

#if FW_MAP
// The features of ROWS tokens; all threads.
template <int ROWS>
__device__ __forceinline__ void map_rows(Op* q, Op* k, const In* rows_q, const In* rows_k, int tokens) {
    map_rows_at<2 * ROWS, THREADS / 32, FW_K, Op, In>(2 * ROWS, [&](const In*& x, Op*& to, int i) {
        const int t = i % ROWS;
        x = (i < ROWS ? rows_q : rows_k) + t * ROW;
        to = (i < ROWS ? q : k) + t * KEY_ROW;
        return t < tokens;
    });
}

// Of one row for each.
template <int ROWS>
__device__ __forceinline__ void map_rows(Op* features, const In* rows, int tokens) {
    map_rows_at<ROWS, THREADS / 32, FW_K, Op, In>(ROWS, [&](const In*& x, Op*& to, int t) {
        x = rows + t * ROW, to = features + t * KEY_ROW;
        return t < tokens;
    });
}
#endif

// The places of blocks and warps: `at` is in sequence b and head h, number bh of all.

// 16 tokens and columns of dq or dk from t and column on; PARTIAL: of this tile's share.
template <bool PARTIAL, class At, int N>
__device__ __forceinline__ void store_keys(const View& x, const float (&acc)[N][4], const Params& p, const At& at, int t, int column) {
    using Out = typename KeyGradient<PARTIAL>::type;
    View to = x;
    to.p = (Out*)x.p + blockIdx.y * x.tile;
    store_rows<Out>(to, at.b, at.h, acc, t, p.T, column, p.K - column);
}

// A whole tile to rows [t0, t0+ROWS) of those that begin at `to`; by COUNT warps, of which this one is number `index`.
template <int ROWS, int WIDTH, int COUNT, class T>
__device__ __forceinline__ void store_whole(const T* tile, T* to, int64_t stride, unsigned t0, int index) {
    constexpr int N = 16 / (int)sizeof(T), PER_ROW = WIDTH / N, STEP = 32 / PER_ROW, TURN = COUNT * STEP;
    static_assert(32 % PER_ROW == 0, "a warp stores whole rows");
    const unsigned lane = threadIdx.x & 31, row = index * STEP + lane / PER_ROW, column = lane % PER_ROW * N;
    const T* from = tile + row * tile_stride<T>(WIDTH) + column;
    to += (t0 + row) * stride + column;
#pragma unroll
    for (int i = 0; i < ROWS; i += TURN, to += TURN * stride) {
        if (i + TURN <= ROWS || row + i < ROWS) *(uint4*)to = *(const uint4*)(from + i * tile_stride<T>(WIDTH));
    }
}

// ROWS rows of a tile, of which `rows` and `columns` are there, to `to`; by COUNT warps, of which this one is number `index`.
template <int ROWS, int WIDTH, int COUNT, class From, class To>
__device__ __forceinline__ void store_tile(const From* tile, To* to, int64_t stride, int rows, int columns, int index) {
    constexpr int N = FW_ALIGNED ? 16 / (int)sizeof(From) : 1, PER_ROW = WIDTH / N;
    constexpr int STEP = PER_ROW < 32 ? 32 / PER_ROW : 1, TURNS = (ROWS + COUNT * STEP - 1) / (COUNT * STEP);
    const int lane = threadIdx.x & 31, first = PER_ROW < 32 ? lane / PER_ROW : 0;
    if (first >= STEP) return;
#pragma unroll(FW_ALIGNED ? TURNS : 1)
    for (int turn = 0; turn < TURNS; turn++) {
        const int row = (turn * COUNT + index) * STEP + first;
        if (row >= rows) break;
        for (int unit = PER_ROW < 32 ? lane % PER_ROW : lane; unit < PER_ROW; unit += 32) {
            const int column = unit * N;
            if (column >= columns) break;
            const From* from = tile + row * tile_stride<From>(WIDTH) + column;
            To* place = to + row * stride + column;
            if constexpr (FW_ALIGNED && same_type<From, To>) {
                *(uint4*)place = *(const uint4*)from;
            } else {
#pragma unroll
                for (int j = 0; j < N; j++) place[j] = from_float<To>(to_float(from[j]));
            }
        }
    }
}

#if FW_MAP
// dq and dk of ROWS tokens from t0 on, from those of their features; all threads.
template <bool PARTIAL, int ROWS, class At, class Feature>
__device__ __forceinline__ void unmap_rows(const In* rows_q, const In* rows_k, const Feature* dq, const Feature* dk, const Params& p,
                                           const At& at, int t0) {
    using Out = typename KeyGradient<PARTIAL>::type;
    unmap_rows_at<2 * ROWS, THREADS / 32, Out, In, Feature>([&](const In*& x, const Feature*& df, Out*& dx, int i) {
        const bool query = i < ROWS, there = t0 + i % ROWS < p.T;
        const int t = i % ROWS;
        const View& to = query ? p.dq : p.dk;
        x = (query ? rows_q : rows_k) + t * ROW;
        df = (query ? dq : dk) + t * tile_stride<Feature>(FW_K);
        dx = ::at<Out>(to, at.b, at.h, there ? t0 + t : 0) + blockIdx.y * to.tile;
        return there;
    });
}
#endif

// The warp's slice of a memory (B,H,K,V), transposed in its accumulators: f(index, x), or f(-1, x) for what is padding.
template <class At, class F, int TILES>
__device__ __forceinline__ void each_element(const At& at, const Params& p, float (&x)[TILES][4], F f) {
#pragma unroll
    for (int n = 0; n < TILES; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int k = at.first_row() + n * 8 + lane_column() + (i & 1), v = at.first_column() + lane_row() + (i >> 1) * 8;
            f(k < p.K && v < p.V ? ((int64_t)at.bh * p.K + k) * p.V + v : -1, x[n][i]);
        }
    }
}

template <class At, int TILES>
__device__ __forceinline__ void load_memory(float (&x)[TILES][4], const float* memory, const At& at, const Params& p) {
    each_element(at, p, x, [&](int64_t i, float& value) { value = memory && i >= 0 ? memory[i] : 0.f; });
}

template <class At, int TILES>
__device__ __forceinline__ void store_memory(float (&x)[TILES][4], float* memory, const At& at, const Params& p) {
    each_element(at, p, x, [&](int64_t i, float& value) {
        if (i >= 0) memory[i] = value;
    });
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
    return x;
}

// Sums x and y over the four lanes that have more of rows g and g + 8, to their places.
__device__ __forceinline__ void sum_halves(float* to, float x, float y) {
    const bool odd = threadIdx.x & 1;
    float sum = (odd ? y : x) + __shfl_xor_sync(~0u, odd ? x : y, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if ((threadIdx.x & 3) < 2) to[lane_row() + odd * 8] = sum;
}

// Sums x over the 8 lanes that have other columns of the same four tokens; the token whose sum a lane of the first 16 has.
__device__ __forceinline__ int sum_columns(float (&x)[4]) {
    const int lane = threadIdx.x & 31;
    const bool later = lane & 4, odd = lane & 8;
    float low = later ? x[2] : x[0], high = later ? x[3] : x[1];
    low += __shfl_xor_sync(~0u, later ? x[0] : x[2], 4);
    high += __shfl_xor_sync(~0u, later ? x[1] : x[3], 4);
    x[0] = (odd ? high : low) + __shfl_xor_sync(~0u, odd ? low : high, 8);
    x[0] += __shfl_xor_sync(~0u, x[0], 16);
    return lane_column() + later * 8 + odd;
}

// The lane of the first 16 that has the sum of token t.
__device__ __forceinline__ int lane_of_column(int t) { return (t & 7) / 2 + (t & 8) / 2 + (t & 1) * 8; }

// The sum of the products of a warp's slice of a transposed memory, in its accumulators, and of another's in shared memory; in all
// lanes. The first may be in shared memory too, at `own`, where it leaves the range of fp16 in accumulators.
template <int TILES>
__device__ __forceinline__ float multiply_slices(const Op* slice, const float (&x)[TILES][4], const Op* own = nullptr) {
    float sum = 0.f;
    if constexpr (SHORT<P>) {  // the diagonal of their product
        float d[2][4] = {};
#pragma unroll
        for (int n = 0; n < TILES; n += 2) {
            Left<P> a;
            if (own) a = left_from<P, false>(own + n * 8, KEY_ROW);
            else a = left_of<P>(x[n], x[n + 1]);
            multiply_from<P, false>(d, a, slice + n * 8, KEY_ROW);
        }
        const int place = lane_row() - lane_column();
        const float even = d[0][0] + d[1][2], odd = d[0][1] + d[1][3];
        sum = (place == 0 ? even : 0.f) + (place == 1 ? odd : 0.f);
    } else {
        const Op* first = slice + lane_row() * KEY_ROW + lane_column();
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            const float2 low = couple(first + n * 8), high = couple(first + 8 * KEY_ROW + n * 8);
            sum += low.x * x[n][0] + low.y * x[n][1] + high.x * x[n][2] + high.y * x[n][3];
        }
    }
    return warp_sum(sum);
}
