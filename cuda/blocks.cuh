// Products of 16 x 16 blocks on tensor cores, one interface for every precision.
//
// FW_PRECISION 0: bf16 operands. 1: tf32. 2: fp32, each operand the sum of two tf32 numbers (three products, relative error 2^-21).
// Accumulators are fp32. With g = lane / 4 and t = lane % 4, a block's register i holds the elements
//   of a left side   (g + 8 (i % 2), 2t + 8 (i / 2)) and the one to its right,
//   of a right side  (2t + 8 (i % 2), g + 8 (i / 2)) and the one below.
// tf32 instructions want other places along the summed axis; the same order on both sides gives the same sum.
#pragma once

#include "common.cuh"

#if FW_PRECISION == 0
typedef __nv_bfloat16 Operand;
#else
typedef float Operand;
#endif

// Element (g + 8 h, 8 n + 2 t + e) is c[n][2 h + e].
struct Acc {
    float c[2][4];
};

struct Block {
    unsigned hi[FW_PRECISION == 0 ? 4 : 8];
    unsigned lo[FW_PRECISION == 2 ? 8 : 1];
};

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }

__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(unsigned*)&pair;
}

// The value that a product of this precision sees; exact mode sees all of x.
__device__ __forceinline__ float as_operand(float x) {
    if constexpr (FW_PRECISION == 1) return __uint_as_float(to_tf32(x));
    return x;
}

// Two neighbours along a row of an operand array, rounded once, here.
__device__ __forceinline__ void store_operands(Operand* at, float x, float y) {
    if constexpr (FW_PRECISION == 0) {
        *(unsigned*)at = pack_bf16(x, y);
    } else {
        *(float2*)at = make_float2(as_operand(x), as_operand(y));
    }
}

__device__ __forceinline__ float2 load_operands(const Operand* at) {
    if constexpr (FW_PRECISION == 0) {
        unsigned pair = *(const unsigned*)at;
        return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
    } else {
        return *(const float2*)at;
    }
}

__device__ __forceinline__ void clear(Acc& acc) {
#pragma unroll
    for (int i = 0; i < 8; i++) acc.c[i / 4][i % 4] = 0.f;
}

template <bool ROUNDED>
__device__ __forceinline__ void set(Block& block, int i, float x, float y) {
    if constexpr (FW_PRECISION == 0) {
        block.hi[i] = pack_bf16(x, y);
    } else if constexpr (FW_PRECISION == 1) {
        block.hi[2 * i] = ROUNDED ? __float_as_uint(x) : to_tf32(x);
        block.hi[2 * i + 1] = ROUNDED ? __float_as_uint(y) : to_tf32(y);
    } else {
        block.hi[2 * i] = to_tf32(x);
        block.hi[2 * i + 1] = to_tf32(y);
        block.lo[2 * i] = to_tf32(x - __uint_as_float(block.hi[2 * i]));
        block.lo[2 * i + 1] = to_tf32(y - __uint_as_float(block.hi[2 * i + 1]));
    }
}

// A block in shared memory: STORED_T when its summed axis runs down the rows. ld is a multiple of 8, rows aligned to 16 bytes.
template <bool LEFT, bool STORED_T>
__device__ __forceinline__ void load_block(Block& block, const Operand* at, int ld) {
    int lane = lane_id();
    if constexpr (FW_PRECISION == 0) {
        // Matrix m's rows are given by lanes 8m..8m+7. Left blocks count row halves first, right blocks the summed axis first.
        constexpr bool ROWS_FIRST = LEFT != STORED_T;
        int row = (lane & 7) + ((ROWS_FIRST ? lane >> 3 : lane >> 4) & 1) * 8;
        int column = ((ROWS_FIRST ? lane >> 4 : lane >> 3) & 1) * 8;
        ldmatrix_x4<STORED_T>(block.hi, at + row * ld + column);
    } else {
        int g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int summed = 2 * t + 8 * (LEFT ? i / 2 : i % 2), other = g + 8 * (LEFT ? i % 2 : i / 2);
            if constexpr (STORED_T) {
                set<true>(block, i, at[summed * ld + other], at[(summed + 1) * ld + other]);
            } else {
                float2 pair = *(const float2*)(at + other * ld + summed);
                set<true>(block, i, pair.x, pair.y);
            }
        }
    }
}

// Clears the other half of a left block: eight of its rows, or of its columns.
__device__ __forceinline__ void keep_half(Block& block, bool rows, int half) {
    constexpr int EACH = FW_PRECISION == 0 ? 1 : 2;
#pragma unroll
    for (int i = 0; i < 4 * EACH; i++) {
        if ((rows ? i / EACH % 2 : i / EACH / 2) == half) continue;
        block.hi[i] = 0;
        if (FW_PRECISION == 2) block.lo[i % (sizeof(block.lo) / sizeof(unsigned))] = 0;
    }
}
__device__ __forceinline__ void keep_rows(Block& block, int half) { keep_half(block, true, half); }
__device__ __forceinline__ void keep_columns(Block& block, int half) { keep_half(block, false, half); }

// acc as a left side: rows stay rows.
__device__ __forceinline__ void left_from(Block& block, const Acc& acc) {
#pragma unroll
    for (int i = 0; i < 4; i++) set<false>(block, i, acc.c[i / 2][i % 2 * 2], acc.c[i / 2][i % 2 * 2 + 1]);
}

// The transpose of acc as a right side: acc's columns are the summed axis.
__device__ __forceinline__ void right_from_t(Block& block, const Acc& acc) {
#pragma unroll
    for (int i = 0; i < 4; i++) set<false>(block, i, acc.c[i % 2][i / 2 * 2], acc.c[i % 2][i / 2 * 2 + 1]);
}

#if FW_PRECISION == 0
__device__ __forceinline__ void multiply(Acc& acc, const Block& a, const Block& b) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const unsigned right[2] = {b.hi[2 * n], b.hi[2 * n + 1]};
        mma_bf16(acc.c[n], a.hi, right, acc.c[n]);
    }
}
#else
__device__ __forceinline__ void multiply_tf32(Acc& acc, const unsigned (&a)[8], const unsigned (&b)[8]) {
#pragma unroll
    for (int s = 0; s < 2; s++) {
        const unsigned left[4] = {a[4 * s], a[4 * s + 2], a[4 * s + 1], a[4 * s + 3]};
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const unsigned right[2] = {b[4 * n + 2 * s], b[4 * n + 2 * s + 1]};
            mma_tf32(acc.c[n], left, right, acc.c[n]);
        }
    }
}

// acc += a b
__device__ __forceinline__ void multiply(Acc& acc, const Block& a, const Block& b) {
#if FW_PRECISION == 2
    multiply_tf32(acc, a.lo, b.hi);
    multiply_tf32(acc, a.hi, b.lo);
#endif
    multiply_tf32(acc, a.hi, b.hi);
}
#endif
