// What a block of delta_backward.cu has in shared memory, and where in device memory it comes from and goes to.
#pragma once
#define FW_NO_GATE 1e-30f  // a smaller gate counts as this here, where its gradient is divided by it
#include "delta.cuh"
#include "erase_parts.cuh"

// dq and dk go through shared memory, unless shares that are added up would lose digits there.
constexpr bool KEEP_KEYS = FW_MAP || !(FW_PARTIAL && SHORT<P>);

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

// Gradients of features have no bounds that fp16 holds.
using Feature = OperandOf<P == F16 && FW_MAP ? EXACT : P>::type;
constexpr int FEATURE_ROW = tile_stride<Feature>(FW_K);

struct DeltaFirsts : Firsts {
    const uint4* borders;
};

struct __align__(16) BackwardShared {
    Stage stage[FW_STAGES];
    DeltaFirsts first;
#if FW_MAP
    Op q[FW_SPAN * KEY_ROW], k[FW_SPAN * KEY_ROW];
#endif
#if FW_MAP && FW_PRECISION == F16
    Feature dq[FW_SPAN * FEATURE_ROW], dk[FW_SPAN * FEATURE_ROW];
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
#if FW_PRECISION == F16
    Exponents exponents[CHUNKS];
#endif
};
static_assert(sizeof(BackwardShared) == FW_SHARED, "the host computes the same");

__device__ __forceinline__ int grouped(int c) { return ROOMY ? c : 0; }

// What pairs add to the gradients of the gates between them: dA A and dL L, in the places of the inverse and of L where nothing
// comes there before they are added up.
__device__ __forceinline__ float* spans_of(BackwardShared& s, int c, bool erasing) {
    return AHEAD ? s.spans[erasing][c] : erasing ? s.erase[c] : s.inverse[c];
}

__device__ __forceinline__ void find_firsts(DeltaFirsts& first, const Params& p, const Place& at) {
    find_firsts((Firsts&)first, p, at);
    first.borders = border(p, at, 0) - (at.warp * UNITS * 32 + at.lane);
}

__device__ __forceinline__ const uint4* border_from(const DeltaFirsts& first, const Place& at, int s) {
    return first.borders + (int64_t)(s * (int)gridDim.y) * (WARPS * UNITS * 32) + (at.warp * UNITS * 32 + at.lane);
}

// The part at hand: its rows, features where there is a map, and gates.
struct Part {
    Op *q, *k;
    Feature *dq, *dk;  // where their gradients come, in place of them but in fp16
    Stage& in;
    BackwardShared& s;

    __device__ __forceinline__ Chunk chunk(int c) const { return chunk_of(q, k, in.v + c * C * INPUT_ROW, in.g, s, c); }
};
