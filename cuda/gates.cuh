// Products of the gates inside a chunk of 16 tokens, and the rounds that a chunk takes.
//
// A pair of tokens s < t is weighed by the gates s+1..t. Split about the chunk's middle into a factor of t and one of s, one
// product of matrices does all pairs (PAIRS), and the memory can live in the same frame (ALL). Both need quotients. Where gates are
// too small for that, the products run from border to token (BORDERS: no factor exceeds 1) and the pairs are taken apart: those
// across the chunk's middle, then across the middle of each half, and so on (LEVEL16, 8, 4, 2), where no factor exceeds 1 either,
// and those of a token with itself (DIAGONAL). That is exact for every gate, 0 included.
#pragma once

#include "common.cuh"

#define FW_CHUNK 16

enum Mode { ALL, BORDERS, PAIRS, LEVEL16, LEVEL8, LEVEL4, LEVEL2, DIAGONAL, DONE };

// The smallest product of 8 gates with which a chunk can run in one frame (ALL), or with split pairs (PAIRS). In ALL a factor of
// the key side meets one of the value side, 1e15 * 1e15, and the operands themselves.
#define FW_ONE_FRAME 1e-15f
#define FW_SPLIT_PAIRS 1e-30f

__device__ __forceinline__ int first_mode(int tier) { return tier == 0 ? ALL : BORDERS; }

__device__ __forceinline__ int next_mode(int mode, int tier) {
    if (mode == BORDERS) return tier == 1 ? PAIRS : LEVEL16;
    return mode == ALL || mode == PAIRS ? DONE : mode + 1;
}

__device__ __forceinline__ bool has_borders(int mode) { return mode <= BORDERS; }
__device__ __forceinline__ bool has_pairs(int mode) { return mode != BORDERS; }
__device__ __forceinline__ int level_size(int mode) { return 16 >> (mode - LEVEL16); }

// Whether this mode does the pair of tokens t (reads) and s (was written), s < t.
__device__ __forceinline__ bool does_pair(int mode, int t, int s) {
    if (mode == ALL || mode == PAIRS) return s < t;
    if (mode < LEVEL16 || mode > LEVEL2) return false;
    int size = level_size(mode);
    return t / size == s / size && t % size >= size / 2 && s % size < size / 2;
}

__device__ __forceinline__ bool does_self(int mode) { return mode == ALL || mode == PAIRS || mode == DIAGONAL; }

// A lane holds eight tokens of a channel, outward from the chunk's middle: token_of(late, j) for j = 0..7. The lane 16 away
// holds the other eight.
__device__ __forceinline__ int token_of(int late, int j) { return late ? 8 + j : 7 - j; }

struct Factors {
    float reads[8], writes[8];  // of the token as it reads, as it was written
    float first, second;        // products of the chunk's halves
};

// The factors of one channel. All lanes of the warp take part.
__device__ __forceinline__ void gate_factors(Factors& out, int mode, int late, const float (&gate)[8]) {
    float run = 1.f, near[8];  // product from the middle: gates after an early token, up to a late one
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float next = run * gate[j];
        near[j] = late ? next : run;
        run = next;
    }
    float other = __shfl_xor_sync(0xFFFFFFFFu, run, 16);
    out.first = late ? other : run;
    out.second = late ? run : other;
    if (mode == ALL || mode == PAIRS) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float back = __fdividef(1.f, near[j]);
            out.reads[j] = late ? near[j] : back;
            out.writes[j] = late ? back : near[j];
        }
    } else if (mode == BORDERS) {
        run = 1.f;
#pragma unroll
        for (int j = 7; j >= 0; j--) {
            float next = run * gate[j], far = late ? run : next, across = other * near[j];
            out.reads[j] = late ? across : far;
            out.writes[j] = late ? far : across;
            run = next;
        }
    } else if (mode == DIAGONAL) {
#pragma unroll
        for (int j = 0; j < 8; j++) out.reads[j] = out.writes[j] = 1.f;
    } else {
        int size = level_size(mode);
        float outward[8];
        run = 1.f;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (((j + 8) & (size - 1)) == size / 2) run = 1.f;
            float next = run * gate[j];
            outward[j] = late ? next : run;
            run = next;
        }
        run = 1.f;
#pragma unroll
        for (int j = 7; j >= 0; j--) {
            if (((j + 9) & (size - 1)) == size / 2) run = 1.f;
            float next = run * gate[j];
            bool far = ((j + 8) & (size - 1)) >= size / 2;
            float factor = far ? outward[j] : (late ? run : next);
            out.reads[j] = far == (late != 0) ? factor : 0.f;
            out.writes[j] = far == (late != 0) ? 0.f : factor;
            run = next;
        }
    }
}

__device__ __forceinline__ float half_product(const float (&gate)[8]) {
    float run = 1.f;
#pragma unroll
    for (int j = 0; j < 8; j++) run *= gate[j];
    return run;
}

// How a chunk is run, from the smallest product of 8 gates that this thread has seen. A barrier.
__device__ __forceinline__ int vote_tier(float smallest) {
    if (__syncthreads_and(smallest >= FW_ONE_FRAME)) return 0;
    return __syncthreads_and(smallest >= FW_SPLIT_PAIRS) ? 1 : 2;
}
