// Pairs of 16 tokens in the accumulators of a warp, row t and column s: products of gates and triangles.
#pragma once
#include "tile.cuh"

// Run by one warp: D_ts, the product of the gates after s up to t, for 16 tokens; 0 for s > t. As each_pair has them.
__device__ __forceinline__ void decay_pairs(float (&d)[2][4], const float* gate) {
    const int t = lane_row(), s = lane_column() + 1, steps = max(t - s, 0);
    float last[2][2];  // of the pairs within the first and the last 8 tokens
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float f[8], x = 1.f;
#pragma unroll
        for (int r = 0; r < 8; r += 4) *(float4*)(f + r) = *(const float4*)(gate + h * 8 + r);
#pragma unroll
        for (int r = 2; r < 8; r++) {
            if ((unsigned)(r - s - 1) < (unsigned)steps) x *= f[r];
        }
        last[h][1] = t >= s ? x : 0.f;
        last[h][0] = t >= s ? x * gate[h * 8 + s] : t == s - 1 ? 1.f : 0.f;
    }
    // Across the middle: from s to the end of the first half, then to t.
    const float to_t = __shfl_sync(~0u, last[1][0], t * 4) * gate[8];
    const int end = 28 + (threadIdx.x & 3);
    const float from0 = __shfl_sync(~0u, last[0][0], end), from1 = __shfl_sync(~0u, last[0][1], end);
    d[0][0] = last[0][0], d[0][1] = last[0][1], d[0][2] = from0 * to_t, d[0][3] = from1 * to_t;
    d[1][0] = d[1][1] = 0.f, d[1][2] = last[1][0], d[1][3] = last[1][1];
}

// Zeros for s > t, and for s = t unless DIAGONAL.
template <bool DIAGONAL>
__device__ __forceinline__ void keep_lower(float (&x)[2][4]) {
    const int t = lane_row(), s = lane_column();
    const bool even = DIAGONAL ? s <= t : s < t, odd = DIAGONAL ? s < t : s + 1 < t;
    x[0][0] = even ? x[0][0] : 0.f, x[0][1] = odd ? x[0][1] : 0.f, x[1][0] = x[1][1] = 0.f;
    x[1][2] = even ? x[1][2] : 0.f, x[1][3] = odd ? x[1][3] : 0.f;
}
