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
// the pairs of a token with itself, within one chunk only. Divided by the gate that is right to 1e-7 / gate; where a gate is
// smaller than FW_SMALL_GATE, and where pairs are split, those that it spans are summed one by one, or they are taken apart
// (gates.cuh), and nothing cancels.
//
// Each value tile writes its share of dq, dk, df and dw.
//
// With FW_SIDE_BITS several blocks share the parts of a sequence. Each keeps dW in a place of its own, and begins with what
// decay_walk.cu has put there.
#include "decay_one_round.cuh"

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

__device__ __forceinline__ bool has_small_gate(const Columns& columns) {
    float smallest = 1.f;
#pragma unroll
    for (int j = 0; j < 8; j++) smallest = fminf(smallest, fminf(columns.gate[0][j], columns.gate[1][j]));
    return smallest < FW_SMALL_GATE;
}

// Gates, and k and v, or with READS q and dy.
template <bool READS, class J>
__device__ __forceinline__ void load_columns(Columns& columns, const Params& p, const J& job, int start) {
    columns.load_gates(p, job, start);
    if (READS) columns.load_reads(p, job, start);
    else columns.load_writes(p, job, start);
}

#if FW_MAP
// With a map a chunk's columns cannot be loaded while another one is computed: their features do not exist yet.
template <bool READS>
__device__ __forceinline__ void map_columns(const Params& p, Shared& s, Columns& columns, int start) {
    map_chunk(s.features, s.rows, p, start, READS ? 32 : 16);
    __syncthreads();
    by_side(p, s, [&](const auto& job) { load_columns<READS>(columns, p, job, start); });
}
#endif

// This lane's columns of a round, scaled by its factors.
template <bool READS, class J>
__device__ __forceinline__ void put_round(Shared& s, const Params& p, const J& job, int mode, int start, int chunk, int turn) {
    Columns columns;
    Factors factors;
    constexpr int LD = J::key ? FW_LDK : FW_LDV;
    start = unknown(start);  // addresses that were kept would fill the registers
    columns.find(p, job);
    columns.load_gates(p, job, start, FW_NO_GATE);
    factors.multiply(mode, job.late, columns.gate);
    columns.load_writes(p, job, start);
    columns.put<false>(J::key ? s.k[chunk] : s.v[chunk], LD, job, factors.writes);
    if (READS) {
        columns.load_reads(p, job, start);
        columns.put<true>(J::key ? s.q : s.dy, LD, job, factors.reads);
    }
    if (mode == BORDERS) s.scales.put_whole(job, factors.whole, turn);
}

// How a chunk runs. A gate may be so small that no difference of sums may be divided by it.
__device__ __forceinline__ int vote_tier(const Params& p, Shared& s, const Columns& columns, Frame& frame, float smallest, bool key,
                                         bool small) {
    if (FW_TIER <= SMALL_GATES) {
        if (__syncthreads_and(smallest >= FW_ONE_FRAME && !small)) return FW_TIER < 0 ? ONE_ROUND : FW_TIER;
        if (in_range(smallest, key)) return __syncthreads_and(!small) ? ONE_ROUND : SMALL_GATES;
    }
    if (FW_HALVES && __syncthreads_and(!small)) return vote_halves(p, s, columns, frame, smallest, key, FW_SPLIT_GRADIENTS);
    return vote_rounds(smallest, FW_SPLIT_GRADIENTS);
}

// The memory before each chunk of a part, and the chunk's keys and values, in the frame that the chunk will use. Returns how the
// chunks run, four bits for each.
__device__ __forceinline__ int recompute(const Params& p, Shared& s, int part, int chunks) {
    Memory memory;
    Columns columns;
    int tier = ONE_ROUND, tiers = 0;
    s.scales.leave_nothing(1);
    by_side(p, s, [&](const auto& job) { columns.find(p, job); });
    if (is_owner()) memory.load(part ? memory_of(p.borders, p, p.parts - 1, part - 1) : memory_of(p.memory, p), p);
#pragma unroll 1
    for (int chunk = -1; chunk < chunks; chunk++) {  // the first turn loads the first chunk
        const int start = part * FW_PART + chunk * FW_CHUNK, turn = chunk & 1;
        if (chunk >= 0) {
#if FW_MAP
            map_columns<false>(p, s, columns, start);
#endif
            Frame frame;
            float smallest = 1.f;
            bool key = false, small = false;
            by_side(p, s, [&](const auto& job) {
                frame.multiply(job, columns.gate);
                smallest = frame.smallest();
                key = job.key;
                small = job.gated && has_small_gate(columns);
            });
            tier = vote_tier(p, s, columns, frame, smallest, key, small);
            tiers |= tier << 4 * chunk;
            if (tier <= HALVES) {
                by_side(p, s, [&](const auto& job) {
                    columns.put<false>(job.key ? s.k[chunk] : s.v[chunk], job.key ? FW_LDK : FW_LDV, job, frame.writes);
                    if (FW_HALVES && tier == HALVES) {
                        s.scales.put<false>(job, frame.before, frame.after, turn);
                        s.scales.put_middle(job, true, frame.before);
                    } else {
                        s.scales.put<false>(job, frame.half, frame.half, turn);
                    }
                });
            } else {
                by_side<true>(p, s, [&](const auto& job) { put_round<false>(s, p, job, BORDERS, start, chunk, turn); });
            }
        }
        __syncthreads();
#if !FW_MAP
        columns.forget();
        if (chunk + 1 < chunks) by_side(p, s, [&](const auto& job) { load_columns<false>(columns, p, job, start + FW_CHUNK); });
#endif
        if (chunk >= 0 && is_owner()) {
            memory.scale(s.scales, tier <= HALVES ? Scales::CHUNK : Scales::LEFT + (turn ^ 1));
            put_memory(s.memory[chunk], memory);
            if (tier > HALVES) memory.scale(s.scales, Scales::CHUNK);
            if (FW_HALVES && tier == HALVES) {
                memory.add_outer<0>(s.v[chunk], s.k[chunk]);
                memory.scale(s.scales, Scales::MIDDLE);
                memory.add_outer<1>(s.v[chunk], s.k[chunk]);
            } else {
                memory.add_outer(s.v[chunk], s.k[chunk]);
            }
        }
    }
    __syncthreads();
    return tiers;
}

// The products of the pairs of tokens, by two warps.
template <bool IN_HALVES = false>
__device__ __forceinline__ void score_pairs(Shared& s, int mode, int chunk) {
    const int warp = threadIdx.x >> 5;
    const float *key = IN_HALVES ? s.scales.key[Scales::MIDDLE] : nullptr, *value = IN_HALVES ? s.scales.value[Scales::MIDDLE] : nullptr;
    if (warp == 0) score<FW_K>(s.scores, s.self[0], s.q, s.k[chunk], mode, key);
    if (warp == FW_WARPS - 1) score<FW_V>(s.dscores, s.self[1], s.dy, s.v[chunk], mode, value);
}

// What seldom runs is a function of its own, so that the loop has all registers for itself. With operands of 32 bits the call would
// spill more than it saves.
#if FW_PRECISION == 0 && FW_TIER < 2  // tests/counts does not follow calls
#define FW_SELDOM __noinline__
#else
#define FW_SELDOM __forceinline__
#endif

// A chunk backwards in several rounds. The adjoint waits in the place of its result, for the registers.
__device__ FW_SELDOM void reverse_rounds(const Params& p, Shared& s, int start, int chunk, int tier, int turn) {
    Sums sums;
    sums.clear();
#pragma unroll 1
    for (int mode = BORDERS; mode != DONE; mode = next_mode(mode, tier)) {
        by_side<true>(p, s, [&](const auto& job) { put_round<true>(s, p, job, mode, start, chunk, turn); });
        __syncthreads();
        if (mode == BORDERS && is_owner()) {
            Memory adjoint;
            adjoint.load(memory_of(own(p, side()), p), p);
            adjoint.scale(s.scales, Scales::LEFT + (turn ^ 1));
            put_memory(s.adjoint, adjoint);
            adjoint.scale(s.scales, Scales::CHUNK);
            adjoint.add_outer(s.dy, s.q);
            adjoint.store(memory_of(own(p, side()), p), p);
        }
        if (mode != BORDERS) score_pairs(s, mode, chunk);
        __syncthreads();
        multiply_side<true>(s, mode, chunk);
        multiply_side<false>(s, mode, chunk);
        __syncthreads();
        by_side<true>(p, s, [&](const auto& job) {
            Columns columns;
            const int again = unknown(start);
            columns.find(p, job);
            if (does_self(mode)) collect_self(p, sums, s.self[job.key], job, again);
            columns.load_gates(p, job, again, FW_NO_GATE);
            const float2 past = mode == BORDERS && job.gated ? through(s, job, chunk) : make_float2(0.f, 0.f);
            collect<0>(sums, s, job, columns, mode, chunk, past.x);
            collect<1>(sums, s, job, columns, mode, chunk, past.y);
            if (mode == PAIRS && job.gated) add_pairs(sums.log_gate, s, job, chunk);
        });
        __syncthreads();
    }
    by_side<true>(p, s, [&](const auto& job) {
        Columns columns;
        columns.find(p, job);
        columns.load_gates(p, job, start, FW_NO_GATE);
        store_side(p, s, job, columns, sums, start);
    });
}

// A chunk backwards in one round: this lane's columns, and the factors that the results need.
template <bool IN_HALVES, class J>
__device__ __forceinline__ void put_reads(Shared& s, const Columns& columns, const J& job, int turn) {
    constexpr int LD = J::key ? FW_LDK : FW_LDV;
    Frame frame;
    if (IN_HALVES) {
        frame.multiply_half(job, columns.gate);
    } else {
        frame.multiply(job, columns.gate);
    }
    columns.put<true>(J::key ? s.q : s.dy, LD, job, frame.reads);
    if (IN_HALVES) {  // behind the columns: before them it would hold a register more
        s.scales.put_middle(job, false, frame.after);
        s.scales.put<true>(job, frame.after, frame.before, turn);
    } else {
        s.scales.put<true>(job, frame.half, frame.half, turn);
    }
    if (!J::gated || !job.active) return;
    float* factors = (J::key ? s.key[FW_KEY_SUMS - 1] : s.value[FW_VALUE_SUMS - 1]) + job.column;
#pragma unroll
    for (int j = 0; j < 8; j++) *(float2*)(factors + job.token(j) * LD) = make_float2(frame.reads[0][j], frame.reads[1][j]);
}

// And what they do, in shared memory.
template <bool IN_HALVES>
__device__ __forceinline__ void reverse_round(const Params& p, Shared& s, Memory& adjoint, const float (&gate)[2][8], int start,
                                              int chunk, bool small) {
    if (is_owner()) {
        adjoint.scale(s.scales, Scales::CHUNK);
        put_memory(s.adjoint, adjoint);
    }
    score_pairs<IN_HALVES>(s, PAIRS, chunk);
    __syncthreads();
    take_side<true, IN_HALVES>(p, s, start, chunk, small);
    take_side<false, IN_HALVES>(p, s, start, chunk, small);
    if (is_owner()) {
        adjoint.add_outer<IN_HALVES ? 1 : -1>(s.dy, s.q);
        if (IN_HALVES) {
            adjoint.scale(s.scales, Scales::MIDDLE);
            adjoint.add_outer<0>(s.dy, s.q);
        }
    }
    __syncthreads();
    by_side(p, s, [&](const auto& job) { take_gates(p, s, job, gate, start, chunk, small); });
    if (small) __syncthreads();  // it has read columns of other warps
}

// A chunk backwards whose halves have frames of their own.
__device__ FW_SELDOM void reverse_halves(const Params& p, Shared& s, int start, int chunk, int turn) {
    Memory adjoint;
    Columns columns;
    if (is_owner()) adjoint.load(memory_of(own(p, side()), p), p);
    columns.forget();
    by_side(p, s, [&](const auto& job) {
        columns.find(p, job);
        load_columns<true>(columns, p, job, start);
        put_reads<true>(s, columns, job, turn);
    });
    __syncthreads();
    by_side(p, s, [&](const auto& job) {
        const float(&g)[2][8] = columns.gate;
        const float before[2] = {g[0][0] * g[0][1] * g[0][2] * g[0][3], g[1][0] * g[1][1] * g[1][2] * g[1][3]};
        s.scales.put_middle(job, true, before);
    });
    __syncthreads();
    reverse_round<true>(p, s, adjoint, columns.gate, start, chunk, false);
    if (is_owner()) adjoint.store(memory_of(own(p, side()), p), p);
}

// The chunks of a part, from the last to the first. Between two parts the adjoint is in the place of its result.
__device__ __forceinline__ void reverse_part(const Params& p, Shared& s, int part, int chunks, int tiers) {
    Memory adjoint;
    Columns columns;
    if (is_owner()) adjoint.load(memory_of(part == p.parts - 1 ? p.dfinal : own(p, side()), p), p);
    s.scales.leave_nothing(chunks & 1);
    by_side(p, s, [&](const auto& job) { columns.find(p, job); });
#pragma unroll 1
    for (int chunk = chunks; chunk >= 0; chunk--) {  // the first turn loads the last chunk
        const int start = part * FW_PART + chunk * FW_CHUNK, turn = chunk & 1;
        const int tier = chunk < chunks ? tiers >> 4 * chunk & 15 : ONE_ROUND;
        float gate[2][8];
        if (chunk < chunks) {
#if FW_MAP
            map_columns<true>(p, s, columns, start);
#endif
            if (tier < HALVES) {
                by_side(p, s, [&](const auto& job) { put_reads<false>(s, columns, job, turn); });
#pragma unroll
                for (int i = 0; i < 16; i++) gate[i / 8][i % 8] = columns.gate[i / 8][i % 8];
            }
        }
        __syncthreads();
        if (tier >= HALVES) {
            if (is_owner()) adjoint.store(memory_of(own(p, side()), p), p);
            if (FW_HALVES && tier == HALVES) reverse_halves(p, s, start, chunk, turn);
            else reverse_rounds(p, s, start, chunk, tier, turn);
            if (is_owner()) adjoint.load(memory_of(own(p, side()), p), p);
        }
#if !FW_MAP
        columns.forget();
        if (chunk > 0) by_side(p, s, [&](const auto& job) { load_columns<true>(columns, p, job, start - FW_CHUNK); });
#endif
        if (chunk < chunks && tier < HALVES) reverse_round<false>(p, s, adjoint, gate, start, chunk, tier == SMALL_GATES);
#if FW_MAP
        __syncthreads();
        if (chunk < chunks) unmap_chunk(p, s, start);
        __syncthreads();
#endif
    }
    __syncthreads();
    if (is_owner()) {
        adjoint.scale(s.scales, Scales::LEFT);
        adjoint.store(memory_of(own(p, side()), p), p);
    }
}

#if FW_MAP
__device__ __forceinline__ void take_rows(Shared& s, const Params& p, int part, int chunks) {
    for (int chunk = 0; chunk < chunks; chunk++) load_rows(s.rows, p, part * FW_PART + chunk * FW_CHUNK);
    cp_async_wait<0>();
    __syncthreads();
}
#endif

extern "C" __global__ void __launch_bounds__(FW_WARPS * 32, 1) decay_backward(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char shared[];
    Shared& s = *(Shared*)shared;
    const int each = (p.parts + (1 << FW_SIDE_BITS) - 1) >> FW_SIDE_BITS, first = side() * each, end = min(p.parts, first + each);
#pragma unroll 1
    for (int part = end - 1; part >= first; part--) {
        int chunks = min(FW_CHUNKS, (p.T - part * FW_PART + FW_CHUNK - 1) / FW_CHUNK);
        __syncthreads();
#if FW_MAP
        take_rows(s, p, part, chunks);
#endif
        const int tiers = recompute(p, s, part, chunks);
        reverse_part(p, s, part, chunks, tiers);
    }
}
