// The gradients of a chunk that the two families with erase compute in the same way.
//
// The file that includes this one has defined BackwardShared, Part and grouped.
#pragma once
#include "erase.cuh"

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
    keep_memory(at, s.dmemory[grouped(c)], dw);
#if FW_F
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
        const int any = exponents->scores | (FW_F ? exponents->memory[at.local() / 16] : 0) | exponent;
        if (__builtin_expect(!leaves_range(dr, any), 1)) return false;
        bool beyond;
        do {
            reads = pass_back<true>(part, at, c, dw, dr, turn, exponent);
            beyond = leaves_range(dr) || __any_sync(~0u, largest_in(reads) * power(exponent) >= LARGE);
            if (FW_KSPLIT > 1) beyond = __syncthreads_or(beyond);
        } while (beyond && rescale(at, dw, dr, exponent, part.s.sums, largest_in(reads)));
        return true;
    }
    return false;
}

// The products that end in columns of V: dR and dv of chunk c, and dW before it; dmemory keeps dW as it was. carry(dw) is what decay
// does to dW between the reads of the chunk and its writes. dw and all that is linear in it are times 2^exponent.
template <class F>
__device__ __forceinline__ void value_side(const Part& part, const Place& at, int c, float (&dw)[TILES][4], int& turn, int& exponent,
                                           F carry) {
    BackwardShared& s = part.s;
    const Chunk chunk = part.chunk(c);
    float dr[2][4];
    Left<P> reads;
    const bool scaled = pass_back(part, at, c, dw, dr, reads, turn, exponent);
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

// Whether one of a chunk's exponents, from number FIRST on, is not 0; for all lanes.
template <int FIRST>
__device__ __forceinline__ bool has_exponents(const Exponents* exponents) {
    constexpr int COUNT = 2 + 2 * VALUE_WARPS;
    static_assert(COUNT <= 32, "a lane for each");
    if constexpr (P != F16) return false;
    else return any_exponent(((const int*)exponents)[min(((int)threadIdx.x & 31) + FIRST, COUNT - 1)]);
}

// d (16 x 16) = the products of a chunk's rows with U; left(i) is the operand of the columns of V from i on.
template <bool ADJOINT, class F>
__device__ __forceinline__ void multiply_writes(float (&d)[2][4], const Op* u, const Exponents* exponents, F left) {
    for (int i = 0; i < FW_V; i += 16) multiply_from<P, true>(d, left(i), u + i * PAIR_ROW, PAIR_ROW);
    if (__builtin_expect(!has_exponents<2>(exponents), 1)) return;
    for (int i = 0; i < 8; i++) d[i >> 2][i & 3] = 0.f;
    for (int i = 0; i < FW_V; i += 16) {
        float x[2][4] = {};
        multiply_from<P, true>(x, left(i), u + i * PAIR_ROW, PAIR_ROW);
        add_times(d, x, power(-exponents->memory[i / 16]) * (ADJOINT ? power(-exponents->adjoint[i / 16]) : 1.f));
    }
}

// Run by one warp: dA of chunk c, as D dA in the place of A.
__device__ __forceinline__ void score_gradient(const Part& part, int c) {
    BackwardShared& s = part.s;
    float d[2][4] = {};
    const Op *dy = part.in.dy + c * C * VALUE_ROW, *u = s.u[c];
    Exponents* exponents = part.chunk(c).exponents;
    const auto left = [&](int i) { return left_from<P, false>(dy + i, VALUE_ROW); };
    multiply_writes<false>(d, u, exponents, left);
    keep_lower<true>(d);
#if FW_F
    float products[2][4] = {};  // in fp16 the scores again, without the gates, below whose product it has no numbers
    for (int i = 0; P == F16 && i < FW_K; i += 16) {
        const Chunk chunk = part.chunk(c);
        multiply_from<P, false>(products, left_from<P, false>(chunk.q + i, KEY_ROW), chunk.k + i, KEY_ROW);
    }
    each_two(d, [&](int t, int earlier, float& x, float& y) {
        const float2 kept = couple(s.pairs[c] + t * SOLVE_ROW + earlier);
        float2 a;
        if constexpr (P == F16) {
            const float* both = products[earlier >> 3] + (t >> 3) * 2;
            a = make_float2(kept.x * both[0], kept.y * both[1]);
        } else {
            a = couple(s.scores[c] + t * PAIR_ROW + earlier);
        }
        put_couple(spans_of(s, c, false) + t * SOLVE_ROW + earlier, x * a.x, y * a.y);
        x *= kept.x, y *= kept.y;
    });
#endif
    __syncwarp();
    put_pairs<&Exponents::scores>(s.scores[c], d, exponents);
}

// Run by one warp: dL of chunk c, as X, and its share of de.
__device__ __forceinline__ void erase_gradient(const Part& part, int c) {
    BackwardShared& s = part.s;
    float d[2][4] = {}, de[2] = {};
    const Op *dr = s.dr[grouped(c)], *u = s.u[c];
    Exponents* exponents = part.chunk(c).exponents;
    const auto left = [&](int i) { return left_from<P, true>(dr + i * PAIR_ROW, PAIR_ROW); };
    multiply_writes<true>(d, u, exponents, left);
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
    put_pairs<&Exponents::erases>(s.dkeys[grouped(c)], d, exponents);
    sum_halves(s.de[c], de[0], de[1]);
}
