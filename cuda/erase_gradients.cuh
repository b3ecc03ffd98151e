// The gradients of a chunk that the two families with erase compute in the same way.
//
// The file that includes this one has defined BackwardShared, Part and grouped.
#pragma once
#include "erase_adjoint.cuh"

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
