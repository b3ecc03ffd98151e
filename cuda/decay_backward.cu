// The recurrence without erase and with decay per channel (rule decay), backward. dW is the adjoint of the memory, carried from the
// last token to the first.
//
// A block takes one sequence and one tile of value channels, part by part from the last: from the memory saved before the
// part it recomputes the memory before each of its chunks into shared memory, then goes through the chunks backwards. Per chunk,
// with hats for operands scaled by products of gates (gates.cuh), P = tril(Q^ K^T) and dP = tril(dY^ V^T):
//
//     dQ^ = dY^ W^T + dP K^     dK^ = V^ dW^T + dP^T Q^     dV^ = K^ dW + P^T dY^     dW += Q^T dY^
//
// A gate's log gradient is the sum over everything that spans it: the memory's way through the chunk (sum of W * dW), reads from
// the memory after it (q dq), writes into the memory before it (k dk), all of one sign of error, and pairs of tokens on its two
// sides. Those come as sums of q dq - k dk, which cancel but for rounding: the terms are made of the same rounded operands, without
// the pairs of a token with itself, within one chunk only. Divided by the gate that is right to 1e-7 / gate; where gates are
// smaller than FW_SMALL_GATE the pairs are taken apart (gates.cuh), and nothing cancels.
//
// Each value tile writes its share of dq, dk, df and dw. Memory bandwidth bounds the speed: inputs are read from DRAM once.
#include "decay_gradients.cuh"

__device__ __forceinline__ void put_memory(Operand* at, Memory& memory) {
    int g = lane_id() >> 2, t = lane_id() & 3;
#pragma unroll
    for (int r = 0; r < Memory::ROWS; r++)
#pragma unroll
        for (int c = 0; c < Memory::COLUMNS; c++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int row = Memory::first_row() + 16 * r + g + 8 * (i % 2), column = Memory::first_column() + 16 * c + 8 * (i / 2) + 2 * t;
                const float* x = &memory.acc[r][c].c[i / 2][i % 2 * 2];
                store_operands(at + row * FW_LDK + column, x[0], x[1]);
            }
}

// The smallest product of 8 gates, 0 where a gate is too small to divide by.
__device__ __forceinline__ float smallest_of(const Columns& columns) {
    float smallest = 1.f;
#pragma unroll
    for (int j = 0; j < 8; j++) smallest = fminf(smallest, fminf(columns.gate[0][j], columns.gate[1][j]));
    return smallest < FW_SMALL_GATE ? 0.f : columns.smallest();
}

// The memory before each chunk of a part, in the frame that the chunk will use.
__device__ __forceinline__ void recompute(const Params& p, Shared& s, int part, int chunks) {
    Memory memory;
    if (is_owner())
        memory.load(part ? memory_of(p.borders, p, p.parts - 1, part - 1) : memory_of(p.memory, p), p);
    float2 left_over = make_float2(1.f, 1.f);
    for (int chunk = 0; chunk < chunks; chunk++) {
        Columns columns;
        int start = part * FW_PART + chunk * FW_CHUNK;
#if FW_MAP
        map_chunk(s.features, s.rows, p, start, 16);
        __syncthreads();
#endif
        float smallest = 1.f;
        by_side(p, s, [&](const auto& job) {
            columns.load_gates(p, job, start, FW_NO_GATE);
            columns.load_writes(p, job, start);
            smallest = smallest_of(columns);
        });
        int mode = first_mode(vote_tier(smallest));
        by_side(p, s, [&](const auto& job) {
            Factors factors[2];
            gate_factors(factors[0], mode, job.late, columns.gate[0]);
            gate_factors(factors[1], mode, job.late, columns.gate[1]);
            columns.put<false>(job.key ? s.k : s.v, job.key ? FW_LDK : FW_LDV, job, factors);
            float2 first = make_float2(factors[0].first, factors[1].first), second = make_float2(factors[0].second, factors[1].second);
            s.scales.put(job, left_over, first, make_float2(first.x * second.x, first.y * second.y));
            left_over = mode == ALL ? second : make_float2(1.f, 1.f);
        });
        __syncthreads();
        if (is_owner()) {
            memory.scale(s.scales, 0);
            if (mode == ALL) memory.scale(s.scales, 1);
            put_memory(s.memory[chunk], memory);
            if (chunk + 1 < chunks) {
                if (mode == BORDERS) memory.scale(s.scales, 2);
                memory.add_outer(s.v, s.k);
            }
        }
        __syncthreads();
    }
}

// A round of a chunk. Chunks in one frame, which nearly all are, have code of their own.
template <bool ONE_FRAME>
__device__ __forceinline__ void reverse_round(const Params& p, Shared& s, Memory& adjoint, Columns& columns, Sums& sums, int start,
                                              int chunk, int round, float2& left_over) {
    const int mode = ONE_FRAME ? ALL : round, warp = threadIdx.x >> 5;
    by_side(p, s, [&](const auto& job) {
        Factors factors[2];
        gate_factors(factors[0], mode, job.late, columns.gate[0]);
        gate_factors(factors[1], mode, job.late, columns.gate[1]);
        columns.put<true>(job.key ? s.q : s.dy, job.key ? FW_LDK : FW_LDV, job, factors);
        columns.put<false>(job.key ? s.k : s.v, job.key ? FW_LDK : FW_LDV, job, factors);
        if (has_borders(mode)) {
            float2 first = make_float2(factors[0].first, factors[1].first), second = make_float2(factors[0].second, factors[1].second);
            s.scales.put(job, left_over, second, make_float2(first.x * second.x, first.y * second.y));
            left_over = mode == ALL ? first : make_float2(1.f, 1.f);
        }
    });
    __syncthreads();
    if (has_borders(mode) && is_owner()) {
        adjoint.scale(s.scales, 0);
        if (mode == ALL) adjoint.scale(s.scales, 1);
        put_memory(s.adjoint, adjoint);
    }
    if (has_pairs(mode)) {
        if (warp == 0) score<FW_K>(s.scores, s.self[0], s.q, s.k, mode);
        if (warp == FW_WARPS - 1) score<FW_V>(s.dscores, s.self[1], s.dy, s.v, mode);
    }
    __syncthreads();
    multiply_side<true>(s, mode, chunk);
    multiply_side<false>(s, mode, chunk);
    if (has_borders(mode) && is_owner()) {
        if (mode == BORDERS) adjoint.scale(s.scales, 2);
        adjoint.add_outer(s.dy, s.q);
    }
    __syncthreads();
    by_side(p, s, [&](const auto& job) {
        // Loaded again: kept, the gates, their products and addresses would not fit the registers.
        const int again = unknown(start), now = ONE_FRAME ? ALL : unknown(round);
        if (does_self(now)) collect_self(p, sums, s.self[job.key], job, again);
        columns.load_gates(p, job, again, FW_NO_GATE);
        const bool spanned = has_borders(now) && (job.key ? FW_F != 0 : FW_Z != 0);
        const float2 past = spanned ? through(s, job, now, chunk) : make_float2(0.f, 0.f);
        collect<0>(sums, s, job, columns, now, past.x);
        collect<1>(sums, s, job, columns, now, past.y);
    });
}

// One chunk backwards; `left_over` is what a chunk leaves to do to the adjoint.
__device__ __forceinline__ void reverse_chunk(const Params& p, Shared& s, Memory& adjoint, int start, int chunk, float2& left_over) {
    Columns columns;
    Sums sums;
    sums.clear();
#if FW_MAP
    map_chunk(s.features, s.rows, p, start, 32);
    __syncthreads();
#endif
    float smallest = 1.f;
    by_side(p, s, [&](const auto& job) {
        columns.load_gates(p, job, start, FW_NO_GATE);
        columns.load_writes(p, job, start);
        columns.load_reads(p, job, start);
        smallest = smallest_of(columns);
    });
    const int tier = vote_tier(smallest);
    if (tier == 0) {
        reverse_round<true>(p, s, adjoint, columns, sums, start, chunk, ALL, left_over);
    } else {
        for (int mode = first_mode(tier);; mode = next_mode(mode, tier)) {
            reverse_round<false>(p, s, adjoint, columns, sums, start, chunk, mode, left_over);
            if (next_mode(mode, tier) == DONE) break;
            by_side(p, s, [&](const auto& job) {
                columns.load_writes(p, job, start);
                columns.load_reads(p, job, start);
            });
            __syncthreads();
        }
    }
    start = unknown(start);
    by_side(p, s, [&](const auto& job) { store_side(p, s, job, columns, sums, start); });
#if FW_MAP
    __syncthreads();
    unmap_chunk(p, s, start);
#endif
}

#if FW_MAP
__device__ __forceinline__ void take_rows(Shared& s, const Params& p, int part, int chunks) {
    for (int chunk = 0; chunk < chunks; chunk++) load_rows(s.rows, p, part * FW_PART + chunk * FW_CHUNK);
    cp_async_wait<0>();
    __syncthreads();
}
#endif

extern "C" __global__ void __launch_bounds__(FW_WARPS * 32, 1) decay_backward(const Params p) {
    extern __shared__ __align__(16) unsigned char shared[];
    Shared& s = *(Shared*)shared;
    Memory adjoint;
    float2 left_over = make_float2(1.f, 1.f);

    if (is_owner()) adjoint.load(memory_of(p.dfinal, p), p);
    for (int part = p.parts - 1; part >= 0; part--) {
        int chunks = min(FW_CHUNKS, (p.T - part * FW_PART + FW_CHUNK - 1) / FW_CHUNK);
        __syncthreads();
#if FW_MAP
        take_rows(s, p, part, chunks);
#endif
        recompute(p, s, part, chunks);
        for (int chunk = chunks - 1; chunk >= 0; chunk--) {
            int start = part * FW_PART + chunk * FW_CHUNK;
            reverse_chunk(p, s, adjoint, start, chunk, left_over);
            __syncthreads();
        }
    }
    by_side(p, s, [&](const auto& job) { s.scales.put(job, left_over, left_over, left_over); });
    __syncthreads();
    if (is_owner()) {
        adjoint.scale(s.scales, 0);
        adjoint.store(memory_of(p.dmemory, p), p);
    }
}
