// The memory at the beginning of each part of the tokens but the first, for decay.cu, or with FW_ADJOINT its adjoint dW, for
// decay_backward.cu, whose blocks then take the parts side by side. Over a chunk, from the first one on, or from the last,
//
//     W_C = (F z^T) * W_0 + (F_t k_t) (Z_t w_t v_t)^T summed over t,    dW_0 = (F z^T) * dW_C + (F_t q_t) (Z_t dy_t)^T
//
// with F_t, Z_t the products of the gates of each channel after t, for dW those since the chunk's start up to t, and F, Z those of
// the whole chunk. No factor exceeds 1. A block owns FW_V columns, as in linear.cu, whose code it shares.
//
// Macros besides those of linear.cuh: FW_ADJOINT, where p.k and p.v are q and dy; FW_KEYS, FW_VALUES 1 where there are gates f of
// the keys, z of the values (p.e).
#define FW_NO_GATE 0.f
#define FW_F 0  // per token
#include "linear.cuh"

constexpr int KEY_GATES = tile_stride<float>(FW_K), VALUE_GATES = tile_stride<float>(FW_V);

__device__ __forceinline__ void multiply(float2& x, float2 y) { x.x *= y.x, x.y *= y.y; }

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

// One side's numbers and gates of a chunk, and the products of these over each 16 tokens, and over the chunk.
template <int WIDTH, int NUMBERS, bool LATE>
struct Side {
    static constexpr int GATES = tile_stride<float>(WIDTH);
    Op* numbers;
    const float *gates, *strengths;  // null where there are none
    float (&products)[BLOCKS + 1][WIDTH];
    int tokens;  // that the chunk has

    // f(channel, block) for all couples of channels and 16 tokens, spread over the threads, from the last one backwards if LATE.
    template <class F>
    __device__ __forceinline__ void each(F f) const {
        for (int i = LATE ? THREADS - 1 - (int)threadIdx.x : threadIdx.x; i < BLOCKS * WIDTH / 2; i += THREADS)
            f(i % (WIDTH / 2) * 2, i / (WIDTH / 2));
    }

    __device__ __forceinline__ float2 gate(int channel, int t) const {
        return gates && t < tokens ? couple(gates + t * GATES + channel) : make_float2(1.f, 1.f);
    }

    __device__ __forceinline__ void multiply_gates() const {
        each([&](int channel, int block) {
            float2 product = make_float2(1.f, 1.f);
#pragma unroll
            for (int t = 0; t < 16; t++) multiply(product, gate(channel, block * 16 + t));
            *(float2*)(products[block] + channel) = product;
        });
    }

    // Behind a barrier: the numbers times the products of their gates and their strengths.
    __device__ __forceinline__ void scale_numbers() const {
        each([&](int channel, int block) {
            float2 product = make_float2(1.f, 1.f);
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) {
                if (FW_ADJOINT ? b < block : b > block) multiply(product, couple(products[b] + channel));
            }
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int t = block * 16 + (FW_ADJOINT ? i : 15 - i);
                Op* number = numbers + t * NUMBERS + channel;
                const float2 here = gate(channel, t), x = couple(number);
                if (FW_ADJOINT) multiply(product, here);
                const float strength = strengths ? strengths[t] : 1.f;
                put_couple(number, x.x * strength * product.x, x.y * strength * product.y);
                if (!FW_ADJOINT) multiply(product, here);
            }
            if (block == (FW_ADJOINT ? BLOCKS - 1 : 0)) *(float2*)(products[BLOCKS] + channel) = product;
        });
    }
};

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
        const Side<FW_K, KEY_ROW, false> keys = {k, FW_KEYS ? s.f : nullptr, nullptr, shared.keys, tokens};
        const Side<FW_V, VALUE_ROW, true> values = {s.v, FW_VALUES ? s.z : nullptr, FW_W ? s.w : nullptr, shared.values, tokens};
        if (FW_KEYS) keys.multiply_gates();
        if (FW_VALUES || FW_W) values.multiply_gates();
        __syncthreads();
        if (FW_KEYS) keys.scale_numbers();
        if (FW_VALUES || FW_W) values.scale_numbers();
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
