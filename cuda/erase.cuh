// What the kernels of the two families with erase share: the sizes of a block, the inverse of a chunk, and a block's slice of the
// memory in the accumulators of its warps.
//
// Macros: FW_IN type of q, k, v, y; FW_K, FW_V padded widths of a block's memory, multiples of 16; FW_F 1 where there is a decay f
// per token, FW_W where there is a write strength w; FW_PRECISION of the products; FW_KSPLIT warps share the rows of one column of the
// memory; FW_SPAN tokens are in shared memory at a time, FW_PART between two saved memories; FW_ALIGNED rows start at 16 bytes;
// FW_PARTIAL there are several tiles of V, each with its share of the sums over V; FW_SHARED bytes of shared memory; those of
// row_map.cuh where q and k are rows to map.
#pragma once
#include "pairs.cuh"
#include "range.cuh"

constexpr int C = 16;  // tokens of a chunk
constexpr int CHUNKS = FW_SPAN / C;
constexpr int VALUE_WARPS = FW_V / 16;
constexpr int WARPS = VALUE_WARPS * FW_KSPLIT;
#ifndef FW_AHEAD
#define FW_AHEAD 0  // 1: a warp more for each chunk of a span, which finds what does not depend on the memory, a span ahead
#endif
constexpr int THREADS = (WARPS + (FW_AHEAD ? CHUNKS : 0)) * 32;
constexpr int WARP_ROWS = FW_K / FW_KSPLIT;  // rows of the memory that a warp holds
constexpr int TILES = WARP_ROWS / 8;         // its accumulators
constexpr int INVERTERS = (CHUNKS + 1) / 2;  // warps that have work in invert_all
#include "rows.cuh"

constexpr int SOLVE = SHORT<P> ? TF32 : EXACT;  // products with the inverse: bf16 there is what breaks, and fp16 has no range for it
constexpr int INPUT_ROW = tile_stride<In>(FW_V);
constexpr int LARGEST_EXPONENT = 80;  // of columns: values times that are in the range of fp32
constexpr int PAIR_ROW = tile_stride<Op>(C);  // of (C,C) operands
constexpr int SOLVE_ROW = tile_stride<float>(C);

// f(i) for i from first in steps of STEP below END; where that is one turn for every first, no loop is left.
template <int STEP, int END, class F>
__device__ __forceinline__ void each_turn(int first, F f) {
    if constexpr (STEP == END) f(first);
    else for (int i = first; i < END; i += STEP) f(i);
}

// inverse = (I + e erase)^-1 of a chunk, by forward substitution, which keeps its digits whatever the keys; a product of powers of the
// strict triangle would lose 4 of them where keys repeat. A lane takes one column, those without one write nothing. erase and inverse
// may be the same memory.
__device__ __forceinline__ void invert(const float* e, const float* erase, float* inverse, bool writes) {
    const int column = threadIdx.x & 15;
    float x[C] = {};  // row by row the sum over the rows above, then the solution
#pragma unroll
    for (int s = 0; s < C; s += 4) {
#pragma unroll
        for (int t = s; t < C; t++) {
            const float4 row = *(const float4*)(erase + t * SOLVE_ROW + s);
            if (t > s) x[t] = fmaf(row.x, x[s], x[t]);
            if (t > s + 1) x[t] = fmaf(row.y, x[s + 1], x[t]);
            if (t > s + 2) x[t] = fmaf(row.z, x[s + 2], x[t]);
            if (t > s + 3) x[t] = fmaf(row.w, x[s + 3], x[t]);
            if (t < s + 4) x[t] = (t == column ? 1.f : 0.f) - e[t] * x[t];
        }
    }
    __syncwarp();
    if (!writes) return;
    inverse += column;
#pragma unroll
    for (int t = 0; t < C; t++) inverse[t * SOLVE_ROW] = SOLVE == TF32 ? __uint_as_float(to_tf32(x[t])) : x[t];
}

// Behind a barrier, the inverses of all chunks: a warp takes two.
__device__ __forceinline__ void invert_all(const float* strengths, const float (*erases)[C * SOLVE_ROW], float (*inverses)[C * SOLVE_ROW]) {
    const int half = (threadIdx.x & 31) >> 4;
    for (int first = (threadIdx.x >> 5) * 2; first < CHUNKS; first += 2 * WARPS) {
        const int c = min(first + half, CHUNKS - 1);
        invert(strengths + c * C, erases[c], inverses[c], first + half < CHUNKS);
    }
}

// Sums x over the FW_KSPLIT warps that hold slices of the same columns; every one of them gets the sum. All threads take part;
// `turn` alternates, so that one barrier is enough.
template <int N>
__device__ __forceinline__ void sum_split(float (&x)[N][4], float4* shared, int& turn) {
#if FW_KSPLIT > 1
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float4* all = shared + turn * WARPS * N * 32;
    turn ^= 1;
#pragma unroll
    for (int n = 0; n < N; n++) all[(warp * N + n) * 32 + lane] = make_float4(x[n][0], x[n][1], x[n][2], x[n][3]);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; n++) {
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int split = 0; split < FW_KSPLIT; split++) {
            const float4 one = all[((split * VALUE_WARPS + warp % VALUE_WARPS) * N + n) * 32 + lane];
            sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
        }
        x[n][0] = sum.x, x[n][1] = sum.y, x[n][2] = sum.z, x[n][3] = sum.w;
    }
#endif
}

static_assert(!FW_AHEAD || FW_KSPLIT == 1, "warps that share a column meet at barriers that the others do not come to");

// Every warp has all rows of its columns, so that addresses and branches need not ask; in fp32 sm_120 has no registers for that.
constexpr bool ALL_ROWS = FW_KSPLIT == 1 && SHORT<P>;

struct Place {
    int b, h, bh, lane, warp, column, row;  // column: the warp's first of V; row: its first of K
    __device__ Place(const Params& p)
        : bh(blockIdx.x), lane(threadIdx.x & 31), warp(threadIdx.x >> 5), column(blockIdx.y * FW_V + local()),
          row(ALL_ROWS ? 0 : warp / VALUE_WARPS * WARP_ROWS) {
        b = bh / p.H, h = bh % p.H;
    }
    __device__ int first_row() const { return row; }
    __device__ int first_column() const { return column; }
    __device__ int local() const { return (ALL_ROWS ? warp : warp % VALUE_WARPS) * 16; }
    __device__ bool has_first_rows() const { return ALL_ROWS || warp < VALUE_WARPS; }
    __device__ bool is_ahead() const { return FW_AHEAD && warp >= WARPS; }  // and holds no memory
};

// The warp's slice of a memory to a transposed one in shared memory, rows of KEY_ROW.
__device__ __forceinline__ void keep_memory(const Place& at, Op* shared, const float (&x)[TILES][4]) {
#pragma unroll
    for (int n = 0; n < TILES; n += 2) put_square<false>(shared + at.local() * KEY_ROW + at.row + n * 8, KEY_ROW, x[n], x[n + 1]);
}

// The warp's 16 columns of a chunk, transposed in its accumulators: f(i, token, column in the block, x).
template <class F>
__device__ __forceinline__ void each_token(const Place& at, float (&x)[2][4], F f) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        f(i, lane_column() + (i & 1) + (i >> 2) * 8, at.local() + lane_row() + (i >> 1 & 1) * 8, x[i >> 2][i & 3]);
    }
}

// A warp's memory at the start of part s, as its lanes hold it, in the operands' type: what is read from it is no different. A lane
// has UNITS of 16 bytes, 32 apart.
constexpr int UNITS = TILES * 4 * (int)sizeof(Op) / 16;

__device__ __forceinline__ uint4* border(const Params& p, const Place& at, int s) {
    const int64_t parts = (p.T + FW_PART - 1) / FW_PART, block = (at.bh * parts + s) * gridDim.y + blockIdx.y;
    return (uint4*)p.borders + ((block * WARPS + at.warp) * UNITS) * 32 + at.lane;
}

__device__ __forceinline__ void save_border(const float (&w)[TILES][4], uint4* saved) {
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
#if FW_PRECISION == BF16 || FW_PRECISION == F16
        const Left<P> x = left_of<P>(w[2 * i], w[2 * i + 1]);
        saved[i * 32] = make_uint4(x.x[0], x.x[1], x.x[2], x.x[3]);
#else
        *(float4*)(saved + i * 32) = make_float4(w[i][0], w[i][1], w[i][2], w[i][3]);
#endif
    }
}

// The same back; 0 of null.
__device__ __forceinline__ void load_border(float (&w)[TILES][4], const uint4* saved) {
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
#if FW_PRECISION == BF16 || FW_PRECISION == F16
        const uint4 all = saved ? saved[i * 32] : make_uint4(0, 0, 0, 0);
        const unsigned x[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 both = unpack<P>(x[j]);
            w[2 * i + j / 2][j % 2 * 2] = both.x, w[2 * i + j / 2][j % 2 * 2 + 1] = both.y;
        }
#else
        const float4 all = saved ? *(const float4*)(saved + i * 32) : make_float4(0.f, 0.f, 0.f, 0.f);
        w[i][0] = all.x, w[i][1] = all.y, w[i][2] = all.z, w[i][3] = all.w;
#endif
    }
}

// Of its 16 columns the place of the exponent that a saved memory has in fp16.
__device__ __forceinline__ int32_t* border_exponent(const Params& p, const Place& at, int s) {
    const int64_t parts = (p.T + FW_PART - 1) / FW_PART, block = (at.bh * parts + s) * gridDim.y + blockIdx.y;
    return p.scales + block * VALUE_WARPS + at.local() / 16;
}

// Exponents of the powers of 2 that fp16 takes where its range is left, of one chunk. `memory` is of 16 columns of the memory and of
// all that is linear in them, values and reads; `adjoint` of its adjoint, in the same way.
struct __align__(16) Exponents {
    int erases, scores;
    int memory[VALUE_WARPS], adjoint[VALUE_WARPS];
};

// Those of a block's chunks; in other precisions than fp16 there are none.
template <class S>
__device__ __forceinline__ Exponents* exponents_of(S& s) {
    if constexpr (P == F16) return s.exponents;
    else return nullptr;
}

// Whether one of the warp's lanes has an exponent; in other precisions than fp16 there are none.
__device__ __forceinline__ bool any_exponent(int exponent) { return P == F16 && __any_sync(~0u, exponent != 0); }

// (C,C) pairs of a warp to an array of operands, with the power of 2 that they need in fp16.
template <int Exponents::*OWN>
__device__ __forceinline__ void put_pairs(Op* to, float (&x)[2][4], Exponents* exponents) {
    if constexpr (P == F16) {
        Most most;
        int own = 0;
        most.see(left_of<P>(x[0], x[1]));
        if (most.leaves_range<P>()) {
            own = range_exponent(warp_largest(largest_of(x)));
            scale_by(x, power(own));
        }
        if ((threadIdx.x & 31) == 0) exponents->*OWN = own;
    }
    put_square<false>(to, PAIR_ROW, x[0], x[1]);
}

// Whether x, which the warp made of its columns w, leaves the range of fp16, or they do: where one of them is infinite no x is finite.
// So too with an exponent.
__device__ __forceinline__ bool leaves_range(const float (&x)[2][4], int exponent = 0) {
    if constexpr (P != F16) return false;
    const unsigned most = largest_couple(left_of<P>(x[0], x[1]));
    const int beyond = __any_sync(~0u, has_large(most) | (exponent != 0)) | __all_sync(~0u, !has_whole(most));
    return FW_KSPLIT > 1 ? !__syncthreads_and(!beyond) : beyond;
}

// Gives w and x, made of it, another power of 2 if they need one; whether x is to be made again for that. next: the largest number of
// the lane that is multiplied by the same power later. Where several warps share a column all have the same power.
__device__ __forceinline__ bool rescale(const Place& at, float (&w)[TILES][4], const float (&x)[2][4], int& exponent, float4* shared,
                                        float next) {
    const float own = largest_of(x);
    float largest = warp_largest(fmaxf(fmaxf(largest_of(w), own < 1e38f ? own : 0.f), next * power(exponent)));
#if FW_KSPLIT > 1
    float* all = (float*)shared;
    __syncthreads();
    if (at.lane == 0) all[at.warp] = largest;
    __syncthreads();
    for (int i = 0; i < WARPS; i++) largest = fmaxf(largest, all[i]);
    __syncthreads();
#endif
    const int now = min(max(exponent + range_exponent(largest), -126), LARGEST_EXPONENT), change = now - exponent;
    if (change == 0) return false;
    exponent = now;
    scale_by(w, power(change));
    return true;
}

// Chunk c of a span in shared memory.
struct Chunk {
    const Op *q, *p, *k;  // rows that read, that erases read with, that are written
    const In* v;
    const Op* scores;
    const float *inverse, *w, *start, *erasing, *end;
    Exponents* exponents;
};

// y (transposed) += a A, where SCALED of other powers of 2 and without any.
template <bool SCALED>
__device__ __forceinline__ void multiply_scores(float (&y)[2][4], const Left<P>& a, const Chunk& c, int exponent) {
    if constexpr (!SCALED) return multiply_from<P, false>(y, a, c.scores, PAIR_ROW);
    float pairs[2][4] = {};
    multiply_from<P, false>(pairs, a, c.scores, PAIR_ROW);
    add_times(y, pairs, power(-c.exponents->scores));
    scale_by(y, power(-exponent));
}

// As recall, with the memory as it is.
template <bool READ, bool SCALED>
__device__ __forceinline__ void recall_once(const Place& at, const Chunk& c, float (&w)[TILES][4], float (&u)[2][4], float (&y)[2][4],
                                            float4* shared, int& turn, int exponent) {
    float x[READ ? 4 : 2][4] = {};  // (P W_0)^T and (Q W_0)^T
#pragma unroll
    for (int n = 0; n < TILES; n += 2) {
        const Left<P> a = left_of<P>(w[n], w[n + 1]);
        Right<P> b[2];
        right_from<P, false>(b, c.p + at.row + n * 8, KEY_ROW);
        multiply<P>(x[0], a, b[0]);
        multiply<P>(x[1], a, b[1]);
        if constexpr (READ) {
            right_from<P, false>(b, c.q + at.row + n * 8, KEY_ROW);
            multiply<P>(x[2], a, b[0]);
            multiply<P>(x[3], a, b[1]);
        }
    }
    float source[2][4];
    const Four w_t = four_of(c.w), erasing = four_of(c.erasing), start = READ && FW_F ? four_of(c.start) : Four{{1.f, 1.f, 1.f, 1.f}};
    load_transposed(source, c.v + at.local(), INPUT_ROW);
    if constexpr (SCALED) scale_by(source, power(exponent));
    sum_split(x, shared, turn);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int n = i >> 2, m = i & 3, t = 2 * n + (i & 1);
        source[n][m] = w_t.x[t] * source[n][m] - erasing.x[t] * x[n][m];
        u[n][m] = 0.f;
        if constexpr (READ) y[n][m] = start.x[t] * x[2 + n][m];
    }
    multiply_from<SOLVE, false, true>(u, left_of<SOLVE, true>(source[0], source[1]), c.inverse, SOLVE_ROW);
    if constexpr (READ) multiply_scores<SCALED>(y, left_of<P>(u[0], u[1]), c, exponent);
}

// Reads chunk c with the warp's slice of W_0, which keep() has kept: y, if READ, and u, what is written, also as an operand. w and u
// are times 2^exponent, which may be another one then.
template <bool READ, class F>
__device__ __forceinline__ void recall(const Place& at, const Chunk& c, float (&w)[TILES][4], float (&u)[2][4], float (&y)[2][4],
                                       Left<P>& written, float4* shared, int& turn, int& exponent, F keep) {
    recall_once<READ, false>(at, c, w, u, y, shared, turn, exponent);
    written = left_of<P>(u[0], u[1]);
    if constexpr (P == F16) {
        if (__builtin_expect(!leaves_range(u, READ ? c.exponents->scores | exponent : exponent), 1)) return;
        do recall_once<READ, true>(at, c, w, u, y, shared, turn, exponent);
        while (leaves_range(u) && rescale(at, w, u, exponent, shared, 0.f));
        written = left_of<P>(u[0], u[1]);
        keep();
    }
}

// x += k^T r over a chunk, x and r transposed.
__device__ __forceinline__ void write(const Place& at, float (&x)[TILES][4], const Left<P>& a, const Op* k) {
#pragma unroll
    for (int n = 0; n < TILES; n += 2) accumulate_from<P, true>(x[n], x[n + 1], a, k + at.row + n * 8, KEY_ROW);
}

// A warp's 16 columns of a tile of inputs, ROWS rows, to x.
template <int ROWS>
__device__ __forceinline__ void store_columns(const In* tile, const View& x, int b, int h, int t0, int T, int c0, int columns) {
    constexpr int N = FW_ALIGNED ? 16 / sizeof(In) : 1, PER_ROW = 16 / N, STEP = 32 / PER_ROW;
    const int row = (threadIdx.x & 31) / PER_ROW, column = threadIdx.x % PER_ROW * N, left = T - t0 - row;
    if (c0 + column >= columns) return;
    const In* from = tile + row * INPUT_ROW + column;
    In* to = at<In>(x, b, h, t0 + row) + c0 + column;
#pragma unroll(FW_ALIGNED ? ROWS / STEP : 1)
    for (int i = 0; i < ROWS; i += STEP, to += STEP * x.t) {
        if (i >= left) break;
        if constexpr (FW_ALIGNED) *(uint4*)to = *(const uint4*)(from + i * INPUT_ROW);
        else *to = from[i * INPUT_ROW];
    }
}
