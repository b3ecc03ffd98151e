// CUDA device code on the CPU: g++ -x c++ -include cuda_host.h kernel.cu. half, bfloat16 and float4 come from NVIDIA's own headers;
// here is the language, in fibers.h, meetings.h and launch.h the threads, in intrinsics.h the functions that CUDA builds in.
#pragma once
#define CUDA_HOST_EMU 1

#include <cmath>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#include <immintrin.h>
#include <sys/mman.h>

#include <vector_types.h>
#include <vector_functions.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#undef __forceinline__
#undef __noinline__
#undef __align__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __shared__ static  // hostemu.py adds CUHOST_SHARED(name) behind the declaration and rewrites `extern __shared__`
#define __constant__ static
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__

#include "fibers.h"
#include "meetings.h"
#include "launch.h"

#define threadIdx (cuhost::current->index)
#define blockIdx (cuhost::state.block_index)
#define blockDim (cuhost::state.block_size)
#define gridDim (cuhost::state.grid_size)
#define warpSize 32
#define CUHOST_SHARED(x) cuhost::enter_shared((void*)&x, sizeof x)
#define CUHOST_DYNAMIC(T) ((T*)cuhost::dynamic_shared())

#include "intrinsics.h"

// What hostemu.py calls. The fibers' stacks are the process's, shared by all modules.
#define CUHOST_EXPORT extern "C" __attribute__((visibility("default")))

CUHOST_EXPORT void* cuhost_make_stacks() { return cuhost::make_stacks(); }
CUHOST_EXPORT void cuhost_use_stacks(void* stacks) { cuhost::state.stacks = (char*)stacks; }
CUHOST_EXPORT const char* cuhost_error() { return cuhost::state.error; }

#define CUHOST_KERNEL(ID, ...)                                                                                                   \
    CUHOST_EXPORT int cuhost_launch_##ID(const unsigned* grid, const unsigned* block, size_t shared, void** args, int policy,    \
                                         unsigned long long seed) {                                                              \
        cuhost::Call call = [](void** args) { cuhost::invoke(&__VA_ARGS__, args); };                                             \
        return cuhost::launch(call, dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2]), shared, args, policy,   \
                              seed);                                                                                             \
    }

// What -fsanitize=bounds,alignment calls.
#define CUHOST_HANDLER extern "C" __attribute__((visibility("hidden"), used)) inline

namespace cuhost {
struct SourceLocation {
    const char* file;
    unsigned line, column;
};
}  // namespace cuhost

CUHOST_HANDLER void __ubsan_handle_out_of_bounds_abort(void* where, void* index) {
    cuhost::fail(((cuhost::SourceLocation*)where)->line, "index %ld is out of bounds", (long)index);
}

CUHOST_HANDLER void __ubsan_handle_type_mismatch_v1_abort(void* where, void* address) {
    cuhost::fail(((cuhost::SourceLocation*)where)->line, "misaligned access at %p", address);
}
