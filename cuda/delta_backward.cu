// The recurrence with erase (rules delta, gated_delta), backward. dW is the adjoint of the memory, carried from the last chunk to
// the first. In a chunk, with the names of delta.cu:
//
//     dU = A^T dY + end (K dW_C),   dR = (I + e E)^-T dU,   dv = w dR,   dA = tril(dY U^T),   dL = -strict tril(dR U^T)
//     dq = start (dY W_0^T) + (D dA) K
//     dk = end (U dW_C^T) - e start (dR W_0^T) + (D dA)^T Q + (X + X^T) K,     X = D e dL
//     dW_0 = start_C dW_C + Q^T (start dY) - K^T (e start dR)
//     dw = dR . v,     de = dL . E - start (k . W_0 dR)
//
// A gate f_r is a factor of D_ts for s < r <= t, of start_t for r <= t, of end_s for s < r. Its gradient is the sum of every
// product that it is a factor of times that product's gradient, over f_r: sums without large terms that cancel.
//
// A block takes its parts from the last to the first: it reads a part's inputs once, runs it forward from its saved memory,
// keeping U and each chunk's W_0 in shared memory, then goes back. Products that end in columns of V are divided over warps by
// columns, with dW in accumulators; those that end in columns of K by those, with W_0, dW, dY, dR and U from shared memory.
#include "delta_gradients.cuh"

__device__ __forceinline__ void load_part(BackwardShared& s, const Params& p, const Place& at, int t0) {
#if FW_MAP
    load_rows<FW_SPAN>(s.rows_q, s.rows_k, p, at.b, at.h, t0);
#else
    load_rows<FW_SPAN>(s.q, s.k, p, at.b, at.h, t0);
#endif
    load_tile<In, In, FW_SPAN, FW_V>(s.v, p.v, at.b, at.h, t0, p.T, blockIdx.y * FW_V, p.V);
    load_tile<In, Op, FW_SPAN, FW_V>(s.dy, p.dy, at.b, at.h, t0, p.T, blockIdx.y * FW_V, p.V);
    load_gates(s.g, p, at.b, at.h, t0);
    cp_async_commit();
    cp_async_wait<0>();
}

// Shared memory has no room for two parts, so the next one is brought into the L2 cache.
__device__ __forceinline__ void prefetch_part(const Params& p, const Place& at, int t0) {
    prefetch_tile<In, FW_SPAN, ROW_WIDTH>(p.q, at.b, at.h, t0, p.T, 0, row_width(p));
    prefetch_tile<In, FW_SPAN, ROW_WIDTH>(p.k, at.b, at.h, t0, p.T, 0, row_width(p));
    prefetch_tile<In, FW_SPAN, FW_V>(p.v, at.b, at.h, t0, p.T, blockIdx.y * FW_V, p.V);
    prefetch_tile<In, FW_SPAN, FW_V>(p.dy, at.b, at.h, t0, p.T, blockIdx.y * FW_V, p.V);
    if (at.lane * sizeof(Quad) % 128 == 0) {
#pragma unroll 1
        for (int n = 0; n < TILES; n++) prefetch_l2(border(p, at, t0 / FW_PART) + n * 32);
    }
}

// The part forward from its saved memory: U and the memory before each chunk.
__device__ __forceinline__ void run_forward(BackwardShared& s, const Params& p, const Place& at, int t0, int& turn) {
    float w[TILES][4];
    load_border(w, border(p, at, t0 / FW_PART));
    for (int c = 0; c < CHUNKS; c++) {
        float u[2][4], y[2][4];
        each_couple(at, s.memory[c], w, [](Op* to, float x, float y) { put_couple(to, x, y); });
        recall<false>(at, chunk_of(s, c), w, u, y, s.sums, turn);
        if (at.has_first_rows()) {
            each_token(at, u, [&](int, int t, int v, float& x) { s.u[(c * C + t) * VALUE_ROW + v] = from_float<Op>(x); });
        }
        if (c + 1 < CHUNKS) advance(at, chunk_of(s, c), w, u);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) delta_backward(const Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    BackwardShared& s = *(BackwardShared*)bytes;
    const Place at(p);
    float dw[TILES][4];
    int turn = 0;
    load_memory(dw, p.dfinal, at, p);
    for (int t0 = (p.T - 1) / FW_PART * FW_PART; t0 >= 0; t0 -= FW_PART) {
        load_part(s, p, at, t0);
        __syncthreads();
        if (t0 > 0) prefetch_part(p, at, t0 - FW_PART);
#if FW_MAP
        map_rows<FW_SPAN>(s.q, s.k, s.rows_q, s.rows_k, p.T - t0);
        __syncthreads();
#endif
        for (int c = at.warp; c < CHUNKS; c += WARPS) {
            float* pairs = FW_F ? s.pairs[c] : nullptr;
            solve(s.g, c, p.T - t0, s.q + c * C * KEY_ROW, s.k + c * C * KEY_ROW, s.scores[c], pairs, s.erase[c], s.inverse[c]);
        }
        __syncthreads();
        run_forward(s, p, at, t0, turn);
        for (int c = CHUNKS - 1; c >= 0; c--) {
            value_side(s, at, c, dw, turn);
            __syncthreads();
            if (at.warp == 0) score_gradient(s, c);
            if (at.warp == 1 % WARPS) erase_gradient(s, c);
            __syncthreads();
            key_side(s, p, at, c, t0);
            __syncthreads();
            if (at.warp == 0) gate_side(s, p, at, c, t0);
#if FW_MAP
            const int first = c * C;
            unmap_rows<FW_PARTIAL, C>(s.rows_q + first * ROW, s.rows_k + first * ROW, s.q + first * KEY_ROW, s.k + first * KEY_ROW, p,
                                      at, t0 + first);
#endif
        }
        if (at.has_first_rows()) store_columns<FW_SPAN>(s.v + at.local(), p.dv, at.b, at.h, t0, p.T, at.column, p.V);
        __syncthreads();
    }
    store_memory(dw, p.dmemory, at, p);
}
