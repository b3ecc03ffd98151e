// The adjoint dW of the memory at the beginning of each part of the tokens but the first, for decay_backward.cu, whose blocks then take
// the parts side by side. Over a chunk, from the last one on,
//
//     dW_0 = (F z^T) * dW_C + (F_t q_t) (Z_t dy_t)^T summed over t
//
// with F_t, Z_t the products of the gates of each channel since the chunk's start up to t, and F, Z those of the whole chunk. No
// factor exceeds 1. A block owns FW_V columns of dW, as in linear.cu, whose code it shares.
//
// Macros besides those of linear.cuh: FW_KEYS, FW_VALUES 1 where there are gates f of the keys, z of the values (p.e).
#define FW_NO_GATE 0.f
#define FW_F 0  // per token
#include "linear.cuh"

constexpr int KEY_GATES = tile_stride<float>(FW_K), VALUE_GATES = tile_stride<float>(FW_V);

struct __align__(16) Stage {
    Row q[C * ROW];
    Op dy[C * VALUE_ROW];
    float f[FW_KEYS ? C * KEY_GATES : 4], z[FW_VALUES ? C * VALUE_GATES : 4];
};

struct __align__(16) Shared {
    Stage stage[2];
#if FW_MAP
    Op q[C * KEY_ROW];
#endif
    float keys[FW_K], values[FW_V];  // products over the chunk
};
static_assert(sizeof(Shared) == FW_SHARED, "the host computes the same");

__device__ __forceinline__ void load_stage(Stage& s, const Params& p, const Place& at, int t0) {
    const int column = blockIdx.y * FW_V;
    load_tile<In, Row, C, ROW_WIDTH>(s.q, p.q, at.b, at.h, t0, p.T, 0, row_width(p));
    load_tile<In, Op, C, FW_V>(s.dy, p.dy, at.b, at.h, t0, p.T, column, p.V);
    if (FW_KEYS) load_tile<float, float, C, FW_K>(s.f, p.f, at.b, at.h, t0, p.T, 0, p.K);
    if (FW_VALUES) load_tile<float, float, C, FW_V>(s.z, p.e, at.b, at.h, t0, p.T, column, p.V);
    cp_async_commit();
}

// The numbers of two channels times the products of their gates, `tokens` of them; the products of all.
template <int STRIDE, int GATES>
__device__ __forceinline__ void scale_channels(Op* x, const float* gates, float* all, int tokens) {
    float2 product = make_float2(1.f, 1.f);
#pragma unroll
    for (int t = 0; t < C; t++) {
        const float2 gate = *(const float2*)(gates + t * GATES), number = couple(x + t * STRIDE);
        if (t < tokens) product.x *= gate.x, product.y *= gate.y;
        put_couple(x + t * STRIDE, number.x * product.x, number.y * product.y);
    }
    *(float2*)all = product;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decay_adjoint(const Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Shared& shared = *(Shared*)bytes;
    const Place at(p);
    const int last = (p.T - 1) / C * C;
    float dw[TILES][4];
    load_memory(dw, p.dfinal, at, p);
    load_stage(shared.stage[0], p, at, last);
    for (int t0 = last, now = 0; t0 >= p.part; t0 -= C, now ^= 1) {
        Stage& s = shared.stage[now];
        cp_async_wait<0>();
        __syncthreads();
        if (t0 > p.part) load_stage(shared.stage[now ^ 1], p, at, t0 - C);
#if FW_MAP
        map_rows<C>(shared.q, s.q, p.T - t0);
        __syncthreads();
        Op* q = shared.q;
#else
        Op* q = s.q;
#endif
        const int tokens = min(C, p.T - t0);
        for (int i = threadIdx.x * 2; FW_KEYS && i < FW_K; i += THREADS * 2) {
            scale_channels<KEY_ROW, KEY_GATES>(q + i, s.f + i, shared.keys + i, tokens);
        }
        for (int i = (THREADS - 1 - (int)threadIdx.x) * 2; FW_VALUES && i < FW_V; i += THREADS * 2) {
            scale_channels<VALUE_ROW, VALUE_GATES>(s.dy + i, s.z + i, shared.values + i, tokens);
        }
        __syncthreads();
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (FW_KEYS) dw[n][i] *= shared.keys[at.key + n * 8 + lane_column() + (i & 1)];
                if (FW_VALUES) dw[n][i] *= shared.values[at.value + lane_row() + (i >> 1) * 8];
            }
        }
        write_tokens<false, false>(dw, s.dy, q, 1.f, at, [](int, int) { return 1.f; });
        if (t0 % p.part == 0) store_memory(dw, adjoint_of(p.adjoints, p.K * p.V, t0 / p.part - 1), at, p);
    }
}
