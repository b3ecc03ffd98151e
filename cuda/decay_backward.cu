// Fast weights without erase (sum, gated, decay), backward. dW is the adjoint of the memory, carried from the right.
//
// A block takes one sequence and one tile of value channels, segment by segment from the last: from the memory saved before the
// segment it recomputes the memory before each of its chunks into shared memory, then goes through the chunks backwards. Per chunk,
// with hats for operands scaled by products of gates (gates.cuh), P = tril(Q^ K^T) and dP = tril(dY^ V^T):
//
//     dQ^ = dY^ W^T + dP K^     dK^ = V^ dW^T + dP^T Q^     dV^ = K^ dW + P^T dY^     dW += Q^T dY^
//
// A gate's log gradient is the sum over everything that spans it: the memory's way through the chunk (sum of W * dW), reads from the
// memory after it (q dq), writes into the memory before it (k dk), all of one sign of error, and pairs of tokens on its two sides.
// Those come as sums of q dq - k dk, which cancel but for rounding: the terms are made of the same rounded operands, without the
// pairs of a token with itself, within one chunk only. Divided by the gate that is right to 1e-7 / gate; where gates are smaller
// than FW_SMALL_GATE the pairs are taken apart (gates.cuh), and nothing cancels.
//
// Value tiles add their shares of dq, dk, df and dw. Bound by memory bandwidth: inputs are read from DRAM once.
#include "columns.cuh"

#define FW_LDP 24
#define FW_CHUNKS (FW_SEGMENT / FW_CHUNK)
#define FW_KEY_SUMS (FW_F ? 3 : 2)
#define FW_VALUE_SUMS (FW_Z ? 3 : 1)
#define FW_SMALL_GATE (FW_PRECISION == 2 ? 1e-2f : 1e-4f)
#define FW_NO_GATE 1e-12f  // counts as this, for a gradient with respect to a gate of 0

#if FW_PARTIAL
typedef float Share;
#else
typedef FW_IN Share;
#endif

struct Shared {
    Operand q[16 * FW_LDK], k[16 * FW_LDK], v[16 * FW_LDV], dy[16 * FW_LDV];
    Operand scores[16 * FW_LDP], dscores[16 * FW_LDP];
    Operand memory[FW_CHUNKS][FW_V * FW_LDK], adjoint[FW_V * FW_LDK];  // transposed, in the chunk's frame
    float self[2][16];                                                 // P and dP of a token with itself
    float key[FW_KEY_SUMS][16 * FW_LDK];                               // dK^ (by the memory), dQ^, dK^ (by pairs)
    float value[FW_VALUE_SUMS][16 * FW_LDV];                           // dV^, Y^, dV^
    Scales scales;
};
static_assert(sizeof(Shared) == FW_SHARED, "the host counts other bytes");

// Gradients of one lane's columns, summed over a chunk's rounds.
struct Sums {
    float reads[2][8], writes[2][8], log_gate[2][8];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 16; i++) reads[i / 8][i % 8] = writes[i / 8][i % 8] = log_gate[i / 8][i % 8] = 0.f;
    }
};

__device__ __forceinline__ void put_memory(Operand* at, Memory& memory) {
    int g = lane_id() >> 2, t = lane_id() & 3;
#pragma unroll
    for (int r = 0; r < Memory::ROWS; r++)
#pragma unroll
        for (int c = 0; c < Memory::COLUMNS; c++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int row = Memory::first_row() + 16 * r + g + 8 * (i % 2), column = Memory::first_column() + 16 * c + 8 * (i / 2) + 2 * t;
                const float* x = &memory.part[r][c].c[i / 2][i % 2 * 2];
                store_operands(at + row * FW_LDK + column, x[0], x[1]);
            }
}

__device__ __forceinline__ int tier_of(const Columns& columns) {
    if (!FW_F && !FW_Z) return 0;
    float smallest = 1.f;
#pragma unroll
    for (int j = 0; j < 8; j++) smallest = fminf(smallest, fminf(columns.gate[0][j], columns.gate[1][j]));
    return vote_tier(smallest < FW_SMALL_GATE ? 0.f : columns.smallest());
}

// The memory before each chunk of a segment, in the frame that the chunk will use.
__device__ __forceinline__ void recompute(const Params& p, Shared& s, const Job& job, int segment, int chunks) {
    Memory memory;
    if (is_owner())
        memory.load(segment ? memory_of(p.borders, p, p.segments - 1, segment - 1) : memory_of(p.memory, p), p);
    float2 left_over = make_float2(1.f, 1.f);
    for (int chunk = 0; chunk < chunks; chunk++) {
        Columns columns;
        Factors factors[2];
        int start = segment * FW_SEGMENT + chunk * FW_CHUNK;
        columns.load_gates(p, job, start, FW_NO_GATE);
        columns.load_writes(p, job, start);
        int mode = first_mode(tier_of(columns));
        gate_factors(factors[0], mode, job.late, columns.gate[0]);
        gate_factors(factors[1], mode, job.late, columns.gate[1]);
        columns.put<false>(job.key ? s.k : s.v, job.key ? FW_LDK : FW_LDV, job, factors);
        float2 first = make_float2(factors[0].first, factors[1].first), second = make_float2(factors[0].second, factors[1].second);
        s.scales.put(job, left_over, first, make_float2(first.x * second.x, first.y * second.y));
        left_over = mode == ALL ? second : make_float2(1.f, 1.f);
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

// The pairs of a round, those of a token with itself apart. One warp.
template <int WIDTH>
__device__ __forceinline__ void score(Operand* to, float* self, const Operand* reads, const Operand* writes, int mode) {
    Acc acc;
    clear(acc);
#pragma unroll 2
    for (int c = 0; c < WIDTH; c += 16) {
        Block left, right;
        load_block<true, false>(left, reads + c, WIDTH + 8);
        load_block<false, false>(right, writes + c, WIDTH + 8);
        multiply(acc, left, right);
    }
    int g = lane_id() >> 2, t = lane_id() & 3;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int reader = g + 8 * (i % 2), writer = 8 * (i / 2) + 2 * t;
        float x = acc.c[i / 2][i % 2 * 2], y = acc.c[i / 2][i % 2 * 2 + 1];
        if (does_self(mode) && reader / 2 == writer / 2) self[reader] = reader == writer ? x : y;
        store_operands(to + reader * FW_LDP + writer, does_pair(mode, reader, writer) ? x : 0.f,
                       does_pair(mode, reader, writer + 1) ? y : 0.f);
    }
}

__device__ __forceinline__ void put_sums(float* at, const Acc& acc, int ld) {
    int g = lane_id() >> 2, t = lane_id() & 3;
#pragma unroll
    for (int i = 0; i < 4; i++)
        *(float2*)(at + (g + 8 * (i % 2)) * ld + 8 * (i / 2) + 2 * t) = make_float2(acc.c[i / 2][i % 2 * 2], acc.c[i / 2][i % 2 * 2 + 1]);
}

// dQ^ and dK^, or Y^ and dV^, 16 channels a warp at a time.
template <bool KEY>
__device__ __forceinline__ void multiply_side(Shared& s, int mode, int chunk) {
    constexpr int OWN = KEY ? FW_K : FW_V, ACROSS = KEY ? FW_V : FW_K, LD = OWN + 8;
    constexpr bool GATED = KEY ? FW_F != 0 : FW_Z != 0, READS = KEY || GATED;
    int warp = threadIdx.x >> 5;
    for (int own = 16 * (KEY ? warp : FW_WARPS - 1 - warp); own < OWN; own += 16 * FW_WARPS) {
        Acc reads, writes, pairs;
        Block left, right;
        clear(reads);
        clear(writes);
        clear(pairs);
        if (has_borders(mode)) {
#pragma unroll 1
            for (int across = 0; across < ACROSS; across += 16) {
                int at = KEY ? across * FW_LDK + own : own * FW_LDK + across;
                if (READS) {
                    load_block<true, false>(left, (KEY ? s.dy : s.q) + across, ACROSS + 8);
                    load_block<false, KEY>(right, s.memory[chunk] + at, FW_LDK);
                    multiply(reads, left, right);
                }
                load_block<true, false>(left, (KEY ? s.v : s.k) + across, ACROSS + 8);
                load_block<false, KEY>(right, s.adjoint + at, FW_LDK);
                multiply(writes, left, right);
            }
        }
        if (has_pairs(mode)) {
            const Operand* scores = KEY ? s.dscores : s.scores;
            if (READS) {
                load_block<true, false>(left, scores, FW_LDP);
                load_block<false, true>(right, (KEY ? s.k : s.v) + own, LD);
                multiply(reads, left, right);
            }
            load_block<true, true>(left, scores, FW_LDP);
            load_block<false, true>(right, (KEY ? s.q : s.dy) + own, LD);
            multiply(GATED ? pairs : writes, left, right);
        }
        float* sums = KEY ? s.key[0] : s.value[0];
        put_sums(sums + own, writes, LD);
        if (READS) put_sums(sums + 16 * LD + own, reads, LD);
        if (GATED) put_sums(sums + 32 * LD + own, pairs, LD);
    }
}

// Sum of W * dW over the other side's channels: what goes through the chunk past this lane's two columns.
__device__ __forceinline__ float2 through(const Shared& s, const Job& job, int mode, int chunk) {
    float2 sum = make_float2(0.f, 0.f);
    if (job.active) {
        const Operand *memory = s.memory[chunk], *adjoint = s.adjoint;
        bool weigh = mode == BORDERS;
        if (job.key) {
#pragma unroll 1
            for (int row = job.late * FW_V / 2; row < (job.late + 1) * FW_V / 2; row++) {
                float2 x = load_operands(memory + row * FW_LDK + job.column), dx = load_operands(adjoint + row * FW_LDK + job.column);
                float weight = weigh ? s.scales.value[2][row] : 1.f;
                sum.x += x.x * dx.x * weight;
                sum.y += x.y * dx.y * weight;
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < FW_K / 2; i += 2) {
                int column = job.late * FW_K / 2 + (i + 2 * (lane_id() & 15)) % (FW_K / 2);
                int at = job.column * FW_LDK + column;
                float2 weight = weigh ? *(const float2*)(s.scales.key[2] + column) : make_float2(1.f, 1.f);
                float2 x = load_operands(memory + at), dx = load_operands(adjoint + at);
                sum.x += x.x * dx.x * weight.x + x.y * dx.y * weight.y;
                x = load_operands(memory + at + FW_LDK), dx = load_operands(adjoint + at + FW_LDK);
                sum.y += x.x * dx.x * weight.x + x.y * dx.y * weight.y;
            }
        }
        if (weigh) {
            const float* total = job.key ? s.scales.key[2] : s.scales.value[2];
            sum.x *= total[job.column];
            sum.y *= total[job.column + 1];
        }
    }
    sum.x += __shfl_xor_sync(0xFFFFFFFFu, sum.x, 16);
    sum.y += __shfl_xor_sync(0xFFFFFFFFu, sum.y, 16);
    return sum;
}

// What spans each gate of a channel, from the products of operands and their gradients: `after` a gate and `before` it.
__device__ __forceinline__ void add_spans(float (&log_gate)[8], const float (&after)[8], const float (&before)[8], int late, int mode) {
    bool level = mode >= LEVEL16;
    int size = level ? level_size(mode) : 16;
    float outward[8], run = 0.f;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (level && (j & (size - 1)) == 0) run = 0.f;
        float next = run + (late ? before[j] : after[j]);
        outward[j] = late ? run : next;
        run = next;
    }
    run = 0.f;
    float inward[8];
#pragma unroll
    for (int j = 7; j >= 0; j--) {
        if (level && (j & (size - 1)) == size - 1) run = 0.f;
        float next = run + (late ? after[j] : before[j]);
        inward[j] = late ? next : run;
        run = next;
    }
    float other = __shfl_xor_sync(0xFFFFFFFFu, run, 16);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        bool far = ((j + 8) & (size - 1)) >= size / 2;
        log_gate[j] += !level ? outward[j] + inward[j] + other : far ? inward[j] : outward[j];
    }
}

// The pairs of a token with itself.
__device__ __forceinline__ void collect_self(const Params& p, Sums& sums, const float* self, const Job& job, int start) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        int token = token_of(job.late, j), t = start + token;
        bool valid = job.active && t < p.T;
        float2 read = to_float2(load_pair(job.row<FW_IN>(job.key ? p.q : p.dy, t), job.column, job.width, valid, 0.f));
        sums.writes[0][j] += self[token] * read.x;
        sums.writes[1][j] += self[token] * read.y;
        if (!job.key) continue;
        float2 write = to_float2(load_pair(job.row<FW_IN>(p.k, t), job.column, job.width, valid, 0.f));
        sums.reads[0][j] += self[token] * write.x;
        sums.reads[1][j] += self[token] * write.y;
    }
}

// A round's share of the gradients of one of this lane's columns, C; one after the other, for the registers.
template <int C>
__device__ __forceinline__ void collect(Sums& sums, const Shared& s, const Job& job, const Columns& columns, int mode, float past) {
    const bool gated = job.key ? FW_F != 0 : FW_Z != 0;
    const int ld = job.key ? FW_LDK : FW_LDV;
    const float* results = (job.key ? s.key[0] : s.value[0]) + job.column + C;
    const Operand *reads = (job.key ? s.q : s.dy) + job.column + C, *writes = (job.key ? s.k : s.v) + job.column + C;
    Factors factors;
    gate_factors(factors, mode, job.late, columns.gate[C]);
    float after[8], before[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        int token = token_of(job.late, j), at = token * ld;
        float dwrite = 0.f, dread = 0.f, dpair = 0.f;
        after[j] = before[j] = 0.f;
        if (job.active) {
            dwrite = results[at];
            if (job.key || gated) dread = results[16 * ld + at];
            if (gated) {
                dpair = results[32 * ld + at];
                float write = to_float(writes[at]), by_pairs = write * dpair;
                after[j] = to_float(reads[at]) * dread - (mode < LEVEL16 ? by_pairs : 0.f);
                before[j] = write * dwrite + (mode < LEVEL16 ? 0.f : by_pairs);
            }
        }
        sums.reads[C][j] += factors.reads[j] * dread;
        sums.writes[C][j] += factors.writes[j] * (dwrite + dpair);
    }
    if (!gated || mode == DIAGONAL) return;
    add_spans(sums.log_gate[C], after, before, job.late, mode);
#pragma unroll
    for (int j = 0; j < 8; j++) sums.log_gate[C][j] += past;
}

// x summed over the lanes that hold this lane's token.
__device__ __forceinline__ float sum_channels(float x) {
#pragma unroll
    for (int i = 8; i; i >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, i);
    return x;
}

__device__ __forceinline__ void store_keys(const Params& p, const Job& job, const Columns& columns, const Sums& sums, int start) {
    int part = blockIdx.x;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        int t = start + token_of(job.late, j);
        bool valid = job.active && t < p.T;
        store_pair(job.row<Share>(p.dq, t, part), job.column, job.width, valid, sums.reads[0][j], sums.reads[1][j]);
        store_pair(job.row<Share>(p.dk, t, part), job.column, job.width, valid, sums.writes[0][j], sums.writes[1][j]);
        float df[2] = {sums.log_gate[0][j] / columns.gate[0][j], sums.log_gate[1][j] / columns.gate[1][j]};
        if (FW_F == 1) {
            float sum = sum_channels(df[0] + df[1]);
            if ((lane_id() & 15) == 0 && t < p.T) *row_of<float>(p.df, t, part * FW_KEY_JOBS + job.number) = sum;
        } else if (FW_F) {
            store_pair(job.row<float>(p.df, t, part), job.column, job.width, valid, df[0], df[1]);
        }
    }
}

__device__ __forceinline__ void store_values(const Params& p, const Job& job, const Columns& columns, const Sums& sums, int start) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        int t = start + token_of(job.late, j);
        bool valid = job.active && t < p.T;
        float w = columns.strength[j], dx = sums.writes[0][j], dy = sums.writes[1][j];
        store_pair(job.row<FW_IN>(p.dv, t), job.column, job.width, valid, w * dx, w * dy);
        if (FW_Z) {
            store_pair(job.row<float>(p.dz, t), job.column, job.width, valid, sums.log_gate[0][j] / columns.gate[0][j],
                       sums.log_gate[1][j] / columns.gate[1][j]);
        }
        if (FW_W) {
            float2 v = to_float2(columns.writes[j]);
            float sum = sum_channels(job.active ? v.x * dx + v.y * dy : 0.f);
            if ((lane_id() & 15) == 0 && t < p.T && job.number < FW_VALUE_JOBS)
                *row_of<float>(p.dw, t, blockIdx.x * FW_VALUE_JOBS + job.number) = sum;
        }
    }
}

// One chunk backwards; returns what it leaves to do to the adjoint.
__device__ __forceinline__ float2 reverse_chunk(const Params& p, Shared& s, const Job& job, Memory& adjoint, int start, int chunk,
                                                float2 left_over) {
    Columns columns;
    Sums sums;
    sums.clear();
    columns.load_gates(p, job, start, FW_NO_GATE);
    columns.load_writes(p, job, start);
    columns.load_reads(p, job, job.key ? p.q : p.dy, start);
    int tier = tier_of(columns), warp = threadIdx.x >> 5;
    for (int mode = first_mode(tier); mode != DONE; mode = next_mode(mode, tier)) {
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
        // Loaded again: kept, the gates, their products and addresses would not fit the registers.
        start = unknown(start);
        mode = unknown(mode);
        if (does_self(mode)) collect_self(p, sums, s.self[job.key], job, start);
        columns.load_gates(p, job, start, FW_NO_GATE);
        bool spanned = has_borders(mode) && (job.key ? FW_F != 0 : FW_Z != 0);
        float2 past = spanned ? through(s, job, mode, chunk) : make_float2(0.f, 0.f);
        collect<0>(sums, s, job, columns, mode, past.x);
        collect<1>(sums, s, job, columns, mode, past.y);
        if (next_mode(mode, tier) == DONE) break;
        columns.load_writes(p, job, start);
        columns.load_reads(p, job, job.key ? p.q : p.dy, start);
        __syncthreads();
    }
    start = unknown(start);
    if (job.key) {
        store_keys(p, job, columns, sums, start);
    } else {
        if (FW_W) columns.load_writes(p, job, start);
        store_values(p, job, columns, sums, start);
    }
    return left_over;
}

extern "C" __global__ void __launch_bounds__(FW_WARPS * 32, 1) decay_backward(const Params p) {
    extern __shared__ __align__(16) unsigned char shared[];
    Shared& s = *(Shared*)shared;
    const Job job(p);
    Memory adjoint;
    float2 left_over = make_float2(1.f, 1.f);

    if (is_owner()) adjoint.load(memory_of(p.dfinal, p), p);
    for (int segment = p.segments - 1; segment >= 0; segment--) {
        int chunks = min(FW_CHUNKS, (p.T - segment * FW_SEGMENT + FW_CHUNK - 1) / FW_CHUNK);
        __syncthreads();
        recompute(p, s, job, segment, chunks);
        for (int chunk = chunks - 1; chunk >= 0; chunk--) {
            int start = segment * FW_SEGMENT + chunk * FW_CHUNK;
            left_over = reverse_chunk(p, s, job, adjoint, start, chunk, left_over);
            if (FW_F || FW_Z) __syncthreads();
        }
    }
    s.scales.put(job, left_over, left_over, left_over);
    __syncthreads();
    if (is_owner()) {
        adjoint.scale(s.scales, 0);
        adjoint.store(memory_of(p.dmemory, p), p);
    }
}
