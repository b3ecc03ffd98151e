// The parameters of the family with decay per channel, its tile, and how its threads own columns: who loads, scales and stores
// what.
//
// A lane takes two neighbouring channels of the key side or of the value side over half a chunk. In a chunk of one round a warp takes
// 64 channels and one of the halves. In a chunk of several rounds, and where there are 32 channels or fewer, it takes 32 of them; the
// lane 16 away has the other half.
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
    float* final_memory;    // (B,H,K,V), or null
    float* borders;         // (B,H,parts-1,K,V): memory before each part but the first; null where no backward follows
    const float* dfinal;    // (B,H,K,V)
    float* dmemory;         // (sides,B,H,K,V), in the forward memories
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
__device__ __forceinline__ float2 to_float2(__nv_bfloat162 pair) {
    const unsigned both = *(const unsigned*)&pair;
    return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000u));
}

#ifndef FW_SIDE_BITS
#define FW_SIDE_BITS 0  // a power of 2 of blocks share the parts of a sequence, side by side along the third dimension
#endif
__device__ __forceinline__ unsigned batch() { return blockIdx.z >> FW_SIDE_BITS; }
__device__ __forceinline__ int side() { return blockIdx.z & ((1 << FW_SIDE_BITS) - 1); }

template <class T>
__device__ __forceinline__ T* row_of(const Tensor& x, int t, int share = 0) {
    return (T*)x.data + batch() * x.b + blockIdx.y * x.h + t * x.t + share * x.share;
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
    map_rows_at<32, FW_WARPS, FW_K, FW_IN, FW_IN>(rows, [&](const FW_IN*& x, FW_IN*& features, int i) {
        int token = i % 16;
        x = (i < 16 ? from.k : from.q) + token * ROW;
        features = (i < 16 ? to.k : to.q) + token * FW_LDK;
        return start + token < p.T;
    });
}
#endif

// This lane's share of the work on columns, of q and k (KEY) or of v. ROUNDS: in a chunk of several rounds.
template <bool KEY, bool ROUNDS>
struct Job {
    static constexpr bool key = KEY, gated = KEY ? FW_F != 0 : FW_Z != 0, wide = !ROUNDS && (KEY ? FW_K : FW_V) > 32;
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
        number = (threadIdx.x >> 5) - (KEY ? 0 : FW_KEY_JOBS);
        late = wide ? number % 2 : lane_id() >> 4;
        column = wide ? number / 2 * 64 + 2 * lane_id() : number * 32 + 2 * (lane_id() & 15);
        active = wide || column < (KEY ? FW_K : FW_V);
        first = KEY ? 0 : blockIdx.x * FW_V;
        width = KEY ? p.K : p.V - first;
    }

    // Of the lane's eight tokens number j: outward from the middle where a lane meets the one 16 away, else forward.
    __device__ __forceinline__ int token(int j) const { return ROUNDS ? token_of(late, j) : 8 * late + j; }
    __device__ __forceinline__ int other_token(int j) const { return 8 - 8 * late + j; }
};

// Runs f(job) in the warps that have columns. What the two sides do is compiled apart.
template <bool ROUNDS = false, class S, class F>
__device__ __forceinline__ void by_side(const Params& p, const S& shared, F f) {
    const int warp = threadIdx.x >> 5;
    if (warp < FW_KEY_JOBS) {
        Job<true, ROUNDS> job(p);
#if FW_MAP
        job.features = &shared.features;
#endif
        f(job);
    } else if (FW_KEY_JOBS + FW_VALUE_JOBS == FW_WARPS || warp < FW_KEY_JOBS + FW_VALUE_JOBS) {
        Job<false, ROUNDS> job(p);
        f(job);
    }
}

template <class T, class J>
__device__ __forceinline__ T* row_in(const J& job, const Tensor& x, int t, int share = 0) {
    return row_of<T>(x, t, share) + job.first;
}

// This lane's columns of x at token 0; those of another lane, where x has none for this one.
template <class T, class J>
__device__ __forceinline__ char* first_of(const J& job, const Tensor& x, int share = 0) {
    return (char*)(row_in<T>(job, x, 0, share) + (job.active && job.column < job.width ? job.column : 0));
}

// Whether x has all tokens of the chunk and all channels of this warp's job.
template <class J>
__device__ __forceinline__ bool is_whole(const Params& p, const J& job, int start) {
    constexpr int SIDE = J::key ? FW_K : FW_V;
    const int end = J::wide ? (job.number / 2 + 1) * 64 : min((job.number + 1) * 32, SIDE);
    return FW_PAIRED && start + FW_CHUNK <= p.T && end <= job.width;
}

// Eight tokens of a lane's columns, of the chunk that starts at `start`; `other` where there are none. `first`
// is from first_of.
template <class T, class J>
__device__ __forceinline__ void load_eight(typename PairOf<T>::type (&to)[8], const Params& p, const J& job, const Tensor& x,
                                           const char* first, int start, float other) {
#if FW_PAIRED
    const int step = (int)x.t * (int)sizeof(T);
    if (is_whole(p, job, start)) {
        const char* from = first + (int64_t)(start + job.token(0)) * step;
        const int next = unknown(job.token(1) > job.token(0) ? step : -step);  // its multiples would fill the registers
#pragma unroll
        for (int j = 0; j < 8; j++) to[j] = *(const typename PairOf<T>::type*)(from + (int64_t)next * j);
        return;
    }
    const bool there = job.active && job.column < job.width;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const int t = start + job.token(j);
        to[j].x = to[j].y = from_float<T>(other);
        if (there && t < p.T) to[j] = *(const typename PairOf<T>::type*)(first + (int64_t)t * step);
    }
#else
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const int t = start + job.token(j);
        to[j] = load_pair(row_in<T>(job, x, t), job.column, job.width, job.active && t < p.T, other);
    }
#endif
}

// The same back: put(j) are token j's two numbers.
template <class T, class J, class F>
__device__ __forceinline__ void store_eight(const Params& p, const J& job, const Tensor& x, int start, int share, F put) {
#if FW_PAIRED
    const int step = (int)x.t * (int)sizeof(T);
    if (is_whole(p, job, start)) {
        char* to = first_of<T>(job, x, share) + (int64_t)(start + job.token(0)) * step;
        const int next = unknown(job.token(1) > job.token(0) ? step : -step);  // its multiples would fill the registers
        if (!job.active) return;
#pragma unroll
        for (int j = 0; j < 8; j++) store_pair((T*)(to + (int64_t)next * j), 0, 1, true, put(j).x, put(j).y);
        return;
    }
#endif
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const int t = start + job.token(j);
        store_pair(row_in<T>(job, x, t, share), job.column, job.width, job.active && t < p.T, put(j).x, put(j).y);
    }
}

// Eight tokens of q (READS) or k, on the value side of dy or v.
template <bool READS, class J>
__device__ __forceinline__ void load_operands_of(Pair (&to)[8], const Params& p, const J& job, const char* first, int start) {
#if FW_MAP
    if constexpr (J::key) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int t = start + job.token(j);
            const FW_IN* from = (READS ? job.features->q : job.features->k) + t % FW_CHUNK * FW_LDK;
            to[j] = load_pair(from, job.column, FW_K, true, 0.f);
        }
        return;
    }
#endif
    load_eight<FW_IN>(to, p, job, J::key ? (READS ? p.q : p.k) : (READS ? p.dy : p.v), first, start, 0.f);
}

// Eight tokens of two channels, as they come from memory.
struct Columns {
    Pair reads[8], writes[8];  // q and k, or dy and v
    float gate[2][8];
    float strength[8];  // w, on the value side
    const char *first_gate, *first_read, *first_write;

    template <class J>
    __device__ __forceinline__ void find(const Params& p, const J& job) {
        first_gate = first_of<float>(job, J::key ? p.f : p.z);
        first_read = first_of<FW_IN>(job, J::key ? p.q : p.dy);
        first_write = first_of<FW_IN>(job, J::key ? p.k : p.v);
    }

    template <class J>
    __device__ __forceinline__ void load_gates(const Params& p, const J& job, int start, float least = 0.f) {
        float2 pairs[8];
        if constexpr (J::gated) load_eight<float>(pairs, p, job, J::key ? p.f : p.z, first_gate, start, 1.f);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            gate[0][j] = J::gated ? pairs[j].x : 1.f;
            gate[1][j] = J::gated ? pairs[j].y : 1.f;
            if (least > 0.f) gate[0][j] = fmaxf(gate[0][j], least), gate[1][j] = fmaxf(gate[1][j], least);
        }
    }

    template <class J>
    __device__ __forceinline__ void load_writes(const Params& p, const J& job, int start) {
        load_operands_of<false>(writes, p, job, first_write, start);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            strength[j] = 1.f;
#if FW_W
            int t = start + job.token(j);
            if (!J::key && job.active && t < p.T) strength[j] = *row_of<float>(p.w, t);
#endif
        }
    }

    template <class J>
    __device__ __forceinline__ void load_reads(const Params& p, const J& job, int start) {
        load_operands_of<true>(reads, p, job, first_read, start);
    }

    // Until something is loaded again no register holds what was.
    __device__ __forceinline__ void forget() {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            gate[0][j] = gate[1][j] = 0.f;
            reads[j].x = reads[j].y = writes[j].x = writes[j].y = from_float<FW_IN>(0.f);
        }
    }

    // The half-chunk's operands into rows of a chunk's array, times the factors.
    template <bool READS, class J>
    __device__ __forceinline__ void put(Operand* at, int ld, const J& job, const float (&factor)[2][8]) const {
        if (!job.active) return;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float2 x = to_float2(READS ? reads[j] : writes[j]);
            float x0 = factor[0][j], x1 = factor[1][j];
            if (!READS && FW_W) x0 *= strength[j], x1 *= strength[j];
            store_operands(at + job.token(j) * ld + job.column, x.x * x0, x.y * x1);
        }
    }
};

// Told apart only where there are other warps: what those leave unset would otherwise hold registers from turn to turn.
__device__ __forceinline__ bool is_owner() { return FW_OWNERS == FW_WARPS || (threadIdx.x >> 5) < FW_OWNERS; }

__device__ __forceinline__ int64_t sequence() { return (int64_t)batch() * gridDim.y + blockIdx.y; }

// The memories or adjoints of all sequences, (B,H,K,V), that the blocks of one side begin with.
__device__ __forceinline__ float* own(const Params& p, int side) {
    return p.dmemory + (int64_t)side * (gridDim.z >> FW_SIDE_BITS) * gridDim.y * p.K * p.V;
}

// The memory of this block's sequence in a (B,H,n,K,V) array.
template <class T>
__device__ __forceinline__ T* memory_of(T* array, const Params& p, int n = 1, int i = 0) {
    return array ? array + (sequence() * n + i) * p.K * p.V : nullptr;
}
