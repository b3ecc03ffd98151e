// The gradients of one chunk, as linear_backward.cu takes them, and the shared memory that they meet in.
#pragma once
#include "linear_gates.cuh"

struct __align__(16) Stage {
    Row q[C * ROW], k[C * ROW];
    Op v[C * VALUE_ROW], dy[C * VALUE_ROW];
    Op memory[FW_V * KEY_ROW];  // W_0, transposed
#if FW_SUMS
    Op sums[FW_K];  // n_0
    float reads[C];  // the gradients of the divisors
#endif
    float f[C], w[C];
#if FW_PRECISION == F16
    int scale[4];  // of W_0, the first of them
#endif
};

// Gradients of features have no bounds that fp16 holds.
using Feature = OperandOf<P == F16 ? EXACT : P>::type;
constexpr int FEATURE_ROW = tile_stride<Feature>(FW_K);

struct __align__(16) Shared {
    Stage stage[FW_STAGES];
    Op dmemory[FW_V * KEY_ROW];  // dW_C, transposed
#if FW_SUMS
    Op dsums[FW_K];  // dn_C
#endif
#if FW_MAP
    Op q[C * KEY_ROW], k[C * KEY_ROW];
    Feature dq[C * FEATURE_ROW], dk[C * FEATURE_ROW];
#endif
    Products products[FW_F ? WARPS : 1];
    float pairs[FW_F ? WARPS : 1][16 * PAIR_ROW];  // D of the warp's block
    GateSums sums;
#if FW_PRECISION == F16
    float largest[16];  // of each warp's dW
#endif
};
static_assert(sizeof(Shared) == FW_SHARED, "the host computes the same");

// The rows of a chunk in shared memory.
struct Rows {
    const Op *q, *k, *v, *dy, *memory;
    const float* w;
    const Op* sums;
    const float* reads;
    Scale before, after;  // of W_0 and dW_C

    // Where the products of values with dy begin, of which each that reads a token's divisor has the divisor's gradient besides:
    // those of tokens t to t + 16, as rows or, with LATER, as columns.
    template <bool LATER>
    __device__ __forceinline__ void begin(float (&pairs)[2][4], int t) const {
        if (!FW_SUMS) return;
        each_pair(pairs, [&](int, int row, int column, float& x) { x = reads[t + (LATER ? column : row)]; });
    }
};

// acc (16 rows, N * 8 columns) += the same numbers in each row, row by row times low and high.
template <int N>
__device__ __forceinline__ void add_numbers(float (&acc)[N][4], const Op* numbers, float low, float high) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float2 both = couple(numbers + n * 8 + lane_column());
        acc[n][0] += low * both.x, acc[n][1] += low * both.y, acc[n][2] += high * both.x, acc[n][3] += high * both.y;
    }
}

__device__ __forceinline__ void load_border(Op* to, const Op* from, int rows) {
    constexpr int N = 16 / sizeof(Op), UNITS = FW_K / N;
    if constexpr (THREADS % UNITS == 0 && FW_V * UNITS % THREADS == 0) {
        if (rows == FW_V) return copy_tile<Op, FW_V, FW_K>(to, from, FW_K);
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < FW_V * UNITS; i += THREADS) {
        const bool inside = i < rows * UNITS;
        cp_async16(to + i / UNITS * KEY_ROW + i % UNITS * N, inside ? from + i * N : from, inside ? 16 : 0);
    }
}

// dq or dk of 16 tokens and the columns from `column` on.
template <bool QUERY>
__device__ __forceinline__ void put_keys(Shared& s, const Params& p, const Place& at, const float (&acc)[KEY_COLUMNS / 8][4], int t0,
                                         int t, int column) {
#if FW_MAP
    Feature* first = (QUERY ? s.dq : s.dk) + (t + lane_row()) * FEATURE_ROW + column + lane_column();
#pragma unroll
    for (int n = 0; n < KEY_COLUMNS / 8; n++) {
        put_couple(first + n * 8, acc[n][0], acc[n][1]);
        put_couple(first + 8 * FEATURE_ROW + n * 8, acc[n][2], acc[n][3]);
    }
#else
    store_keys<FW_PARTIAL>(QUERY ? p.dq : p.dk, acc, p, at, t0 + t, column);
#endif
}

// dq of a block. Whether a pair left the range, and all of it was for nothing, as of the next two.
template <bool CAREFUL>
__device__ __forceinline__ bool query_side(Shared& s, const Params& p, const Place& at, const Rows& rows, const Products& x, int block,
                                           int group, int t0) {
    constexpr int N = KEY_COLUMNS / 8;
    const int t = block * 16, column = group * KEY_COLUMNS;
    const Op *dy = rows.dy + t * VALUE_ROW, *q = rows.q + t * KEY_ROW + column;
    float acc[N][4] = {}, sum[2];
    Most most;
    RowNumbers<N> own;
    if (FW_SUMS) add_numbers(acc, rows.sums + column, rows.reads[t + lane_row()], rows.reads[t + lane_row() + 8]);
#pragma unroll(FW_V * (P == EXACT ? 4 : 1) <= 64 ? FW_V / 16 : 1)
    for (int i = 0; i < FW_V; i += 16) {
        multiply_wide<true, N, KEY_ROW>(acc, left_from<P, false>(dy + i, VALUE_ROW), rows.memory + i * KEY_ROW + column);
    }
    rows.before.undo(acc);
    if (FW_F) {
        scale_rows(acc, x.before[block], x.before[block]);
        own.load<KEY_ROW>(q);
        own.dot(sum, acc);
        const float initial = warp_sum(sum[0] * x.start[t + lane_row()] + sum[1] * x.start[t + lane_row() + 8]);
        if (at.lane == 0) s.sums.initial[group][block] = initial;
    }
    float between = 1.f;
    for (int b = block - 1; b >= 0; b--) {
        float pairs[2][4] = {};
        rows.begin<false>(pairs, t);
        compare_rows<FW_V, VALUE_ROW>(pairs, dy, rows.v + b * 16 * VALUE_ROW);
        each_pair(pairs, [&](int, int, int earlier, float& x_ts) {
            if (FW_F) x_ts *= between * x.end[b * 16 + earlier];
            if (FW_W) x_ts *= rows.w[b * 16 + earlier];
        });
        multiply_pairs<CAREFUL, true, N, KEY_ROW>(acc, pairs, rows.k + b * 16 * KEY_ROW + column, most);
        if (FW_F) between *= x.total[b];
    }
    if (FW_F) {
        scale_rows(acc, x.start[t + lane_row()], x.start[t + lane_row() + 8]);
        own.dot(sum, acc);
        sum_halves(s.sums.reads[group] + t, sum[0], sum[1]);
    }
    float pairs[2][4] = {};
    rows.begin<false>(pairs, t);
    compare_rows<FW_V, VALUE_ROW>(pairs, dy, rows.v + t * VALUE_ROW);
    each_pair(pairs, [&](int, int row, int earlier, float& x_ts) {
        if (FW_W) x_ts *= rows.w[t + earlier];
        x_ts = earlier > row ? 0.f : FW_F ? x_ts * s.pairs[at.warp][row * PAIR_ROW + earlier] : x_ts;
    });
    multiply_pairs<CAREFUL, true, N, KEY_ROW>(acc, pairs, rows.k + t * KEY_ROW + column, most);
    put_keys<true>(s, p, at, acc, t0, t, column);
    return most.leaves_range<P>();
}

// dk of a block, and what its pairs with later tokens add to the gradients of the gates between.
template <bool CAREFUL>
__device__ __forceinline__ bool key_side(Shared& s, const Params& p, const Place& at, const Rows& rows, const Products& x, int block,
                                         int group, int t0) {
    constexpr int N = KEY_COLUMNS / 8;
    const int t = block * 16, column = group * KEY_COLUMNS;
    const Op *v = rows.v + t * VALUE_ROW, *all = rows.k + t * KEY_ROW, *k = all + column;
    float acc[N][4] = {}, sum[2], written[2];
    Most most;
    RowNumbers<N> own;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        written[i] = (FW_F ? x.end[t + lane_row() + i * 8] : 1.f) * (FW_W ? rows.w[t + lane_row() + i * 8] : 1.f);
    }
#if FW_SUMS
    add_numbers(acc, s.dsums + column, 1.f, 1.f);
#endif
#pragma unroll(FW_V * (P == EXACT ? 4 : 1) <= 64 ? FW_V / 16 : 1)
    for (int i = 0; i < FW_V; i += 16) {
        multiply_wide<true, N, KEY_ROW>(acc, left_from<P, false>(v + i, VALUE_ROW), s.dmemory + i * KEY_ROW + column);
    }
    rows.after.undo(acc);
    if (FW_F) {
        scale_rows(acc, x.after[block], x.after[block]);
        own.load<KEY_ROW>(k);
        own.dot(sum, acc);
        const float final = warp_sum(sum[0] * written[0] + sum[1] * written[1]);
        if (at.lane == 0) s.sums.final[group][block] = final;
    }
    float between = 1.f;
    for (int b = block + 1; b < BLOCKS; b++) {
        float pairs[2][4] = {};
        rows.begin<true>(pairs, b * 16);
        compare_rows<FW_V, VALUE_ROW>(pairs, v, rows.dy + b * 16 * VALUE_ROW);
        each_pair(pairs, [&](int, int, int later, float& x_st) {
            if (FW_F) x_st *= between * x.start[b * 16 + later];
        });
        if (FW_F && b > block + 1 && group == 0) {
            float scores[2][4] = {}, across = 0.f;
            compare_rows<FW_K, KEY_ROW>(scores, all, rows.q + b * 16 * KEY_ROW);
            each_pair(scores, [&](int i, int, int, float& score) { across += score * pairs[i >> 2][i & 3] * written[i >> 1 & 1]; });
            across = warp_sum(across);
            if (at.lane == 0) s.sums.across[b][block] = across;
        }
        multiply_pairs<CAREFUL, true, N, KEY_ROW>(acc, pairs, rows.q + b * 16 * KEY_ROW + column, most);
        if (FW_F) between *= x.total[b];
    }
    if (FW_F || FW_W) scale_rows(acc, written[0], written[1]);
    if (FW_F) {
        own.dot(sum, acc);
        sum_halves(s.sums.writes[group] + t, sum[0], sum[1]);
    }
    float pairs[2][4] = {};
    rows.begin<true>(pairs, t);
    compare_rows<FW_V, VALUE_ROW>(pairs, v, rows.dy + t * VALUE_ROW);
    each_pair(pairs, [&](int, int row, int later, float& x_st) {
        if (FW_W) x_st *= rows.w[t + row];
        x_st = later < row ? 0.f : FW_F ? x_st * s.pairs[at.warp][later * PAIR_ROW + row] : x_st;
    });
    if (FW_F && group == 0) {
        float scores[2][4] = {};
        compare_rows<FW_K, KEY_ROW>(scores, all, rows.q + t * KEY_ROW);
        each_pair(scores, [&](int i, int row, int later, float& score) { score = later > row ? score * pairs[i >> 2][i & 3] : 0.f; });
        put_spans(s.sums.within + t, scores);
    }
    multiply_pairs<CAREFUL, true, N, KEY_ROW>(acc, pairs, rows.q + t * KEY_ROW + column, most);
    put_keys<false>(s, p, at, acc, t0, t, column);
    return most.leaves_range<P>();
}

// dv of a block, and dw.
template <bool CAREFUL>
__device__ __forceinline__ bool value_side(Shared& s, const Params& p, const Place& at, const Rows& rows, const Products& x, int block,
                                           int group, int t0) {
    constexpr int N = VALUE_COLUMNS / 8;
    const int t = block * 16, column = group * VALUE_COLUMNS, first = blockIdx.y * FW_V + column;
    const Op* k = rows.k + t * KEY_ROW;
    constexpr bool STRENGTH = FW_SUMS && FW_W;
    Most most;
    float acc[N][4] = {}, one[1][4] = {};  // one: the same of n's values; after its first product a lane's share
#pragma unroll(FW_K * (P == EXACT ? 4 : 1) <= 64 ? FW_K / 16 : 1)
    for (int i = 0; i < FW_K; i += 16) {
        const Left<P> a = left_from<P, false>(k + i, KEY_ROW);
        multiply_wide<false, N, KEY_ROW>(acc, a, s.dmemory + column * KEY_ROW + i);
#if FW_SUMS
        if (STRENGTH) multiply_vector(one[0], a, s.dsums + i);
#endif
    }
    if (STRENGTH) one[0][0] = lane_column() ? 0.f : one[0][0], one[0][2] = lane_column() ? 0.f : one[0][2];
    rows.after.undo(acc);
    if (FW_F) scale_rows(acc, x.after[block], x.after[block]);
    if (FW_F && STRENGTH) scale_rows(one, x.after[block], x.after[block]);
    const auto read_one = [&](const float (&pairs)[2][4], int first) {
#pragma unroll
        for (int i = 0; STRENGTH && i < 8; i++) {
            one[0][i & 2] += pairs[i >> 2][i & 3] * rows.reads[first + lane_column() + (i & 1) + (i >> 2) * 8];
        }
    };
    float between = 1.f;
    for (int b = block + 1; b < BLOCKS; b++) {
        float pairs[2][4] = {};
        compare_rows<FW_K, KEY_ROW>(pairs, k, rows.q + b * 16 * KEY_ROW);
        each_pair(pairs, [&](int, int, int later, float& x_st) {
            if (FW_F) x_st *= between * x.start[b * 16 + later];
        });
        multiply_pairs<CAREFUL, true, N, VALUE_ROW>(acc, pairs, rows.dy + b * 16 * VALUE_ROW + column, most);
        read_one(pairs, b * 16);
        if (FW_F) between *= x.total[b];
    }
    if (FW_F) scale_rows(acc, x.end[t + lane_row()], x.end[t + lane_row() + 8]);
    if (FW_F && STRENGTH) scale_rows(one, x.end[t + lane_row()], x.end[t + lane_row() + 8]);
    float pairs[2][4] = {};
    compare_rows<FW_K, KEY_ROW>(pairs, k, rows.q + t * KEY_ROW);
    each_pair(pairs, [&](int, int row, int later, float& x_st) {
        x_st = later < row ? 0.f : FW_F ? x_st * s.pairs[at.warp][later * PAIR_ROW + row] : x_st;
    });
    multiply_pairs<CAREFUL, true, N, VALUE_ROW>(acc, pairs, rows.dy + t * VALUE_ROW + column, most);
    read_one(pairs, t);
    if (FW_W) {
        float sum[2];
        RowNumbers<N> own;
        own.load<VALUE_ROW>(rows.v + t * VALUE_ROW + column);
        own.dot(sum, acc);
        if (STRENGTH && group == 0) sum[0] += one[0][0], sum[1] += one[0][2];
        sum_halves(s.sums.strength[group] + t, sum[0], sum[1]);
        scale_rows(acc, rows.w[t + lane_row()], rows.w[t + lane_row() + 8]);
    }
    store_rows<In>(p.dv, at.b, at.h, acc, t0 + t, p.T, first, p.V - first);
    return most.leaves_range<P>();
}
