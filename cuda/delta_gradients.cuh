// The gradients of one chunk, in the order that delta_backward.cu takes them, and the shared memory that they meet in.
#pragma once
#define FW_NO_GATE 1e-30f  // a smaller gate counts as this here, where its gradient is divided by it
#include "delta_memory.cuh"

static_assert(FW_SPAN == FW_PART, "a part at a time");

// dq and dk go through shared memory, unless shares that are added up would lose digits there.
constexpr bool KEEP_KEYS = FW_MAP || !(FW_PARTIAL && P == BF16);

// With room for two parts the next one is copied meanwhile, and barriers are between phases of a part, not of a chunk.
constexpr bool ROOMY = FW_STAGES > 1;
constexpr int GROUP = ROOMY ? CHUNKS : 1;  // chunks between two barriers
constexpr bool AHEAD = ROOMY && !FW_MAP && WARPS > INVERTERS;  // some warps invert for the next part while others store this one

struct __align__(16) Stage {
    Row q[FW_SPAN * ROW], k[FW_SPAN * ROW];  // features: dq and dk take their places
    Op dy[FW_SPAN * VALUE_ROW];
    In v[FW_SPAN * INPUT_ROW];  // dv takes its place
    Gates g;
};

struct __align__(16) BackwardShared {
    Stage stage[FW_STAGES];
#if FW_MAP
    Op q[FW_SPAN * KEY_ROW], k[FW_SPAN * KEY_ROW];
#endif
    Op memory[CHUNKS][FW_V * KEY_ROW];  // W_0, transposed
    Op dmemory[GROUP][FW_V * KEY_ROW];  // dW_C, transposed
    uint4 border[ROOMY ? WARPS * UNITS * 32 : 1];  // the next part's memory
    Op u[CHUNKS][FW_V * PAIR_ROW], dr[GROUP][FW_V * PAIR_ROW];  // transposed
    Op scores[CHUNKS][C * PAIR_ROW], dkeys[GROUP][C * PAIR_ROW];  // A, then D dA; X
    float inverse[CHUNKS][C * SOLVE_ROW], erase[CHUNKS][C * SOLVE_ROW], pairs[FW_F ? CHUNKS : 1][C * SOLVE_ROW];
    float spans[2][AHEAD && FW_F ? CHUNKS : 1][AHEAD && FW_F ? C * SOLVE_ROW : 4];
    float rows[CHUNKS][WARPS][3][C], de[CHUNKS][C], dw[CHUNKS][VALUE_WARPS][C], carried[CHUNKS][WARPS];
    float4 sums[FW_KSPLIT > 1 ? 2 * WARPS * 2 * 32 : 1];
};
static_assert(sizeof(BackwardShared) == FW_SHARED, "the host computes the same");

__device__ __forceinline__ int grouped(int c) { return ROOMY ? c : 0; }

// What pairs add to the gradients of the gates between them: dA A and dL L, in the places of the inverse and of L where nothing
// comes there before they are added up.
__device__ __forceinline__ float* spans_of(BackwardShared& s, int c, bool erasing) {
    return AHEAD ? s.spans[erasing][c] : erasing ? s.erase[c] : s.inverse[c];
}

// The part at hand: its rows, features where there is a map, and gates.
struct Part {
    Op *q, *k;
    Stage& in;
    BackwardShared& s;

    __device__ __forceinline__ Chunk chunk(int c) const {
        const int t = c * C;
        const Gates& g = in.g;
        return {q + t * KEY_ROW, k + t * KEY_ROW, in.v + t * INPUT_ROW,           s.scores[c], s.inverse[c],
                g.w + t,         g.start + t,     (FW_F ? g.erasing : g.e) + t, g.end + t};
    }
};

// A warp's 16 columns of a chunk, transposed in its accumulators, to an array with a row for each column.
__device__ __forceinline__ void keep_transposed(const Place& at, Op* to, const float (&x)[2][4]) {
    Op* first = to + (at.local() + lane_row()) * PAIR_ROW + lane_column();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float* both = x[i >> 1] + (i & 1) * 2;
        put_couple(first + (i & 1) * 8 * PAIR_ROW + (i >> 1) * 8, both[0], both[1]);
    }
}

// The products that end in columns of V: dR and dv of chunk c, and dW carried over it; dmemory keeps dW as it was.
__device__ __forceinline__ void value_side(const Part& part, const Place& at, int c, float (&dw)[TILES][4], int& turn) {
    BackwardShared& s = part.s;
    const Chunk chunk = part.chunk(c);
    each_couple(at, s.dmemory[grouped(c)], dw, [](Op* to, float x, float y) { put_couple(to, x, y); });
    if (FW_F) {
        const float carried = multiply_slices(s.memory[c] + at.local() * KEY_ROW + at.row, dw);
        if (at.lane == 0) s.carried[c][at.warp] = carried * chunk.start[C - 1];
    }
    float du[2][4] = {}, dr[2][4] = {};
#pragma unroll
    for (int n = 0; n < TILES; n += 2) multiply_from<P, false>(du, left_of<P>(dw[n], dw[n + 1]), chunk.k + at.row + n * 8, KEY_ROW);
    sum_split(du, s.sums, turn);
    if (FW_F) {
        const Four end = four_of(chunk.end);
        each_token(at, du, [&](int i, int, int, float& x) { x *= end.x[(i >> 2) * 2 + (i & 1)]; });
    }
    const Op* dy = part.in.dy + c * C * VALUE_ROW + at.local();
    Left<P> reads = left_from<P, true>(dy, VALUE_ROW);
    multiply_from<P, true>(du, reads, chunk.scores, PAIR_ROW);
    multiply_from<SOLVE, true, true>(dr, left_of<SOLVE, true>(du[0], du[1]), chunk.inverse, SOLVE_ROW);
    if (at.has_first_rows()) {
        const Four w = four_of(chunk.w);
        In* values = part.in.v + c * C * INPUT_ROW;
        if (FW_W) {
            float v[2][4], dwrite[4] = {};  // of this lane's tokens
            load_transposed(v, values + at.local(), INPUT_ROW);
            each_token(at, dr, [&](int i, int, int, float& x) { dwrite[(i & 1) + (i >> 2) * 2] += x * v[i >> 2][i & 3]; });
            const int t = sum_columns(dwrite);  // behind which no lane reads v any more
            if (at.lane < 16) s.dw[c][at.warp][t] = dwrite[0];
        }
        keep_transposed(at, s.dr[grouped(c)], dr);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float* x = dr[i >> 1] + (i & 1) * 2;
            In* value = values + (lane_column() + (i >> 1) * 8) * INPUT_ROW + at.local() + lane_row() + (i & 1) * 8;
            put_column<INPUT_ROW>(value, FW_W ? w.x[i >> 1 << 1] * x[0] : x[0], FW_W ? w.x[(i >> 1 << 1) + 1] * x[1] : x[1]);
        }
    }
    const Four erasing = four_of(chunk.erasing);
    each_token(at, dr, [&](int i, int, int, float& x) { x *= -erasing.x[(i >> 2) * 2 + (i & 1)]; });
    if (FW_F) {
        const Four start = four_of(chunk.start);
        const float total = chunk.start[C - 1];
        reads = left_scaled<P>(dy, VALUE_ROW, start);
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) dw[n][i] *= total;
        }
    }
    write(at, dw, reads, chunk.q);
    write(at, dw, left_of<P>(dr[0], dr[1]), chunk.k);
}

// Run by one warp: dA of chunk c, as D dA in the place of A.
__device__ __forceinline__ void score_gradient(const Part& part, int c) {
    BackwardShared& s = part.s;
    float d[2][4] = {};
    const Op *dy = part.in.dy + c * C * VALUE_ROW, *u = s.u[c];
    for (int i = 0; i < FW_V; i += 16) multiply_from<P, true>(d, left_from<P, false>(dy + i, VALUE_ROW), u + i * PAIR_ROW, PAIR_ROW);
    keep_lower<true>(d);
    each_two(d, [&](int t, int earlier, float x, float y) {
        Op* score = s.scores[c] + t * PAIR_ROW + earlier;
        float2 kept = make_float2(1.f, 1.f);
        if (FW_F) {
            const float2 a = couple(score);
            put_couple(spans_of(s, c, false) + t * SOLVE_ROW + earlier, x * a.x, y * a.y);
            kept = couple(s.pairs[c] + t * SOLVE_ROW + earlier);
        }
        put_couple(score, x * kept.x, y * kept.y);
    });
}

// Run by one warp: dL of chunk c, as X, and its share of de.
__device__ __forceinline__ void erase_gradient(const Part& part, int c) {
    BackwardShared& s = part.s;
    float d[2][4] = {}, de[2] = {};
    const Op *dr = s.dr[grouped(c)], *u = s.u[c];
    for (int i = 0; i < FW_V; i += 16) {
        multiply_from<P, true>(d, left_from<P, true>(dr + i * PAIR_ROW, PAIR_ROW), u + i * PAIR_ROW, PAIR_ROW);
    }
    keep_lower<false>(d);
    const float e[2] = {part.in.g.e[c * C + lane_row()], part.in.g.e[c * C + lane_row() + 8]};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int half = i & 1, t = lane_row() + half * 8, earlier = lane_column() + (i >> 1) * 8;
        const float x = -d[i >> 1][half * 2], y = -d[i >> 1][half * 2 + 1];
        const float2 l = couple(s.erase[c] + t * SOLVE_ROW + earlier);
        const float2 kept = FW_F ? couple(s.pairs[c] + t * SOLVE_ROW + earlier) : make_float2(1.f, 1.f);
        de[half] += x * l.x + y * l.y;
        if (FW_F) put_couple(spans_of(s, c, true) + t * SOLVE_ROW + earlier, e[half] * x * l.x, e[half] * y * l.y);
        put_couple(s.dkeys[grouped(c)] + t * PAIR_ROW + earlier, e[half] * x * kept.x, e[half] * y * kept.y);
    }
    sum_halves(s.de[c], de[0], de[1]);
}

// The products that end in columns of K: dq and dk of chunk c, and for the gates' gradients q . (W_0 dy), k . (W_0 dR) and k .
// (dW_C u).
__device__ __forceinline__ void key_side(const Part& part, const Params& p, const Place& at, int c, int t0) {
    BackwardShared& s = part.s;
    const Chunk chunk = part.chunk(c);
    const Op *dy_rows = part.in.dy + c * C * VALUE_ROW, *dr_columns = s.dr[grouped(c)], *u_columns = s.u[c];
    float rows[3][2] = {};
    for (int j = at.warp * 16; j < FW_K; j += WARPS * 16) {
        float dq[2][4] = {}, erased[2][4] = {}, dk[2][4] = {}, q[2][4], k[2][4];
#pragma unroll(P == EXACT ? 1 : FW_V / 16)  // unrolled, fp32 has more fragments than registers
        for (int i = 0; i < FW_V; i += 16) {
            Right<P> b[2];
            right_from<P, true>(b, s.memory[c] + i * KEY_ROW + j, KEY_ROW);
            const Left<P> dy = left_from<P, false>(dy_rows + i, VALUE_ROW);
            const Left<P> dr = left_from<P, true>(dr_columns + i * PAIR_ROW, PAIR_ROW);
            multiply<P>(dq[0], dy, b[0]);
            multiply<P>(dq[1], dy, b[1]);
            multiply<P>(erased[0], dr, b[0]);
            multiply<P>(erased[1], dr, b[1]);
            const Left<P> u = left_from<P, true>(u_columns + i * PAIR_ROW, PAIR_ROW);
            multiply_from<P, true>(dk, u, s.dmemory[grouped(c)] + i * KEY_ROW + j, KEY_ROW);
        }
        load_straight(k, chunk.k + j, KEY_ROW);
        if (FW_F) load_straight(q, chunk.q + j, KEY_ROW);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int t = lane_row() + half * 8;
            const float start = scale_of(chunk.start + t), end = scale_of(chunk.end + t), erasing = chunk.erasing[t];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int n = i >> 1, m = half * 2 + (i & 1);
                if (FW_F) rows[0][half] += q[n][m] * dq[n][m], rows[2][half] += k[n][m] * dk[n][m];
                rows[1][half] += k[n][m] * erased[n][m];
                if (FW_F) dq[n][m] *= start, dk[n][m] *= end;
                dk[n][m] -= erasing * erased[n][m];
            }
        }
        Right<P> b[2];
        right_from<P, true>(b, chunk.k + j, KEY_ROW);
        const Left<P> reads = left_from<P, false>(chunk.scores, PAIR_ROW);
        multiply<P>(dq[0], reads, b[0]);
        multiply<P>(dq[1], reads, b[1]);
        const Op* dkeys = s.dkeys[grouped(c)];
        const Left<P> x = left_from<P, false>(dkeys, PAIR_ROW), across = left_from<P, true>(dkeys, PAIR_ROW);
        multiply<P>(dk[0], x, b[0]);
        multiply<P>(dk[1], x, b[1]);
        multiply<P>(dk[0], across, b[0]);
        multiply<P>(dk[1], across, b[1]);
        multiply_from<P, true>(dk, left_from<P, true>(chunk.scores, PAIR_ROW), chunk.q + j, KEY_ROW);
        if constexpr (KEEP_KEYS) {
            __syncwarp();
            each_two(dq, [&](int t, int i, float x, float y) { put_couple(part.q + (c * C + t) * KEY_ROW + j + i, x, y); });
            each_two(dk, [&](int t, int i, float x, float y) { put_couple(part.k + (c * C + t) * KEY_ROW + j + i, x, y); });
        } else {
            store_keys<FW_PARTIAL>(p.dq, dq, p, at, t0 + c * C, j);
            store_keys<FW_PARTIAL>(p.dk, dk, p, at, t0 + c * C, j);
        }
    }
#pragma unroll
    for (int i = 0; i < 3; i++) {
        if (FW_F || i == 1) sum_halves(s.rows[c][at.warp][i], rows[i][0], rows[i][1]);
    }
}

// Two rows of (C,C) added up; at t the sum of what is before t.
__device__ __forceinline__ void sum_rows(float* to, const float* other) {
    float before = 0.f;
#pragma unroll
    for (int t = 0; t < C; t += 4) {
        const float4 x = *(const float4*)(to + t), y = *(const float4*)(other + t);
        const float a = before + (x.x + y.x), b = a + (x.y + y.y), c = b + (x.z + y.z);
        *(float4*)(to + t) = make_float4(before, a, b, c);
        before = c + (x.w + y.w);
    }
}

// Run by one warp: the gradients of a chunk's gates.
__device__ __forceinline__ void gate_side(const Part& part, const Params& p, const Place& at, int c, int t0) {
    BackwardShared& s = part.s;
    const Gates& g = part.in.g;
    const int lane = at.lane, t = lane & 15;
    float sums[3] = {}, dw = 0.f, df = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
#pragma unroll
        for (int j = 0; j < 3; j++) {
            if (FW_F || j == 1) sums[j] += s.rows[c][i][j][t];
        }
        if (FW_F) df += s.carried[c][i];
    }
#pragma unroll
    for (int i = 0; FW_W && i < VALUE_WARPS; i++) dw += s.dw[c][i][t];
    const int i = c * C + t;
    const float start = scale_of(g.start + i), e = g.e[i];
    const auto put = [&](const View& to, float x) {
        if (lane < C && t0 + i < p.T) ::at<float>(to, at.b, at.h, t0 + i)[blockIdx.y * to.tile] = x;
    };
    put(p.de, s.de[c][t] - start * sums[1]);
    if (FW_W) put(p.dw, dw);
    if (FW_F) {
        float starting = start * (sums[0] - e * sums[1]), ending = g.end[i] * sums[2];
#pragma unroll
        for (int o = 1; o < C; o <<= 1) {  // starting: its sum from t on, ending: its sum up to t
            const float later = __shfl_down_sync(~0u, starting, o, C), earlier = __shfl_up_sync(~0u, ending, o, C);
            if (t + o < C) starting += later;
            if (t >= o) ending += earlier;
        }
        ending = __shfl_up_sync(~0u, ending, 1, C);
        df += starting + (t > 0 ? ending : 0.f);
        float* spans = spans_of(s, c, false);
        if (lane < C) sum_rows(spans + t * SOLVE_ROW, spans_of(s, c, true) + t * SOLVE_ROW);
        __syncwarp();
#pragma unroll
        for (int r = 1; r < C; r++) df += r >= t ? spans[r * SOLVE_ROW + t] : 0.f;
        put(p.df, df / g.f[i]);
    }
}
