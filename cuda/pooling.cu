// Softmax-weighted means of the past, all of it or a window of k tokens, and their gradients:
//
//     g_t = sum_l exp(a_l - L_t) x_l,    L_t = log sum_l exp(a_l),    l the tokens up to t that it sees
//
// Time is cut into blocks of k tokens (one block where there is no window). A window is the end of one block and the beginning of
// the next, so nothing is ever taken out of a sum: every sum is kept as (m, s, z), which stand for exp(m) s and exp(m) z, m the
// largest score in it. Blocks are cut into chunks of FW_CHUNK tokens, and a thread has one channel of one chunk:
//
//     pool_chunks    the sum of each chunk
//     pool_borders   what is before each chunk in its block, what is after it; one thread for each block and channel
//     pool_tokens    the sums again, token by token, starting from those borders
//
// Where a block is one chunk, as with short windows, the last one is all. Memory bandwidth bounds the speed: x is read twice (with
// a window three times, mostly from the L2 cache) and g is written once; the sums of chunks are a sixteenth of that. Saved for the
// backward: g and L.
//
// The gradients are the same sums back in time: dx_l = exp(a_l) sum_t exp(-L_t) dg_t and, with d_t = dg_t . g_t - dL_t,
// e_l = exp(a_l) sum_t exp(-L_t) d_t, which gives da_l = x_l . dx_l - e_l. Scores there are -L_t and tokens count from the end.
//
// Macros: FW_IN (type of x, or of dg), FW_OUT (of g, or of dx), FW_CHUNK, FW_WINDOW (0, 1), FW_CHUNKS (1: blocks have several
// chunks), FW_TEXTS (1: tokens see only those of their own text), FW_BACKWARD (0, 1).
#include "common.cuh"

struct View {  // element (b, h, t, v) is at p[b * stride_b + h * stride_h + t * stride_t + v]
    void* p;
    long long stride_b, stride_h, stride_t;
};

struct Params {
    View scores, values, out, out_scores;  // backward: L, dg, dx, e
    View own, extra;                       // backward: a, d
    View texts;                         // (B,T), increasing
    float *sums, *borders;                 // [2][chunks of all][3 + V]: m, s, e, z
    int B, H, T, V, window, blocks, chunks;
};

struct Sum {
    float m, s, e, z;

    __device__ __forceinline__ void add(float score, float value, float extra) { merge({score, 1.f, extra, value}); }

    __device__ __forceinline__ void merge(const Sum& x) {
        const float apart = x.m - m, smaller = __expf(-fabsf(apart));
        const float old = apart > 0.f ? smaller : 1.f, fresh = apart > 0.f ? 1.f : smaller;
        m = fmaxf(m, x.m);
        s = s * old + x.s * fresh;
        if (FW_BACKWARD) e = e * old + x.e * fresh;
        z = z * old + x.z * fresh;
    }
};

__device__ __forceinline__ Sum nothing() { return {-1e30f, 0.f, 0.f, 0.f}; }

struct Place {
    int b, h, block, chunk, v;
    long long n;  // of the chunk among all
};

__device__ __forceinline__ Place find(const Params& p, long long index, int chunks) {
    Place x;
    x.v = index % p.V;
    x.n = index / p.V;
    x.chunk = x.n % chunks;
    const long long block = x.n / chunks;
    x.block = block % p.blocks;
    const int row = block / p.blocks;
    x.b = row / p.H;
    x.h = row % p.H;
    return x;
}

template <class T>
__device__ __forceinline__ T* at(const View& x, const Params& p, const Place& place, int t) {
    const int token = FW_BACKWARD ? p.T - 1 - t : t;
    return (T*)x.p + place.b * x.stride_b + place.h * x.stride_h + token * x.stride_t;
}

__device__ __forceinline__ long long text(const Params& p, const Place& place, int t) {
    return FW_TEXTS ? *at<const long long>(p.texts, p, place, t) : 0;
}

__device__ __forceinline__ void add_token(Sum& sum, const Params& p, const Place& place, int t) {
    const float score = *at<const float>(p.scores, p, place, t);
    const float value = to_float(at<const FW_IN>(p.values, p, place, t)[place.v]);
    sum.add(FW_BACKWARD ? -score : score, value, FW_BACKWARD ? *at<const float>(p.extra, p, place, t) : 0.f);
}

// side: 0 what counts for later tokens of the block, 1 what counts for tokens of the next block.
__device__ __forceinline__ float* record(float* sums, const Params& p, long long n, int side) {
    const long long all = (long long)p.B * p.H * p.blocks * p.chunks;
    return sums + (side * all + n) * (3 + p.V);
}

__device__ __forceinline__ void write(float* to, int v, const Sum& x) {
    to[3 + v] = x.z;
    if (v == 0) {
        to[0] = x.m;
        to[1] = x.s;
        to[2] = x.e;
    }
}

__device__ __forceinline__ Sum read(const float* from, int v) { return {from[0], from[1], from[2], from[3 + v]}; }

constexpr int THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS) pool_chunks(const Params p) {
    const Place place = find(p, (long long)blockIdx.x * THREADS + threadIdx.x, p.chunks);
    if (place.b >= p.B) return;
    const int block = place.block * p.window, first = block + place.chunk * FW_CHUNK;
    const int end = min(min(first + FW_CHUNK, block + p.window), p.T);
    Sum sum = nothing(), whole = nothing();
    for (int t = first; t < end; t++) {
        if (FW_TEXTS && t > first && text(p, place, t) != text(p, place, t - 1)) sum = nothing();
        add_token(sum, p, place, t);
    }
    write(record(p.sums, p, place.n, 0), place.v, sum);
#if FW_WINDOW && FW_TEXTS
    if (place.block + 1 < p.blocks) {
        const long long last = text(p, place, block + p.window - 1);
        if (end > first && text(p, place, end - 1) == last) whole = sum;  // before, the texts only get older
        write(record(p.sums, p, place.n, 1), place.v, whole);
    }
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_borders(const Params p) {
    const Place place = find(p, (long long)blockIdx.x * THREADS + threadIdx.x, 1);
    if (place.b >= p.B) return;
    const long long first = place.n * p.chunks;
    const int block = place.block * p.window;
    Sum sum = nothing();
#pragma unroll 4
    for (int i = 0; i < p.chunks; i++) {
        const int start = block + i * FW_CHUNK, end = min(min(start + FW_CHUNK, block + p.window), p.T);
        write(record(p.borders, p, first + i, 0), place.v, sum);
        if (start >= p.T) break;
        if (FW_TEXTS && i && text(p, place, end - 1) != text(p, place, start - 1)) sum = nothing();
        sum.merge(read(record(p.sums, p, first + i, 0), place.v));
    }
#if FW_WINDOW
    if (place.block + 1 == p.blocks) return;
    sum = nothing();
#pragma unroll 4
    for (int i = p.chunks - 1; i >= 0; i--) {
        write(record(p.borders, p, first + i, 1), place.v, sum);
        sum.merge(read(record(p.sums, p, first + i, FW_TEXTS), place.v));
    }
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_tokens(const Params p) {
    const Place place = find(p, (long long)blockIdx.x * THREADS + threadIdx.x, p.chunks);
    if (place.b >= p.B) return;
    const int offset = place.chunk * FW_CHUNK, first = place.block * p.window + offset;
#if FW_WINDOW
    // The sum over the tokens of the block before that each token still sees.
    Sum left[FW_CHUNK];
    const long long last = place.block ? text(p, place, place.block * p.window - 1) : -1;
    Sum after = place.block && FW_CHUNKS ? read(record(p.borders, p, place.n - p.chunks, 1), place.v) : nothing();
#pragma unroll
    for (int i = FW_CHUNK - 1; i >= 0; i--) {
        left[i] = after;
        const int t = first + i - p.window;
        if (place.block && offset + i < p.window && text(p, place, t) == last) add_token(after, p, place, t);
    }
#endif
    Sum sum = place.chunk ? read(record(p.borders, p, place.n, 0), place.v) : nothing();
#pragma unroll
    for (int i = 0; i < FW_CHUNK; i++) {
        const int t = first + i;
        if (offset + i < p.window && t < p.T) {
            if (FW_TEXTS && offset + i && text(p, place, t) != text(p, place, t - 1)) sum = nothing();
            add_token(sum, p, place, t);
            Sum all = sum;
#if FW_WINDOW
            if (!FW_TEXTS || text(p, place, t) == last) all.merge(left[i]);
#endif
            const float scale = FW_BACKWARD ? expf(*at<const float>(p.own, p, place, t) + all.m) : 1.f / all.s;
            at<FW_OUT>(p.out, p, place, t)[place.v] = from_float<FW_OUT>(all.z * scale);
            if (place.v == 0) *at<float>(p.out_scores, p, place, t) = FW_BACKWARD ? all.e * scale : all.m + logf(all.s);
        }
    }
}
