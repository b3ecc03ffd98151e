// One token's reading of memories that do not change, which is the cross attention of decoding:
//
//     y = W^T q / (n . q + eps), or W^T q where FW_SUMS is 0
//
// Rows share memories: row b reads memory order[b], and those of one sentence, which stand side by side, find it in the cache. So the
// memories stay where they are however beam search orders the rows.
//
// A block has 32 columns of one row's head, one per lane; a warp has FW_ROWS consecutive keys. Macros: FW_IN (type of q), FW_OUT (of
// y), FW_SUMS (0, 1), FW_ROWS (at most 32); those of row_map.cuh where q is a row to map.
#include "row_map.cuh"
#include "views.cuh"

struct Params {
    View q, memory, sums, y;  // memory: (S,H,K,V), its last two dimensions dense
    const long long* order;
    int H, K, V;
    float eps;
};

extern "C" __global__ void __launch_bounds__(COLUMNS * MAX_WARPS) read_memory(const Params p) {
    __shared__ float shares[MAX_WARPS][COLUMNS];
    __shared__ float divisors[MAX_WARPS];
    const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y;
    const int b = blockIdx.x / p.H, h = blockIdx.x % p.H;
    const int column = blockIdx.y * COLUMNS + lane, row = warp * FW_ROWS;
    const bool inside = column < p.V;
    const long long source = p.order[b];

    // Lane i has the feature of key i of this warp; beyond K it is 0.
    const bool own = lane < FW_ROWS && row + lane < p.K;
#if FW_MAP
    __shared__ FW_IN mapped[FW_D];
    for (int i = warp * COLUMNS + lane; i < FW_D; i += warps * COLUMNS) mapped[i] = at<const FW_IN>(p.q, b, h)[i];
    __syncthreads();
    const float scale = row_scale(mapped);
    const float q = own ? scale * feature(mapped, row + lane) : 0.f;
#else
    const float q = own ? to_float(at<const FW_IN>(p.q, b, h)[row + lane]) : 0.f;
#endif

    const float* memory = at<const float>(p.memory, source, h) + column;
    float share = 0.f;
#pragma unroll
    for (int i = 0; i < FW_ROWS; i++) {
        const float weight = __shfl_sync(~0u, q, i);
        if (inside && row + i < p.K) share += weight * memory[(long long)(row + i) * p.V];
    }
    shares[warp][lane] = share;
#if FW_SUMS
    float divisor = own ? q * at<const float>(p.sums, source, h)[row + lane] : 0.f;
    for (int distance = 16; distance; distance /= 2) divisor += __shfl_xor_sync(~0u, divisor, distance);
    if (lane == 0) divisors[warp] = divisor;
#endif
    __syncthreads();
    if (warp || !inside) return;

    float y = 0.f, all = 0.f;
    for (int i = 0; i < warps; i++) {
        y += shares[i][lane];
#if FW_SUMS
        all += divisors[i];
#endif
    }
#if FW_SUMS
    y = all == 0.f ? 0.f : y / (all + p.eps);
#endif
    at<FW_OUT>(p.y, b, h)[column] = from_float<FW_OUT>(y);
}
