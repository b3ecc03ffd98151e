// Feature maps of the rows of q and k. The kernel that loads a row makes its features, which exist in registers and shared memory
// only. One warp makes the features of one row.
//
// Macros: FW_MAP and FW_NORM are the numbers of the map and the norm, the same as in fw_fairseq/ops/kernels/common.py (FW_MAP is
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
static_assert(FW_MAP >= FW_IDENTITY && FW_MAP <= FW_DPFP, "FW_MAP is no map of this file");
static_assert(FW_NORM >= 0 && FW_NORM <= FW_L2, "FW_NORM is no norm of this file");

constexpr int POINTS = FW_MAP == FW_DPFP ? 2 * FW_D : FW_D;
constexpr int FEATURES = FW_MAP == FW_DPFP ? FW_NU * POINTS : POINTS;
constexpr float LEAST_SUM = 1e-6f, LEAST_LENGTH = 1e-12f;  // of a row's features; a smaller one counts as this

__device__ __forceinline__ float rectified(float x) { return x < 0.f ? 0.f : x; }

// x'_i, or what the other maps make of x_i. From -2d to 4d the index of dpfp wraps.
template <class T>
__device__ __forceinline__ float point(const T* x, int i) {
    if constexpr (FW_MAP == FW_DPFP) {
        i += i < 0 ? POINTS : i >= POINTS ? -POINTS : 0;
        return i < FW_D ? rectified(to_float(x[i])) : rectified(-to_float(x[i - FW_D]));
    }
    const float value = to_float(x[i]);
    return FW_MAP == FW_ELU ? (value > 0.f ? value + 1.f : expf(value)) : FW_MAP == FW_RELU ? rectified(value) : value;
}

// Feature i of a row, before the norm.
template <class T>
__device__ __forceinline__ float feature(const T* x, int i) {
    if constexpr (FW_MAP == FW_DPFP) return point(x, i % POINTS) * point(x, i % POINTS - i / POINTS - 1);
    return point(x, i);
}

__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
    return x;
}

// The norm's divisor, from the sum of the features or of their squares.
__device__ __forceinline__ float divisor(float sum) {
    return FW_NORM == FW_SUM ? fmaxf(sum, LEAST_SUM) : FW_NORM == FW_L2 ? fmaxf(sqrtf(sum), LEAST_LENGTH) : 1.f;
}

// The norm's factor for the features of a row.
template <class T>
__device__ __forceinline__ float row_scale(const T* x) {
    float sum = 0.f;
    for (int i = threadIdx.x & 31; FW_NORM && i < FEATURES; i += 32) {
        const float f = feature(x, i);
        sum += FW_NORM == FW_L2 ? f * f : f;
    }
    return 1.f / divisor(FW_NORM ? row_sum(sum) : sum);
}

template <class T>
struct __align__(2 * sizeof(T)) Couple {
    T x, y;
};

// Writes the features of a row into shared memory, with zeros up to WIDTH; zeros only for a row that is not `there`.
template <int WIDTH, class To, class T>
__device__ __forceinline__ void map_row(To* to, const T* x, bool there) {
    constexpr int COUPLES = (WIDTH + 63) / 64;
    float f[COUPLES][2], sum = 0.f;
#pragma unroll
    for (int n = 0; n < COUPLES * 2; n++) {
        const int i = 2 * (threadIdx.x & 31) + n / 2 * 64 + n % 2;
        const float one = i < FEATURES ? feature(x, i) : 0.f;
        f[n / 2][n % 2] = one;
        sum += FW_NORM == FW_L2 ? one * one : one;
    }
    const float scale = there ? 1.f / divisor(FW_NORM ? row_sum(sum) : sum) : 0.f;
#pragma unroll
    for (int n = 0; n < COUPLES; n++) {
        const int i = 2 * (threadIdx.x & 31) + n * 64;
        if (i < WIDTH) *(Couple<To>*)(to + i) = {from_float<To>(f[n][0] * scale), from_float<To>(f[n][1] * scale)};
    }
}

// The gradient of a row x from that of its features, df in shared memory: put(i, dx_i) by the lane that has i.
template <class T, class G, class F>
__device__ __forceinline__ void unmap_row(const T* x, const G* df, F put) {
    const int lane = threadIdx.x & 31;
    float scale = 1.f, along = 0.f;  // along: the share of df that the norm removes
    if constexpr (FW_NORM != 0) {
        float sum = 0.f, product = 0.f;
        for (int i = lane; i < FEATURES; i += 32) {
            const float f = feature(x, i);
            sum += FW_NORM == FW_L2 ? f * f : f;
            product += f * to_float(df[i]);
        }
        sum = row_sum(sum), product = row_sum(product);
        scale = 1.f / divisor(sum);
        const bool counts = FW_NORM == FW_SUM ? sum >= LEAST_SUM : sqrtf(sum) >= LEAST_LENGTH;
        along = counts ? product * scale * scale * (FW_NORM == FW_L2 ? scale : 1.f) : 0.f;
    }
    // The gradient of feature i before the norm.
    const auto gradient = [&](int i) { return scale * to_float(df[i]) - along * (FW_NORM == FW_L2 ? feature(x, i) : 1.f); };
    for (int i = lane; i < FW_D; i += 32) {
        const float value = to_float(x[i]);
        if constexpr (FW_MAP == FW_DPFP) {
            const int own = value > 0.f ? i : i + FW_D;
            float sum = 0.f;
#pragma unroll
            for (int j = 1; j <= FW_NU; j++) {
                const int block = (j - 1) * POINTS, later = own + j < POINTS ? own + j : own + j - POINTS;
                sum += gradient(block + own) * point(x, own - j) + gradient(block + later) * point(x, later);
            }
            put(i, value > 0.f ? sum : value < 0.f ? -sum : 0.f);
        } else {
            const float slope = FW_MAP == FW_IDENTITY || value > 0.f ? 1.f : FW_MAP == FW_ELU ? expf(value) : 0.f;
            put(i, slope * gradient(i));
        }
    }
}
#endif
