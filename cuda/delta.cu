// The recurrence with erase (rules delta, gated_delta), forward:
//
//     W_t = f_t W_{t-1} - e_t k_t (f_t W_{t-1}^T k_t)^T + w_t k_t v_t^T,    y_t = W_t^T q_t
//
// A block owns one sequence and head and FW_V columns of the memory. They stay in fp32 in the accumulators of its warps from the
// first token to the last, transposed: a warp's 16 columns are the rows of its tiles. So the accumulators are the left operand of
// the reads without a move, and so are the written values for the update. Columns do not depend on each other: between two loads of
// FW_SPAN tokens the warps of the forward do not wait for each other, unless FW_KSPLIT of them share a column. Chunks are 16
// tokens:
//
//     R = w V - e start (K W_0),   U = (I + e E)^-1 R,   Y = start (Q W_0) + A U,   W_C = start_C W_0 + K^T (end U)
//
// with A = tril(D Q K^T), E = strict tril(D K K^T) and D, start, end the products of f between two tokens, since the chunk's start
// and until its end (delta.cuh). The matrices that do not depend on W are computed for all chunks of a span at once.
//
// Memory bandwidth bounds the speed: q, k, v are read once and y is written once. Saved for the backward: the memory every FW_PART
// tokens. A gate of 0 is taken as it is.
#define FW_NO_GATE 0.f
#include "delta.cuh"

constexpr int STAGES = 2 + FW_AHEAD;

struct __align__(16) Stage {
    Row q[FW_SPAN * ROW], k[FW_SPAN * ROW];
    In v[FW_SPAN * INPUT_ROW];
    Gates g;
};

struct __align__(16) ForwardShared {
    Stage stage[STAGES];
#if FW_MAP
    Op q[FW_SPAN * KEY_ROW], k[FW_SPAN * KEY_ROW];
#endif
    Prepared prepared[1 + FW_AHEAD];
    float4 sums[FW_KSPLIT > 1 ? 2 * WARPS * 4 * 32 : 1];
};

__device__ __forceinline__ void load_stage(Stage& s, const Params& p, const Place& at, int t0) {
    load_rows<FW_SPAN>(s.q, s.k, p, at.b, at.h, t0);
    load_tile<In, In, FW_SPAN, FW_V>(s.v, p.v, at.b, at.h, t0, p.T, blockIdx.y * FW_V, p.V);
    load_gates(s.g, p, at.b, at.h, t0);
    cp_async_commit();
}

static_assert(sizeof(ForwardShared) == FW_SHARED, "the host computes the same");

extern "C" __global__ void __launch_bounds__(THREADS, 1) delta_forward(const Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    ForwardShared& shared = *(ForwardShared*)bytes;
    const Place at(p);
    float w[TILES][4];
    int turn = 0, exponent = 0;
    if (!at.is_ahead()) load_memory(w, p.memory, at, p);
    load_stage(shared.stage[0], p, at, 0);
    // with FW_AHEAD there is a turn before the first span, and the copies are one more ahead
    for (int t0 = -FW_AHEAD * FW_SPAN, now = FW_AHEAD ? 2 : 0; t0 < p.T; t0 += FW_SPAN, now = (now + 1) % STAGES) {
        Stage& s = shared.stage[now];
        const int turn_of_two = t0 / FW_SPAN & FW_AHEAD;
        cp_async_wait<0>();
        __syncthreads();
        const int coming = t0 + FW_SPAN * (1 + FW_AHEAD);
        if (coming < p.T) load_stage(shared.stage[(now + 1 + FW_AHEAD) % STAGES], p, at, coming);
#if FW_AHEAD
        if (at.is_ahead()) {
            Stage& next = shared.stage[(now + 1) % STAGES];
            if (t0 + FW_SPAN < p.T) prepare_ahead(next.g, next.q, next.k, shared.prepared[turn_of_two ^ 1]);
            continue;
        }
        if (t0 < 0) continue;
#endif
#if FW_MAP
        map_rows<FW_SPAN>(shared.q, shared.k, s.q, s.k, p.T - t0);
        __syncthreads();
        const Op *q = shared.q, *k = shared.k;
#else
        const Op *q = s.q, *k = s.k;
#endif
        Prepared& prepared = shared.prepared[turn_of_two];
        if (!FW_AHEAD) prepare(s.g, q, k, prepared);
#if FW_AHEAD || FW_PRECISION == BF16
#pragma unroll
#elif FW_PRECISION == F16
#pragma unroll 2  // others are better off without
#endif
        for (int c = 0; c < CHUNKS && t0 + c * C < p.T; c++) {
            const int t = c * C;
            const Chunk chunk = chunk_of(q, k, s.v + t * INPUT_ROW, s.g, prepared, c);
            float u[2][4], y[2][4];
            Left<P> written;
            const auto save = [&](int token) {
                if (!p.borders || token % FW_PART != 0 || !has_memory(p, token)) return;
                save_border(w, border(p, at, token / FW_PART));
                if (P == F16 && at.has_first_rows() && at.lane == 0) *border_exponent(p, at, token / FW_PART) = exponent;
            };
            save(t0 + t);
            recall<true>(at, chunk, w, u, y, written, shared.sums, turn, exponent, [&] { save(unknown(t0 + t)); });
            advance(at, chunk, w, u, written);
            if (at.has_first_rows()) {  // y takes the place of v
                put_square<true>(s.v + t * INPUT_ROW + at.local(), INPUT_ROW, y[0], y[1]);
            }
        }
        __syncwarp();
        if (at.has_first_rows()) store_columns<FW_SPAN>(s.v + at.local(), p.y, at.b, at.h, t0, p.T, at.column, p.V);
    }
    if (at.is_ahead() || !p.final) return;
    if (any_exponent(exponent)) scale_by(w, power(-exponent));
    store_memory(w, p.final, at, p);
}
