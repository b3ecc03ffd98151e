// The recurrence with one gate per token and without erase (rules sum, gated), forward:
//
//     W_t = f_t W_{t-1} + w_t k_t v_t^T,    y_t = W_t^T q_t
//
// and with FW_SUMS attention normalisation, n_t = f_t n_{t-1} + w_t k_t, y_t = W_t^T q_t / (n_t . q_t + eps): the divisor is the sum of
// a row of the scores that multiply V below, taken by one more product with ones, and of q_t n_0.
//
// A block owns one sequence and head and FW_V columns of the memory, in fp32 in the accumulators of its warps from the first token
// to the last, transposed: values run along the rows of the tensor cores' tiles. A chunk of FW_CHUNK tokens takes
//
//     Y = start (Q W_0) + tril(D Q K^T) w V,    W_C = total W_0 + K^T (end w V)
//
// with D, start, end, total the products of f between two tokens, since the chunk's start, until its end, over all of it. Every
// warp reads for 16 tokens: with W_0 as the operands of a product in shared memory, and with the pairs of its tokens and earlier
// ones in its own registers. Between blocks of 16 tokens D is a product of a factor of each block and of the blocks between
// (Products), so no number is divided by a gate and a gate may be 0. There is one barrier for each chunk, or two with one memory
// (FW_MEMORIES), and one more with a map; the next chunk's rows are copied meanwhile. Saved for the backward: the memory every FW_PART
// tokens, in the operands' type.
#define FW_NO_GATE 0.f
#include "linear.cuh"

struct __align__(16) Stage {
    Row q[C * ROW], k[C * ROW];
    Op v[C * VALUE_ROW];
    float f[C], w[C];
};

struct __align__(16) Shared {
    Stage stage[2];
    Op memory[FW_MEMORIES][FW_V * KEY_ROW];  // W_0, transposed; two of them in turns save a barrier
#if FW_SUMS
    Op sums[FW_MEMORIES][FW_K];  // n_0
#endif
#if FW_MAP
    Op q[C * KEY_ROW], k[C * KEY_ROW];
#endif
    Products products[FW_F ? WARPS : 1];
#if FW_PRECISION == F16
    float largest[16];  // of each warp's memory
#endif
};
static_assert(sizeof(Shared) == FW_SHARED, "the host computes the same");

constexpr int GROUPS = groups(FW_V), COLUMNS = FW_V / GROUPS;

__device__ __forceinline__ void load_stage(Stage& s, const Params& p, const Place& at, int t0) {
    load_rows<C>(s.q, s.k, p, at.b, at.h, t0);
    load_tile<In, Op, C, FW_V>(s.v, p.v, at.b, at.h, t0, p.T, blockIdx.y * FW_V, p.V);
    load_gates(s.f, s.w, p, at, t0);
    cp_async_commit();
}

// What q, k, v and W_0 make of block `block`'s tokens and the columns from `column` on; with the divisors of its rows.
template <bool CAREFUL>
__device__ __forceinline__ Most read_tokens(float (&y)[COLUMNS / 8][4], float (&divisors)[1][4], const Stage& s, const Op* q,
                                            const Op* k, const Op* memory, const Op* sums, const Products& x, int block, int column,
                                            const Scale& scale) {
    const Op* rows = q + block * 16 * KEY_ROW;
#pragma unroll(FW_K * (P == EXACT ? 4 : 1) <= 64 ? FW_K / 16 : 1)
    for (int i = 0; i < FW_K; i += 16) {
        const Left<P> a = left_from<P, false>(rows + i, KEY_ROW);
        multiply_wide<false, COLUMNS / 8, KEY_ROW>(y, a, memory + column * KEY_ROW + i);
        if (FW_SUMS) multiply_vector(divisors[0], a, sums + i);
    }
    scale.undo(y);
    if (FW_F) scale_rows(y, x.before[block], x.before[block]);
    if (FW_F && FW_SUMS) scale_rows(divisors, x.before[block], x.before[block]);
    Most most;
    float between = 1.f;
    for (int b = block - 1; b >= 0; b--) {
        float pairs[2][4] = {};
        compare_rows<FW_K, KEY_ROW>(pairs, rows, k + b * 16 * KEY_ROW);
        each_pair(pairs, [&](int, int, int t, float& x_ts) {
            if (FW_F) x_ts *= between * x.end[b * 16 + t];
            if (FW_W) x_ts *= s.w[b * 16 + t];
        });
        const Left<P> a = multiply_pairs<CAREFUL, true, COLUMNS / 8, VALUE_ROW>(y, pairs, s.v + b * 16 * VALUE_ROW + column, most);
        if (FW_SUMS) add_rows(divisors[0], a);
        if (FW_F) between *= x.total[b];
    }
    if (FW_F) scale_rows(y, x.start[block * 16 + lane_row()], x.start[block * 16 + lane_row() + 8]);
    if (FW_F && FW_SUMS) scale_rows(divisors, x.start[block * 16 + lane_row()], x.start[block * 16 + lane_row() + 8]);
    float pairs[2][4] = {}, d[2][4];
    compare_rows<FW_K, KEY_ROW>(pairs, rows, k + block * 16 * KEY_ROW);
    if (FW_F) decay_pairs(d, x.gate + block * 16);
    each_pair(pairs, [&](int i, int t, int earlier, float& x_ts) {
        if (FW_W) x_ts *= s.w[block * 16 + earlier];
        x_ts = earlier > t ? 0.f : FW_F ? x_ts * d[i >> 2][i & 3] : x_ts;
    });
    const Left<P> a = multiply_pairs<CAREFUL, true, COLUMNS / 8, VALUE_ROW>(y, pairs, s.v + block * 16 * VALUE_ROW + column, most);
    if (FW_SUMS) add_rows(divisors[0], a);
    return most;
}

// Divides y, 16 tokens from t on, and keeps the divisors; where nothing is read y is 0.
__device__ __forceinline__ void divide(float (&y)[COLUMNS / 8][4], const float (&divisors)[4], const Params& p, const Place& at,
                                       int t, bool keep) {
    float scale[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float read = divisors[half * 2];
        scale[half] = 1.f / (read == 0.f ? p.least : read + p.eps);
        const int row = t + lane_row() + half * 8;
        if (keep && row < p.T && lane_column() == 0) *::at<float>(p.divisors, at.b, at.h, row) = read;
    }
    scale_rows(y, scale[0], scale[1]);
}

// The reads of 16 tokens with some columns of V. Whether a pair left the range, and all of it was for nothing.
template <bool CAREFUL>
__device__ __forceinline__ bool take_job(const Params& p, const Place& at, const Stage& s, const Op* q, const Op* k, const Op* memory,
                                         const Op* sums, const Products& products, int job, int t0, const Scale& scale) {
    const int block = job % BLOCKS, column = job / BLOCKS * COLUMNS, first = blockIdx.y * FW_V + column;
    float y[COLUMNS / 8][4] = {}, divisors[1][4] = {};
    const Most most = read_tokens<CAREFUL>(y, divisors, s, q, k, memory, sums, products, block, column, scale);
    if (FW_SUMS) divide(y, divisors[0], p, at, t0 + block * 16, p.divisors.p && column == 0 && blockIdx.y == 0);
    store_rows<In>(p.y, at.b, at.h, y, t0 + block * 16, p.T, first, p.V - first);
    return most.leaves_range<P>();
}

__device__ __forceinline__ void save_border(const Op* memory, const Params& p, const Place& at, int t0, const Scale& scale) {
    constexpr int N = 16 / sizeof(Op), UNITS = FW_K / N;
    Op* to = border(p, at, t0 / FW_PART, (p.T + FW_PART - 1) / FW_PART);
    const int rows = border_rows(p);
    for (int i = threadIdx.x; i < rows * UNITS; i += THREADS) {
        *(uint4*)(to + i * N) = *(const uint4*)(memory + i / UNITS * KEY_ROW + i % UNITS * N);
    }
    if (P == F16 && (int)threadIdx.x * 16 < rows) border_scale(p, at, t0 / FW_PART, (p.T + FW_PART - 1) / FW_PART)[threadIdx.x] = scale.exponent;
}

__device__ __forceinline__ void save_sums(const Op* sums, const Params& p, const Place& at, int t0) {
    constexpr int N = 16 / sizeof(Op);
    Op* to = (Op*)p.sums_borders + ((int64_t)at.bh * ((p.T + FW_PART - 1) / FW_PART) + t0 / FW_PART) * FW_K;
    for (int i = threadIdx.x * N; i < FW_K && blockIdx.y == 0; i += THREADS * N) *(uint4*)(to + i) = *(const uint4*)(sums + i);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) linear_forward(const Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Shared& shared = *(Shared*)bytes;
    const Place at(p);
    Products& products = shared.products[FW_F ? at.warp : 0];
    float w[TILES][4];
    load_memory(w, p.memory, at, p);
    KeySums n(at);
    Scale scale;
    if (FW_SUMS) n.load(p.sums, p, at);
    load_stage(shared.stage[0], p, at, 0);
    for (int t0 = 0, now = 0; t0 < p.T; t0 += C, now ^= 1) {
        Stage& s = shared.stage[now];
        Op* memory = shared.memory[FW_MEMORIES > 1 ? now : 0];
        if (FW_MEMORIES == 1) __syncthreads();
#if FW_SUMS
        Op* sums = shared.sums[FW_MEMORIES > 1 ? now : 0];
        n.share(sums);
#else
        const Op* sums = nullptr;
#endif
        cp_async_wait<0>();
        share_in_range(memory, w, at, scale, shared);
        if (t0 + C < p.T) load_stage(shared.stage[now ^ 1], p, at, t0 + C);
#if FW_MAP
        map_rows<C>(shared.q, shared.k, s.q, s.k, p.T - t0);
        __syncthreads();
        const Op *q = shared.q, *k = shared.k;
#else
        const Op *q = s.q, *k = s.k;
#endif
        if (FW_F) multiply_gates(products, s.f, p.T - t0);
        if (p.borders && t0 % FW_PART == 0) {
            if (has_memory(p, t0)) save_border(memory, p, at, t0, scale);
            if (FW_SUMS) save_sums(sums, p, at, t0);
        }
        for (int job = at.warp; job < BLOCKS * GROUPS; job += WARPS) {
            if (take_job<false>(p, at, s, q, k, memory, sums, products, job, t0, scale))
                take_job<true>(p, at, s, q, k, memory, sums, products, job, t0, scale);
        }
        const float total = FW_F ? products.before[BLOCKS - 1] * products.total[BLOCKS - 1] : 1.f;
        const auto left = [&](int b, int t) {
            const float left = FW_F ? products.end[t] * products.after[b] : 1.f;
            return FW_W ? left * s.w[t] : left;
        };
        write_tokens<FW_F || FW_W, FW_W>(w, s.v, k, total, at, left);
        if (FW_SUMS) n.write(k, total, left);
        __syncwarp();
    }
    if (p.final) store_memory(w, p.final, at, p);
    if (FW_SUMS) n.store(p.final_sums, p, at);
}
