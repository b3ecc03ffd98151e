// A warp's slice of the memory in its accumulators, and what a chunk multiplies it by.
#pragma once

#include "columns.cuh"

// What the memory is multiplied by, for each key channel and each value channel: by a chunk (CHUNK), what a chunk leaves to do
// to it, in turns, and on its way from the middle of a chunk's first half to that of its second (MIDDLE).
struct Scales {
    enum { CHUNK, LEFT, MIDDLE = LEFT + 2 };
    float key[4][FW_K];
    float value[4][FW_V];

    template <class J>
    __device__ __forceinline__ float2* at(const J& job, int which) {
        return (float2*)(J::key ? key[which] + job.column : value[which] + job.column);
    }

    // All threads; the next barrier ends it.
    __device__ __forceinline__ void leave_nothing(int turn) {
        for (int i = threadIdx.x; i < FW_K; i += FW_WARPS * 32) key[LEFT + turn][i] = 1.f;
        for (int i = threadIdx.x; i < FW_V; i += FW_WARPS * 32) value[LEFT + turn][i] = 1.f;
    }

    // For a chunk of one round: on its way to the chunk's middle the memory takes up what the last chunk left and one half's gates;
    // those of the other half are left. BACK: time runs backwards. Of a half with a frame of its own the first or the last gates.
    template <bool BACK, class J>
    __device__ __forceinline__ void put(const J& job, const float (&first)[2], const float (&last)[2], int turn) {
        if (!job.active) return;
        if (BACK == (job.late != 0)) {
            const float2 left = *at(job, LEFT + (turn ^ 1));
            *at(job, CHUNK) = make_float2(left.x * first[0], left.y * first[1]);
        } else {
            *at(job, LEFT + turn) = make_float2(last[0], last[1]);
        }
    }

    // The first half's share of MIDDLE, and after a barrier the second's.
    template <class J>
    __device__ __forceinline__ void put_middle(const J& job, bool second, const float (&gates)[2]) {
        if (!job.active || second != (job.late != 0)) return;
        const float2 first = second ? *at(job, MIDDLE) : make_float2(1.f, 1.f);
        *at(job, MIDDLE) = make_float2(first.x * gates[0], first.y * gates[1]);
    }

    // For a chunk of several rounds: all of its gates; nothing is left.
    template <class J>
    __device__ __forceinline__ void put_whole(const J& job, float2 whole, int turn) {
        if (!job.active || job.late) return;
        *at(job, CHUNK) = whole;
        *at(job, LEFT + turn) = make_float2(1.f, 1.f);
    }
};

// How a chunk runs that is not in range of one frame, and its frames in halves (FW_HALVES: if it may). `smallest` is that of 8 gates.
template <class S>
__device__ __forceinline__ int vote_halves(const Params& p, S& s, const Columns& columns, Frame& frame, float smallest, bool key, float least) {
    if (!FW_HALVES || FW_TIER > HALVES) return vote_rounds(smallest, least);
    float quarter = 1.f;
    by_side(p, s, [&](const auto& job) {
        frame.multiply_half(job, columns.gate);
        quarter = frame.smallest_of_half();
        s.scales.put_middle(job, false, frame.after);
    });
    return in_range(quarter, key) || FW_TIER == HALVES ? HALVES : vote_rounds(smallest, least);
}

// acc += a b, where acc is a sum over all of time. In fp32 the tensor cores do not make that sum, because they cut off
// what they add up.
__device__ __forceinline__ void add_product(Acc& acc, const Block& a, const Block& b) {
    if (FW_PRECISION != 2) return multiply(acc, a, b);
    Acc added;
    clear(added);
    multiply(added, a, b);
#pragma unroll
    for (int i = 0; i < 8; i++) acc.c[i / 4][i % 4] += added.c[i / 4][i % 4];
}

// A warp's slice of the memory (or of its adjoint), transposed: rows are value channels, columns key channels.
struct Memory {
    static constexpr int ROWS = FW_V / 16 / FW_V_WARPS, COLUMNS = FW_K / 16 / FW_K_WARPS;
    Acc acc[ROWS][COLUMNS];

    static __device__ __forceinline__ int first_row() { return (threadIdx.x >> 5) / FW_K_WARPS * ROWS * 16; }
    static __device__ __forceinline__ int first_column() { return (threadIdx.x >> 5) % FW_K_WARPS * COLUMNS * 16; }

    // f(element, the address of its place in `memory`, (K,V), whether that has the place) for all elements of this lane.
    template <class T, class F>
    __device__ __forceinline__ void each(T* memory, const Params& p, F f) {
        const int row = blockIdx.x * FW_V + first_row() + (lane_id() >> 2), column = first_column() + 2 * (lane_id() & 3);
        T* first = memory + (int64_t)column * p.V + row;
        const bool whole = blockIdx.x * FW_V + FW_V <= p.V && FW_K <= p.K;
        if (whole) each_place(first, p.V, [&](float& x, T* at, int, int) { f(x, at, true); });
        else each_place(first, p.V, [&](float& x, T* at, int r, int c) { f(x, at, row + r < p.V && column + c < p.K); });
    }

    template <class T, class F>
    __device__ __forceinline__ void each_place(T* first, int V, F f) {
#pragma unroll
        for (int n = 0; n < 2 * COLUMNS; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                T* at = first + (int64_t)V * (8 * n + e);
#pragma unroll
                for (int r = 0; r < 2 * ROWS; r++) f(acc[r / 2][n / 2].c[n % 2][r % 2 * 2 + e], at + 8 * r, 8 * r, 8 * n + e);
            }
    }

    __device__ __forceinline__ void load(const float* from, const Params& p) {
        if (from) each(from, p, [](float& x, const float* at, bool there) { x = there ? *at : 0.f; });
        else each_place(from, 0, [](float& x, const float*, int, int) { x = 0.f; });
    }

    __device__ __forceinline__ void store(float* to, const Params& p) {
        each(to, p, [](float& x, float* at, bool there) {
            if (there) *at = x;
        });
    }

    __device__ __forceinline__ void scale(const Scales& s, int which) {
        const int g = lane_id() >> 2, t = lane_id() & 3;
        float value[ROWS][2];
#pragma unroll
        for (int i = 0; i < 2 * ROWS; i++) value[i / 2][i % 2] = FW_Z ? s.value[which][first_row() + 8 * i + g] : 1.f;
#pragma unroll
        for (int i = 0; i < 2 * COLUMNS; i++) {
            const float2 key = FW_F ? *(const float2*)(s.key[which] + first_column() + 8 * i + 2 * t) : make_float2(1.f, 1.f);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float(&c)[4] = acc[r][i / 2].c[i % 2];
                if (FW_F) c[0] *= key.x, c[1] *= key.y, c[2] *= key.x, c[3] *= key.y;
                if (FW_Z) c[0] *= value[r][0], c[1] *= value[r][0], c[2] *= value[r][1], c[3] *= value[r][1];
            }
        }
    }

    // += values^T keys, both (16, channels) arrays of a chunk, or of one half of it.
    template <int HALF = -1>
    __device__ __forceinline__ void add_outer(const Operand* values, const Operand* keys) {
        Block left[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            load_block<true, true>(left[r], values + first_row() + 16 * r, FW_LDV);
            if (HALF >= 0) keep_columns(left[r], HALF);
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            Block right;
            load_block<false, true>(right, keys + first_column() + 16 * c, FW_LDK);
#pragma unroll
            for (int r = 0; r < ROWS; r++) add_product(acc[r][c], left[r], right);
        }
    }
};
