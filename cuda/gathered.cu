// A sparse feed-forward layer for few tokens, in one launch; each token chooses one unit of each block of N:
//
//     inner  = A x                                      the controller, of low rank
//     chosen = argmax of B inner + c within each block
//     h      = relu(W_1[chosen] x)
//     y      = sum of h W_2[chosen] + b
//
// Memory bandwidth bounds the speed: A, B and the chosen rows of both matrices are read once for each token, and a row of W_2 whose
// h is 0 is not read. Nothing is saved, because the kernel has no backward.
//
// The work of a token is cut into items: those of inner (a row of A for each warp), of the blocks (one each) and of the columns of
// y (FW_COLUMNS for each lane). A thread block takes one item, by a ticket: items that need others have later tickets, and wait for
// thread blocks that run already. So the grid may be larger than the device, and thread blocks may start in any order. The last one
// sets all counters back to 0, for the next launch.
//
// Macros: FW_IN (type of x, the weights and y), FW_VECTOR (numbers of a load: those of 16 bytes where all rows start at multiples
// of 16, else 1), FW_COLUMNS (those of 4 bytes, else 1).
#include "common.cuh"

constexpr int WARPS = 8;

struct Params {
    const FW_IN *x, *A, *B, *c, *W1, *W2, *b;  // x (R,C), A (rank,C), B (F,rank), c (F), W1, W2 (F,C), b (C)
    FW_IN* y;                                  // (R,C)
    float *inner, *hidden;                     // (R,rank), (R,F/N)
    int *chosen, *counters;                    // (R,F/N); tickets, items that are done, and those of inner and blocks by token
    int R, C, rank, units, block;
};

template <class T, int N>
struct __align__(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Numbers {
    T at[N];
};

template <int N, class T>
__device__ __forceinline__ Numbers<T, N> load(const T* p) {
    return *(const Numbers<T, N>*)p;
}

// The product of two rows of n numbers that ``threads`` threads share; the sum of a warp's, in all its lanes.
template <class T>
__device__ __forceinline__ float product(const FW_IN* row, const T* x, int n, int thread, int threads) {
    float sum = 0.f;
#pragma unroll 2
    for (int i = thread * FW_VECTOR; i < n; i += threads * FW_VECTOR) {
        const Numbers<FW_IN, FW_VECTOR> weights = load<FW_VECTOR>(row + i);
        const Numbers<T, FW_VECTOR> numbers = load<FW_VECTOR>(x + i);
#pragma unroll
        for (int j = 0; j < FW_VECTOR; j++) sum += to_float(weights.at[j]) * to_float(numbers.at[j]);
    }
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
}

// Other thread blocks have then written what this one reads.
__device__ __forceinline__ void wait_for(int* counter, int count) {
    if (threadIdx.x == 0) {
        while (atomicAdd(counter, 0) < count) __nanosleep(20);
    }
    __syncthreads();
    __threadfence();
}

__device__ __forceinline__ void arrive(int* counter) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(counter, 1);
}

__device__ __forceinline__ void controller(const Params& p, int r, int item, int lane, int warp) {
    const int row = item * WARPS + warp;
    if (row >= p.rank) return;
    const float sum = product(p.A + (long long)row * p.C, p.x + (long long)r * p.C, p.C, lane, 32);
    if (lane == 0) p.inner[r * p.rank + row] = sum;
}

__device__ __forceinline__ void one_block(const Params& p, int r, int item, int lane, int warp, float* inner) {
    __shared__ float best[WARPS];
    __shared__ int where[WARPS];
    const volatile float* found = p.inner + r * p.rank;  // of other blocks: not from a cache of this processor
    for (int i = threadIdx.x; i < p.rank; i += 32 * WARPS) inner[i] = found[i];
    __syncthreads();
    const int first = item * p.block;
    float largest = 0.f;
    int place = -1;
    for (int unit = first + warp; unit < first + p.block; unit += WARPS) {
        const float logit = product(p.B + (long long)unit * p.rank, (const float*)inner, p.rank, lane, 32) + to_float(p.c[unit]);
        if (place < 0 || logit > largest) largest = logit, place = unit;
    }
    if (lane == 0) best[warp] = largest, where[warp] = place;
    __syncthreads();
    for (int i = 0; i < WARPS; i++) {  // the first of equal ones
        const bool better = where[i] >= 0 && (best[i] > largest || (best[i] == largest && where[i] < place));
        if (place < 0 || better) largest = best[i], place = where[i];
    }
    __syncthreads();

    const FW_IN *row = p.W1 + (long long)place * p.C, *x = p.x + (long long)r * p.C;
    float sum = product(row, x, p.C, threadIdx.x, 32 * WARPS);
    if (lane == 0) best[warp] = sum;
    __syncthreads();
    if (threadIdx.x) return;
    sum = 0.f;
    for (int i = 0; i < WARPS; i++) sum += best[i];
    const int blocks = p.units / p.block;
    p.hidden[r * blocks + item] = sum < 0.f ? 0.f : sum;
    p.chosen[r * blocks + item] = place;
}

__device__ __forceinline__ void columns(const Params& p, int r, int item, int lane, int warp, float* hidden) {
    __shared__ float shares[WARPS][32 * FW_COLUMNS];
    const int blocks = p.units / p.block, column = (item * 32 + lane) * FW_COLUMNS;
    int* chosen = (int*)(hidden + blocks);
    const volatile float* values = p.hidden + r * blocks;
    const volatile int* places = p.chosen + r * blocks;
    for (int i = threadIdx.x; i < blocks; i += 32 * WARPS) hidden[i] = values[i], chosen[i] = places[i];
    __syncthreads();
    float sums[FW_COLUMNS] = {};
    if (column < p.C) {
#pragma unroll 4
        for (int i = warp; i < blocks; i += WARPS) {
            if (hidden[i] == 0.f) continue;
            const Numbers<FW_IN, FW_COLUMNS> numbers = load<FW_COLUMNS>(p.W2 + (long long)chosen[i] * p.C + column);
#pragma unroll
            for (int j = 0; j < FW_COLUMNS; j++) sums[j] += hidden[i] * to_float(numbers.at[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < FW_COLUMNS; j++) shares[warp][lane * FW_COLUMNS + j] = sums[j];
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * FW_COLUMNS; i += 32 * WARPS) {
        const int place = item * 32 * FW_COLUMNS + i;
        if (place >= p.C) continue;
        float sum = to_float(p.b[place]);
        for (int j = 0; j < WARPS; j++) sum += shares[j][i];
        p.y[(long long)r * p.C + place] = from_float<FW_IN>(sum);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 4) feed_forward(const Params p) {
    extern __shared__ __align__(16) float held[];  // the rank's numbers, or two for each block of units
    __shared__ int ticket[1];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, blocks = p.units / p.block;
    const int inners = (p.rank + WARPS - 1) / WARPS;
    if (threadIdx.x == 0) ticket[0] = atomicAdd(p.counters, 1);
    __syncthreads();
    int item = ticket[0];
    if (item < p.R * inners) {
        const int r = item % p.R;
        controller(p, r, item / p.R, lane, warp);
        arrive(p.counters + 2 + r);
    } else if (item -= p.R * inners; item < p.R * blocks) {
        const int r = item % p.R;
        wait_for(p.counters + 2 + r, inners);
        one_block(p, r, item / p.R, lane, warp, held);
        arrive(p.counters + 2 + p.R + r);
    } else {
        item -= p.R * blocks;
        const int r = item % p.R;
        wait_for(p.counters + 2 + p.R + r, blocks);
        columns(p, r, item / p.R, lane, warp, held);
    }
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(p.counters + 1, 1) == (int)gridDim.x - 1) {
        for (int i = 0; i < 2 + 2 * p.R; i++) p.counters[i] = 0;
    }
}
