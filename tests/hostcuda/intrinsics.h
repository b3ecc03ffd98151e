// The functions that CUDA builds in, for fibers.h: barriers, warp operations, atomics, arithmetic.
#pragma once

#define CUHOST_LINE int line = __builtin_LINE()

// ---- barriers

inline void __syncthreads(CUHOST_LINE) { cuhost::barrier(0, -1, line); }
inline int __syncthreads_count(int predicate, CUHOST_LINE) { return cuhost::barrier(0, -1, line, predicate, 0); }
inline int __syncthreads_or(int predicate, CUHOST_LINE) { return cuhost::barrier(0, -1, line, predicate, 1); }
inline int __syncthreads_and(int predicate, CUHOST_LINE) { return cuhost::barrier(0, -1, line, predicate, 2); }
inline void named_bar_sync(int id, int threads, CUHOST_LINE) { cuhost::barrier(id, threads, line); }
inline void named_bar_arrive(int id, int threads, CUHOST_LINE) { cuhost::barrier(id, threads, line, 0, 0, false); }
inline void __syncwarp(unsigned mask = ~0u, CUHOST_LINE) { cuhost::collective(mask, 1, nullptr, nullptr, line); }
inline void __threadfence_block() {}
inline void __threadfence() {}
inline void __nanosleep(unsigned) { cuhost::give_way(); }

[[noreturn]] inline void __trap(CUHOST_LINE) {
    cuhost::fail(line, "__trap()");
    __builtin_unreachable();
}

// ---- shuffles

namespace cuhost {

inline int lane() { return current->linear % LANES; }

template <class T>
struct Shuffle {
    T in, out;
    int source;
};

// A lane that reads from one outside the mask gets garbage.
template <class T>
inline void exchange(void** payloads, unsigned arrived) {
    for (int lane = 0; lane < LANES; lane++) {
        if (!(arrived >> lane & 1)) continue;
        Shuffle<T>& own = *(Shuffle<T>*)payloads[lane];
        if (arrived >> own.source & 1) own.out = ((Shuffle<T>*)payloads[own.source])->in;
        else memset((void*)&own.out, 0xFF, sizeof own.out);
    }
}

template <class T>
inline T shuffle(unsigned mask, T value, int source, int operation, int line) {
    Shuffle<T> s{value, value, source};
    collective(mask, operation * 16 + sizeof(T), &s, exchange<T>, line);
    return s.out;
}

}  // namespace cuhost

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, CUHOST_LINE) {
    int lane = cuhost::lane();
    return cuhost::shuffle(mask, value, (lane & ~(width - 1)) | (source & (width - 1)), 2, line);
}

template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32, CUHOST_LINE) {
    int lane = cuhost::lane(), source = lane - (int)distance;
    return cuhost::shuffle(mask, value, source < (lane & ~(width - 1)) ? lane : source, 3, line);
}

template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32, CUHOST_LINE) {
    int lane = cuhost::lane();
    bool outside = (lane & (width - 1)) + (int)distance >= width;
    return cuhost::shuffle(mask, value, outside ? lane : lane + (int)distance, 4, line);
}

template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, CUHOST_LINE) {
    int lane = cuhost::lane(), source = lane ^ bits;
    return cuhost::shuffle(mask, value, source > (lane | (width - 1)) ? lane : source, 5, line);
}

// ---- votes and reductions over a warp

namespace cuhost {

struct Vote {
    unsigned in, out;
};

// Every lane gets the fold of all lanes' values: fold(result, value, lane).
template <class Value, class Fold>
inline void fold_votes(void** payloads, unsigned arrived, Value start, Fold fold) {
    Value result = start;
    for (int lane = 0; lane < LANES; lane++) {
        if (arrived >> lane & 1) result = fold(result, (Value)((Vote*)payloads[lane])->in, lane);
    }
    for (int lane = 0; lane < LANES; lane++) {
        if (arrived >> lane & 1) ((Vote*)payloads[lane])->out = (unsigned)result;
    }
}

inline unsigned vote(unsigned mask, unsigned value, int operation, int line, Combine combine) {
    Vote v{value, 0};
    collective(mask, operation, &v, combine, line);
    return v.out;
}

inline void match(void** payloads, unsigned arrived) {
    auto at = [payloads](int lane) -> Vote& { return *(Vote*)payloads[lane]; };
    for (int lane = 0; lane < LANES; lane++) {
        if (!(arrived >> lane & 1)) continue;
        at(lane).out = 0;
        for (int other = 0; other < LANES; other++) {
            if (arrived >> other & 1 && at(other).in == at(lane).in) at(lane).out |= 1u << other;
        }
    }
}

}  // namespace cuhost

#define CUHOST_VOTE(NAME, RETURNS, VALUE, OPERATION, START, FOLDED)                                                      \
    inline RETURNS NAME(unsigned mask, VALUE value, CUHOST_LINE) {                                                       \
        return (RETURNS)cuhost::vote(mask, (unsigned)value, OPERATION, line, [](void** payloads, unsigned arrived) {     \
            cuhost::fold_votes<VALUE>(payloads, arrived, START, [](VALUE r, VALUE x, int lane) { return (VALUE)(FOLDED); }); \
        });                                                                                                              \
    }
CUHOST_VOTE(__ballot_sync, unsigned, int, 6, 0, r | (x ? 1u << lane : 0u))
CUHOST_VOTE(__any_sync, int, int, 7, 0, r | !!x)
CUHOST_VOTE(__all_sync, int, int, 8, 1, r & !!x)
CUHOST_VOTE(__reduce_add_sync, unsigned, unsigned, 9, 0, r + x)
CUHOST_VOTE(__reduce_max_sync, int, int, 10, INT32_MIN, x > r ? x : r)
CUHOST_VOTE(__reduce_min_sync, int, int, 11, INT32_MAX, x < r ? x : r)
#undef CUHOST_VOTE

inline unsigned __match_any_sync(unsigned mask, unsigned value, CUHOST_LINE) {
    return cuhost::vote(mask, value, 12, line, cuhost::match);
}

inline unsigned __activemask() { return cuhost::state.live[cuhost::current->linear / cuhost::LANES]; }

// ---- atomics: fibers are never interrupted; __atomic is for the thread sanitizer

namespace cuhost {

template <class T, class Update>
inline T read_modify_write(T* p, Update update) {
    T old, changed;
    __atomic_load(p, &old, __ATOMIC_RELAXED);
    do {
        changed = update(old);
    } while (!__atomic_compare_exchange(p, &old, &changed, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}

template <class T>
using Same = typename std::common_type<T>::type;  // not deduced from

}  // namespace cuhost

#define CUHOST_ATOMIC(NAME, CHANGED)                                                 \
    template <class T>                                                               \
    inline T NAME(T* p, cuhost::Same<T> v) {                                         \
        return cuhost::read_modify_write(p, [=](T old) { return (T)(CHANGED); });    \
    }
CUHOST_ATOMIC(atomicAdd, old + v)
CUHOST_ATOMIC(atomicSub, old - v)
CUHOST_ATOMIC(atomicMax, old > v ? old : v)
CUHOST_ATOMIC(atomicMin, old < v ? old : v)
CUHOST_ATOMIC(atomicExch, v)
CUHOST_ATOMIC(atomicOr, old | v)
CUHOST_ATOMIC(atomicAnd, old & v)
#undef CUHOST_ATOMIC

template <class T>
inline T atomicCAS(T* p, cuhost::Same<T> expected, cuhost::Same<T> v) {
    cuhost::give_way();
    return cuhost::read_modify_write(p, [=](T old) { return old == expected ? v : old; });
}

// ---- arithmetic

template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(b) < T(a) ? T(b) : T(a);
}

template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(a) < T(b) ? T(b) : T(a);
}

namespace cuhost {

template <class To, class From>
inline To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From), "");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}

}  // namespace cuhost

inline int __float_as_int(float x) { return cuhost::bits_as<int>(x); }
inline unsigned __float_as_uint(float x) { return cuhost::bits_as<unsigned>(x); }
inline float __int_as_float(int x) { return cuhost::bits_as<float>(x); }
inline float __uint_as_float(unsigned x) { return cuhost::bits_as<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.f / a; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

template <class T>
inline T __ldg(const T* p) {
    return *p;
}

inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
    float2 x = __bfloat1622float2(a), y = __bfloat1622float2(b), z = __bfloat1622float2(c);
    return __floats2bfloat162_rn(fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y));
}

inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    float2 x = __half22float2(a), y = __half22float2(b), z = __half22float2(c);
    return __floats2half2_rn(fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y));
}
