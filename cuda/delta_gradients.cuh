// The gradients of one chunk, in the order that delta_backward.cu takes them.
#pragma once
#include "delta_parts.cuh"
#include "erase_gradients.cuh"

// Sums every x over the four lanes that have more of rows g and g + 8, to their places; where not ALL, of the second x only.
template <bool ALL>
__device__ __forceinline__ void sum_rows_of(float (*to)[C], const float (&x)[3][2]) {
    if constexpr (!ALL) return sum_halves(to[1], x[1][0], x[1][1]);
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    float sum[3];
#pragma unroll
    for (int i = 0; i < 3; i++) sum[i] = (odd ? x[i][1] : x[i][0]) + __shfl_xor_sync(~0u, odd ? x[i][0] : x[i][1], 1);
    const float mine = (high ? sum[1] : sum[0]) + __shfl_xor_sync(~0u, high ? sum[0] : sum[1], 2);
    sum[2] += __shfl_xor_sync(~0u, sum[2], 2);
    float* place = to[0] + lane_row() + odd * 8;
    place[high * C] = mine;
    if (!high) place[2 * C] = sum[2];
}

// The products of key_side with the memory and its adjoint, where columns of V have powers of 2.
__device__ __forceinline__ void multiply_scaled(const Part& part, int c, int j, float (&dq)[2][4], float (&erased)[2][4], float (&dk)[2][4]) {
    BackwardShared& s = part.s;
    const Exponents* exponents = part.chunk(c).exponents;
    for (int i = 0; i < 8; i++) dq[i >> 2][i & 3] = erased[i >> 2][i & 3] = dk[i >> 2][i & 3] = 0.f;
#pragma unroll 1
    for (int i = 0; i < FW_V; i += 16) {
        float x[3][2][4] = {};
        const Op* memory = s.memory[c] + i * KEY_ROW + j;
        multiply_from<P, true>(x[0], left_from<P, false>(part.in.dy + c * C * VALUE_ROW + i, VALUE_ROW), memory, KEY_ROW);
        multiply_from<P, true>(x[1], left_from<P, true>(s.dr[grouped(c)] + i * PAIR_ROW, PAIR_ROW), memory, KEY_ROW);
        const Left<P> u = left_from<P, true>(s.u[c] + i * PAIR_ROW, PAIR_ROW);
        multiply_from<P, true>(x[2], u, s.dmemory[grouped(c)] + i * KEY_ROW + j, KEY_ROW);
        const float back = power(-exponents->memory[i / 16]), both = back * power(-exponents->adjoint[i / 16]);
        add_times(dq, x[0], back), add_times(erased, x[1], both), add_times(dk, x[2], both);
    }
}

// The products that end in columns of K: dq and dk of chunk c, and for the gates' gradients q . (W_0 dy), k . (W_0 dR) and k .
// (dW_C u).
__device__ __forceinline__ void key_side(const Part& part, const Params& p, const Place& at, int c, int t0) {
    BackwardShared& s = part.s;
    const Chunk chunk = part.chunk(c);
    const Op *dy_rows = part.in.dy + c * C * VALUE_ROW, *dr_columns = s.dr[grouped(c)], *u_columns = s.u[c];
    const bool scaled = has_exponents<0>(chunk.exponents);
    float rows[3][2] = {};
    each_turn<WARPS * 16, FW_K>(at.warp * 16, [&](int j) {
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
        if (__builtin_expect(scaled, 0)) multiply_scaled(part, c, j, dq, erased, dk);
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
        const auto multiply_pairs = [&](float (&dq)[2][4], float (&keys)[2][4], float (&queries)[2][4]) {
            Right<P> b[2];
            right_from<P, true>(b, chunk.k + j, KEY_ROW);
            const Left<P> reads = left_from<P, false>(chunk.scores, PAIR_ROW);
            multiply<P>(dq[0], reads, b[0]);
            multiply<P>(dq[1], reads, b[1]);
            const Op* dkeys = s.dkeys[grouped(c)];
            const Left<P> x = left_from<P, false>(dkeys, PAIR_ROW), across = left_from<P, true>(dkeys, PAIR_ROW);
            multiply<P>(keys[0], x, b[0]);
            multiply<P>(keys[1], x, b[1]);
            multiply<P>(keys[0], across, b[0]);
            multiply<P>(keys[1], across, b[1]);
            multiply_from<P, true>(queries, left_from<P, true>(chunk.scores, PAIR_ROW), chunk.q + j, KEY_ROW);
        };
        if (__builtin_expect(scaled, 0)) {
            float sums[3][2][4] = {};
            multiply_pairs(sums[0], sums[1], sums[2]);
            const float reading = power(-chunk.exponents->scores);
            add_times(dq, sums[0], reading), add_times(dk, sums[1], power(-chunk.exponents->erases)), add_times(dk, sums[2], reading);
        } else {
            multiply_pairs(dq, dk, dk);
        }
        if constexpr (KEEP_KEYS) {
            __syncwarp();
            put_square<false>(part.dq + c * C * FEATURE_ROW + j, FEATURE_ROW, dq[0], dq[1]);
            put_square<false>(part.dk + c * C * FEATURE_ROW + j, FEATURE_ROW, dk[0], dk[1]);
        } else {
            store_keys<FW_PARTIAL>(p.dq, dq, p, at, t0 + c * C, j);
            store_keys<FW_PARTIAL>(p.dk, dk, p, at, t0 + c * C, j);
        }
    });
    sum_rows_of<FW_F>(s.rows[c][at.warp], rows);
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
    for (int i = 0; FW_W && i < VALUE_WARPS; i++) dw += s.dw[c][i][lane_of_column(t)];
    const int i = c * C + t;
    const float start = scale_of(g.start + i), e = g.e[i];
    const auto put = [&](void* first, const View& to, float x) {
        if (lane < C && t0 + i < p.T) *::at<float>(view_from(first, to), 0, 0, t0 + i) = x;
    };
    put(s.first.de, p.de, s.de[c][t] - start * sums[1]);
    if (FW_W) put(s.first.dw, p.dw, dw);
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
        float within = 0.f;  // half of the rows, the other half in the other half of the warp
#pragma unroll
        for (int first = 0; first < C; first += 2) {
            const int r = first + (lane >> 4);
            within += r >= t ? spans[r * SOLVE_ROW + t] : 0.f;
        }
        df += within + __shfl_xor_sync(~0u, within, 16);
        put(s.first.df, p.df, df / g.f[i]);
    }
}
