// The gradients of one chunk, in the order that delta_backward.cu takes them, and the shared memory that they meet in.
#pragma once
#define FW_NO_GATE 1e-30f  // a smaller gate counts as this here, where its gradient is divided by it
#include "delta_memory.cuh"

static_assert(FW_SPAN == FW_PART, "a part at a time");

struct __align__(16) BackwardShared {
    Op q[FW_SPAN * KEY_ROW], k[FW_SPAN * KEY_ROW];
#if FW_MAP
    Row rows_q[FW_SPAN * ROW], rows_k[FW_SPAN * ROW];
#endif
    Op dy[FW_SPAN * VALUE_ROW], u[FW_SPAN * VALUE_ROW];
    In v[FW_SPAN * INPUT_ROW];
    Op memory[CHUNKS][FW_V * KEY_ROW];  // W_0 of each chunk, transposed
    Op dmemory[FW_V * KEY_ROW];         // dW_C of the chunk at hand
    Op dr[C * VALUE_ROW];
    Op dscores[C * PAIR_ROW], dkeys[C * PAIR_ROW];  // D dA and X + X^T
    Op scores[CHUNKS][C * PAIR_ROW];
    float inverse[CHUNKS][C * SOLVE_ROW], erase[CHUNKS][C * SOLVE_ROW], pairs[FW_F ? CHUNKS : 1][C * SOLVE_ROW];
    float spans[2][C * SOLVE_ROW];  // dA A and dL L
    float rows[WARPS][3][C], de[C];
    float dw[2][VALUE_WARPS][C], carried[2][WARPS];  // in turns: the next chunk's are written while the last one's are read
    Gates g;
    float4 sums[FW_KSPLIT > 1 ? 2 * WARPS * 2 * 32 : 1];
};
static_assert(sizeof(BackwardShared) == FW_SHARED, "the host computes the same");

__device__ __forceinline__ Chunk chunk_of(BackwardShared& s, int c) {
    const int t = c * C;
    return {s.q + t * KEY_ROW, s.k + t * KEY_ROW, s.v + t * INPUT_ROW, s.scores[c],  s.inverse[c],
            s.g.e + t,         s.g.w + t,         s.g.start + t,       s.g.end + t};
}

// The products that end in columns of V: dR and dv of chunk c, and dW carried over it; s.dmemory keeps dW as it was.
__device__ __forceinline__ void value_side(BackwardShared& s, const Place& at, int c, float (&dw)[TILES][4], int& turn) {
    const Chunk chunk = chunk_of(s, c);
    float carried = 0.f;
    each_couple(at, s.dmemory, dw, [](Op* to, float x, float y) { put_couple(to, x, y); });
    if (FW_F) {
        each_couple(at, s.memory[c], dw, [&](Op* from, float x, float y) {
            const float2 w = couple(from);
            carried += x * w.x + y * w.y;
        });
        carried = warp_sum(carried);
        if (at.lane == 0) s.carried[c & 1][at.warp] = carried * chunk.start[C - 1];
    }
    float du[2][4] = {}, dy[2][4], dr[2][4] = {};
#pragma unroll
    for (int n = 0; n < TILES; n += 2) multiply_from<P, false>(du, left_of<P>(dw[n], dw[n + 1]), chunk.k + at.row + n * 8, KEY_ROW);
    sum_split(du, s.sums, turn);
    load_transposed(dy, s.dy + c * C * VALUE_ROW + at.local(), VALUE_ROW);
    if (FW_F) {
        const Four end = four_of(chunk.end);
        each_token(at, du, [&](int i, int, int, float& x) { x *= end.x[(i >> 2) * 2 + (i & 1)]; });
    }
    multiply_from<P, true>(du, left_of<P>(dy[0], dy[1]), chunk.scores, PAIR_ROW);
    multiply_from<SOLVE, true, true>(dr, left_of<SOLVE>(du[0], du[1]), chunk.inverse, SOLVE_ROW);

    float dwrite[4] = {};  // of this lane's tokens
    if (at.has_first_rows()) {
        each_token(at, dr, [&](int i, int t, int v, float& x) {
            In* value = s.v + (c * C + t) * INPUT_ROW + v;
            dwrite[(i & 1) + (i >> 2) * 2] += x * to_float(*value);
            *value = from_float<In>(chunk.w[t] * x);  // dv takes the place of v
            s.dr[t * VALUE_ROW + v] = from_float<Op>(x);
        });
#pragma unroll
        for (int i = 0; i < 4; i++) {
            for (int o = 4; o < 32; o <<= 1) dwrite[i] += __shfl_xor_sync(~0u, dwrite[i], o);
            if (at.lane < 4) s.dw[c & 1][at.warp][lane_column() + (i & 1) + (i >> 1) * 8] = dwrite[i];
        }
    }
    const Four e = four_of(chunk.e), start = FW_F ? four_of(chunk.start) : Four{{1.f, 1.f, 1.f, 1.f}};
    each_token(at, dy, [&](int i, int, int, float& x) { x *= start.x[(i >> 2) * 2 + (i & 1)]; });
    each_token(at, dr, [&](int i, int, int, float& x) { x *= -e.x[(i >> 2) * 2 + (i & 1)] * start.x[(i >> 2) * 2 + (i & 1)]; });
    if (FW_F) {
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) dw[n][i] *= chunk.start[C - 1];
        }
    }
    write(at, dw, dy, chunk.q);
    write(at, dw, dr, chunk.k);
}

// Run by one warp: dA of chunk c, as D dA.
__device__ __forceinline__ void score_gradient(BackwardShared& s, int c) {
    float d[2][4] = {};
    const Op *dy = s.dy + c * C * VALUE_ROW, *u = s.u + c * C * VALUE_ROW;
    for (int i = 0; i < FW_V; i += 16) multiply_from<P, false>(d, left_from<P, false>(dy + i, VALUE_ROW), u + i, VALUE_ROW);
    each_two(d, [&](int t, int earlier, float x, float y) {
        float2 kept = make_float2(1.f, 1.f);
        if (FW_F) {
            const float2 score = couple(s.scores[c] + t * PAIR_ROW + earlier);
            put_couple(s.spans[0] + t * SOLVE_ROW + earlier, earlier < t ? x * score.x : 0.f, earlier + 1 < t ? y * score.y : 0.f);
            kept = couple(s.pairs[c] + t * SOLVE_ROW + earlier);
        }
        put_couple(s.dscores + t * PAIR_ROW + earlier, earlier <= t ? x * kept.x : 0.f, earlier < t ? y * kept.y : 0.f);
    });
}

// Run by one warp: dL of chunk c, as X + X^T, and its share of de.
__device__ __forceinline__ void erase_gradient(BackwardShared& s, int c) {
    float d[2][4] = {}, de[2] = {};
    const Op* u = s.u + c * C * VALUE_ROW;
    for (int i = 0; i < FW_V; i += 16) multiply_from<P, false>(d, left_from<P, false>(s.dr + i, VALUE_ROW), u + i, VALUE_ROW);
    each_pair(d, [&](int i, int t, int earlier, float& x) {
        const float change = -x * s.erase[c][t * SOLVE_ROW + earlier], e = s.g.e[c * C + t];
        de[i >> 1 & 1] += earlier < t ? change : 0.f;
        if (FW_F) s.spans[1][t * SOLVE_ROW + earlier] = earlier < t ? e * change : 0.f;
        const Op key = from_float<Op>(earlier < t ? -x * e * (FW_F ? s.pairs[c][t * SOLVE_ROW + earlier] : 1.f) : 0.f);
        if (earlier <= t) s.dkeys[t * PAIR_ROW + earlier] = s.dkeys[earlier * PAIR_ROW + t] = key;
    });
#pragma unroll
    for (int i = 0; i < 2; i++) {
        de[i] += __shfl_xor_sync(~0u, de[i], 1);
        de[i] += __shfl_xor_sync(~0u, de[i], 2);
        if ((threadIdx.x & 3) == 0) s.de[lane_row() + i * 8] = de[i];
    }
}

#if FW_MAP
// 16 tokens and columns of dq or dk take the place of the features.
__device__ __forceinline__ void keep_keys(Op* to, float (&x)[2][4]) {
    each_two(x, [&](int row, int k, float& a, float& b) { put_couple(to + row * KEY_ROW + k, a, b); });
}
#endif

// The products that end in columns of K: dq and dk of chunk c, and for the gates' gradients q . (W_0 dy), k . (W_0 dR) and k .
// (dW_C u).
__device__ __forceinline__ void key_side(BackwardShared& s, const Params& p, const Place& at, int c, int t0) {
    const Chunk chunk = chunk_of(s, c);
    float rows[3][2] = {}, start[2], end[2], erasing[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int t = lane_row() + half * 8;
        start[half] = scale_of(chunk.start + t), end[half] = scale_of(chunk.end + t), erasing[half] = chunk.e[t] * start[half];
    }
    for (int j = at.warp * 16; j < FW_K; j += WARPS * 16) {
        float dq[2][4] = {}, erased[2][4] = {}, dk[2][4] = {};
#pragma unroll(P == EXACT ? 1 : FW_V / 16)  // unrolled, fp32 has more fragments than registers
        for (int i = 0; i < FW_V; i += 16) {
            const Op *memory = s.memory[c] + i * KEY_ROW + j, *dmemory = s.dmemory + i * KEY_ROW + j;
            Right<P> b[2];
            right_from<P, true>(b, memory, KEY_ROW);
            const Left<P> dy = left_from<P, false>(s.dy + c * C * VALUE_ROW + i, VALUE_ROW), dr = left_from<P, false>(s.dr + i, VALUE_ROW);
            multiply<P>(dq[0], dy, b[0]);
            multiply<P>(dq[1], dy, b[1]);
            multiply<P>(erased[0], dr, b[0]);
            multiply<P>(erased[1], dr, b[1]);
            multiply_from<P, true>(dk, left_from<P, false>(s.u + c * C * VALUE_ROW + i, VALUE_ROW), dmemory, KEY_ROW);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int half = i & 1, n = i >> 1, t = lane_row() + half * 8, place = t * KEY_ROW + j + lane_column() + n * 8;
            const float2 q = couple(chunk.q + place), k = couple(chunk.k + place);
            float *dq_t = dq[n] + half * 2, *dk_t = dk[n] + half * 2, *erased_t = erased[n] + half * 2;
            if (FW_F) {
                rows[0][half] += q.x * dq_t[0] + q.y * dq_t[1];
                rows[2][half] += k.x * dk_t[0] + k.y * dk_t[1];
            }
            rows[1][half] += k.x * erased_t[0] + k.y * erased_t[1];
#pragma unroll
            for (int m = 0; m < 2; m++) {
                dq_t[m] *= start[half];
                dk_t[m] = end[half] * dk_t[m] - erasing[half] * erased_t[m];
            }
        }
        multiply_from<P, true>(dq, left_from<P, false>(s.dscores, PAIR_ROW), chunk.k + j, KEY_ROW);
        multiply_from<P, true>(dk, left_from<P, true>(s.dscores, PAIR_ROW), chunk.q + j, KEY_ROW);
        multiply_from<P, true>(dk, left_from<P, false>(s.dkeys, PAIR_ROW), chunk.k + j, KEY_ROW);
#if FW_MAP
        __syncwarp();
        keep_keys(s.q + c * C * KEY_ROW + j, dq);
        keep_keys(s.k + c * C * KEY_ROW + j, dk);
#else
        store_keys<FW_PARTIAL>(p.dq, dq, p, at, t0 + c * C, j);
        store_keys<FW_PARTIAL>(p.dk, dk, p, at, t0 + c * C, j);
#endif
    }
#pragma unroll
    for (int i = 0; i < 6; i++) {
        if (!FW_F && i >> 1 != 1) continue;
        float& sum = rows[i >> 1][i & 1];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if ((at.lane & 3) == 0) s.rows[at.warp][i >> 1][lane_row() + (i & 1) * 8] = sum;
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
__device__ __forceinline__ void gate_side(BackwardShared& s, const Params& p, const Place& at, int c, int t0) {
    const int lane = at.lane, t = lane & 15;
    float sums[3] = {}, dw = 0.f, df = 0.f;
    for (int i = 0; i < WARPS; i++) {
#pragma unroll
        for (int j = 0; j < 3; j++) {
            if (FW_F || j == 1) sums[j] += s.rows[i][j][t];
        }
        if (FW_F) df += s.carried[c & 1][i];
    }
    for (int i = 0; i < VALUE_WARPS; i++) dw += s.dw[c & 1][i][t];
    const int i = c * C + t;
    const float start = scale_of(s.g.start + i), e = s.g.e[i];
    const auto put = [&](const View& to, float x) {
        if (lane < C && t0 + i < p.T) ::at<float>(to, at.b, at.h, t0 + i)[blockIdx.y * to.tile] = x;
    };
    put(p.de, s.de[t] - start * sums[1]);
    if (FW_W) put(p.dw, dw);
    if (FW_F) {
        float starting = start * (sums[0] - e * sums[1]), ending = s.g.end[i] * sums[2];
#pragma unroll
        for (int o = 1; o < C; o <<= 1) {  // starting: its sum from t on, ending: its sum up to t
            const float later = __shfl_down_sync(~0u, starting, o, C), earlier = __shfl_up_sync(~0u, ending, o, C);
            if (t + o < C) starting += later;
            if (t >= o) ending += earlier;
        }
        ending = __shfl_up_sync(~0u, ending, 1, C);
        df += starting + (t > 0 ? ending : 0.f);
        if (lane < C) sum_rows(s.spans[0] + t * SOLVE_ROW, s.spans[1] + t * SOLVE_ROW);
        __syncwarp();
        for (int r = 0; r < C; r++) df += r >= t ? s.spans[0][r * SOLVE_ROW + t] : 0.f;
        put(p.df, df / s.g.f[i]);
    }
}
