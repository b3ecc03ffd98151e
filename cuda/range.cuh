// The range of fp16, for products of it: what may leave the range is multiplied by a power of 2, and the product by its reciprocal.
//
// Rows come in fp16. A memory, a pair of tokens and a value times its gates do not. The largest of a product's operands is found on
// the way, two numbers at a time; nothing else happens unless it is beyond the range or has not all bits there: what reads from such
// pairs is then computed again (CAREFUL), each 16 x 16 pairs with a scale.
#pragma once
#include "tile.cuh"

constexpr float LARGE = 32768.f, SMALL = 1.f / 64.f;  // the least number that leaves the range, and of a memory the least that does not

// Couples of numbers without their signs, the larger ones of each place; NaN is larger than all.
__device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
    const __half2 most = __hmax2_nan(__habs2(*(const __half2*)&a), __habs2(*(const __half2*)&b));
    return *(const unsigned*)&most;
}

// Whether a couple without signs has a number from LARGE on, infinite ones and NaN too; from SMALL on; or from 2^-13 on, which has
// all bits.
__device__ __forceinline__ bool has_large(unsigned couple) { return (couple + 0x08000800u) & 0x80008000u; }
__device__ __forceinline__ bool has_medium(unsigned couple) { return (couple + 0x5C005C00u) & 0x80008000u; }
__device__ __forceinline__ bool has_whole(unsigned couple) { return (couple + 0x78007800u) & 0x80008000u; }

// The largest couple of a lane's operands; in other precisions than fp16 nothing.
template <int P>
__device__ __forceinline__ unsigned largest_couple(const Left<P>& a) {
    if constexpr (P != F16) return 0;
    else return larger(larger(a.x[0], a.x[1]), larger(a.x[2], a.x[3]));
}

// The largest couple of what a lane has seen of operands; in other precisions than fp16 nothing.
struct Most {
    unsigned couple = 0;

    template <int P>
    __device__ __forceinline__ void see(const Left<P>& a) {
        if constexpr (P == F16) couple = larger(couple, largest_couple(a));
    }

    // Whether one of the warp's operands is too large, or, if SMALL, all of them are too small.
    template <int P, bool SMALL = true>
    __device__ __forceinline__ bool leaves_range() const {
        return P == F16 && (__any_sync(~0u, has_large(couple)) || (SMALL && __all_sync(~0u, !has_whole(couple))));
    }
};

// The exponent of a power of 2 that brings numbers up to `largest` into the range; 0 where they are, where all are 0, or one is no
// number.
__device__ __forceinline__ int range_exponent(float largest) {
    if ((largest < LARGE && largest >= SMALL) || largest < 1e-36f || !(largest < 1e38f)) return 0;
    return min(max(10 + 127 - (int)(__float_as_uint(largest) >> 23), -126), 126);
}

__device__ __forceinline__ float power(int exponent) { return __uint_as_float((unsigned)(exponent + 127) << 23); }

__device__ __forceinline__ float warp_largest(float x) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
    return x;
}

template <int N>
__device__ __forceinline__ float largest_of(const float (&x)[N][4]) {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < N * 4; i++) largest = fmaxf(largest, fabsf(x[i / 4][i % 4]));
    return largest;
}

template <int P>
__device__ __forceinline__ float largest_in(const Left<P>& a) {
    float largest = 0.f;
    if constexpr (P == F16) {
#pragma unroll
        for (int i = 0; i < 4; i++) largest = fmaxf(largest, fmaxf(fabsf(unpack<P>(a.x[i]).x), fabsf(unpack<P>(a.x[i]).y)));
    }
    return largest;
}

template <int N>
__device__ __forceinline__ void scale_by(float (&x)[N][4], float factor) {
#pragma unroll
    for (int i = 0; i < N * 4; i++) x[i / 4][i % 4] *= factor;
}

// acc += x, which is times 1 / back.
__device__ __forceinline__ void add_times(float (&acc)[2][4], const float (&x)[2][4], float back) {
#pragma unroll
    for (int i = 0; i < 8; i++) acc[i / 4][i % 4] += back * x[i / 4][i % 4];
}

// acc (16 rows, N * 8 columns) += x, which is 16 x 16, times the right operand at p, where x leaves the range.
template <int P, bool ACROSS, int N, int STRIDE, class T>
__device__ __forceinline__ void multiply_beyond(float (&acc)[N][4], const float (&x)[2][4], const T* p) {
    const int exponent = range_exponent(warp_largest(largest_of(x)));
    const float scale = power(exponent), back = power(-exponent);
    float scaled[2][4];
#pragma unroll
    for (int i = 0; i < 8; i++) scaled[i / 4][i % 4] = x[i / 4][i % 4] * scale;
    const Left<P> a = left_of<P>(scaled[0], scaled[1]);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        float sum[2][4] = {};
        multiply_from<P, ACROSS>(sum, a, p + n * 8 * (ACROSS ? 1 : STRIDE), STRIDE);
#pragma unroll
        for (int i = 0; i < 8; i++) acc[n + i / 4][i % 4] += sum[i / 4][i % 4] * back;
    }
}
