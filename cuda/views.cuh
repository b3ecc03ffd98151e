// Tensors of decoding kernels: one vector for each row of the batch and head.
#pragma once

struct View {  // element (b, h, i) is at p[b * stride_b + h * stride_h + i]; without i for numbers per token
    const void* p;
    long long stride_b, stride_h;
};

template <class T>
__device__ __forceinline__ T* at(const View& x, long long b, int h) {
    return (T*)x.p + b * x.stride_b + h * x.stride_h;
}

constexpr int COLUMNS = 32;
constexpr int MAX_WARPS = 16;
