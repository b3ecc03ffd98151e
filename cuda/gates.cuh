// Products of the gates inside a chunk of 16 tokens, and the rounds that a chunk takes.
//
// A pair of tokens s < t is weighed by the gates s+1..t. Split about the chunk's middle into a factor of t and one of s, one
// product of matrices does all pairs, and the memory can live in the same frame. The factors are products from the middle or their
// reciprocals. A chunk takes one round so. Where gates are too small for reciprocals in fp32, a chunk takes several: the
// products run from border to token (BORDERS: no factor exceeds 1), and the pairs are split about the middle (PAIRS), or they are
// taken apart: those across the chunk's middle, then across the middle of each half, and so on (LEVEL16, 8, 4, 2), where no factor
// exceeds 1 either, and those of a token with itself (DIAGONAL). That is exact for every gate, 0 included.
//
// Between the two, each half of a chunk has a frame of its own, about its own middle (HALVES), so that no factor is a product of more
// than four gates. The memory goes from the one to the other inside the chunk, with what the first half wrote.
//
// Where a gate is small, though not too small for one round or for split pairs, the backward differs: there the pairs that a gate
// spans are summed one by one.
#pragma once

#include "common.cuh"

#define FW_CHUNK 16

enum Tier { ONE_ROUND, SMALL_GATES, HALVES, SPLIT, LEVELS };  // how a chunk runs
#ifndef FW_TIER
#define FW_TIER -1  // or the tier of every chunk, whatever its gates: to count what it takes
#endif
enum Mode { BORDERS, PAIRS, LEVEL16, LEVEL8, LEVEL4, LEVEL2, DIAGONAL, DONE, PAIRS_OF_HALVES };

// The smallest product of gates, up to a frame's middle or from there on, with which the frame is used. There a factor of the key
// side meets one of the value side. Together they reach 1e28, so that products of operands may reach 1e10, and the memory's gradient
// meets 1e-28, so that it is lost below 1e-10. One side's product may be smaller where the other side's is larger by as much; not by
// more, because the memory is scaled by two of them at a time.
#define FW_ONE_FRAME 1e-14f
#define FW_UNEVEN 1e4f
// And with split pairs (PAIRS), where the sides do not meet: forward, and backward, where gradients are multiplied by it.
#define FW_SPLIT_PAIRS 1e-30f
#define FW_SPLIT_GRADIENTS 1e-25f

__device__ __forceinline__ int next_mode(int mode, int tier) {
    if (mode == BORDERS) return tier == SPLIT ? PAIRS : LEVEL16;
    return mode == PAIRS ? DONE : mode + 1;
}

__device__ __forceinline__ int level_size(int mode) { return 16 >> (mode - LEVEL16); }

// Whether this mode does the pair of tokens t (reads) and s (was written), s < t.
__device__ __forceinline__ bool does_pair(int mode, int t, int s) {
    if (mode == PAIRS) return s < t;
    if (FW_HALVES && mode == PAIRS_OF_HALVES) return s < t && s / 8 == t / 8;
    if (mode < LEVEL16 || mode > LEVEL2) return false;
    int size = level_size(mode);
    return t / size == s / size && t % size >= size / 2 && s % size < size / 2;
}

__device__ __forceinline__ bool does_self(int mode) { return mode == PAIRS || (FW_HALVES && mode == PAIRS_OF_HALVES) || mode == DIAGONAL; }

// A lane holds eight tokens of a channel, outward from the chunk's middle: token_of(late, j) for j = 0..7. The lane 16 away
// holds the other eight.
__device__ __forceinline__ int token_of(int late, int j) { return late ? 8 + j : 7 - j; }

// The factors of one channel in a round: of eight tokens as they read and as they were written. Returns the product of the chunk's
// gates. All lanes of the warp take part.
__device__ __forceinline__ float gate_factors(float (&reads)[8], float (&writes)[8], int mode, int late, const float (&gate)[8]) {
    float run = 1.f, near[8];  // product from the middle: gates after an early token, up to a late one
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float next = run * gate[j];
        near[j] = late ? next : run;
        run = next;
    }
    float other = __shfl_xor_sync(0xFFFFFFFFu, run, 16);
    const float whole = run * other;
    if (mode == PAIRS) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float back = reciprocal(near[j]);
            reads[j] = late ? near[j] : back;
            writes[j] = late ? back : near[j];
        }
    } else if (mode == BORDERS) {
        run = 1.f;
#pragma unroll
        for (int j = 7; j >= 0; j--) {
            float next = run * gate[j], far = late ? run : next, across = other * near[j];
            reads[j] = late ? across : far;
            writes[j] = late ? far : across;
            run = next;
        }
    } else if (mode == DIAGONAL) {
#pragma unroll
        for (int j = 0; j < 8; j++) reads[j] = writes[j] = 1.f;
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
            reads[j] = far == (late != 0) ? factor : 0.f;
            writes[j] = far == (late != 0) ? 0.f : factor;
            run = next;
        }
    }
    return whole;
}

// The factors of a lane's two channels in a round.
struct Factors {
    float reads[2][8], writes[2][8];
    float2 whole;  // products of the chunk's gates

    __device__ __forceinline__ void multiply(int mode, int late, const float (&gate)[2][8]) {
        whole.x = gate_factors(reads[0], writes[0], mode, late, gate[0]);
        whole.y = gate_factors(reads[1], writes[1], mode, late, gate[1]);
    }
};

// What a chunk of one round multiplies a lane's two channels by at eight tokens, which go forward.
struct Frame {
    float reads[2][8], writes[2][8];  // of the token as it reads, as it was written
    float half[2];                    // products of all eight gates
    float before[2], after[2];        // of a half with a frame of its own: products up to its middle, and from there on

    template <class J>
    __device__ __forceinline__ void multiply(const J& job, const float (&gate)[2][8]) {
        half[0] = half[1] = 1.f;
        if constexpr (!J::gated) {
            set_ones();
        } else if (job.late) {
            multiply_about<0>(gate, half, half);
        } else {
            multiply_about<8>(gate, half, half);
        }
    }

    template <class J>
    __device__ __forceinline__ void multiply_half(const J& job, const float (&gate)[2][8]) {
        before[0] = before[1] = after[0] = after[1] = 1.f;
        if constexpr (J::gated) multiply_about<4>(gate, before, after);
        else set_ones();
    }

    __device__ __forceinline__ void set_ones() {
#pragma unroll
        for (int i = 0; i < 16; i++) reads[i % 2][i / 2] = writes[i % 2][i / 2] = 1.f;
    }

    template <int MIDDLE>
    __device__ __forceinline__ void multiply_about(const float (&gate)[2][8], float (&before)[2], float (&after)[2]) {
#pragma unroll
        for (int i = 2 * MIDDLE; i < 16; i++) {
            reads[i % 2][i / 2] = after[i % 2] *= gate[i % 2][i / 2];
            writes[i % 2][i / 2] = reciprocal(reads[i % 2][i / 2]);
        }
#pragma unroll
        for (int i = 2 * MIDDLE - 1; i >= 0; i--) {
            writes[i % 2][i / 2] = before[i % 2];
            reads[i % 2][i / 2] = reciprocal(before[i % 2]);
            before[i % 2] *= gate[i % 2][i / 2];
        }
    }

    __device__ __forceinline__ float smallest() const { return fminf(half[0], half[1]); }
    __device__ __forceinline__ float smallest_of_half() const { return fminf(fminf(before[0], before[1]), fminf(after[0], after[1])); }
};

__device__ __forceinline__ bool in_one_round(int tier) { return tier <= (FW_HALVES ? HALVES : SMALL_GATES); }

// Whether all frames are in range, from the smallest product of gates that this thread has seen, on the key side or the value side.
// A barrier.
__device__ __forceinline__ bool in_range(float smallest, bool key) {
    constexpr float LESS = FW_ONE_FRAME / FW_UNEVEN, MORE = FW_ONE_FRAME * FW_UNEVEN;
    return __syncthreads_and(smallest >= FW_ONE_FRAME) || __syncthreads_and(smallest >= (key ? LESS : MORE)) ||
           __syncthreads_and(smallest >= (key ? MORE : LESS));
}

// How a chunk of several rounds runs, from the smallest product of 8 gates.
__device__ __forceinline__ int vote_rounds(float smallest, float least) {
    if (FW_TIER >= SPLIT) return FW_TIER;
    return __syncthreads_and(smallest >= least) ? SPLIT : LEVELS;
}
