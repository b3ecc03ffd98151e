// The recurrence with one gate per token and without erase (rules sum, gated), backward. dW is the adjoint of the memory, carried
// from the last chunk to the first, or where there are few sequences from the end of a part of the tokens, which linear_adjoint.cu
// has found, to its beginning; the parts run side by side. In a chunk, with the names of linear.cu:
//
//     dq = start (dY W_0^T) + tril(D w dA) K          dA = dY V^T
//     dk = w (end (V dW_C^T) + tril(D dA)^T Q)
//     dv = w (end (K dW_C) + tril(D Q K^T)^T dY)      dw = dv . v / w
//     dW_0 = total dW_C + Q^T (start dY)
//
// Nothing is run forward again: W_0 of every chunk was saved. A warp takes 16 tokens through all of this, with W_0 and dW as
// operands in shared memory and the pairs of tokens in its own registers, then adds to its slice of dW.
//
// With FW_SUMS dY is that of the undivided reads, and the gradients dr of the divisors add themselves to all of row t of dA, dr n_0 to
// dq start, and n has the adjoint dn_0 = total dn_C + Q^T (start dr), which adds itself to what v_s reads of dW_C (divided.cu).
//
// A gate f_r is a factor of D_ts for s < r <= t, of start_t for r <= t, of end_s for s < r, of total always. Its gradient is the sum
// of every product that it is a factor of times that product's gradient, over f_r: sums without large terms that cancel.
//
// Macros besides those of linear.cuh: FW_STAGES chunks of rows in shared memory.
#include "linear_gradients.cuh"

#if FW_SUMS
// n_0, and the gradients of the divisors, which the first tile of V alone has: they do not depend on V.
__device__ __forceinline__ void load_sums(Stage& s, const Params& p, const Place& at, int t0) {
    constexpr int N = 16 / sizeof(Op);
    const Op* from = (const Op*)p.sums_borders + ((int64_t)at.bh * ((p.T + C - 1) / C) + t0 / C) * FW_K;
#pragma unroll 1
    for (int i = threadIdx.x * N; i < FW_K; i += THREADS * N) cp_async16(s.sums + i, from + i);
    load_numbers(s.reads, p.ddivisors, at, t0, blockIdx.y == 0 ? p.T : 0);
}
#endif

__device__ __forceinline__ void load_stage(Stage& s, const Params& p, const Place& at, int t0) {
    load_rows<C>(s.q, s.k, p, at.b, at.h, t0);
    load_tile<In, Op, C, FW_V>(s.v, p.v, at.b, at.h, t0, p.T, blockIdx.y * FW_V, p.V);
    load_tile<In, Op, C, FW_V>(s.dy, p.dy, at.b, at.h, t0, p.T, blockIdx.y * FW_V, p.V);
    load_border(s.memory, border(p, at, t0 / C, (p.T + C - 1) / C), has_memory(p, t0) ? border_rows(p) : 0);
    load_gates(s.f, s.w, p, at, t0);
#if FW_PRECISION == F16
    if (threadIdx.x == 0) cp_async4(s.scale, border_scale(p, at, t0 / C, (p.T + C - 1) / C), has_memory(p, t0) ? 4 : 0);
#endif
#if FW_SUMS
    load_sums(s, p, at, t0);
#endif
    cp_async_commit();
}

// Where shared memory has no room for two chunks, the next one is brought into the L2 cache.
__device__ __forceinline__ void prefetch_stage(const Params& p, const Place& at, int t0) {
    prefetch_tile<In, C, ROW_WIDTH>(p.q, at.b, at.h, t0, p.T, 0, row_width(p));
    prefetch_tile<In, C, ROW_WIDTH>(p.k, at.b, at.h, t0, p.T, 0, row_width(p));
    prefetch_tile<In, C, FW_V>(p.v, at.b, at.h, t0, p.T, blockIdx.y * FW_V, p.V);
    prefetch_tile<In, C, FW_V>(p.dy, at.b, at.h, t0, p.T, blockIdx.y * FW_V, p.V);
    const char* from = (const char*)border(p, at, t0 / C, (p.T + C - 1) / C);
#pragma unroll 1
    for (int i = threadIdx.x * 128; i < border_rows(p) * FW_K * (int)sizeof(Op); i += THREADS * 128) prefetch_l2(from + i);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) linear_backward(const Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Shared& s = *(Shared*)bytes;
    const Place at(p);
    const Products& x = s.products[FW_F ? at.warp : 0];
    const OwnTokens own(p);
    const int last = (own.end - 1) / C * C, block = at.warp % BLOCKS, group = at.warp / BLOCKS;
    float dw[TILES][4];
    load_memory(dw, own.final ? p.dfinal : adjoint_of(p.adjoints, p.K * p.V), at, p);
    KeySums dn(at);
    Scale scale;
    if (FW_SUMS) dn.load(blockIdx.y ? nullptr : own.final ? p.dfinal_sums : adjoint_of(p.adjoint_sums, p.K), p, at);
    load_stage(s.stage[0], p, at, last);
    for (int t0 = last, now = 0; t0 >= own.begin; t0 -= C, now = (now + 1) % FW_STAGES) {
        Stage& stage = s.stage[now];
#if FW_SUMS
        dn.share(s.dsums);
#endif
        cp_async_wait<0>();
        share_in_range(s.dmemory, dw, at, scale, s);
        if (FW_STAGES > 1 && t0 > own.begin) load_stage(s.stage[now ^ 1], p, at, t0 - C);
        if (FW_STAGES == 1 && t0 > own.begin) prefetch_stage(p, at, t0 - C);
#if FW_MAP
        map_rows<C>(s.q, s.k, stage.q, stage.k, p.T - t0);
        __syncthreads();
        Rows rows = {s.q, s.k, stage.v, stage.dy, stage.memory, stage.w};
#else
        Rows rows = {stage.q, stage.k, stage.v, stage.dy, stage.memory, stage.w};
#endif
#if FW_SUMS
        rows.sums = stage.sums, rows.reads = stage.reads;
#endif
#if FW_PRECISION == F16
        rows.before.exponent = stage.scale[0], rows.after = scale;
#endif
        if (FW_F) {
            multiply_gates(s.products[at.warp], stage.f, p.T - t0);
            share_pairs(s.pairs[at.warp], x.gate + block * 16);
            const int slice = at.value * KEY_ROW + at.key;
            float carried = multiply_slices(rows.memory + slice, dw, P == F16 ? s.dmemory + slice : nullptr);
            if (P == F16) carried *= power(-rows.before.exponent) * power(-rows.after.exponent);
            if (FW_SUMS) carried += dn.multiply_with(rows.sums);
            if (at.lane == 0) s.sums.carried[at.warp] = carried;
        }
        if (group < KEY_GROUPS) {
            if (query_side<false>(s, p, at, rows, x, block, group, t0)) query_side<true>(s, p, at, rows, x, block, group, t0);
            if (key_side<false>(s, p, at, rows, x, block, group, t0)) key_side<true>(s, p, at, rows, x, block, group, t0);
        }
        if (group < VALUE_GROUPS) {
            if (value_side<false>(s, p, at, rows, x, block, group, t0)) value_side<true>(s, p, at, rows, x, block, group, t0);
        }
        const float total = FW_F ? x.before[BLOCKS - 1] * x.total[BLOCKS - 1] : 1.f;
        const auto start = [&](int b, int t) { return FW_F ? x.start[t] * x.before[b] : 1.f; };
        write_tokens<FW_F, false>(dw, rows.dy, rows.q, total, at, start);
        if (FW_SUMS) dn.write(rows.q, total, [&](int b, int t) { return start(b, t) * rows.reads[t]; });
        __syncthreads();
#if FW_MAP
        unmap_rows<FW_PARTIAL, C>(stage.q, stage.k, s.dq, s.dk, p, at, t0);
        if (FW_STAGES == 1) __syncthreads();
#endif
        if (FW_STAGES == 1 && t0 > own.begin) load_stage(stage, p, at, t0 - C);
        if ((FW_F || FW_W) && at.warp < BLOCKS) gate_side(s.sums, p, at, x, at.warp, t0);
    }
    if (own.begin == 0 && p.dmemory) store_memory(dw, p.dmemory, at, p);
    if (FW_SUMS && own.begin == 0 && p.dsums) dn.store(p.dsums, p, at);
}
