// The recurrence without erase and with decay per channel (rule decay), forward. With D_t = (f_t z_t^T) * W_{t-1}:
//
//     W_t = D_t + w_t k_t v_t^T,    y_t = W_t^T q_t
//
// A block takes one sequence and one tile of value channels, and keeps its memory in fp32 accumulators through all chunks of 16
// tokens. Per chunk: columns are scaled by products of gates into shared memory (gates.cuh), then with hats for scaled operands
//
//     Y^ = Q^ W^ + tril(Q^ K^T) V^,    W^ += K^T V^
//
// on tensor cores, while the next chunk's columns are being loaded. There are two barriers for each chunk: one with the vote on its
// rounds, and one before the products; FW_K_WARPS > 1 adds one, and a map two. A chunk in halves does the products with eight tokens
// at a time. Saved for the backward: the memory before each part of FW_PART tokens.
//
// With FW_SIDE_BITS several blocks share the parts of a sequence. Each begins with what decay_walk.cu has put into p.dmemory.
#define FW_HALVES (FW_K <= (FW_PRECISION == 2 ? 64 : 128))  // with wider keys registers would spill
#include "decay_memory.cuh"

// Of a processor, whose schedulers have three warps each; on others than sm_90 registers would spill.
#define FW_BLOCKS (FW_PRECISION == 0 && FW_WARPS <= 4 && __CUDA_ARCH__ == 900 ? 12 / FW_WARPS : 1)

struct Shared {
#if FW_MAP
    Rows rows[FW_ROW_CHUNKS];
    Features features;
#endif
    Operand q[16 * FW_LDK], k[16 * FW_LDK], v[16 * FW_LDV];
    float y[FW_K_WARPS > 1 ? FW_K_WARPS * 16 * FW_LDV : 4];
    float reads[FW_Z ? 16 * FW_LDV : 4];  // factors of the value side
    Scales scales;
};
static_assert(sizeof(Shared) == FW_SHARED, "the host counts other bytes");

// y (16 tokens, this warp's value channels): the share of this warp's key channels, of the memory (BORDERS) and of the pairs. Of
// the memory that of one half alone, if it is given.
template <int HALF = -1>
__device__ __forceinline__ void read_chunk(Acc (&y)[Memory::ROWS], Memory& memory, const Shared& s, bool borders, int mode) {
    Acc scores;
    clear(scores);
#pragma unroll
    for (int c = 0; c < Memory::COLUMNS; c++) {
        int column = Memory::first_column() + 16 * c;
        Block queries, right;
        load_block<true, false>(queries, s.q + column, FW_LDK);
        if (mode != BORDERS) {
            load_block<false, false>(right, s.k + column, FW_LDK);
            multiply(scores, queries, right);
        }
        if (borders) {
            if (HALF >= 0) keep_rows(queries, HALF);
#pragma unroll
            for (int r = 0; r < Memory::ROWS; r++) {
                right_from_t(right, memory.acc[r][c]);
                multiply(y[r], queries, right);
            }
        }
    }
    if (mode == BORDERS) return;
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

// f(tile, couple, token, column) for each couple of neighbours of this lane's y; column counts in the tile of values.
template <class F>
__device__ __forceinline__ void each_read(F f) {
    int g = lane_id() >> 2, t = lane_id() & 3;
#pragma unroll
    for (int r = 0; r < Memory::ROWS; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) f(r, i, g + 8 * (i % 2), Memory::first_row() + 16 * r + 8 * (i / 2) + 2 * t);
}

// Adds y to total, times the value side's factors of the reading tokens.
__device__ __forceinline__ void add_reads(Acc (&total)[Memory::ROWS], const Acc (&y)[Memory::ROWS], const Shared& s) {
    each_read([&](int r, int i, int token, int column) {
        const float2 factor = FW_Z ? *(const float2*)(s.reads + token * FW_LDV + column) : make_float2(1.f, 1.f);
        total[r].c[i / 2][i % 2 * 2] += y[r].c[i / 2][i % 2 * 2] * factor.x;
        total[r].c[i / 2][i % 2 * 2 + 1] += y[r].c[i / 2][i % 2 * 2 + 1] * factor.y;
    });
}

// y to device memory, or to be summed over the warps that share a column.
__device__ __forceinline__ void put_y(const Params& p, Shared& s, const Acc (&y)[Memory::ROWS], int start) {
    const int first = blockIdx.x * FW_V;
    each_read([&](int r, int i, int token, int column) {
        const float low = y[r].c[i / 2][i % 2 * 2], high = y[r].c[i / 2][i % 2 * 2 + 1];
        if constexpr (FW_K_WARPS > 1) {
            *(float2*)(s.y + ((threadIdx.x >> 5) % FW_K_WARPS * 16 + token) * FW_LDV + column) = make_float2(low, high);
        } else if (start + token < p.T) {
            store_pair(row_of<FW_IN>(p.y, start + token) + first, column, p.V - first, true, low, high);
        }
    });
}

__device__ __forceinline__ void sum_y(const Params&, const Shared&, const Job<true, true>&, int) {}

__device__ __forceinline__ void sum_y(const Params& p, const Shared& s, const Job<false, true>& job, int start) {
    if (!job.active) return;
    store_eight<FW_IN>(p, job, p.y, start, 0, [&](int j) {
        float2 sum = make_float2(0.f, 0.f);
#pragma unroll
        for (int warp = 0; warp < FW_K_WARPS; warp++) {
            float2 y = *(const float2*)(s.y + (warp * 16 + job.token(j)) * FW_LDV + job.column);
            sum.x += y.x;
            sum.y += y.y;
        }
        return sum;
    });
}

template <class J>
__device__ __forceinline__ void load_chunk(Columns& columns, const Params& p, const J& job, int start) {
    columns.load_writes(p, job, start);
    if (J::key) columns.load_reads(p, job, start);
}

// Starts the loads of the next chunk, which run while this one is computed. With a map v is only brought into the L2 cache, because
// the registers hold no more.
template <class J>
__device__ __forceinline__ void load_early(Columns& columns, const Params& p, const J& job, int start) {
    columns.load_gates(p, job, start);
#if FW_MAP
    int t = start + lane_id() % 16, column = J::wide ? job.number / 2 * 64 : job.number * 32;
    if (!J::key && t < p.T && column < job.width) prefetch_l2(row_in<FW_IN>(job, p.v, t) + column);
#else
    load_chunk(columns, p, job, start);
#endif
}

#if FW_MAP
// The chunk's features, and the next chunk's rows on their way.
__device__ __forceinline__ void take_rows(Shared& s, Columns& columns, const Params& p, int start, int end) {
    cp_async_wait<0>();
    __syncthreads();
    if (start + FW_CHUNK < end) load_rows(s.rows, p, start + FW_CHUNK);
    map_chunk(s.features, s.rows, p, start, 32);
    __syncthreads();
    by_side(p, s, [&](const auto& job) { load_chunk(columns, p, job, start); });
}
#endif

// This lane's columns, scaled, and the value side's factors.
template <class J, class F>
__device__ __forceinline__ void put_chunk(Shared& s, const Columns& columns, const J& job, const F& factors) {
    columns.put<false>(J::key ? s.k : s.v, J::key ? FW_LDK : FW_LDV, job, factors.writes);
    if (J::key) columns.put<true>(s.q, FW_LDK, job, factors.reads);
    if (!FW_Z || J::key || !job.active) return;
#pragma unroll
    for (int j = 0; j < 8; j++)
        *(float2*)(s.reads + job.token(j) * FW_LDV + job.column) = make_float2(factors.reads[0][j], factors.reads[1][j]);
}

__device__ __forceinline__ void save_border(Memory& memory, const Params& p, int start) {
    if (p.borders && start && start % FW_PART == 0)
        memory.store(memory_of(p.borders, p, p.parts - 1, start / FW_PART - 1), p);
}

// A chunk in several rounds.
__device__ __forceinline__ void take_rounds(const Params& p, Shared& s, Memory& memory, int start, int tier, int turn) {
    Acc total[Memory::ROWS];
#pragma unroll
    for (int r = 0; r < Memory::ROWS; r++) clear(total[r]);
#pragma unroll 1
    for (int mode = BORDERS; mode != DONE; mode = next_mode(mode, tier)) {
        by_side<true>(p, s, [&](const auto& job) {
            Columns columns;
            Factors factors;
            const int again = unknown(start);  // addresses that were kept would fill the registers
            columns.find(p, job);
            columns.load_gates(p, job, again);
            factors.multiply(mode, job.late, columns.gate);
            load_chunk(columns, p, job, again);
            put_chunk(s, columns, job, factors);
            if (mode == BORDERS) s.scales.put_whole(job, factors.whole, turn);
        });
        __syncthreads();
        if (is_owner()) {
            if (mode == BORDERS) {
                memory.scale(s.scales, Scales::LEFT + (turn ^ 1));
                save_border(memory, p, start);
            }
            Acc y[Memory::ROWS];
#pragma unroll
            for (int r = 0; r < Memory::ROWS; r++) clear(y[r]);
            read_chunk(y, memory, s, mode == BORDERS, mode);
            add_reads(total, y, s);
            if (mode == BORDERS) {
                memory.scale(s.scales, Scales::CHUNK);
                memory.add_outer(s.v, s.k);
            }
        }
        __syncthreads();
    }
    if (is_owner()) put_y(p, s, total, start);
}

// A chunk in one round: what its scaled columns in shared memory do.
template <bool IN_HALVES>
__device__ __forceinline__ void take_chunk(const Params& p, Shared& s, Memory& memory, int start, int turn) {
    if (p.borders && start && start % FW_PART == 0) {
        Memory before = memory;
        before.scale(s.scales, Scales::LEFT + (turn ^ 1));
        save_border(before, p, start);
    }
    memory.scale(s.scales, Scales::CHUNK);
    Acc y[Memory::ROWS], scaled[Memory::ROWS];
#pragma unroll
    for (int r = 0; r < Memory::ROWS; r++) clear(y[r]), clear(scaled[r]);
    if (IN_HALVES) {
        read_chunk<0>(y, memory, s, true, BORDERS);
        memory.add_outer<0>(s.v, s.k);
        memory.scale(s.scales, Scales::MIDDLE);
        read_chunk<1>(y, memory, s, true, PAIRS_OF_HALVES);
    } else {
        read_chunk(y, memory, s, true, PAIRS);
    }
    add_reads(scaled, y, s);
    put_y(p, s, scaled, start);
    memory.add_outer<IN_HALVES ? 1 : -1>(s.v, s.k);
}

extern "C" __global__ void __launch_bounds__(FW_WARPS * 32, FW_BLOCKS) decay_forward(const Params p) {
    extern __shared__ __align__(16) unsigned char shared[];
    Shared& s = *(Shared*)shared;
    const int each = ((p.parts + (1 << FW_SIDE_BITS) - 1) >> FW_SIDE_BITS) * FW_PART;
    const int first = FW_SIDE_BITS ? side() * each : 0, end = FW_SIDE_BITS ? min(p.T, first + each) : p.T;
    if (FW_SIDE_BITS && first >= end) return;
    Memory memory;
    Columns columns;
    int tier = SPLIT;

#if FW_MAP
    load_rows(s.rows, p, first);
#endif
    if (is_owner()) memory.load(memory_of(side() ? own(p, side() - 1) : p.memory, p), p);
    s.scales.leave_nothing(first / FW_CHUNK + 1 & 1);
    by_side(p, s, [&](const auto& job) { columns.find(p, job); });
    for (int start = first - FW_CHUNK; start < end; start += FW_CHUNK) {  // the first turn loads the first chunk
        const int turn = start / FW_CHUNK & 1;
        if (start >= first) {
#if FW_MAP
            take_rows(s, columns, p, start, end);
#endif
            Frame frame;
            float smallest = 1.f;
            bool key = false;
            by_side(p, s, [&](const auto& job) {
                frame.multiply(job, columns.gate);
                smallest = frame.smallest();
                key = job.key;
            });
            tier = ONE_ROUND;
            if (FW_TIER > SMALL_GATES || !in_range(smallest, key)) tier = vote_halves(p, s, columns, frame, smallest, key, FW_SPLIT_PAIRS);
            if (in_one_round(tier)) {
                by_side(p, s, [&](const auto& job) {
                    put_chunk(s, columns, job, frame);
                    if (FW_HALVES && tier == HALVES) {
                        s.scales.put<false>(job, frame.before, frame.after, turn);
                        s.scales.put_middle(job, true, frame.before);
                    } else {
                        s.scales.put<false>(job, frame.half, frame.half, turn);
                    }
                });
            } else {
                take_rounds(p, s, memory, start, tier, turn);
            }
        }
        __syncthreads();
        columns.forget();
        by_side(p, s, [&](const auto& job) { load_early(columns, p, job, start + FW_CHUNK); });
        if (FW_HALVES && tier == HALVES && is_owner()) take_chunk<true>(p, s, memory, start, turn);
        else if (in_one_round(tier) && is_owner()) take_chunk<false>(p, s, memory, start, turn);
        if (FW_K_WARPS > 1 && start >= first) {
            __syncthreads();
            by_side<true>(p, s, [&](const auto& job) { sum_y(p, s, job, start); });
        }
    }
    if (end < p.T || !p.final_memory) return;
    __syncthreads();
    if (is_owner()) {
        memory.scale(s.scales, Scales::LEFT + ((p.T + FW_CHUNK - 1) / FW_CHUNK + 1 & 1));
        memory.store(memory_of(p.final_memory, p), p);
    }
}
