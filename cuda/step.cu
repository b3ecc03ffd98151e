// One token of the recurrence, for decoding: the memory is read once and written once, in place if memory_out is memory.
//
//     D   = (f z^T) * W                         what is left of the memory
//     u   = w v - e D^T k                       what is written; with a key e to read with, w v - D^T e
//     W'  = D + k u^T
//     y   = W'^T q = D^T q + (k . q) u          so that one pass over D gives the erase and the output
//
// and with FW_SUMS attention normalisation, n' = f n + w k, y = W'^T q / (n' . q + eps), without z and e.
//
// Memory bandwidth bounds the speed: 8 K V bytes of fp32 memory for each token and head; everything else is small beside it.
// Nothing is saved, because the kernel has no backward.
//
// A block has one head's memory and 32 of its columns, one per lane; a warp has FW_ROWS consecutive rows, held in registers between
// the read and the write. Macros: FW_IN (type of q, k, v, y), FW_F (decay of the key side: 0 none, 1 per token, 2 per key), FW_Z
// (decay of the value side: 0, 1), FW_E (erase: 0 none, 1 a strength per token, 2 a key), FW_W (write strength: 0, 1), FW_SUMS (0, 1),
// FW_ROWS (at most 32); those of
// row_map.cuh where q and k are rows to map.
#include "row_map.cuh"
#include "views.cuh"

struct Params {
    View q, k, v, f, z, e, w, memory, y, memory_out, sums, sums_out;  // sums_out is not sums
    const long long* order;  // row b continues from row order[b] of memory, which memory_out then must not be; null: from row b
    int H, K, V;
    float eps, least;  // what is added to a divisor; and what stands for one of 0
};

extern "C" __global__ void __launch_bounds__(COLUMNS * MAX_WARPS) step(const Params p) {
    __shared__ float recalled[MAX_WARPS][COLUMNS];
    __shared__ float read[MAX_WARPS][COLUMNS];
    __shared__ float overlap[MAX_WARPS];
    const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y;
    const int b = blockIdx.x / p.H, h = blockIdx.x % p.H;
    const int column = blockIdx.y * COLUMNS + lane, row = warp * FW_ROWS;
    const bool inside = column < p.V;

    // Lane i has the numbers of row i of this warp; beyond K they are 0.
    const bool own = lane < FW_ROWS && row + lane < p.K;
#if FW_MAP
    __shared__ FW_IN rows[2][FW_D];
    for (int i = warp * COLUMNS + lane; i < FW_D; i += warps * COLUMNS) {
        rows[0][i] = at<const FW_IN>(p.q, b, h)[i];
        rows[1][i] = at<const FW_IN>(p.k, b, h)[i];
    }
    __syncthreads();
    const float q_scale = row_scale(rows[0]), k_scale = row_scale(rows[1]);
    const float q = own ? q_scale * feature(rows[0], row + lane) : 0.f;
    const float k = own ? k_scale * feature(rows[1], row + lane) : 0.f;
#else
    const float q = own ? to_float(at<const FW_IN>(p.q, b, h)[row + lane]) : 0.f;
    const float k = own ? to_float(at<const FW_IN>(p.k, b, h)[row + lane]) : 0.f;
#endif
#if FW_F == 2
    const float f = own ? at<const float>(p.f, b, h)[row + lane] : 0.f;
#elif FW_F == 1
    const float f = *at<const float>(p.f, b, h);
#endif
#if FW_E == 2
    const float erasing = own ? at<const float>(p.e, b, h)[row + lane] : 0.f;
#else
    const float erasing = k;
#endif
#if FW_Z
    const float z = inside ? at<const float>(p.z, b, h)[column] : 0.f;
#endif

    const long long from = p.order ? p.order[b] : b;
#if FW_SUMS
    __shared__ float divisors[MAX_WARPS];
    float n = own ? at<const float>(p.sums, from, h)[row + lane] : 0.f;
#if FW_F
    n *= f;
#endif
#if FW_W
    n += k * *at<const float>(p.w, b, h);
#else
    n += k;
#endif
    if (own && blockIdx.y == 0) at<float>(p.sums_out, b, h)[row + lane] = n;
    n *= q;
    for (int distance = 16; distance; distance /= 2) n += __shfl_xor_sync(~0u, n, distance);
    if (lane == 0) divisors[warp] = n;
#endif

    const float* source = at<const float>(p.memory, from, h) + column;
    float left[FW_ROWS];
#pragma unroll
    for (int i = 0; i < FW_ROWS; i++) {
        left[i] = inside && row + i < p.K ? source[(long long)(row + i) * p.V] : 0.f;
    }

    float recalls = 0.f, reads = 0.f;
#pragma unroll
    for (int i = 0; i < FW_ROWS; i++) {
#if FW_F == 2
        left[i] *= __shfl_sync(~0u, f, i);
#elif FW_F == 1
        left[i] *= f;
#endif
#if FW_Z
        left[i] *= z;
#endif
        recalls += __shfl_sync(~0u, erasing, i) * left[i];
        reads += __shfl_sync(~0u, q, i) * left[i];
    }
    float both = q * k;
    for (int distance = 16; distance; distance /= 2) both += __shfl_xor_sync(~0u, both, distance);
    recalled[warp][lane] = recalls;
    read[warp][lane] = reads;
    if (lane == 0) overlap[warp] = both;
    __syncthreads();

    recalls = reads = both = 0.f;
    for (int i = 0; i < warps; i++) {
        recalls += recalled[i][lane];
        reads += read[i][lane];
        both += overlap[i];
    }
    float written = inside ? to_float(at<const FW_IN>(p.v, b, h)[column]) : 0.f;
#if FW_W
    written *= *at<const float>(p.w, b, h);
#endif
#if FW_E == 2
    written -= recalls;
#elif FW_E
    written -= *at<const float>(p.e, b, h) * recalls;
#endif
    float y = reads + both * written;
#if FW_SUMS
    float divisor = 0.f;
    for (int i = 0; i < warps; i++) divisor += divisors[i];
    y /= divisor == 0.f ? p.least : divisor + p.eps;
#endif
    if (warp == 0 && inside) at<FW_IN>(p.y, b, h)[column] = from_float<FW_IN>(y);

    float* target = at<float>(p.memory_out, b, h) + column;
#pragma unroll
    for (int i = 0; i < FW_ROWS; i++) {
        const float key = __shfl_sync(~0u, k, i);
        if (inside && row + i < p.K) target[(long long)(row + i) * p.V] = left[i] + key * written;
    }
}
