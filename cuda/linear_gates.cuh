// The gradients of the gates of a chunk: the sums that linear_gradients.cuh leaves for them, and what they add up to.
#pragma once
#define FW_NO_GATE 1e-30f  // a smaller gate counts as this here, where its gradient is divided by it
#include "linear.cuh"

static_assert(WARPS % BLOCKS == 0, "the warps share the chunk's blocks");
constexpr int KEY_GROUPS = groups(FW_K), KEY_COLUMNS = FW_K / KEY_GROUPS;
constexpr int VALUE_GROUPS = groups(FW_V), VALUE_COLUMNS = FW_V / VALUE_GROUPS;
constexpr int PAIR_ROW = tile_stride<float>(16);

// What the gates' gradients are sums of. [group][token or block]
struct GateSums {
    float reads[KEY_GROUPS][C];           // q dq of what is older than the token's block
    float writes[KEY_GROUPS][C];          // k dk of what is younger than the token's block
    float within[C];                      // pairs on the two sides of the gate within its block
    float initial[KEY_GROUPS][BLOCKS];    // q dq of W_0
    float final[KEY_GROUPS][BLOCKS];      // k dk of dW_C
    float across[BLOCKS][BLOCKS];         // pairs of a block and one that is older than the block before it
    float carried[WARPS];                 // W_0 dW_C
    float strength[VALUE_GROUPS][C];      // dw
};

// What this lane has of 16 rows where accumulators have the same places.
template <int N>
struct RowNumbers {
    float x[N][4];

    template <int STRIDE>
    __device__ __forceinline__ void load(const Op* rows) {
#pragma unroll
        for (int n = 0; n < N; n += 2) load_straight(*(float(*)[2][4])x[n], rows + n * 8, STRIDE);
    }

    // This lane's shares of the products of rows g and g + 8 with those of acc.
    __device__ __forceinline__ void dot(float (&sum)[2], const float (&acc)[N][4]) const {
        sum[0] = sum[1] = 0.f;
#pragma unroll
        for (int n = 0; n < N; n++) {
            sum[0] += x[n][0] * acc[n][0] + x[n][1] * acc[n][1];
            sum[1] += x[n][2] * acc[n][2] + x[n][3] * acc[n][3];
        }
    }
};

__device__ __forceinline__ void share_pairs(float* to, const float* gate) {
    float d[2][4];
    decay_pairs(d, gate);
    each_pair(d, [&](int, int t, int s, float& x) { to[t * PAIR_ROW + s] = x; });
    __syncwarp();
}

// For gate r of a block the sum over the pairs c (row s, column t, 0 where t <= s) with s < r <= t.
__device__ __forceinline__ void put_spans(float* to, const float (&c)[2][4]) {
    const int place = threadIdx.x & 3;
    float sums[4] = {};  // of columns 2t, 2t + 1, and 8 more
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float low = c[0][half * 2] + c[0][half * 2 + 1], high = c[1][half * 2] + c[1][half * 2 + 1];
#pragma unroll
        for (int o = 1; o < 4; o <<= 1) {
            const float more_low = __shfl_down_sync(~0u, low, o, 4), more_high = __shfl_down_sync(~0u, high, o, 4);
            if (place + o < 4) low += more_low, high += more_high;
        }
        float after_low = __shfl_down_sync(~0u, low, 1, 4), after_high = __shfl_down_sync(~0u, high, 1, 4);
        if (place == 3) after_low = after_high = 0.f;
        after_low += __shfl_sync(~0u, high, 0, 4);
        const float odd_low = c[0][half * 2 + 1] + after_low, odd_high = c[1][half * 2 + 1] + after_high;
        const float column[4] = {c[0][half * 2] + odd_low, odd_low, c[1][half * 2] + odd_high, odd_high};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (lane_row() + half * 8 < lane_column() + (i & 1) + (i >> 1) * 8) sums[i] += column[i];
        }
    }
    const int t = sum_columns(sums);
    if ((threadIdx.x & 31) < 16) to[t] = sums[0];
}

// Run by one warp, behind a barrier: the gradients of a block's gates.
__device__ __forceinline__ void gate_side(const GateSums& g, const Params& p, const Place& at, const Products& x, int block, int t0) {
    const int lane = at.lane & 15, t = block * 16 + lane;
    const bool there = at.lane < 16 && t0 + t < p.T;
    if (FW_W) {
        float dw = 0.f;
        for (int i = 0; i < VALUE_GROUPS; i++) dw += g.strength[i][t];
        if (there) ::at<float>(p.dw, at.b, at.h, t0 + t)[blockIdx.y * p.dw.tile] = dw;
    }
    if (!FW_F) return;
    float reads = 0.f, writes = 0.f, through = 0.f;
    for (int i = 0; i < KEY_GROUPS; i++) reads += g.reads[i][t], writes += g.writes[i][t];
#pragma unroll
    for (int o = 1; o < 16; o <<= 1) {  // reads: the sum from t on, writes: up to t
        const float later = __shfl_down_sync(~0u, reads, o, 16), earlier = __shfl_up_sync(~0u, writes, o, 16);
        if (lane + o < 16) reads += later;
        if (lane >= o) writes += earlier;
    }
    writes = __shfl_up_sync(~0u, writes, 1, 16);
    for (int i = 0; i < WARPS; i++) through += g.carried[i];
    through *= x.before[BLOCKS - 1] * x.total[BLOCKS - 1];
    for (int b = 0; b < BLOCKS; b++) {
        if (b == block) continue;
        for (int i = 0; i < KEY_GROUPS; i++) through += b > block ? g.initial[i][b] : g.final[i][b];
        for (int older = 0; b > block && older < block; older++) through += g.across[b][older];
    }
    const float df = (through + g.within[t] + reads + (lane > 0 ? writes : 0.f)) / x.gate[t];
    if (there) ::at<float>(p.df, at.b, at.h, t0 + t)[blockIdx.y * p.df.tile] = df;
}
