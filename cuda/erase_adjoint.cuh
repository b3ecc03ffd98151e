// The adjoint of the memory over a chunk, in the two families with erase.
//
// The file that includes this one has defined BackwardShared, Part and grouped, or with FW_WALK the first two: then nothing is kept
// for the gradients of the chunk.
#pragma once
#include "erase.cuh"

#ifndef FW_WALK
#define FW_WALK 0
#endif

// A warp's 16 columns of a chunk, transposed in its accumulators, to an array with a row for each column.
__device__ __forceinline__ void keep_transposed(const Place& at, Op* to, const float (&x)[2][4]) {
    put_square<false>(to + at.local() * PAIR_ROW, PAIR_ROW, x[0], x[1]);
}

// dR of chunk c, from dW as it is, which is kept; and dY as an operand.
template <bool SCALED>
__device__ __forceinline__ Left<P> pass_back(const Part& part, const Place& at, int c, float (&dw)[TILES][4], float (&dr)[2][4],
                                             int& turn, int exponent) {
    BackwardShared& s = part.s;
    const Chunk chunk = part.chunk(c);
#if !FW_WALK
    keep_memory(at, s.dmemory[grouped(c)], dw);
#endif
#if FW_F && !FW_WALK
    float carried = multiply_slices(s.memory[c] + at.local() * KEY_ROW + at.row, dw);
    if constexpr (SCALED) carried *= power(-chunk.exponents->memory[at.local() / 16]) * power(-exponent);
    if (at.lane == 0) s.carried[c][at.warp] = carried * chunk.start[C - 1];
#endif
    float du[2][4] = {};
#pragma unroll
    for (int n = 0; n < TILES; n += 2) multiply_from<P, false>(du, left_of<P>(dw[n], dw[n + 1]), chunk.k + at.row + n * 8, KEY_ROW);
    sum_split(du, s.sums, turn);
    const Left<P> reads = left_from<P, true>(part.in.dy + c * C * VALUE_ROW + at.local(), VALUE_ROW);
    if constexpr (SCALED || (FW_F && SHORT<P>)) {  // the sum takes no instruction of its own; fp32 has no registers for it
        float pairs[2][4] = {};
        multiply_from<P, true>(pairs, reads, chunk.scores, PAIR_ROW);
        if constexpr (SCALED) scale_by(pairs, power(-chunk.exponents->scores) * power(exponent));
        const Four end = FW_F ? four_of(chunk.end) : Four{{1.f, 1.f, 1.f, 1.f}};
        each_token(at, du, [&](int i, int, int, float& x) { x = fmaf(end.x[(i >> 2) * 2 + (i & 1)], x, pairs[i >> 2][i & 3]); });
    } else {
        if (FW_F) {
            const Four end = four_of(chunk.end);
            each_token(at, du, [&](int i, int, int, float& x) { x *= end.x[(i >> 2) * 2 + (i & 1)]; });
        }
        multiply_from<P, true>(du, reads, chunk.scores, PAIR_ROW);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) dr[i >> 2][i & 3] = 0.f;
    multiply_from<SOLVE, true, true>(dr, left_of<SOLVE, true>(du[0], du[1]), chunk.inverse, SOLVE_ROW);
    return reads;
}

// The same, with the power of 2 that dW needs in fp16; whether there is one.
__device__ __forceinline__ bool pass_back(const Part& part, const Place& at, int c, float (&dw)[TILES][4], float (&dr)[2][4],
                                          Left<P>& reads, int& turn, int& exponent) {
    reads = pass_back<false>(part, at, c, dw, dr, turn, exponent);
    if constexpr (P == F16) {
        const Exponents* exponents = part.chunk(c).exponents;
        const Four erasing = four_of(part.chunk(c).erasing);
        const float (&e)[4] = erasing.x;
        // LARGE times more than 2 is no number of fp16
        const bool strong = fmaxf(fmaxf(fabsf(e[0]), fabsf(e[1])), fmaxf(fabsf(e[2]), fabsf(e[3]))) > 2.f;
        const int any = exponents->scores | (FW_F && !FW_WALK ? exponents->memory[at.local() / 16] : 0) | exponent | (int)strong;
        if (__builtin_expect(!leaves_range(dr, any), 1)) return false;
        bool beyond;
        float next;
        do {
            reads = pass_back<true>(part, at, c, dw, dr, turn, exponent);
            next = 0.f;
            each_token(at, dr, [&](int i, int, int, float x) { next = fmaxf(next, fabsf(x * e[(i >> 2) * 2 + (i & 1)])); });
            next = fmaxf(largest_in(reads), next < 1e38f ? next * power(-exponent) : 0.f);
            beyond = leaves_range(dr) || __any_sync(~0u, next * power(exponent) >= LARGE);
            if (FW_KSPLIT > 1) beyond = __syncthreads_or(beyond);
        } while (beyond && rescale(at, dw, dr, exponent, part.s.sums, next));
        return true;
    }
    return false;
}

// The products that end in columns of V: dR and dv of chunk c, and dW before it; dmemory keeps dW as it was. carry(dw) is what decay
// does to dW between the reads of the chunk and its writes. dw and all that is linear in it are times 2^exponent.
template <class F>
__device__ __forceinline__ void value_side(const Part& part, const Place& at, int c, float (&dw)[TILES][4], int& turn, int& exponent,
                                           F carry) {
    const Chunk chunk = part.chunk(c);
    float dr[2][4];
    Left<P> reads;
    const bool scaled = pass_back(part, at, c, dw, dr, reads, turn, exponent);
#if !FW_WALK
    BackwardShared& s = part.s;
    if (at.has_first_rows()) {
        const Four w = four_of(chunk.w);
        In* values = part.in.v + c * C * INPUT_ROW;
        if (FW_W) {
            float v[2][4], dwrite[4] = {};  // of this lane's tokens
            load_transposed(v, values + at.local(), INPUT_ROW);
            each_token(at, dr, [&](int i, int, int, float& x) { dwrite[(i & 1) + (i >> 2) * 2] += x * v[i >> 2][i & 3]; });
            if (scaled) {
#pragma unroll
                for (int i = 0; i < 4; i++) dwrite[i] *= power(-exponent);
            }
            sum_columns(dwrite);  // behind which no lane reads v any more
            if (at.lane < C) s.dw[c][at.warp][at.lane] = dwrite[0];
        }
        keep_transposed(at, s.dr[grouped(c)], dr);
        float dv[2][4];
#pragma unroll
        for (int i = 0; i < 8; i++) dv[i >> 2][i & 3] = (FW_W ? w.x[(i >> 2) * 2 + (i & 1)] : 1.f) * dr[i >> 2][i & 3];
        if (scaled) scale_by(dv, power(-exponent));
        put_square<true>(values + at.local(), INPUT_ROW, dv[0], dv[1]);
        if (P == F16 && at.lane == 0) chunk.exponents->adjoint[at.local() / 16] = exponent;
    }
#endif
    const Four erasing = four_of(chunk.erasing);
    each_token(at, dr, [&](int i, int, int, float& x) { x *= -erasing.x[(i >> 2) * 2 + (i & 1)]; });
    if (FW_F || scaled) {
        Four start = FW_F ? four_of(chunk.start) : Four{{1.f, 1.f, 1.f, 1.f}};
        if (scaled) {
#pragma unroll
            for (int i = 0; i < 4; i++) start.x[i] *= power(exponent);
        }
        reads = left_scaled<P>(part.in.dy + c * C * VALUE_ROW + at.local(), VALUE_ROW, start);
    }
    carry(dw);
    write(at, dw, reads, chunk.q);
    write(at, dw, left_of<P>(dr[0], dr[1]), chunk.p);
}
