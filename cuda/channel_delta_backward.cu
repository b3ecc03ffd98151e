// The recurrence with decay per channel and erase (rules kda, gdn2, rwkv7), backward. dW is the adjoint of the memory, carried from
// the last chunk to the first. In a chunk, of scaled rows and with the names of channel_delta.cu, near, where Z = F_C dW_C:
//
//     dU = A^T dY + K Z,   dR = (I + e E)^-T dU,   dv = w dR,   dA = tril(dY U^T),   dE = -strict tril(dR U^T),   X = e dE
//     dQ = dY W_0^T + dA K,    dP = -e dR W_0^T + X K,    dK = U Z^T + dA^T Q + X^T P
//     dW_0 = Z + Q^T dY - P^T (e dR)
//     dw = dR . v,     de = dE . E - P . W_0 dR
//
// dq, dp and dk are those of scaled rows times what scaled them. Far, Z is dW_C, dW_0 has F_C Z in its place, and the pairs' share
// of dq, dp, dk and df is summed up channel by channel. A gate's gradient is the sum of every product that it is a factor of times
// that product's gradient, over the gate; of a far part, of products that leave the gate out.
//
// A block takes its parts from the last to the first, as in delta_backward.cu, with FW_SIDES those of p.part tokens, from what
// channel_delta_adjoint.cu has found: it runs a part forward from its saved memory, then goes back. Where a part has a gate below LEAST_GATE, or is far in the forward, it is far.
#include "channel_delta_gradients.cuh"

// The part forward from its saved memory, for U and the memory before each chunk, and then back.
template <bool NEAR>
__device__ __forceinline__ void take_back(const Part& part, const Params& p, const Place& at, int t0, float (&dw)[TILES][4],
                                          int& turn) {
    BackwardShared& s = part.s;
    float w[TILES][4];
    int exponent = 0;  // of products in fp16
    load_border(w, has_memory(p, t0) ? border(p, at, t0 / FW_PART) : nullptr);
    for (int c = 0; c < CHUNKS; c++) {
        float u[2][4], y[2][4];
        Left<P> written;
        keep_memory(at, s.memory[c], w);
        recall<false>(at, part.chunk(c), w, u, y, written, s.sums, turn, exponent, [] {});
        if (at.has_first_rows()) keep_transposed(at, s.u[c], u);
        if (c + 1 < CHUNKS) advance(at, part.chunk(c), w, written, NEAR, s.totals[c]);
    }
    for (int c = CHUNKS - 1; c >= 0; c--) {
        if (NEAR) decay(at, dw, s.totals[c]);
        value_side(part, at, c, dw, turn, exponent, [&](float (&x)[TILES][4]) {
            if (!NEAR) decay(at, x, s.totals[c]);
        });
        __syncthreads();
        each_turn<WARPS, 2>(at.warp, [&](int job) {
            if (job == 0) score_gradient(part, c);
            else erase_gradient(part, c);
        });
        __syncthreads();
        key_side<NEAR>(part, p, at, c, t0);
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) channel_delta_backward(const Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    BackwardShared& s = *(BackwardShared*)bytes;
    const Place at(p);
    const OwnTokens own(p);
    const int last = (own.end - 1) / FW_PART * FW_PART;
    float dw[TILES][4];
    int turn = 0;
    if (threadIdx.x == 0) find_firsts(s.first, p, at);
    load_memory(dw, own.final ? p.dfinal : adjoint_of(p.adjoints, p.K * p.V), at, p);
    __syncthreads();
    load_part(s.in, p, s.first, last);
    for (int t0 = last; t0 >= own.begin; t0 -= FW_PART) {
        cp_async_wait<0>();
        __syncthreads();
        if (t0 > own.begin) prefetch_part(p, s.first, at, t0 - FW_PART);
        const Span span = {s.in.q, s.in.k, s.p, s.in.f, s.in.e, s.in.g.e, s.scores, s.erase, s.inverse, s.totals};
        const bool near = prepare(span, p.T - t0, p.K, LEAST_GATE);
        if (near) take_back<true>({s.in, s}, p, at, t0, dw, turn);
        else take_back<false>({s.in, s}, p, at, t0, dw, turn);
        store_part(s, p, at, t0);
        __syncthreads();
        if (t0 > own.begin) load_part(s.in, p, s.first, t0 - FW_PART);
    }
    if (own.begin == 0 && p.dmemory) store_memory(dw, p.dmemory, at, p);
}
