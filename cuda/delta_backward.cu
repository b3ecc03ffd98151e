// The recurrence with erase (rules delta, gated_delta), backward. dW is the adjoint of the memory, carried from the last chunk to
// the first; with FW_SIDES a block takes p.part tokens only, from what delta_adjoint.cu has found. In a chunk, with the names of
// delta.cu:
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
// columns, with dW in accumulators; those that end in columns of K by those, with W_0, dW, dY, dR and U from shared memory. With
// room for two parts in shared memory (FW_STAGES) the next one is copied meanwhile, and all chunks of a part take a phase before
// the next phase begins.
#include "delta_gradients.cuh"

// Parts that copy_tile and store_whole take, but for the end of a sequence.
constexpr bool EVEN_PART = !FW_MAP && KEEP_KEYS && !FW_PARTIAL && EVEN_TILE<In, Op, FW_SPAN, FW_K> && EVEN_TILE<In, Op, FW_SPAN, FW_V> &&
                           WHOLE_ROWS<In, FW_K> && WHOLE_ROWS<In, FW_V>;

__device__ __forceinline__ void load_part(Stage& s, const Params& p, const Firsts& first, int t0) {
    Params here = p;
    here.q = view_from(first.q, p.q), here.k = view_from(first.k, p.k);
    here.f = view_from(first.f, p.f), here.e = view_from(first.e, p.e), here.w = view_from(first.w, p.w);
    const int columns = p.V - blockIdx.y * FW_V;
    if constexpr (EVEN_PART) {
        if (whole_part(p, t0)) {
            copy_tile<Row, FW_SPAN, FW_K>(s.q, (const Row*)first.q, p.q.t, t0);
            copy_tile<Row, FW_SPAN, FW_K>(s.k, (const Row*)first.k, p.k.t, t0);
            copy_tile<In, FW_SPAN, FW_V>(s.v, (const In*)first.v, p.v.t, t0);
            copy_tile<Op, FW_SPAN, FW_V>(s.dy, (const Op*)first.dy, p.dy.t, t0);
            return load_gates(s.g, here, 0, 0, t0);
        }
    }
    load_rows<FW_SPAN>(s.q, s.k, here, 0, 0, t0);
    load_tile<In, In, FW_SPAN, FW_V>(s.v, view_from(first.v, p.v), 0, 0, t0, p.T, 0, columns);
    load_tile<In, Op, FW_SPAN, FW_V>(s.dy, view_from(first.dy, p.dy), 0, 0, t0, p.T, 0, columns);
    load_gates(s.g, here, 0, 0, t0);
}

// A lane's share of a memory to where the same lane reads it.
__device__ __forceinline__ void copy_border(BackwardShared& s, const Params& p, const Place& at, int t0) {
    const uint4* from = border_from(s.first, at, t0 / FW_PART);
    const int bytes = has_memory(p, t0) ? 16 : 0;
#pragma unroll
    for (int i = 0; i < UNITS; i++) cp_async16(s.border + (at.warp * UNITS + i) * 32 + at.lane, from + i * 32, bytes);
}

// Where shared memory has no room for two parts, the next one is brought into the L2 cache.
__device__ __forceinline__ void prefetch_part(const Params& p, const DeltaFirsts& first, const Place& at, int t0) {
    const int columns = p.V - blockIdx.y * FW_V;
    prefetch_tile<In, FW_SPAN, ROW_WIDTH>(view_from(first.q, p.q), 0, 0, t0, p.T, 0, row_width(p));
    prefetch_tile<In, FW_SPAN, ROW_WIDTH>(view_from(first.k, p.k), 0, 0, t0, p.T, 0, row_width(p));
    prefetch_tile<In, FW_SPAN, FW_V>(view_from(first.v, p.v), 0, 0, t0, p.T, 0, columns);
    prefetch_tile<In, FW_SPAN, FW_V>(view_from(first.dy, p.dy), 0, 0, t0, p.T, 0, columns);
    if (at.lane % 8 == 0) {
#pragma unroll 1
        for (int i = 0; i < UNITS; i++) prefetch_l2(border_from(first, at, t0 / FW_PART) + i * 32);
    }
}

__device__ __forceinline__ int load_exponent(const Params& p, const Place& at, int t0) {
    return P == F16 && has_memory(p, t0) ? *border_exponent(p, at, t0 / FW_PART) : 0;
}

// The part forward from its saved memory, which has the exponent `next`: U and the memory before each chunk.
__device__ __forceinline__ void run_forward(const Part& part, const Params& p, const Place& at, int t0, bool more, int& turn,
                                            int& next) {
    BackwardShared& s = part.s;
    float w[TILES][4];
    int exponent = next;
    if (more) next = load_exponent(p, at, t0 - FW_PART);
    if constexpr (ROOMY) {
        load_border(w, s.border + at.warp * UNITS * 32 + at.lane);
        if (more) copy_border(s, p, at, t0 - FW_PART);
    } else {
        load_border(w, has_memory(p, t0) ? border_from(s.first, at, t0 / FW_PART) : nullptr);
    }
#if FW_PRECISION == F16 || FW_PRECISION == BF16
#pragma unroll
#endif
    for (int c = 0; c < CHUNKS; c++) {
        float u[2][4], y[2][4];
        Left<P> written;
        const auto keep = [&] { keep_memory(at, s.memory[c], w); };
        keep();
        recall<false>(at, part.chunk(c), w, u, y, written, s.sums, turn, exponent, keep);
        if (at.has_first_rows()) keep_transposed(at, s.u[c], u);
        if (P == F16 && at.has_first_rows() && at.lane == 0) exponents_of(s)[c].memory[at.local() / 16] = exponent;
        if (c + 1 < CHUNKS) advance(at, part.chunk(c), w, u, written);
    }
    if (P == F16 && FW_KSPLIT > 1) __syncthreads();  // the exponents are there
    else if (P == F16) __syncwarp();
}

// The gradients of a part, where all of it is in shared memory; by COUNT warps, of which this one is number `index`.
template <int COUNT>
__device__ __forceinline__ void store_part(const Part& part, const Params& p, const Place& at, int t0, int index) {
    const int rows = min(FW_SPAN, p.T - t0);
    const Firsts& first = part.s.first;
    for (int c = index; c < CHUNKS; c += COUNT) gate_side(part, p, at, c, t0);
    if constexpr (EVEN_PART) {
        if (whole_part(p, t0)) {
            store_whole<FW_SPAN, FW_K, COUNT>(part.dq, (Feature*)first.dq, p.dq.t, t0, index);
            store_whole<FW_SPAN, FW_K, COUNT>(part.dk, (Feature*)first.dk, p.dk.t, t0, index);
            store_whole<FW_SPAN, FW_V, COUNT>(part.in.v, (In*)first.dv, p.dv.t, t0, index);
            return;
        }
    }
#if FW_MAP
    unmap_rows<FW_PARTIAL, FW_SPAN>(part.in.q, part.in.k, part.dq, part.dk, p, at, t0);
#else
    if constexpr (KEEP_KEYS) {
        using Out = typename KeyGradient<FW_PARTIAL>::type;
        Out* dq = ::at<Out>(view_from(first.dq, p.dq), 0, 0, t0);
        store_tile<FW_SPAN, FW_K, COUNT>(part.dq, dq, p.dq.t, rows, p.K, index);
        Out* dk = ::at<Out>(view_from(first.dk, p.dk), 0, 0, t0);
        store_tile<FW_SPAN, FW_K, COUNT>(part.dk, dk, p.dk.t, rows, p.K, index);
    }
#endif
    In* dv = ::at<In>(view_from(first.dv, p.dv), 0, 0, t0);
    store_tile<FW_SPAN, FW_V, COUNT>(part.in.v, dv, p.dv.t, rows, p.V - blockIdx.y * FW_V, index);
}

// From a part's inputs in shared memory, behind a barrier: what does not depend on the memory.
__device__ __forceinline__ void prepare(const Part& part, int tokens) {
    BackwardShared& s = part.s;
#if FW_MAP
    map_rows<FW_SPAN>(part.q, part.k, part.in.q, part.in.k, tokens);
    __syncthreads();
#endif
    compare_all(part.in.g, part.q, part.k, s.scores, FW_F ? s.pairs : nullptr, s.erase, exponents_of(s));
    __syncthreads();
    invert_all(part.in.g.e, s.erase, s.inverse);
    __syncthreads();
}

// This thread's copies are there.
__device__ __forceinline__ void wait_for(Stage& in) {
    cp_async_commit();
    cp_async_wait<0>();
    bound_gates(in.g);
}

__device__ __forceinline__ Part part_of(BackwardShared& s, int stage) {
    Stage& in = s.stage[stage];
#if FW_MAP && FW_PRECISION == F16
    return {s.q, s.k, s.dq, s.dk, in, s};
#elif FW_MAP
    return {s.q, s.k, s.q, s.k, in, s};
#else
    return {in.q, in.k, (Feature*)in.q, (Feature*)in.k, in, s};
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) delta_backward(const Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    BackwardShared& s = *(BackwardShared*)bytes;
    const Place at(p);
    const OwnTokens own(p);
    const int last = (own.end - 1) / FW_PART * FW_PART;
    float dw[TILES][4];
    int turn = 0, exponent = 0, of_memory = load_exponent(p, at, last);  // of dw, and of the memory of the next part
    if (threadIdx.x == 0) find_firsts(s.first, p, at);
    load_memory(dw, own.final ? p.dfinal : adjoint_of(p.adjoints, p.K * p.V), at, p);
    __syncthreads();
    load_part(s.stage[0], p, s.first, last);
    if (ROOMY) copy_border(s, p, at, last);
    wait_for(s.stage[0]);
    __syncthreads();
    if (ROOMY && last > own.begin) load_part(s.stage[1], p, s.first, last - FW_PART);
    prepare(part_of(s, 0), p.T - last);
    for (int t0 = last, now = 0; t0 >= own.begin; t0 -= FW_PART, now = (now + 1) % FW_STAGES) {
        const Part part = part_of(s, now), next = part_of(s, (now + 1) % FW_STAGES);
        const bool more = t0 > own.begin;
        if (!ROOMY && more) prefetch_part(p, s.first, at, t0 - FW_PART);
        run_forward(part, p, at, t0, more, turn, of_memory);
        for (int first = CHUNKS - GROUP; first >= 0; first -= GROUP) {
#if FW_PRECISION == F16 || FW_PRECISION == BF16
#pragma unroll
#endif
            for (int c = first + GROUP - 1; c >= first; c--) {
                const float total = scale_of(part.in.g.start + c * C + C - 1);
                value_side(part, at, c, dw, turn, exponent, [&](float (&x)[TILES][4]) { multiply_all(x, total); });
            }
            __syncthreads();
            each_turn<WARPS, 2 * GROUP>(at.warp, [&](int job) {
                if (job % 2 == 0) score_gradient(part, first + job / 2);
                else erase_gradient(part, first + job / 2);
            });
            __syncthreads();
#if FW_PRECISION == F16 || FW_PRECISION == BF16
#pragma unroll
#endif
            for (int c = first + GROUP - 1; c >= first; c--) key_side(part, p, at, c, t0);
            if (ROOMY && more) wait_for(next.in);
            __syncthreads();
        }
        if constexpr (AHEAD) {
            if (more) compare_all(next.in.g, next.q, next.k, s.scores, FW_F ? s.pairs : nullptr, s.erase, exponents_of(s));
            __syncthreads();
            if (at.warp >= INVERTERS) store_part<WARPS - INVERTERS>(part, p, at, t0, at.warp - INVERTERS);
            else if (more) invert_all(next.in.g.e, s.erase, s.inverse);
            __syncthreads();
        } else {
            store_part<WARPS>(part, p, at, t0, at.warp);
            __syncthreads();
            if (!ROOMY && more) {
                load_part(part.in, p, s.first, t0 - FW_PART);
                wait_for(part.in);
                __syncthreads();
            }
            if (more) prepare(next, p.T - t0 + FW_PART);
        }
        if (ROOMY && t0 > own.begin + FW_PART) load_part(part.in, p, s.first, t0 - 2 * FW_PART);
    }
    if (any_exponent(exponent)) scale_by(dw, power(-exponent));
    if (own.begin == 0 && p.dmemory) store_memory(dw, p.dmemory, at, p);
}
