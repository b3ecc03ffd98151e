// The recurrence with decay per channel and erase (rules kda, gdn2, rwkv7), forward:
//
//     D_t = f_t * W_{t-1},    W_t = D_t - e_t k_t (p_t^T D_t) + w_t k_t v_t^T,    y_t = W_t^T q_t
//
// with p = k and a strength e per token, or with p in place of e. A block owns one sequence and head and FW_V columns of the
// memory, which stay in fp32 in the accumulators of its warps, as in delta.cu. Chunks are 16 tokens. Rows are scaled by products of f
// first (channel_delta.cuh); from then on, with A = tril(Q K^T) and E = strict tril(P K^T) of the scaled rows,
//
//     R = w V - e (P W_0),   U = (I + e E)^-1 R,   Y = Q W_0 + A U,   W_C = f_1..f_C W_0 + K^T U
//
// Memory bandwidth bounds the speed: q, k, v, f and e are read once and y is written once. Saved for the backward: the memory every
// FW_PART tokens. A gate of 0 is taken as it is.
#include "channel_delta.cuh"

struct __align__(16) Stage {
    Op q[FW_SPAN * KEY_ROW], k[FW_SPAN * KEY_ROW];
    In v[FW_SPAN * INPUT_ROW];
    float f[FW_SPAN * FLOAT_ROW], e[CHANNELS];
    Gates g;
};

struct __align__(16) ForwardShared {
    Stage stage[2];
    Prepared prepared;
    float4 sums[FW_KSPLIT > 1 ? 2 * WARPS * 4 * 32 : 1];
};
static_assert(sizeof(ForwardShared) == FW_SHARED, "the host computes the same");

__device__ __forceinline__ void load_stage(Stage& s, const Params& p, const Place& at, int t0) {
    load_rows<FW_SPAN>(s.q, s.k, p, at.b, at.h, t0);
    load_tile<In, In, FW_SPAN, FW_V>(s.v, p.v, at.b, at.h, t0, p.T, blockIdx.y * FW_V, p.V);
    load_gates(s.f, s.e, s.g, p, at.b, at.h, t0);
    cp_async_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) channel_delta_forward(const Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    ForwardShared& shared = *(ForwardShared*)bytes;
    const Place at(p);
    float w[TILES][4];
    int turn = 0, exponent = 0;
    load_memory(w, p.memory, at, p);
    load_stage(shared.stage[0], p, at, 0);
    for (int t0 = 0, now = 0; t0 < p.T; t0 += FW_SPAN, now ^= 1) {
        Stage& s = shared.stage[now];
        cp_async_wait<0>();
        __syncthreads();
        if (t0 + FW_SPAN < p.T) load_stage(shared.stage[now ^ 1], p, at, t0 + FW_SPAN);
        const bool near = prepare(span_of(s, shared.prepared), p.T - t0, p.K, 0.f);
#if FW_PRECISION == BF16
#pragma unroll
#endif
        for (int c = 0; c < CHUNKS && t0 + c * C < p.T; c++) {
            const int t = c * C;
            if (p.borders && (t0 + t) % FW_PART == 0 && has_memory(p, t0 + t)) save_border(w, border(p, at, (t0 + t) / FW_PART));
            const Chunk chunk = chunk_of(s, s.v + t * INPUT_ROW, shared.prepared, c);
            float u[2][4], y[2][4];
            Left<P> written;
            recall<true>(at, chunk, w, u, y, written, shared.sums, turn, exponent, [] {});
            advance(at, chunk, w, written, near, shared.prepared.totals[c]);
            if (at.has_first_rows()) {  // y takes the place of v
                put_square<true>(s.v + t * INPUT_ROW + at.local(), INPUT_ROW, y[0], y[1]);
            }
        }
        __syncwarp();
        if (at.has_first_rows()) store_columns<FW_SPAN>(s.v + at.local(), p.y, at.b, at.h, t0, p.T, at.column, p.V);
    }
    if (p.final) store_memory(w, p.final, at, p);
}
