// The recurrence without erase and with decay per channel (rule decay), forward. With D_t = (f_t z_t^T) * W_{t-1}:
//
//     W_t = D_t + w_t k_t v_t^T,    y_t = W_t^T q_t
//
// A block takes one sequence and one tile of value channels, and keeps its memory in fp32 accumulators through all chunks of 16
// tokens. Per chunk: columns are scaled by products of gates into shared memory (gates.cuh), then with hats for scaled operands
//
//     Y^ = Q^ W^ + tril(Q^ K^T) V^,    W^ += K^T V^
//
// on tensor cores, while the next chunk's columns are being loaded. Memory bandwidth bounds the speed: every input is read once per
// tile and every output is written once. Saved for the backward: the memory before each part of FW_PART tokens.
#include "columns.cuh"

struct Shared {
#if FW_MAP
    Rows rows[FW_ROW_CHUNKS];
    Features features;
#endif
    Operand q[16 * FW_LDK], k[16 * FW_LDK], v[16 * FW_LDV];
    float y[FW_K_WARPS][16 * FW_LDV];
    float reads[FW_Z ? 16 * FW_LDV : 2];  // factors of the value side
    Scales scales;
};
static_assert(sizeof(Shared) == FW_SHARED, "the host counts other bytes");

// y (16 tokens, this warp's value channels): the share of this warp's key channels.
__device__ __forceinline__ void read_chunk(Acc (&y)[Memory::ROWS], Memory& memory, const Shared& s, int mode) {
    Acc scores;
    clear(scores);
#pragma unroll
    for (int c = 0; c < Memory::COLUMNS; c++) {
        int column = Memory::first_column() + 16 * c;
        Block queries, right;
        load_block<true, false>(queries, s.q + column, FW_LDK);
        if (has_pairs(mode)) {
            load_block<false, false>(right, s.k + column, FW_LDK);
            multiply(scores, queries, right);
        }
        if (has_borders(mode)) {
#pragma unroll
            for (int r = 0; r < Memory::ROWS; r++) {
                right_from_t(right, memory.acc[r][c]);
                multiply(y[r], queries, right);
            }
        }
    }
    if (!has_pairs(mode)) return;
    int g = lane_id() >> 2, t = lane_id() & 3;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int reader = g + 8 * (i % 4 / 2), writer = 8 * (i / 4) + 2 * t + i % 2;
        bool keep = does_pair(mode, reader, writer) || (reader == writer && does_self(mode));
        scores.c[i / 4][i % 4] = keep ? scores.c[i / 4][i % 4] : 0.f;
    }
    Block left, right;
    left_from(left, scores);
#pragma unroll
    for (int r = 0; r < Memory::ROWS; r++) {
        load_block<false, true>(right, s.v + Memory::first_row() + 16 * r, FW_LDV);
        multiply(y[r], left, right);
    }
}

// Adds y to total, times the value side's factors of the reading tokens.
__device__ __forceinline__ void add_reads(Acc (&total)[Memory::ROWS], const Acc (&y)[Memory::ROWS], const Shared& s) {
    int g = lane_id() >> 2, t = lane_id() & 3;
#pragma unroll
    for (int r = 0; r < Memory::ROWS; r++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int token = g + 8 * (i % 4 / 2), column = Memory::first_row() + 16 * r + 8 * (i / 4) + 2 * t + i % 2;
            total[r].c[i / 4][i % 4] += y[r].c[i / 4][i % 4] * (FW_Z ? s.reads[token * FW_LDV + column] : 1.f);
        }
}

__device__ __forceinline__ void put_y(Shared& s, const Acc (&y)[Memory::ROWS]) {
    int g = lane_id() >> 2, t = lane_id() & 3;
    float* at = s.y[(threadIdx.x >> 5) % FW_K_WARPS] + Memory::first_row() + 2 * t;
#pragma unroll
    for (int r = 0; r < Memory::ROWS; r++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            *(float2*)(at + (g + 8 * (i % 2)) * FW_LDV + 16 * r + 8 * (i / 2)) =
                make_float2(y[r].c[i / 2][i % 2 * 2], y[r].c[i / 2][i % 2 * 2 + 1]);
}

__device__ __forceinline__ void store_y(const Params&, const Shared&, const Job<true>&, int) {}

__device__ __forceinline__ void store_y(const Params& p, const Shared& s, const Job<false>& job, int start) {
    if (!job.active) return;
    store_eight<FW_IN>(p, job, p.y, start, 0, [&](int j) {
        float2 sum = make_float2(0.f, 0.f);
#pragma unroll
        for (int warp = 0; warp < FW_K_WARPS; warp++) {
            float2 y = *(const float2*)(s.y[warp] + token_of(job.late, j) * FW_LDV + job.column);
            sum.x += y.x;
            sum.y += y.y;
        }
        return sum;
    });
}

template <bool KEY>
__device__ __forceinline__ void load_chunk(Columns& columns, const Params& p, const Job<KEY>& job, int start) {
    columns.load_writes(p, job, start);
    if (KEY) columns.load_reads(p, job, start);
}

// Starts the loads of the next chunk, which run while this one is computed. With a map v is only brought into the L2 cache, because
// the registers hold no more.
template <bool KEY>
__device__ __forceinline__ void load_early(Columns& columns, const Params& p, const Job<KEY>& job, int start) {
    columns.load_gates(p, job, start);
#if FW_MAP
    int t = start + lane_id() % 16;
    if (!KEY && t < p.T && job.number * 32 < job.width) prefetch_l2(row_in<FW_IN>(job, p.v, t) + job.number * 32);
#else
    load_chunk(columns, p, job, start);
#endif
}

#if FW_MAP
// The chunk's features, and the next chunk's rows on their way.
__device__ __forceinline__ void take_rows(Shared& s, Columns& columns, const Params& p, int start) {
    cp_async_wait<0>();
    __syncthreads();
    if (start + FW_CHUNK < p.T) load_rows(s.rows, p, start + FW_CHUNK);
    map_chunk(s.features, s.rows, p, start, 32);
    __syncthreads();
    by_side(p, s, [&](const auto& job) { load_chunk(columns, p, job, start); });
}
#endif

// Scales this lane's columns for a round; returns what it leaves to do to the memory after it.
template <bool KEY>
__device__ __forceinline__ float2 put_chunk(Shared& s, const Columns& columns, const Job<KEY>& job, int mode, float2 before) {
    Factors factors[2];
    gate_factors(factors[0], mode, job.late, columns.gate[0]);
    gate_factors(factors[1], mode, job.late, columns.gate[1]);
    columns.put<false>(job.key ? s.k : s.v, job.key ? FW_LDK : FW_LDV, job, factors);
    if (job.key) columns.put<true>(s.q, FW_LDK, job, factors);
    if (FW_Z && !job.key && job.active) {
#pragma unroll
        for (int j = 0; j < 8; j++)
            *(float2*)(s.reads + token_of(job.late, j) * FW_LDV + job.column) = make_float2(factors[0].reads[j], factors[1].reads[j]);
    }
    if (!has_borders(mode)) return before;
    float2 first = make_float2(factors[0].first, factors[1].first), second = make_float2(factors[0].second, factors[1].second);
    s.scales.put(job, before, first, make_float2(first.x * second.x, first.y * second.y));
    return mode == ALL ? second : make_float2(1.f, 1.f);
}

extern "C" __global__ void __launch_bounds__(FW_WARPS * 32, 1) decay_forward(const Params p) {
    extern __shared__ __align__(16) unsigned char shared[];
    Shared& s = *(Shared*)shared;
    const bool owner = is_owner();
    Memory memory;
    Columns columns;
    float2 left_over = make_float2(1.f, 1.f);

#if FW_MAP
    load_rows(s.rows, p, 0);
#endif
    if (owner) memory.load(memory_of(p.memory, p), p);
    by_side(p, s, [&](const auto& job) { load_early(columns, p, job, 0); });
    for (int start = 0; start < p.T; start += FW_CHUNK) {
#if FW_MAP
        take_rows(s, columns, p, start);
#endif
        float smallest = 1.f;
        by_side(p, s, [&](const auto&) { smallest = columns.smallest(); });
        int tier = vote_tier(smallest);
        Acc total[Memory::ROWS];
#pragma unroll
        for (int r = 0; r < Memory::ROWS; r++) clear(total[r]);
        for (int mode = first_mode(tier); mode != DONE; mode = next_mode(mode, tier)) {
            by_side(p, s, [&](const auto& job) {
                if (mode > BORDERS) {
                    columns.load_gates(p, job, start);
                    load_chunk(columns, p, job, start);
                }
                left_over = put_chunk(s, columns, job, mode, left_over);
            });
            __syncthreads();
            if (next_mode(mode, tier) == DONE) {
                by_side(p, s, [&](const auto& job) { load_early(columns, p, job, start + FW_CHUNK); });
            }
            if (owner) {
                if (has_borders(mode)) {
                    memory.scale(s.scales, 0);
                    if (p.borders && start && start % FW_PART == 0)
                        memory.store(memory_of(p.borders, p, p.parts - 1, start / FW_PART - 1), p);
                    if (mode == ALL) memory.scale(s.scales, 1);
                }
                Acc y[Memory::ROWS];
#pragma unroll
                for (int r = 0; r < Memory::ROWS; r++) clear(y[r]);
                read_chunk(y, memory, s, mode);
                add_reads(total, y, s);
                if (has_borders(mode)) {
                    if (mode == BORDERS) memory.scale(s.scales, 2);
                    memory.add_outer(s.v, s.k);
                }
                if (next_mode(mode, tier) == DONE) put_y(s, total);
            }
            __syncthreads();
        }
        by_side(p, s, [&](const auto& job) { store_y(p, s, job, start); });
    }
    by_side(p, s, [&](const auto& job) { s.scales.put(job, left_over, left_over, left_over); });
    __syncthreads();
    if (owner) {
        memory.scale(s.scales, 0);
        memory.store(memory_of(p.final_memory, p), p);
    }
}
