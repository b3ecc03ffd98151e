// The gradient of reads that are divided, y = x / (r + eps) with a divisor r for each token: dx = dy / (r + eps) and
// dr = -(dy . y) / (r + eps). Where r is 0, the divisor was `least` and dr is 0.
//
// A block has ROWS tokens of one sequence and head, a token FW_LANES lanes of a warp. A lane moves 16 bytes at a time where
// rows are aligned (FW_ALIGNED). Memory bandwidth bounds the speed: y and dy are read and dx is written, once each. FW_IN is their type.
#include "common.cuh"

struct View {  // (B,H,T) or (B,H,T,V) with V contiguous; strides in elements
    void* p;
    int64_t b, h, t;
};

struct Params {
    View y, dy, dx, divisors, ddivisors;
    int32_t H, T, V;
    float eps, least;
};

template <class T>
__device__ __forceinline__ T* at(const View& x, int b, int h, int t) {
    return (T*)x.p + b * x.b + h * x.h + t * x.t;
}

constexpr int ROWS = 256 / FW_LANES, N = FW_ALIGNED ? 16 / (int)sizeof(FW_IN) : 1;
struct __align__(N * sizeof(FW_IN)) Unit {
    FW_IN x[N];
};

extern "C" __global__ void __launch_bounds__(256) divided_backward(const Params p) {
    const unsigned H = p.H, blocks = (p.T + ROWS - 1u) / ROWS;  // a sequence may need more blocks than a grid has in y
    const unsigned head = blockIdx.x / blocks, row = blockIdx.x % blocks * ROWS + threadIdx.x / FW_LANES;
    const int b = head / H, h = head % H;
    const bool there = row < (unsigned)p.T;
    const int t = there ? row : 0;
    const FW_IN *y = at<const FW_IN>(p.y, b, h, t), *dy = at<const FW_IN>(p.dy, b, h, t);
    FW_IN* dx = at<FW_IN>(p.dx, b, h, t);
    const float read = *at<const float>(p.divisors, b, h, t), scale = 1.f / (read == 0.f ? p.least : read + p.eps);
    float product = 0.f;
    for (int i = threadIdx.x % FW_LANES * N; there && i < p.V; i += FW_LANES * N) {
        const Unit a = *(const Unit*)(y + i), b = *(const Unit*)(dy + i);
        Unit c;
#pragma unroll
        for (int j = 0; j < N; j++) {
            product += to_float(a.x[j]) * to_float(b.x[j]);
            c.x[j] = from_float<FW_IN>(to_float(b.x[j]) * scale);
        }
        *(Unit*)(dx + i) = c;
    }
#pragma unroll
    for (int o = FW_LANES / 2; o > 0; o >>= 1) product += __shfl_xor_sync(~0u, product, o);
    if (there && threadIdx.x % FW_LANES == 0) *at<float>(p.ddivisors, b, h, t) = read == 0.f ? 0.f : -product * scale;
}
