// The gradients of a chunk that the two families with erase compute in the same way.
//
// The file that includes this one has defined BackwardShared, Part and grouped.
#pragma once
#include "erase.cuh"

// A warp's 16 columns of a chunk, transposed in its accumulators, to an array with a row for each column.
__device__ __forceinline__ void keep_transposed(const Place& at, Op* to, const float (&x)[2][4]) {
    put_square<false>(to + at.local() * PAIR_ROW, PAIR_ROW, x[0], x[1]);
}

// The products that end in columns of V: dR and dv of chunk c, and dW before it; dmemory keeps dW as it was. carry(dw) is what decay
// does to dW between the reads of the chunk and its writes.
template <class F>
__device__ __forceinline__ void value_side(const Part& part, const Place& at, int c, float (&dw)[TILES][4], int& turn, F carry) {
    BackwardShared& s = part.s;
    const Chunk chunk = part.chunk(c);
    keep_memory(at, s.dmemory[grouped(c)], dw);
#if FW_F
    const float carried = multiply_slices(s.memory[c] + at.local() * KEY_ROW + at.row, dw);
    if (at.lane == 0) s.carried[c][at.warp] = carried * chunk.start[C - 1];
#endif
    float du[2][4] = {}, dr[2][4] = {};
#pragma unroll
    for (int n = 0; n < TILES; n += 2) multiply_from<P, false>(du, left_of<P>(dw[n], dw[n + 1]), chunk.k + at.row + n * 8, KEY_ROW);
    sum_split(du, s.sums, turn);
    const Op* dy = part.in.dy + c * C * VALUE_ROW + at.local();
    Left<P> reads = left_from<P, true>(dy, VALUE_ROW);
    if constexpr (FW_F && P == BF16) {  // the sum takes no instruction of its own; fp32 has no registers for it
        float pairs[2][4] = {};
        multiply_from<P, true>(pairs, reads, chunk.scores, PAIR_ROW);
        const Four end = four_of(chunk.end);
        each_token(at, du, [&](int i, int, int, float& x) { x = fmaf(end.x[(i >> 2) * 2 + (i & 1)], x, pairs[i >> 2][i & 3]); });
    } else {
        if (FW_F) {
            const Four end = four_of(chunk.end);
            each_token(at, du, [&](int i, int, int, float& x) { x *= end.x[(i >> 2) * 2 + (i & 1)]; });
        }
        multiply_from<P, true>(du, reads, chunk.scores, PAIR_ROW);
    }
    multiply_from<SOLVE, true, true>(dr, left_of<SOLVE, true>(du[0], du[1]), chunk.inverse, SOLVE_ROW);
    if (at.has_first_rows()) {
        const Four w = four_of(chunk.w);
        In* values = part.in.v + c * C * INPUT_ROW;
        if (FW_W) {
            float v[2][4], dwrite[4] = {};  // of this lane's tokens
            load_transposed(v, values + at.local(), INPUT_ROW);
            each_token(at, dr, [&](int i, int, int, float& x) { dwrite[(i & 1) + (i >> 2) * 2] += x * v[i >> 2][i & 3]; });
            sum_columns(dwrite);  // behind which no lane reads v any more
            if (at.lane < C) s.dw[c][at.warp][at.lane] = dwrite[0];
        }
        keep_transposed(at, s.dr[grouped(c)], dr);
        float dv[2][4];
#pragma unroll
        for (int i = 0; i < 8; i++) dv[i >> 2][i & 3] = (FW_W ? w.x[(i >> 2) * 2 + (i & 1)] : 1.f) * dr[i >> 2][i & 3];
        put_square<true>(values + at.local(), INPUT_ROW, dv[0], dv[1]);
    }
    const Four erasing = four_of(chunk.erasing);
    each_token(at, dr, [&](int i, int, int, float& x) { x *= -erasing.x[(i >> 2) * 2 + (i & 1)]; });
#if FW_F
    const Four start = four_of(chunk.start);
    reads = left_scaled<P>(dy, VALUE_ROW, start);
#endif
    carry(dw);
    write(at, dw, reads, chunk.q);
    write(at, dw, left_of<P>(dr[0], dr[1]), chunk.p);
}

// Run by one warp: dA of chunk c, as D dA in the place of A.
__device__ __forceinline__ void score_gradient(const Part& part, int c) {
    BackwardShared& s = part.s;
    float d[2][4] = {};
    const Op *dy = part.in.dy + c * C * VALUE_ROW, *u = s.u[c];
    for (int i = 0; i < FW_V; i += 16) multiply_from<P, true>(d, left_from<P, false>(dy + i, VALUE_ROW), u + i * PAIR_ROW, PAIR_ROW);
    keep_lower<true>(d);
#if FW_F
    each_two(d, [&](int t, int earlier, float& x, float& y) {
        const float2 a = couple(s.scores[c] + t * PAIR_ROW + earlier), kept = couple(s.pairs[c] + t * SOLVE_ROW + earlier);
        put_couple(spans_of(s, c, false) + t * SOLVE_ROW + earlier, x * a.x, y * a.y);
        x *= kept.x, y *= kept.y;
    });
#endif
    __syncwarp();
    put_square<false>(s.scores[c], PAIR_ROW, d[0], d[1]);
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
        de[half] += x * l.x + y * l.y;
        float2 kept = make_float2(1.f, 1.f);
#if FW_F
        kept = couple(s.pairs[c] + t * SOLVE_ROW + earlier);
        put_couple(spans_of(s, c, true) + t * SOLVE_ROW + earlier, e[half] * x * l.x, e[half] * y * l.y);
#endif
        d[i >> 1][half * 2] = e[half] * x * kept.x, d[i >> 1][half * 2 + 1] = e[half] * y * kept.y;
    }
    put_square<false>(s.dkeys[grouped(c)], PAIR_ROW, d[0], d[1]);
    sum_halves(s.de[c], de[0], de[1]);
}
