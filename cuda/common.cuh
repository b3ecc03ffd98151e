// The types of q, k, v and y, and their conversions to fp32 and back. Every kernel includes this file.
//
// A kernel is compiled once per choice of macros; FW_IN is the type of q, k, v and y: float, __half or __nv_bfloat16.
#pragma once

#include "ptx.cuh"

#ifndef CUDA_HOST_EMU
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef long long int64_t;
#endif

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Rounds to nearest even; fp16 overflows to infinity as torch's conversion does.
template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
