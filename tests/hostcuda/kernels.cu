// What the emulator is tested with; see test_hostcuda.py.
#include "tile.cuh"

#ifndef FW_IN
#define FW_IN float
#endif

struct Params {
    const FW_IN* x;
    float* y;
    int n;
};

extern "C" __global__ void reverse(const Params p) {
    extern __shared__ float held[];
    int i = threadIdx.x;
    held[i] = to_float(p.x[i]);
    __syncthreads();
    p.y[i] = held[p.n - 1 - i];
}

// ---- warps and blocks

extern "C" __global__ void shuffles(int* found, int width) {
    int lane = threadIdx.x;
    for (int distance = 0; distance < 32; distance++) {
        int* row = found + distance * 128 + lane * 4;
        row[0] = __shfl_sync(~0u, lane, distance, width);
        row[1] = __shfl_up_sync(~0u, lane, distance, width);
        row[2] = __shfl_down_sync(~0u, lane, distance, width);
        row[3] = __shfl_xor_sync(~0u, lane, distance, width);
    }
}

#if defined(CUDA_HOST_EMU) || __CUDA_ARCH__ >= 800
extern "C" __global__ void votes(const int* x, unsigned* found) {
    int lane = threadIdx.x;
    found[lane] = __ballot_sync(~0u, x[lane]);
    found[32 + lane] = __any_sync(~0u, x[lane]);
    found[64 + lane] = __all_sync(~0u, x[lane] < 9);
    found[96 + lane] = __reduce_add_sync(~0u, (unsigned)x[lane]);
    found[128 + lane] = __match_any_sync(~0u, (unsigned)x[lane]);
}
#endif

extern "C" __global__ void barrier_votes(int* found) {
    int i = threadIdx.x;
    found[i] = __syncthreads_count(i % 3 == 0);
    found[64 + i] = __syncthreads_or(i == 63);
    found[128 + i] = __syncthreads_and(i < 63);
}

extern "C" __global__ void leave_early(float* y, int n) {
    __shared__ float held[96];
    int i = threadIdx.y * blockDim.x + threadIdx.x;
    held[i] = i;
    if (i >= n) return;
    __syncthreads();
    y[i] = held[n - 1 - i];
}

extern "C" __global__ void half_warps(float* y) {
    int lane = threadIdx.x;
    unsigned mask = lane < 16 ? 0xffffu : 0xffff0000u;
    float sum = lane;
    for (int distance = 8; distance; distance /= 2) sum += __shfl_xor_sync(mask, sum, distance);
    y[lane] = sum;
}

extern "C" __global__ void ring(const float* x, float* y, int n) {
    __shared__ float buffer[2][32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sum = 0;
    for (int i = 0; i < n; i++) {
        int slot = i & 1, full = 1 + slot, empty = 3 + slot;
        if (warp == 0) {
            if (i >= 2) named_bar_sync(empty, 128);
            buffer[slot][lane] = x[i * 32 + lane];
            named_bar_sync(full, 128);
        } else {
            named_bar_sync(full, 128);
            sum += buffer[slot][(lane + warp) & 31];
            if (i + 2 < n) named_bar_arrive(empty, 128);
        }
    }
    if (warp) y[(warp - 1) * 32 + lane] = sum;
}

extern "C" __global__ void __launch_bounds__(1024) histogram(const int* x, int* counts, float* total, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    atomicAdd(&counts[x[i]], 1);
    atomicAdd(total, 0.5f);
    atomicMax(&counts[16], x[i]);
}

extern "C" __global__ void lock(int* held, int* count) {
    for (bool done = false; !done;) {
        if (atomicCAS(held, 0, 1) == 0) {
            *count = *count + 1;
            __threadfence();
            atomicExch(held, 0);
            done = true;
        } else {
            __nanosleep(10);
        }
    }
}

// ---- tensor cores

template <class T, class Product>
__device__ void product_16(const T* a, const T* b, float* c, Product mma) {
    __shared__ __align__(16) T left[16][24];
    __shared__ __align__(16) T right[16][24];
    __shared__ __align__(16) T turned[16][24];
    int lane = threadIdx.x, g = lane / 4, t = lane % 4 * 2;
    cp_async16(&left[lane / 2][lane % 2 * 8], a + lane * 8);
    cp_async16(&right[lane / 2][lane % 2 * 8], b + lane * 8);
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
    for (int i = lane; i < 256; i += 32) turned[i % 16][i / 16] = right[i / 16][i % 16];
    __syncwarp();
    unsigned rows[4];
    ldmatrix_x4<false>(rows, &left[lane & 15][(lane >> 4) * 8]);
    for (int half = 0; half < 2; half++) {
        unsigned columns[2];
        if (half == 0) ldmatrix_x2<true>(columns, &right[lane & 15][0]);
        else ldmatrix_x2<false>(columns, &turned[8 + (lane & 7)][(lane >> 3 & 1) * 8]);
        unsigned both[4];
        ldmatrix_x4<true>(both, &right[lane & 15][(lane >> 4) * 8]);
        float sum[4] = {};
        mma(sum, rows, columns, sum);
        bool same = both[2 * half] == columns[0] && both[2 * half + 1] == columns[1];
        for (int i = 0; i < 4; i++) c[(g + i / 2 * 8) * 16 + half * 8 + t + i % 2] = same ? sum[i] : 0.f;
    }
}

extern "C" __global__ void product_f16(const __half* a, const __half* b, float* c) {
    product_16(a, b, c, [](float(&d)[4], unsigned(&x)[4], unsigned(&y)[2], float(&z)[4]) { mma_f16(d, x, y, z); });
}

#if defined(CUDA_HOST_EMU) || __CUDA_ARCH__ >= 800
extern "C" __global__ void product_bf16(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c) {
    product_16(a, b, c, [](float(&d)[4], unsigned(&x)[4], unsigned(&y)[2], float(&z)[4]) { mma_bf16(d, x, y, z); });
}

// x, a matrix of 16 rows and columns, and its transpose, by stmatrix and without: four matrices.
extern "C" __global__ void squares(const float* x, float* y) {
    __shared__ __align__(16) __nv_bfloat16 held[4][16 * 24];
    float c[2][4];
    each_pair(c, [&](int, int row, int column, float& value) { value = x[row * 16 + column]; });
    put_square<false, true>(held[0], 24, c[0], c[1]);
    put_square<true, true>(held[1], 24, c[0], c[1]);
    put_square<false, false>(held[2], 24, c[0], c[1]);
    put_square<true, false>(held[3], 24, c[0], c[1]);
    __syncwarp();
    for (int i = threadIdx.x; i < 1024; i += 32) y[i] = to_float(held[i / 256][i / 16 % 16 * 24 + i % 16]);
}

extern "C" __global__ void product_tf32(const float* a, const float* b, float* c) {
    int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    unsigned rows[4], columns[2];
    for (int i = 0; i < 4; i++) rows[i] = to_tf32(a[(g + i % 2 * 8) * 8 + t + i / 2 * 4]);
    for (int i = 0; i < 2; i++) columns[i] = to_tf32(b[(t + i * 4) * 8 + g]);
    float sum[4] = {};
    mma_tf32(sum, rows, columns, sum);
    for (int i = 0; i < 4; i++) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sum[i];
}
#endif

extern "C" __global__ void partial_copy(const unsigned char* x, unsigned char* y, int read, int size) {
    __shared__ __align__(16) unsigned char held[16];
    if (size == 16) cp_async16(held, x, read);
    else cp_async4(held, x, read);
    cp_async_commit();
    cp_async_wait<0>();
    for (int i = 0; i < size; i++) y[i] = held[i];
}

// ---- right only with all their barriers

#ifdef WITHOUT_FIRST
#define FIRST_BARRIER()
#else
#define FIRST_BARRIER() __syncthreads()
#endif
#ifdef WITHOUT_SECOND
#define SECOND_BARRIER()
#else
#define SECOND_BARRIER() __syncthreads()
#endif
#ifdef BEYOND
#define PLACE (i + 1)
#else
#define PLACE i
#endif

__device__ void rotate_by_33(const float* x, float* y) {
    __shared__ float held[128];
    int i = threadIdx.x;
    float value = x[i];
    for (int step = 0; step < 8; step++) {
        held[i] = value;
        FIRST_BARRIER();
        value = held[(i + 33) % 128];
        SECOND_BARRIER();
    }
    y[PLACE] = value;
}

extern "C" __global__ void rotate(const float* x, float* y) { rotate_by_33(x, y); }

extern "C" __global__ void rotate_params(const Params p) { rotate_by_33((const float*)p.x, p.y); }

extern "C" __global__ void rotate_warp(const float* x, float* y) {
    __shared__ float held[32];
    int i = threadIdx.x;
    held[i] = x[i];
#ifndef WITHOUT_WARP
    __syncwarp();
#endif
    y[i] = held[(i + 31) % 32];
}

extern "C" __global__ void copy(const float* x, float* y) {
    __shared__ __align__(16) float held[128];
    int i = threadIdx.x;
    if (i < 32) cp_async16(held + 4 * i, x + 4 * i);
    cp_async_commit();
#ifndef WITHOUT_WAIT
    cp_async_wait<0>();
#endif
    __syncthreads();
    y[i] = held[(i + 4) % 128];
#ifdef WITHOUT_WAIT
    cp_async_wait<0>();
#endif
}

// ---- mistakes

extern "C" __global__ void divergent(float* y) {
    if (threadIdx.x < 32) {
        __syncthreads();
        y[0] = 1;
    } else {
        y[threadIdx.x] = 1;
        __syncthreads();
    }
}

extern "C" __global__ void half_shuffle(float* y) {
    if (threadIdx.x < 16) y[threadIdx.x] = __shfl_down_sync(~0u, (float)threadIdx.x, 1);
    __syncthreads();
}

extern "C" __global__ void stray_lane(float* y) { y[threadIdx.x] = __shfl_sync(0x0000ffffu, (float)threadIdx.x, 0); }

extern "C" __global__ void no_wait(const float* y) {
    __shared__ __align__(16) float held[4];
    cp_async16(held, y);
    cp_async_commit();
}

extern "C" __global__ void ldmatrix_misaligned() {
    __shared__ __align__(16) __half rows[32][9];
    unsigned r[4];
    ldmatrix_x4<false>(r, rows[threadIdx.x]);
}

extern "C" __global__ void past_the_end(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x + 1]; }

extern "C" __global__ void unwritten(float* y) {
    __shared__ float held[32];
    if (threadIdx.x < 31) held[threadIdx.x] = 1;
    __syncthreads();
    y[threadIdx.x] = held[threadIdx.x];
}

extern "C" __global__ void index(float* y, int i) {
    __shared__ float held[32];
    held[threadIdx.x] = 1;
    __syncthreads();
    y[threadIdx.x] = held[i];
}

extern "C" __global__ void misaligned(char* y) { *(float*)(y + 2) = 1; }

// ---- more registers than there are

extern "C" __global__ void __launch_bounds__(1024, 2) spill(const float* x, float* y, int n) {
    float values[64];
    for (int i = 0; i < 64; i++) values[i] = x[i * n + threadIdx.x];
    __syncthreads();
    for (int j = 0; j < n; j++) {
#pragma unroll
        for (int i = 0; i < 64; i++) values[i] = values[i] * x[j] + values[(i + 7) % 64];
    }
#pragma unroll
    for (int i = 0; i < 64; i++) y[i * n + threadIdx.x] = values[i];
}
