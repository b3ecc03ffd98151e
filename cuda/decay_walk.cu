// The memory at the beginning of each part of the tokens but the first, for decay.cu, or with FW_ADJOINT its adjoint dW, for
// decay_backward.cu, whose blocks then take the parts side by side. Over a chunk, from the first one on, or from the last,
//
//     W_C = (F z^T) * W_0 + (F_t k_t) (Z_t w_t v_t)^T summed over t,    dW_0 = (F z^T) * dW_C + (F_t q_t) (Z_t dy_t)^T
//
// with F_t, Z_t the products of the gates of each channel after t, for dW those since the chunk's start up to t, and F, Z those of
// the whole chunk. No factor exceeds 1. A block owns FW_V columns, as in linear.cu, whose code it shares.
//
// Macros besides those of linear.cuh: FW_ADJOINT, then p.k and p.v are q and dy; FW_KEYS, FW_VALUES 1 where there are gates f of the
// keys, z of the values (p.e).
#define FW_NO_GATE 0.f
#define FW_F 0  // per token
#include "linear.cuh"

constexpr int KEY_GATES = tile_stride<float>(FW_K), VALUE_GATES = tile_stride<float>(FW_V);

struct __align__(16) Stage {
    Row k[C * ROW];
    Op v[C * VALUE_ROW];
    float f[FW_KEYS ? C * KEY_GATES : 4], z[FW_VALUES ? C * VALUE_GATES : 4], w[C];
};

struct __align__(16) Shared {
    Stage stage[2];
#if FW_MAP
    Op k[C * KEY_ROW];
#endif
    float keys[BLOCKS + 1][FW_K], values[BLOCKS + 1][FW_V];  // products over each 16 tokens, and over the chunk
};
static_assert(sizeof(Shared) == FW_SHARED, "the host computes the same");

__device__ __forceinline__ void load_stage(Stage& s, const Params& p, const Place& at, int t0) {
    const int column = blockIdx.y * FW_V;
    load_tile<In, Row, C, ROW_WIDTH>(s.k, p.k, at.b, at.h, t0, p.T, 0, row_width(p));
    load_tile<In, Op, C, FW_V>(s.v, p.v, at.b, at.h, t0, p.T, column, p.V);
    if (FW_KEYS) load_tile<float, float, C, FW_K>(s.f, p.f, at.b, at.h, t0, p.T, 0, p.K);
    if (FW_VALUES) load_tile<float, float, C, FW_V>(s.z, p.e, at.b, at.h, t0, p.T, column, p.V);
    if (FW_W) load_numbers(s.w, p.w, at, t0, p.T);
    cp_async_commit();
}

// f(two channels, 16 tokens) for all channels of one side, spread over the threads, from the last one backwards if BACK.
template <int WIDTH, bool BACK, class F>
__device__ __forceinline__ void each_couple(F f) {
    for (int i = BACK ? THREADS - 1 - (int)threadIdx.x : threadIdx.x; i < BLOCKS * WIDTH / 2; i += THREADS)
        f(i % (WIDTH / 2) * 2, i / (WIDTH / 2));
}

__device__ __forceinline__ void multiply(float2& x, float2 y) { x.x *= y.x, x.y *= y.y; }

// The products of the gates of 16 tokens, of which `tokens` exist.
template <int GATES>
__device__ __forceinline__ float2 product_of(const float* gates, int tokens) {
    float2 product = make_float2(1.f, 1.f);
#pragma unroll
    for (int t = 0; t < 16; t++) {
        if (t < tokens) multiply(product, couple(gates + t * GATES));
    }
    return product;
}

// The numbers of two channels and 16 tokens times the products of their gates, and times w if there is one. products: those over each
// 16 tokens, whose last place takes that of all.
template <int STRIDE, int GATES, int WIDTH>
__device__ __forceinline__ void scale_channels(Op* x, const float* gates, const float* w, float (&products)[BLOCKS + 1][WIDTH], int channel,
                                               int block, int tokens) {
    float2 product = make_float2(1.f, 1.f);
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        if (tokens && (FW_ADJOINT ? b < block : b > block)) multiply(product, couple(products[b] + channel));
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int t = FW_ADJOINT ? i : 15 - i;
        const float2 gate = block * 16 + t < tokens ? couple(gates + t * GATES) : make_float2(1.f, 1.f), number = couple(x + t * STRIDE);
        if (FW_ADJOINT) multiply(product, gate);
        const float strength = w ? w[t] : 1.f;
        put_couple(x + t * STRIDE, number.x * strength * product.x, number.y * strength * product.y);
        if (!FW_ADJOINT) multiply(product, gate);
    }
    if (block == (FW_ADJOINT ? BLOCKS - 1 : 0)) *(float2*)(products[BLOCKS] + channel) = product;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decay_walk(const Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Shared& shared = *(Shared*)bytes;
    const Place at(p);
    constexpr int STEP = FW_ADJOINT ? -1 : 1;
    const int first = FW_ADJOINT ? (p.T - 1) / C * C : 0;
    Border<FW_ADJOINT> border(p);  // whose memory is found next
    float w[TILES][4];
    load_memory(w, FW_ADJOINT ? p.dfinal : p.memory, at, p);
    load_stage(shared.stage[0], p, at, first);
    for (int t0 = first, now = 0; border.is_there(p); t0 += STEP * C, now ^= 1) {
        const Border<FW_ADJOINT> found = border;
        const bool is_found = (FW_ADJOINT ? t0 : t0 + C) == border.token;
        if (is_found) border.go_on(p);
        Stage& s = shared.stage[now];
        cp_async_wait<0>();
        __syncthreads();
        if (border.is_there(p)) load_stage(shared.stage[now ^ 1], p, at, t0 + STEP * C);
#if FW_MAP
        map_rows<C>(shared.k, s.k, p.T - t0);
        Op* k = shared.k;
#else
        Op* k = s.k;
#endif
        const int tokens = p.T - t0;
        if (FW_KEYS) each_couple<FW_K, false>([&](int channel, int b) {
            *(float2*)(shared.keys[b] + channel) = product_of<KEY_GATES>(s.f + b * 16 * KEY_GATES + channel, tokens - b * 16);
        });
        if (FW_VALUES) each_couple<FW_V, true>([&](int channel, int b) {
            *(float2*)(shared.values[b] + channel) = product_of<VALUE_GATES>(s.z + b * 16 * VALUE_GATES + channel, tokens - b * 16);
        });
        __syncthreads();
        if (FW_KEYS) each_couple<FW_K, false>([&](int channel, int b) {
            const int t = b * 16;
            scale_channels<KEY_ROW, KEY_GATES>(k + t * KEY_ROW + channel, s.f + t * KEY_GATES + channel, nullptr, shared.keys, channel, b, tokens);
        });
        if (FW_VALUES || FW_W) each_couple<FW_V, true>([&](int channel, int b) {
            const int t = b * 16;
            scale_channels<VALUE_ROW, VALUE_GATES>(s.v + t * VALUE_ROW + channel, s.z + t * VALUE_GATES + channel, FW_W ? s.w + t : nullptr,
                                                   shared.values, channel, b, FW_VALUES ? tokens : 0);
        });
        __syncthreads();
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (FW_KEYS) w[n][i] *= shared.keys[BLOCKS][at.key + n * 8 + lane_column() + (i & 1)];
                if (FW_VALUES) w[n][i] *= shared.values[BLOCKS][at.value + lane_row() + (i >> 1) * 8];
            }
        }
        write_tokens<false, false>(w, s.v, k, 1.f, at, [](int, int) { return 1.f; });
        if (is_found) store_memory(w, adjoint_of(p.adjoints, p.K * p.V, found.place), at, p);
    }
}
