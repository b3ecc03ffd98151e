// Fragments of m16n8k16 products in the chosen precision, from accumulators and from shared memory.
//
// Lane l of a warp has g = l / 4 and t = l % 4. An accumulator c[4] of a 16 x 8 tile holds (row g, columns 2t, 2t+1) and
// (row g+8, the same columns). Two accumulators side by side are the left operand of the next product as they are. In tf32 the
// 16 terms of a sum are taken in the order 2t, 2t+8 | 2t+1, 2t+9 that this needs; both operands agree on it.
// Tiles in shared memory have rows of tile_stride elements: no bank conflicts in either direction for bf16, across rows for fp32.
#pragma once
#include "common.cuh"

#define BF16 0
#define TF32 1
#define EXACT 2  // fp32 as two tf32 parts each, the product of the two lower parts left out: relative error about 2^-22
#define F16 3    // numbers that may leave its range are multiplied by a power of 2 (range.cuh)

template <int P>
struct OperandOf {
    using type = float;
};
template <>
struct OperandOf<BF16> {
    using type = __nv_bfloat16;
};
template <>
struct OperandOf<F16> {
    using type = __half;
};

template <int P>
struct Left {
    unsigned x[2][4], low[2][4];
};
template <>
struct Left<TF32> {
    unsigned x[2][4];
};
template <>
struct Left<BF16> {
    unsigned x[4];
};
template <>
struct Left<F16> {
    unsigned x[4];
};

template <int P>
struct Right {
    unsigned x[2][2], low[2][2];
};
template <>
struct Right<TF32> {
    unsigned x[2][2];
};
template <>
struct Right<BF16> {
    unsigned x[2];
};
template <>
struct Right<F16> {
    unsigned x[2];
};

template <class A, class B>
constexpr bool same_type = false;
template <class A>
constexpr bool same_type<A, A> = true;

template <int P>
constexpr bool SHORT = P == BF16 || P == F16;  // operands of 16 bits
template <class T>
constexpr int PRECISION_OF = same_type<T, __half> ? F16 : BF16;  // of tiles of 16 bits

template <class T>
__host__ __device__ constexpr int tile_stride(int width) {
    return width + 16 / (int)sizeof(T);
}

__device__ __forceinline__ int lane_row() { return (threadIdx.x & 31) >> 2; }
__device__ __forceinline__ int lane_column() { return 2 * (threadIdx.x & 3); }

template <int P>
__device__ __forceinline__ unsigned pack(float low, float high) {
    if constexpr (P == F16) {
        const __half2 both = __floats2half2_rn(low, high);
        return *(const unsigned*)&both;
    } else {
        const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
        return *(const unsigned*)&both;
    }
}
template <int P>
__device__ __forceinline__ float2 unpack(unsigned both) {
    if constexpr (P == F16) return __half22float2(*(const __half2*)&both);
    else return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000u));
}

// Two neighbours in a tile, the first at an even place.
__device__ __forceinline__ void put_couple(float* p, float x, float y) { *(float2*)p = make_float2(x, y); }
__device__ __forceinline__ void put_couple(__nv_bfloat16* p, float x, float y) { *(unsigned*)p = pack<BF16>(x, y); }
__device__ __forceinline__ void put_couple(__half* p, float x, float y) { *(unsigned*)p = pack<F16>(x, y); }
__device__ __forceinline__ float2 couple(const float* p) { return *(const float2*)p; }
__device__ __forceinline__ float2 couple(const __nv_bfloat16* p) { return __bfloat1622float2(*(const __nv_bfloat162*)p); }
__device__ __forceinline__ float2 couple(const __half* p) { return __half22float2(*(const __half2*)p); }

// Part h of a fragment, N values; ROUNDED where they are tf32 already.
template <int P, bool ROUNDED = false, class F, int N>
__device__ __forceinline__ void set_half(F& f, int h, const float (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        f.x[h][i] = ROUNDED && P == TF32 ? __float_as_uint(v[i]) : to_tf32(v[i]);
        if constexpr (P == EXACT) f.low[h][i] = to_tf32(v[i] - __uint_as_float(f.x[h][i]));
    }
}

template <int P>
__device__ __forceinline__ void multiply(float (&d)[4], const Left<P>& a, const Right<P>& b) {
    if constexpr (P == BF16) {
        mma_bf16(d, a.x, b.x, d);
    } else if constexpr (P == F16) {
        mma_f16(d, a.x, b.x, d);
    } else {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if constexpr (P == EXACT) {
                mma_tf32(d, a.low[h], b.x[h], d);
                mma_tf32(d, a.x[h], b.low[h], d);
            }
            mma_tf32(d, a.x[h], b.x[h], d);
        }
    }
}

// The left operand that two accumulators, columns 0..7 and 8..15, are. CUT: a product in tf32 takes them as they are and cuts them
// off at 11 bits, where rounding takes three instructions for a number.
template <int P, bool CUT = false>
__device__ __forceinline__ Left<P> left_of(const float (&c0)[4], const float (&c1)[4]) {
    Left<P> a;
    if constexpr (SHORT<P>) {
        a.x[0] = pack<P>(c0[0], c0[1]), a.x[1] = pack<P>(c0[2], c0[3]);
        a.x[2] = pack<P>(c1[0], c1[1]), a.x[3] = pack<P>(c1[2], c1[3]);
    } else {
        const float v0[4] = {c0[0], c0[2], c0[1], c0[3]}, v1[4] = {c1[0], c1[2], c1[1], c1[3]};
        set_half<P, CUT>(a, 0, v0);
        set_half<P, CUT>(a, 1, v1);
    }
    return a;
}

// The left operand (16 rows, 16 terms) at p[row * stride + term], or with ACROSS at p[term * stride + row].
template <int P, bool ACROSS, class T>
__device__ __forceinline__ Left<P> left_from(const T* p, int stride) {
    Left<P> a;
    if constexpr (SHORT<P>) {
        const int l = threadIdx.x & 31;
        const int along = (l & 7) + (l >> 4) * 8, other = (l >> 3 & 1) * 8;
        if constexpr (ACROSS) ldmatrix_x4<true>(a.x, p + along * stride + other);
        else ldmatrix_x4<false>(a.x, p + (l & 15) * stride + (l >> 4) * 8);
    } else {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = lane_row(), term = lane_column() + h * 8;
            if constexpr (ACROSS) {
                const T *first = p + term * stride + row, *next = first + stride;
                const float v[4] = {first[0], first[8], next[0], next[8]};
                set_half<P>(a, h, v);
            } else {
                const float2 upper = couple(p + row * stride + term), lower = couple(p + (row + 8) * stride + term);
                const float v[4] = {upper.x, lower.x, upper.y, lower.y};
                set_half<P>(a, h, v);
            }
        }
    }
    return a;
}

// Two accumulators side by side, 16 rows and columns, to p[row * stride + column], or with ACROSS to p[column * stride + row].
template <bool ACROSS, bool MATRICES = HAS_STMATRIX, class T>
__device__ __forceinline__ void put_square(T* p, int stride, const float (&c0)[4], const float (&c1)[4]) {
    if constexpr (sizeof(T) == 2 && MATRICES) {
        const Left<PRECISION_OF<T>> a = left_of<PRECISION_OF<T>>(c0, c1);
        const int l = threadIdx.x & 31;
        const int along = (l & 7) + (l >> 4) * 8, other = (l >> 3 & 1) * 8;
        if constexpr (ACROSS) stmatrix_x4<true>(p + along * stride + other, a.x);
        else stmatrix_x4<false>(p + (l & 15) * stride + (l >> 4) * 8, a.x);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = lane_row() + (i & 1) * 8, column = lane_column() + (i >> 1) * 8;
            const float x = (i >> 1 ? c1 : c0)[(i & 1) * 2], y = (i >> 1 ? c1 : c0)[(i & 1) * 2 + 1];
            if constexpr (ACROSS) {
                T* to = p + column * stride + row;
                if constexpr (same_type<T, __nv_bfloat16>) {
                    const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
                    to[0] = both.x, to[stride] = both.y;
                } else {
                    to[0] = from_float<T>(x), to[stride] = from_float<T>(y);
                }
            } else {
                put_couple(p + row * stride + column, x, y);
            }
        }
    }
}

// The numbers of an array at the four tokens of a lane's transposed accumulators; x[n][i] takes number 2 n + i % 2.
struct Four {
    float x[4];
};

__device__ __forceinline__ Four four_of(const float* p) {
    const float2 low = couple(p + lane_column()), high = couple(p + lane_column() + 8);
    return {{low.x, low.y, high.x, high.y}};
}

// The left operand (16 rows, 16 terms) at p[term * stride + row], term by term times a factor.
template <int P, class T>
__device__ __forceinline__ Left<P> left_scaled(const T* p, int stride, const Four& factors) {
    const float (&factor)[4] = factors.x;
    Left<P> a;
    if constexpr (SHORT<P>) {
        a = left_from<P, true>(p, stride);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 both = unpack<P>(a.x[i]);
            a.x[i] = pack<P>(both.x * factor[i / 2 * 2], both.y * factor[i / 2 * 2 + 1]);
        }
    } else {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                v[i] = p[(lane_column() + (i >> 1) + h * 8) * stride + lane_row() + (i & 1) * 8] * factor[h * 2 + (i >> 1)];
            }
            set_half<P>(a, h, v);
        }
    }
    return a;
}

// Two right operands (16 terms, 8 columns each) at p[column * stride + term], or with ACROSS at p[term * stride + column].
template <int P, bool ACROSS, bool ROUNDED = false, class T>
__device__ __forceinline__ void right_from(Right<P> (&b)[2], const T* p, int stride) {
    if constexpr (SHORT<P>) {
        const int l = threadIdx.x & 31;
        const int along = (l & 7) + (l >> 4) * 8, other = (l >> 3 & 1) * 8;
        unsigned r[4];
        if constexpr (ACROSS) ldmatrix_x4<true>(r, p + (l & 15) * stride + (l >> 4) * 8);
        else ldmatrix_x4<false>(r, p + along * stride + other);
        b[0].x[0] = r[0], b[0].x[1] = r[1], b[1].x[0] = r[2], b[1].x[1] = r[3];
    } else {
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int column = lane_row() + n * 8, term = lane_column() + h * 8;
                if constexpr (ACROSS) {
                    const float v[2] = {p[term * stride + column], p[(term + 1) * stride + column]};
                    set_half<P, ROUNDED>(b[n], h, v);
                } else {
                    const float2 both = couple(p + column * stride + term);
                    const float v[2] = {both.x, both.y};
                    set_half<P, ROUNDED>(b[n], h, v);
                }
            }
        }
    }
}

// The rows of a left operand as the columns of a right one.
template <int P>
__device__ __forceinline__ void right_of(Right<P> (&b)[2], const Left<P>& a) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
        if constexpr (SHORT<P>) {
            b[n].x[0] = a.x[n], b[n].x[1] = a.x[n + 2];
        } else {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                b[n].x[h][0] = a.x[h][n], b[n].x[h][1] = a.x[h][n + 2];
                if constexpr (P == EXACT) b[n].low[h][0] = a.low[h][n], b[n].low[h][1] = a.low[h][n + 2];
            }
        }
    }
}

// d (16 x 16 as two accumulators) += a times the right operand at p.
template <int P, bool ACROSS, bool ROUNDED = false, class T>
__device__ __forceinline__ void multiply_from(float (&d)[2][4], const Left<P>& a, const T* p, int stride) {
    Right<P> b[2];
    right_from<P, ACROSS, ROUNDED>(b, p, stride);
    multiply<P>(d[0], a, b[0]);
    multiply<P>(d[1], a, b[1]);
}

// The same for sums over all of time. Tensor cores cut off what they add to an accumulator, always towards 0, so that fp32 sums
// leave them.
template <int P, bool ACROSS, class T>
__device__ __forceinline__ void accumulate_from(float (&d0)[4], float (&d1)[4], const Left<P>& a, const T* p, int stride) {
    Right<P> b[2];
    right_from<P, ACROSS>(b, p, stride);
    if constexpr (SHORT<P>) {
        multiply<P>(d0, a, b[0]);
        multiply<P>(d1, a, b[1]);
    } else {
        float sum[2][4] = {};
        multiply<P>(sum[0], a, b[0]);
        multiply<P>(sum[1], a, b[1]);
#pragma unroll
        for (int i = 0; i < 4; i++) d0[i] += sum[0][i], d1[i] += sum[1][i];
    }
}

// 16 x 16 accumulators, not transposed, two neighbours at a time: f(row, column, x, y).
template <class F>
__device__ __forceinline__ void each_two(float (&x)[2][4], F f) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float* both = x[i >> 1] + (i & 1) * 2;
        f(lane_row() + (i & 1) * 8, lane_column() + (i >> 1) * 8, both[0], both[1]);
    }
}

// A tile's 16 rows and 16 columns, transposed in accumulators.
template <class T>
__device__ __forceinline__ void load_transposed(float (&x)[2][4], const T* p, int stride) {
    if constexpr (sizeof(T) == 2) {
        const Left<PRECISION_OF<T>> a = left_from<PRECISION_OF<T>, true>(p, stride);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 both = unpack<PRECISION_OF<T>>(a.x[i]);
            x[i >> 1][(i & 1) * 2] = both.x, x[i >> 1][(i & 1) * 2 + 1] = both.y;
        }
    } else {
        const T* first = p + lane_column() * stride + lane_row();
#pragma unroll
        for (int i = 0; i < 8; i++) x[i >> 2][i & 3] = to_float(first[((i & 1) + (i >> 2) * 8) * stride + (i >> 1 & 1) * 8]);
    }
}

// The same not transposed.
template <class T>
__device__ __forceinline__ void load_straight(float (&x)[2][4], const T* p, int stride) {
    if constexpr (sizeof(T) == 2) {
        const Left<PRECISION_OF<T>> a = left_from<PRECISION_OF<T>, false>(p, stride);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 both = unpack<PRECISION_OF<T>>(a.x[i]);
            x[i >> 1][(i & 1) * 2] = both.x, x[i >> 1][(i & 1) * 2 + 1] = both.y;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 both = couple(p + (lane_row() + (i & 1) * 8) * stride + lane_column() + (i >> 1) * 8);
            x[i >> 1][(i & 1) * 2] = both.x, x[i >> 1][(i & 1) * 2 + 1] = both.y;
        }
    }
}

// 16 x 16 accumulators, not transposed: f(i, row, column, x).
template <class F>
__device__ __forceinline__ void each_pair(float (&x)[2][4], F f) {
#pragma unroll
    for (int i = 0; i < 8; i++) f(i, lane_row() + (i >> 1 & 1) * 8, lane_column() + (i & 1) + (i >> 2) * 8, x[i >> 2][i & 3]);
}
