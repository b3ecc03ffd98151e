// The parameters of the family with decay per channel, its tile, and how its threads own columns: who loads, scales and stores
// what.
//
// A warp takes 32 channels of the key side or of the value side, a lane two neighbouring ones over half a chunk, outward from the
// middle; the lane 16 away has the other half.
#pragma once

#include "blocks.cuh"
#include "gates.cuh"
#include "row_map.cuh"

#define FW_KEY_JOBS ((FW_K + 31) / 32)
#define FW_VALUE_JOBS ((FW_V + 31) / 32)
#define FW_OWNERS (FW_K_WARPS * FW_V_WARPS)  // warps that hold a slice of the memory
#define FW_LDK (FW_K + 8)
#define FW_LDV (FW_V + 8)

// Columns are channels, contiguous; strides in elements. `share` is from one value tile's share of a sum to the next.
struct Tensor {
    char* data;
    int64_t b, h, t, share;
};

struct Params {
    Tensor q, k, v, f, z, w, y;
    Tensor dy, dq, dk, dv, df, dz, dw;
    const float* memory;    // (B,H,K,V)
    float* final_memory;    // (B,H,K,V)
    float* borders;         // (B,H,parts-1,K,V): memory before each part but the first; null where no backward follows
    const float* dfinal;    // (B,H,K,V)
    float* dmemory;         // (B,H,K,V)
    int32_t T, K, V, parts;
};

template <class T>
struct PairOf;
template <>
struct PairOf<float> {
    typedef float2 type;
};
template <>
struct PairOf<__half> {
    typedef __half2 type;
};
template <>
struct PairOf<__nv_bfloat16> {
    typedef __nv_bfloat162 type;
};
typedef PairOf<FW_IN>::type Pair;

template <class T>
__device__ __forceinline__ float2 to_float2(T pair) {
    return make_float2(to_float(pair.x), to_float(pair.y));
}

template <class T>
__device__ __forceinline__ T* row_of(const Tensor& x, int t, int share = 0) {
    return (T*)x.data + blockIdx.z * x.b + blockIdx.y * x.h + t * x.t + share * x.share;
}

// Channels column and column + 1 of a row with `width` of them; `other` where there are none.
template <class T>
__device__ __forceinline__ typename PairOf<T>::type load_pair(const T* row, int column, int width, bool valid, float other) {
    typename PairOf<T>::type pair;
#if FW_PAIRED
    if (valid && column < width) return *(const typename PairOf<T>::type*)(row + column);
    pair.x = pair.y = from_float<T>(other);
#else
    pair.x = valid && column < width ? row[column] : from_float<T>(other);
    pair.y = valid && column + 1 < width ? row[column + 1] : from_float<T>(other);
#endif
    return pair;
}

template <class T>
__device__ __forceinline__ void store_pair(T* row, int column, int width, bool valid, float x, float y) {
    typename PairOf<T>::type pair;
    pair.x = from_float<T>(x);
    pair.y = from_float<T>(y);
#if FW_PAIRED
    if (valid && column < width) *(typename PairOf<T>::type*)(row + column) = pair;
#else
    if (valid && column < width) row[column] = pair.x;
    if (valid && column + 1 < width) row[column + 1] = pair.y;
#endif
}

#if FW_MAP
constexpr int ROW_UNIT = 16 / sizeof(FW_IN);  // elements of a copy
constexpr int ROW = (FW_D + ROW_UNIT - 1) / ROW_UNIT * ROW_UNIT + ROW_UNIT;

// The rows of a chunk before the feature map, and its features. Shared memory holds the rows of FW_ROW_CHUNKS chunks, in turns.
struct Rows {
    FW_IN k[16 * ROW], q[16 * ROW];
};
struct Features {
    FW_IN k[16 * FW_LDK], q[16 * FW_LDK];
};

// 0 beyond T. Complete after cp_async_wait.
__device__ __forceinline__ void load_rows(Rows* all, const Params& p, int start) {
    constexpr int UNITS = ROW / ROW_UNIT - 1;
    Rows& rows = all[start / FW_CHUNK % FW_ROW_CHUNKS];
#pragma unroll 1
    for (int i = threadIdx.x; i < 32 * UNITS; i += FW_WARPS * 32) {
        int token = i / UNITS % 16, column = i % UNITS * ROW_UNIT;
        bool query = i >= 16 * UNITS, inside = start + token < p.T;
        const FW_IN* from = row_of<const FW_IN>(query ? p.q : p.k, inside ? start + token : 0) + column;
        FW_IN* to = (query ? rows.q : rows.k) + token * ROW + column;
#if FW_ALIGNED
        cp_async16(to, from, inside ? 16 : 0);
#else
        for (int n = 0; n < ROW_UNIT; n++) to[n] = inside && column + n < FW_D ? from[n] : from_float<FW_IN>(0.f);
#endif
    }
    cp_async_commit();
}

// The features of the chunk from `start` on; all warps. The first 16 rows are k, then q.
__device__ __forceinline__ void map_chunk(Features& to, const Rows* all, const Params& p, int start, int rows) {
    const Rows& from = all[start / FW_CHUNK % FW_ROW_CHUNKS];
#pragma unroll 1  // registers
    for (int i = threadIdx.x >> 5; i < rows; i += FW_WARPS) {
        int token = i % 16;
        map_row<FW_K>((i < 16 ? to.k : to.q) + token * FW_LDK, (i < 16 ? from.k : from.q) + token * ROW, start + token < p.T);
    }
}
#endif

// This lane's share of the work on columns, of q and k (KEY) or of v.
template <bool KEY>
struct Job {
    static constexpr bool key = KEY;
    bool active;  // the tile has this column
    int late;     // which half of the chunk
    int number;   // of its side's jobs
    int column;   // in the tile
    int first;    // channel of the tile's first column
    int width;    // channels from there on
#if FW_MAP
    const Features* features;
#endif

    __device__ __forceinline__ Job(const Params& p) {
        int lane = lane_id();
        number = (threadIdx.x >> 5) - (KEY ? 0 : FW_KEY_JOBS);
        column = number * 32 + 2 * (lane & 15);
        active = column < (KEY ? FW_K : FW_V);
        late = lane >> 4;
        first = KEY ? 0 : blockIdx.x * FW_V;
        width = KEY ? p.K : p.V - first;
    }
};

// Runs f(job) in the warps that have columns. What the two sides do is compiled apart.
template <class S, class F>
__device__ __forceinline__ void by_side(const Params& p, const S& shared, F f) {
    const int warp = threadIdx.x >> 5;
    if (warp < FW_KEY_JOBS) {
        Job<true> job(p);
#if FW_MAP
        job.features = &shared.features;
#endif
        f(job);
    } else if (warp < FW_KEY_JOBS + FW_VALUE_JOBS) {
        Job<false> job(p);
        f(job);
    }
}

template <class T, bool KEY>
__device__ __forceinline__ T* row_in(const Job<KEY>& job, const Tensor& x, int t, int share = 0) {
    return row_of<T>(x, t, share) + job.first;
}

// Eight tokens of a lane's columns, outward from the middle of the chunk that starts at `start`; `other` where there are none. A whole
// chunk is loaded before anything waits for it.
template <class T, bool KEY>
__device__ __forceinline__ void load_eight(typename PairOf<T>::type (&to)[8], const Params& p, const Job<KEY>& job, const Tensor& x,
                                           int start, float other) {
#if FW_PAIRED
    if (start + FW_CHUNK <= p.T) {
        const T* from = row_in<T>(job, x, start + token_of(job.late, 0)) + job.column;
        const int64_t step = job.late ? x.t : -x.t;
        const bool there = job.active && job.column < job.width;
#pragma unroll
        for (int j = 0; j < 8; j++, from += step) {
            to[j].x = to[j].y = from_float<T>(other);
            if (there) to[j] = *(const typename PairOf<T>::type*)from;
        }
        return;
    }
#endif
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const int t = start + token_of(job.late, j);
        to[j] = load_pair(row_in<T>(job, x, t), job.column, job.width, job.active && t < p.T, other);
    }
}

// The same back: put(j) are token j's two numbers.
template <class T, bool KEY, class F>
__device__ __forceinline__ void store_eight(const Params& p, const Job<KEY>& job, const Tensor& x, int start, int share, F put) {
#if FW_PAIRED
    if (start + FW_CHUNK <= p.T) {
        T* to = row_in<T>(job, x, start + token_of(job.late, 0), share) + job.column;
        const int64_t step = job.late ? x.t : -x.t;
        if (job.active && job.column < job.width) {
#pragma unroll
            for (int j = 0; j < 8; j++, to += step) store_pair(to, 0, 1, true, put(j).x, put(j).y);
        }
        return;
    }
#endif
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const int t = start + token_of(job.late, j);
        store_pair(row_in<T>(job, x, t, share), job.column, job.width, job.active && t < p.T, put(j).x, put(j).y);
    }
}

// Eight tokens of q (READS) or k, of x on the value side.
template <bool READS, bool KEY>
__device__ __forceinline__ void load_operands_of(Pair (&to)[8], const Params& p, const Job<KEY>& job, const Tensor& x, int start) {
#if FW_MAP
    if constexpr (KEY) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int t = start + token_of(job.late, j);
            const FW_IN* from = (READS ? job.features->q : job.features->k) + t % FW_CHUNK * FW_LDK;
            to[j] = load_pair(from, job.column, FW_K, true, 0.f);
        }
        return;
    }
#endif
    load_eight<FW_IN>(to, p, job, KEY ? (READS ? p.q : p.k) : x, start, 0.f);
}

// Eight tokens of two channels, as they come from memory.
struct Columns {
    Pair reads[8], writes[8];  // q and k, or dy and v
    float gate[2][8];
    float strength[8];  // w, on the value side

    template <bool KEY>
    __device__ __forceinline__ void load_gates(const Params& p, const Job<KEY>& job, int start, float least = 0.f) {
        float2 pairs[8];
        if constexpr (KEY ? FW_F != 0 : FW_Z != 0) load_eight<float>(pairs, p, job, KEY ? p.f : p.z, start, 1.f);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            gate[0][j] = (KEY ? FW_F : FW_Z) ? pairs[j].x : 1.f;
            gate[1][j] = (KEY ? FW_F : FW_Z) ? pairs[j].y : 1.f;
            if (least > 0.f) gate[0][j] = fmaxf(gate[0][j], least), gate[1][j] = fmaxf(gate[1][j], least);
        }
    }

    template <bool KEY>
    __device__ __forceinline__ void load_writes(const Params& p, const Job<KEY>& job, int start) {
        load_operands_of<false>(writes, p, job, p.v, start);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            strength[j] = 1.f;
#if FW_W
            int t = start + token_of(job.late, j);
            if (!KEY && job.active && t < p.T) strength[j] = *row_of<float>(p.w, t);
#endif
        }
    }

    template <bool KEY>
    __device__ __forceinline__ void load_reads(const Params& p, const Job<KEY>& job, int start) {
        load_operands_of<true>(reads, p, job, p.dy, start);
    }

    __device__ __forceinline__ float smallest() const { return fminf(half_product(gate[0]), half_product(gate[1])); }

    // The half-chunk's operands into rows of a chunk's array.
    template <bool READS, bool KEY>
    __device__ __forceinline__ void put(Operand* at, int ld, const Job<KEY>& job, const Factors (&factors)[2]) const {
        if (!job.active) return;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float2 x = to_float2(READS ? reads[j] : writes[j]);
            float x0 = READS ? factors[0].reads[j] : factors[0].writes[j];
            float x1 = READS ? factors[1].reads[j] : factors[1].writes[j];
            if (!READS && FW_W) x0 *= strength[j], x1 *= strength[j];
            store_operands(at + token_of(job.late, j) * ld + job.column, x.x * x0, x.y * x1);
        }
    }
};

// The factors by which a chunk multiplies the memory, per key channel and per value channel: before the chunk (left over from the
// last one), from the chunk's start to the frame that it is computed in, and over the whole chunk.
struct Scales {
    float key[3][FW_K];
    float value[3][FW_V];

    template <bool KEY>
    __device__ __forceinline__ void put(const Job<KEY>& job, float2 before, float2 into, float2 total) {
        if (!job.active || job.late) return;
        float* at = job.key ? key[0] : value[0];
        int stride = job.key ? FW_K : FW_V;
        *(float2*)(at + job.column) = before;
        *(float2*)(at + stride + job.column) = into;
        *(float2*)(at + 2 * stride + job.column) = total;
    }
};

// A warp's slice of the memory (or of its adjoint), transposed: rows are value channels, columns key channels.
struct Memory {
    static constexpr int ROWS = FW_V / 16 / FW_V_WARPS, COLUMNS = FW_K / 16 / FW_K_WARPS;
    Acc acc[ROWS][COLUMNS];

    static __device__ __forceinline__ int first_row() { return (threadIdx.x >> 5) / FW_K_WARPS * ROWS * 16; }
    static __device__ __forceinline__ int first_column() { return (threadIdx.x >> 5) % FW_K_WARPS * COLUMNS * 16; }

    // f(element, row, column) for all elements of this lane.
    template <class F>
    __device__ __forceinline__ void each(F f) {
        int g = lane_id() >> 2, t = lane_id() & 3;
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
#pragma unroll
                for (int i = 0; i < 8; i++)
                    f(acc[r][c].c[i / 4][i % 4], first_row() + 16 * r + g + 8 * (i % 4 / 2),
                      first_column() + 16 * c + 8 * (i / 4) + 2 * t + i % 2);
    }

    __device__ __forceinline__ void load(const float* from, const Params& p) {
        int first = blockIdx.x * FW_V;
        each([&](float& x, int row, int column) {
            x = from && column < p.K && first + row < p.V ? from[(int64_t)column * p.V + first + row] : 0.f;
        });
    }

    __device__ __forceinline__ void store(float* to, const Params& p) {
        int first = blockIdx.x * FW_V;
        each([&](float& x, int row, int column) {
            if (column < p.K && first + row < p.V) to[(int64_t)column * p.V + first + row] = x;
        });
    }

    __device__ __forceinline__ void scale(const Scales& s, int which) {
        if constexpr (FW_F != 0 || FW_Z) {
            each([&](float& x, int row, int column) { x *= (FW_F ? s.key[which][column] : 1.f) * (FW_Z ? s.value[which][row] : 1.f); });
        }
    }

    // += values^T keys, both (16, channels) arrays of a chunk
    __device__ __forceinline__ void add_outer(const Operand* values, const Operand* keys) {
        Block left[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) load_block<true, true>(left[r], values + first_row() + 16 * r, FW_LDV);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            Block right;
            load_block<false, true>(right, keys + first_column() + 16 * c, FW_LDK);
#pragma unroll
            for (int r = 0; r < ROWS; r++) multiply(acc[r][c], left[r], right);
        }
    }
};

__device__ __forceinline__ bool is_owner() { return (threadIdx.x >> 5) < FW_OWNERS; }

__device__ __forceinline__ int64_t sequence() { return (int64_t)blockIdx.z * gridDim.y + blockIdx.y; }

// The memory of this block's sequence in a (B,H,n,K,V) array.
template <class T>
__device__ __forceinline__ T* memory_of(T* array, const Params& p, int n = 1, int i = 0) {
    return array ? array + (sequence() * n + i) * p.K * p.V : nullptr;
}
