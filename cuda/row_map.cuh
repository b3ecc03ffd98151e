// Feature maps of the rows of q and k. The kernel that loads a row makes its features, which exist in registers and shared memory
// only. A warp makes the features of several short rows at a time: each row has some of its lanes (Split).
//
// Macros: FW_MAP and FW_NORM are the numbers of the map and the norm, the same as in fw_fairseq/feature_maps.py (FW_MAP is
// 0 where q and k are features already); FW_D is the width of a row x; FW_NU is the nu of dpfp. With x' = [relu(x), relu(-x)],
// feature (j-1) 2d + i of dpfp, j = 1..FW_NU, is x'_i x'_(i-j), indices modulo 2d.
#pragma once
#include "common.cuh"

#ifndef FW_MAP
#define FW_MAP 0
#endif

#if FW_MAP
#define FW_IDENTITY 1
#define FW_ELU 2
#define FW_RELU 3
#define FW_DPFP 4
#define FW_SUM 1
#define FW_L2 2
#define FW_L2_EPS 3
static_assert(FW_MAP >= FW_IDENTITY && FW_MAP <= FW_DPFP, "FW_MAP is no map of this file");
static_assert(FW_NORM >= 0 && FW_NORM <= FW_L2_EPS, "FW_NORM is no norm of this file");

constexpr int POINTS = FW_MAP == FW_DPFP ? 2 * FW_D : FW_D;
constexpr int FEATURES = FW_MAP == FW_DPFP ? FW_NU * POINTS : POINTS;
constexpr int REPEATS = FEATURES / POINTS, BEFORE = FW_MAP == FW_DPFP ? FW_NU : 0;
constexpr float LEAST_SUM = 1e-6f, LEAST_LENGTH = 1e-12f;  // of a row's features; a smaller one counts as this
constexpr float EPS = 1e-6f;                               // l2_eps adds this to a row's square
constexpr bool OF_SQUARES = FW_NORM == FW_L2 || FW_NORM == FW_L2_EPS;

__device__ __forceinline__ float rectified(float x) { return x < 0.f ? 0.f : x; }

// elu(x) + 1. Both sides are computed: with a branch, each number of a lane would wait for the one before.
__device__ __forceinline__ float elu_of(float x) {
    const float below = expf(x > 0.f ? 0.f : x);
    return x > 0.f ? x + 1.f : below;
}

// What the maps other than dpfp make of a number, and the slope there, from what they made of it.
__device__ __forceinline__ float point_of(float x) {
    return FW_MAP == FW_ELU ? elu_of(x) : FW_MAP == FW_RELU ? rectified(x) : x;
}
__device__ __forceinline__ float slope(float point) {
    return FW_MAP == FW_ELU ? (point > 1.f ? 1.f : point) : FW_MAP == FW_RELU ? (point > 0.f ? 1.f : 0.f) : 1.f;
}

// x'_i, or what the other maps make of x_i. From -2d to 4d the index of dpfp wraps.
template <class T>
__device__ __forceinline__ float point(const T* x, int i) {
    if constexpr (FW_MAP == FW_DPFP) {
        i += i < 0 ? POINTS : i >= POINTS ? -POINTS : 0;
        return i < FW_D ? rectified(to_float(x[i])) : rectified(-to_float(x[i - FW_D]));
    }
    return point_of(to_float(x[i]));
}

// Feature i of a row, before the norm.
template <class T>
__device__ __forceinline__ float feature(const T* x, int i) {
    if constexpr (FW_MAP == FW_DPFP) return point(x, i % POINTS) * point(x, i % POINTS - i / POINTS - 1);
    return point(x, i);
}

template <int LANES = 32>
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
    for (int o = LANES / 2; o > 0; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
    return x;
}

// The norm's divisor, from the sum of the features or of their squares.
__device__ __forceinline__ float divisor(float sum) {
    if constexpr (FW_NORM == FW_L2_EPS) return sqrtf(sum + EPS);
    return FW_NORM == FW_SUM ? fmaxf(sum, LEAST_SUM) : FW_NORM == FW_L2 ? fmaxf(sqrtf(sum), LEAST_LENGTH) : 1.f;
}

// The norm's factor for the features of a row.
template <class T>
__device__ __forceinline__ float row_scale(const T* x) {
    float sum = 0.f;
    for (int i = threadIdx.x & 31; FW_NORM && i < FEATURES; i += 32) {
        const float f = feature(x, i);
        sum += OF_SQUARES ? f * f : f;
    }
    return 1.f / divisor(FW_NORM ? row_sum(sum) : sum);
}

// How ROWS rows are split among WARPS warps: LANES lanes make the features of a row, so that a warp has PER_WARP rows at a time, and
// each lane has SPAN of the row's points. LANES is as small as up to 16 features a lane and a row for every warp allow: features of
// one lane do not wait for each other, and its share of the norm's sum needs no other lane.
template <int ROWS, int WARPS>
struct Split {
    static constexpr int lanes(int n) {
        return n < 32 && POINTS >= 8 * n && (FEATURES > 16 * n || ROWS * n < 32 * WARPS) ? lanes(2 * n) : n;
    }
    static constexpr int LANES = lanes(1), PER_WARP = 32 / LANES, SPAN = ((POINTS + LANES - 1) / LANES + 3) / 4 * 4;
    static constexpr bool EVEN = SPAN * LANES == POINTS;  // no lane's points end before the others'

    static __device__ __forceinline__ bool has(int point) { return EVEN || point < POINTS; }
};

template <class T>
struct __align__(4 * sizeof(T)) Quad {
    T x[4];
};

// A lane's points from `first` on, and for dpfp those before them that it multiplies with; 0 beyond the last one.
template <class S, class T>
__device__ __forceinline__ void load_points(float (&points)[BEFORE + S::SPAN], const T* x, int first) {
    if constexpr (FW_MAP == FW_DPFP) {
#pragma unroll
        for (int i = 0; i < BEFORE + S::SPAN; i++) points[i] = S::has(first + i - BEFORE) ? point(x, first + i - BEFORE) : 0.f;
    } else {
#pragma unroll
        for (int i = 0; i < S::SPAN; i += 4) {  // whole units of shared memory, which a row fills
            Quad<T> four = {};
            if (S::has(first + i)) four = *(const Quad<T>*)(x + first + i);
#pragma unroll
            for (int n = 0; n < 4; n++) points[i + n] = S::has(first + i + n) ? point_of(to_float(four.x[n])) : 0.f;
        }
    }
}

// Feature i of a lane's in block number `block`, before the norm.
template <int N>
__device__ __forceinline__ float feature_of(const float (&points)[N], int block, int i) {
    return FW_MAP == FW_DPFP ? points[BEFORE + i] * points[BEFORE + i - block - 1] : points[i];
}

// Writes the features of the first `rows` of ROWS rows into shared memory, with zeros up to WIDTH; all WARPS warps. place(x, to, i)
// sets x to row i and `to` to the place of its features, and says whether the row is there. Else it holds zeros, and its features are 0.
template <int ROWS, int WARPS, int WIDTH, class To, class T, class P>
__device__ __forceinline__ void map_rows_at(int rows, P place) {
    using S = Split<ROWS, WARPS>;
    const int lane = threadIdx.x & 31, first = lane % S::LANES * S::SPAN;
#pragma unroll 1  // registers
    for (int i = (threadIdx.x >> 5) * S::PER_WARP; i < rows; i += WARPS * S::PER_WARP) {
        const T* x;
        To* to;
        const int row = i + lane / S::LANES;
        const bool there = place(x, to, row < rows ? row : rows - 1);
        float points[BEFORE + S::SPAN], sum = 0.f;
        load_points<S>(points, x, first);
        if constexpr (FW_NORM != 0) {
#pragma unroll
            for (int n = 0; n < REPEATS * S::SPAN; n++) {
                const float f = feature_of(points, n / S::SPAN, n % S::SPAN);
                sum += OF_SQUARES ? f * f : f;
            }
            sum = row_sum<S::LANES>(sum);
        }
        const float scale = there ? 1.f / divisor(sum) : 0.f;
        if (row >= rows) continue;
#pragma unroll
        for (int n = 0; n < REPEATS * S::SPAN; n += 4) {
            const int block = n / S::SPAN, own = n % S::SPAN, column = block * POINTS + first + own;
            Quad<To> four;
#pragma unroll
            for (int m = 0; m < 4; m++) four.x[m] = from_float<To>(feature_of(points, block, own + m) * scale);
            if (POINTS % 4 == 0) {
                if (S::has(first + own)) *(Quad<To>*)(to + column) = four;
            } else {
#pragma unroll
                for (int m = 0; m < 4; m++)
                    if (S::has(first + own + m)) to[column + m] = four.x[m];
            }
        }
        for (int column = FEATURES + lane % S::LANES; column < WIDTH; column += S::LANES) to[column] = from_float<To>(0.f);
    }
}

// Writes dx of a row's columns from i on.
template <class Out>
__device__ __forceinline__ void store_four(Out* to, int i, const float (&dx)[4]) {
#if FW_ALIGNED
    Quad<Out> four;
#pragma unroll
    for (int n = 0; n < 4; n++) four.x[n] = from_float<Out>(dx[n]);
    if (i < FW_D) *(Quad<Out>*)(to + i) = four;
#else
#pragma unroll
    for (int n = 0; n < 4; n++)
        if (i + n < FW_D) to[i + n] = from_float<Out>(dx[n]);
#endif
}

// Writes the gradients of ROWS rows from those of their features; all WARPS warps. place(x, df, dx, i) sets x to row i, df to the
// gradient of its features and dx to the place of its own, and says whether the row is there.
template <int ROWS, int WARPS, class Out, class T, class G, class P>
__device__ __forceinline__ void unmap_rows_at(P place) {
    using S = Split<ROWS, WARPS>;
    static_assert(ROWS % S::PER_WARP == 0, "the lanes of a warp have rows together");
    const int lane = threadIdx.x & 31, first = lane % S::LANES * S::SPAN;
#pragma unroll 1
    for (int i = (threadIdx.x >> 5) * S::PER_WARP; i < ROWS; i += WARPS * S::PER_WARP) {
        const T* x;
        const G* df;
        Out* dx;
        const bool there = place(x, df, dx, i + lane / S::LANES);
        float points[BEFORE + S::SPAN], gradients[S::SPAN];
        float scale = 1.f, along = 0.f;  // along: the share of df that the norm removes
        if (FW_NORM != 0 || FW_MAP != FW_DPFP) load_points<S>(points, x, first);
        float sum = 0.f, product = 0.f;
#pragma unroll
        for (int n = 0; n < REPEATS * S::SPAN; n += 4) {
            const int block = n / S::SPAN, own = n % S::SPAN;
            if (FW_NORM == 0 && FW_MAP == FW_DPFP) break;
            Quad<G> four = {};
            const G* from = df + block * POINTS + first + own;
            if (POINTS % 4 == 0 && S::has(first + own)) four = *(const Quad<G>*)from;
#pragma unroll
            for (int m = 0; m < 4; m++) {
                if (POINTS % 4 && S::has(first + own + m)) four.x[m] = from[m];
                const float d = to_float(four.x[m]), f = feature_of(points, block, own + m);
                sum += OF_SQUARES ? f * f : f;
                product += f * d;
                if (FW_MAP != FW_DPFP) gradients[own + m] = d;
            }
        }
        if constexpr (FW_NORM != 0) {
            sum = row_sum<S::LANES>(sum), product = row_sum<S::LANES>(product);
            scale = sum == 0.f && FW_NORM != FW_L2_EPS ? 1.f : 1.f / divisor(sum);  // zeros have a finite gradient
            const bool counts = FW_NORM == FW_L2_EPS || (FW_NORM == FW_SUM ? sum >= LEAST_SUM : sqrtf(sum) >= LEAST_LENGTH);
            along = counts ? product * scale * scale * (OF_SQUARES ? scale : 1.f) : 0.f;
        }
        if (!there) continue;
        if constexpr (FW_MAP == FW_DPFP) {
            // The gradient of feature j before the norm.
            const auto gradient = [&](int j) { return scale * to_float(df[j]) - along * (OF_SQUARES ? feature(x, j) : 1.f); };
            for (int column = lane % S::LANES * 4; column < FW_D; column += S::LANES * 4) {
                float four[4];
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    if (column + n >= FW_D) break;
                    const float value = to_float(x[column + n]);
                    const int own = value > 0.f ? column + n : column + n + FW_D;
                    float dpoint = 0.f;
#pragma unroll
                    for (int j = 1; j <= FW_NU; j++) {
                        const int block = (j - 1) * POINTS, later = own + j < POINTS ? own + j : own + j - POINTS;
                        dpoint += gradient(block + own) * point(x, own - j) + gradient(block + later) * point(x, later);
                    }
                    four[n] = value > 0.f ? dpoint : value < 0.f ? -dpoint : 0.f;
                }
                store_four(dx, column, four);
            }
        } else {
#pragma unroll
            for (int n = 0; n < S::SPAN; n += 4) {
                float four[4];
#pragma unroll
                for (int m = 0; m < 4; m++) {
                    const float removed = along * (OF_SQUARES ? points[n + m] : 1.f);
                    four[m] = slope(points[n + m]) * (scale * gradients[n + m] - removed);
                }
                store_four(dx, first + n, four);
            }
        }
    }
}
#endif
