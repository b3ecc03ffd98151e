// The gradients of a chunk of several rounds, in the order that decay_backward.cu takes them, and the shared memory that they meet
// in.
#pragma once
#define FW_HALVES (FW_PRECISION == 0 && FW_K <= 64)  // wider operands or keys would spill registers
#include "decay_memory.cuh"

#define FW_LDP 24
#define FW_CHUNKS (FW_PART / FW_CHUNK)
#define FW_KEY_SUMS (FW_F ? 3 : 2)
#define FW_VALUE_SUMS (FW_Z ? 3 : 1)
#define FW_STRENGTHS (FW_V / 16)  // shares of dw
#define FW_SMALL_GATE (FW_PRECISION == 2 ? 1e-2f : 1e-4f)
#define FW_NO_GATE 1e-30f  // a smaller gate counts as this, for its own gradient; the forward takes it as it is

#if FW_PARTIAL
typedef float Share;
#else
typedef FW_IN Share;
#endif

struct Shared {
#if FW_MAP
    Rows rows[FW_ROW_CHUNKS];
    Features features;
#endif
    Operand q[16 * FW_LDK], dy[16 * FW_LDV];
    Operand k[FW_CHUNKS][16 * FW_LDK], v[FW_CHUNKS][16 * FW_LDV];
    Operand scores[16 * FW_LDP], dscores[16 * FW_LDP];
    Operand memory[FW_CHUNKS][FW_V * FW_LDK], adjoint[FW_V * FW_LDK];  // transposed, in the chunk's frame
    float self[2][16];                                                 // P and dP of a token with itself
    float past_key[FW_K], past_value[FW_V];                            // sum of W * dW over the other side's channels
    // In a chunk of several rounds: dK^ (by the memory), dQ^, dK^ (by pairs); dV^, Y^, dV^. In a chunk of one: what a token adds to
    // the gates up to its own, what to those after it, and the factors of the token as it reads.
    float key[FW_KEY_SUMS][16 * FW_LDK];
    float value[FW_VALUE_SUMS][16 * FW_LDV];
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

// dq and dk of a token's couple of channels: to device memory, or with a map to the place of the features.
__device__ __forceinline__ void put_key_gradients(Shared& s, const Params& p, int start, int token, int column, float2 dq,
                                                  float2 dk) {
#if FW_MAP
    store_pair(s.features.q + token * FW_LDK, column, FW_K, true, dq.x, dq.y);
    store_pair(s.features.k + token * FW_LDK, column, FW_K, true, dk.x, dk.y);
#else
    if (start + token >= p.T) return;
    store_pair(row_of<Share>(p.dq, start + token, blockIdx.x), column, p.K, true, dq.x, dq.y);
    store_pair(row_of<Share>(p.dk, start + token, blockIdx.x), column, p.K, true, dk.x, dk.y);
#endif
}

// Eight rows of a left block that go to the frame of the other half of the chunk: times what lies between the frames, for each
// column.
__device__ __forceinline__ void to_other_half(Block& left, const float* between, int half) {
#if FW_HALVES
#pragma unroll
    for (int i = half; i < 4; i += 2) {
        const float2 x = load_operands((const Operand*)&left.hi[i]);
        const float2 factor = *(const float2*)(between + 8 * (i / 2) + 2 * (lane_id() & 3));
        left.hi[i] = pack_bf16(x.x * factor.x, x.y * factor.y);
    }
#endif
}

// And of results, which come from there.
__device__ __forceinline__ void to_other_half(Acc& acc, const float* between, int half) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const float2 factor = *(const float2*)(between + 8 * n + 2 * (lane_id() & 3));
        acc.c[n][2 * half] *= factor.x;
        acc.c[n][2 * half + 1] *= factor.y;
    }
}

// The pairs of a round, those of a token with itself apart. One warp. `between`: the frames of two halves differ by it.
template <int WIDTH>
__device__ __forceinline__ void score(Operand* to, float* self, const Operand* reads, const Operand* writes, int mode,
                                      const float* between = nullptr) {
    Acc acc, across;
    clear(acc);
    clear(across);
#pragma unroll 2
    for (int c = 0; c < WIDTH; c += 16) {
        Block left, right;
        load_block<true, false>(left, reads + c, WIDTH + 8);
        load_block<false, false>(right, writes + c, WIDTH + 8);
        multiply(acc, left, right);
        if (!between) continue;
        to_other_half(left, between + c, 1);
        multiply(across, left, right);
    }
    if (between) {
#pragma unroll
        for (int i = 0; i < 4; i++) acc.c[0][i] = across.c[0][i];
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

// The scores of a chunk times 16 of its channels: what the reads of earlier tokens and the pairs of later ones add. HALF: those
// whose writes, or whose reads, one half has.
template <bool KEY, int HALF = -1>
__device__ __forceinline__ void multiply_scores(const Shared& s, int chunk, int own, Acc& reads, Acc& pairs) {
    constexpr int LD = (KEY ? FW_K : FW_V) + 8;
    const Operand* scores = KEY ? s.dscores : s.scores;
    Block left, right;
    if (KEY || FW_Z) {
        load_block<true, false>(left, scores, FW_LDP);
        if (HALF >= 0) keep_columns(left, HALF);
        load_block<false, true>(right, (KEY ? s.k[chunk] : s.v[chunk]) + own, LD);
        multiply(reads, left, right);
    }
    load_block<true, true>(left, scores, FW_LDP);
    if (HALF >= 0) keep_columns(left, 1 - HALF);
    load_block<false, true>(right, (KEY ? s.q : s.dy) + own, LD);
    multiply(pairs, left, right);
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
        if (mode == BORDERS) {
#pragma unroll 1
            for (int across = 0; across < ACROSS; across += 16) {
                int at = KEY ? across * FW_LDK + own : own * FW_LDK + across;
                if (READS) {
                    load_block<true, false>(left, (KEY ? s.dy : s.q) + across, ACROSS + 8);
                    load_block<false, KEY>(right, s.memory[chunk] + at, FW_LDK);
                    multiply(reads, left, right);
                }
                load_block<true, false>(left, (KEY ? s.v[chunk] : s.k[chunk]) + across, ACROSS + 8);
                load_block<false, KEY>(right, s.adjoint + at, FW_LDK);
                multiply(writes, left, right);
            }
        }
        if (mode != BORDERS) multiply_scores<KEY>(s, chunk, own, reads, GATED ? pairs : writes);
        float* sums = KEY ? s.key[0] : s.value[0];
        put_sums(sums + own, writes, LD);
        if (READS) put_sums(sums + 16 * LD + own, reads, LD);
        if (GATED) put_sums(sums + 32 * LD + own, pairs, LD);
    }
}

// Sum of W * dW over the other side's channels: what goes through the chunk past this lane's two columns.
template <bool KEY>
__device__ __forceinline__ float2 through(const Shared& s, const Job<KEY, true>& job, int chunk) {
    float2 sum = make_float2(0.f, 0.f);
    if (job.active) {
        const Operand *memory = s.memory[chunk], *adjoint = s.adjoint;
        if (job.key) {
#pragma unroll 1
            for (int row = job.late * FW_V / 2; row < (job.late + 1) * FW_V / 2; row++) {
                float2 x = load_operands(memory + row * FW_LDK + job.column), dx = load_operands(adjoint + row * FW_LDK + job.column);
                float weight = s.scales.value[Scales::CHUNK][row];
                sum.x += x.x * dx.x * weight;
                sum.y += x.y * dx.y * weight;
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < FW_K / 2; i += 2) {
                int column = job.late * FW_K / 2 + (i + 2 * (lane_id() & 15)) % (FW_K / 2);
                int at = job.column * FW_LDK + column;
                float2 weight = *(const float2*)(s.scales.key[Scales::CHUNK] + column);
                float2 x = load_operands(memory + at), dx = load_operands(adjoint + at);
                sum.x += x.x * dx.x * weight.x + x.y * dx.y * weight.y;
                x = load_operands(memory + at + FW_LDK), dx = load_operands(adjoint + at + FW_LDK);
                sum.y += x.x * dx.x * weight.x + x.y * dx.y * weight.y;
            }
        }
        const float* total = job.key ? s.scales.key[Scales::CHUNK] : s.scales.value[Scales::CHUNK];
        sum.x *= total[job.column];
        sum.y *= total[job.column + 1];
    }
    sum.x += __shfl_xor_sync(0xFFFFFFFFu, sum.x, 16);
    sum.y += __shfl_xor_sync(0xFFFFFFFFu, sum.y, 16);
    return sum;
}

// Adds to each gate's log gradient the terms that span the gate: products of operands and their gradients `after` it and `before`
// it.
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
template <bool KEY>
__device__ __forceinline__ void collect_self(const Params& p, Sums& sums, const float* self, const Job<KEY, true>& job, int start) {
    Columns own;
    own.find(p, job);
    own.load_reads(p, job, start);
    if (KEY) own.load_writes(p, job, start);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float weight = self[token_of(job.late, j)];
        const float2 read = to_float2(own.reads[j]);
        sums.writes[0][j] += weight * read.x;
        sums.writes[1][j] += weight * read.y;
        if (!KEY) continue;
        const float2 write = to_float2(own.writes[j]);
        sums.reads[0][j] += weight * write.x;
        sums.reads[1][j] += weight * write.y;
    }
}

// A round's share of the gradients of one of this lane's columns, C; one after the other, for the registers.
template <int C, bool KEY>
__device__ __forceinline__ void collect(Sums& sums, const Shared& s, const Job<KEY, true>& job, const Columns& columns, int mode, int chunk,
                                        float past) {
    const bool gated = job.key ? FW_F != 0 : FW_Z != 0;
    const int ld = job.key ? FW_LDK : FW_LDV;
    const float* results = (job.key ? s.key[0] : s.value[0]) + job.column + C;
    const Operand *reads = (job.key ? s.q : s.dy) + job.column + C, *writes = (job.key ? s.k[chunk] : s.v[chunk]) + job.column + C;
    float read_factors[8], write_factors[8];
    gate_factors(read_factors, write_factors, mode, job.late, columns.gate[C]);
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
                after[j] = to_float(reads[at]) * dread;
                before[j] = to_float(writes[at]) * (dwrite + dpair);
            }
        }
        sums.reads[C][j] += read_factors[j] * dread;
        sums.writes[C][j] += write_factors[j] * (dwrite + dpair);
    }
    if (!gated || mode == DIAGONAL || mode == PAIRS) return;  // pairs that are split are added one by one
    add_spans(sums.log_gate[C], after, before, job.late, mode);
#pragma unroll
    for (int j = 0; j < 8; j++) sums.log_gate[C][j] += past;
}

// The sum of x over the lanes that hold this lane's token.
__device__ __forceinline__ float sum_channels(float x) {
#pragma unroll
    for (int i = 8; i; i >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, i);
    return x;
}

// The gradients of the key side, and below of the value side.
__device__ __forceinline__ void store_side(const Params& p, Shared& s, const Job<true, true>& job, const Columns& columns, const Sums& sums,
                                           int start) {
    const int share = blockIdx.x;
#if FW_MAP
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const int token = token_of(job.late, j);
        if (job.active) {  // in the place of the features, which nothing reads again
            put_key_gradients(s, p, start, token, job.column, make_float2(sums.reads[0][j], sums.reads[1][j]),
                              make_float2(sums.writes[0][j], sums.writes[1][j]));
        }
    }
#else
    store_eight<Share>(p, job, p.dq, start, share, [&](int j) { return make_float2(sums.reads[0][j], sums.reads[1][j]); });
    store_eight<Share>(p, job, p.dk, start, share, [&](int j) { return make_float2(sums.writes[0][j], sums.writes[1][j]); });
#endif
    if (FW_F) {
        store_eight<float>(p, job, p.df, start, share, [&](int j) {
            return make_float2(sums.log_gate[0][j] / columns.gate[0][j], sums.log_gate[1][j] / columns.gate[1][j]);
        });
    }
}

#if FW_MAP
// dk and dq of a chunk, from those of the features that store_side has left.
__device__ __forceinline__ void unmap_chunk(const Params& p, const Shared& s, int start) {
    const Rows& rows = s.rows[start / FW_CHUNK % FW_ROW_CHUNKS];
    unmap_rows_at<32, FW_WARPS, Share, FW_IN, FW_IN>([&](const FW_IN*& x, const FW_IN*& df, Share*& dx, int i) {
        int token = i % 16;
        bool there = start + token < p.T;
        x = (i < 16 ? rows.k : rows.q) + token * ROW;
        df = (i < 16 ? s.features.k : s.features.q) + token * FW_LDK;
        dx = row_of<Share>(i < 16 ? p.dk : p.dq, there ? start + token : 0, blockIdx.x);
        return there;
    });
}
#endif

__device__ __forceinline__ void store_side(const Params& p, Shared&, const Job<false, true>& job, Columns& columns, const Sums& sums, int start) {
    if (FW_W) columns.load_writes(p, job, start);
    store_eight<FW_IN>(p, job, p.dv, start, 0, [&](int j) {
        const float w = FW_W ? columns.strength[j] : 1.f;
        return make_float2(w * sums.writes[0][j], w * sums.writes[1][j]);
    });
    if (FW_Z) {
        store_eight<float>(p, job, p.dz, start, 0, [&](int j) {
            return make_float2(sums.log_gate[0][j] / columns.gate[0][j], sums.log_gate[1][j] / columns.gate[1][j]);
        });
    }
    if (!FW_W) return;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const int t = start + token_of(job.late, j);
        const float2 v = to_float2(columns.writes[j]);
        const float sum = sum_channels(job.active ? v.x * sums.writes[0][j] + v.y * sums.writes[1][j] : 0.f);
        if ((lane_id() & 15) != 0 || t >= p.T) continue;
        *row_of<float>(p.dw, t, blockIdx.x * FW_STRENGTHS + 2 * job.number) = sum;
        if (FW_V > 16) *row_of<float>(p.dw, t, blockIdx.x * FW_STRENGTHS + 2 * job.number + 1) = 0.f;
    }
}
