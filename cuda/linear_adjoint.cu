// The adjoint dW of the memory before each part of the tokens but the first, for linear_backward.cu, whose blocks then take the parts
// side by side. With the names of linear.cu, from the last chunk on,
//
//     dW_0 = total dW_C + Q^T (start dY)
//
// and with FW_SUMS that of the sum of the keys, dn_0 = total dn_C + Q^T (start dr). A block owns FW_V columns of dW, as in linear.cu.
#define FW_NO_GATE 1e-30f  // as in the backward
#include "linear.cuh"

struct __align__(16) Stage {
    Row q[C * ROW];
    Op dy[C * VALUE_ROW];
    float f[C];
#if FW_SUMS
    float reads[C];  // dr
#endif
};

struct __align__(16) Shared {
    Stage stage[2];
#if FW_MAP
    Op q[C * KEY_ROW];
#endif
    Products products[FW_F ? WARPS : 1];
};
static_assert(sizeof(Shared) == FW_SHARED, "the host computes the same");

__device__ __forceinline__ void load_stage(Stage& s, const Params& p, const Place& at, int t0) {
    load_tile<In, Row, C, ROW_WIDTH>(s.q, p.q, at.b, at.h, t0, p.T, 0, row_width(p));
    load_tile<In, Op, C, FW_V>(s.dy, p.dy, at.b, at.h, t0, p.T, blockIdx.y * FW_V, p.V);
    load_gates(s.f, nullptr, p, at, t0);
#if FW_SUMS
    load_numbers(s.reads, p.ddivisors, at, t0, blockIdx.y == 0 ? p.T : 0);
#endif
    cp_async_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) linear_adjoint(const Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Shared& shared = *(Shared*)bytes;
    const Place at(p);
    Products& x = shared.products[FW_F ? at.warp : 0];
    const int last = (p.T - 1) / C * C;
    Border<true> border(p);
    float dw[TILES][4];
    load_memory(dw, p.dfinal, at, p);
    KeySums dn(at);
    if (FW_SUMS) dn.load(blockIdx.y ? nullptr : p.dfinal_sums, p, at);
    load_stage(shared.stage[0], p, at, last);
    for (int t0 = last, now = 0; t0 >= p.part; t0 -= C, now ^= 1) {
        Stage& s = shared.stage[now];
        cp_async_wait<0>();
        __syncthreads();
        if (t0 > p.part) load_stage(shared.stage[now ^ 1], p, at, t0 - C);
#if FW_MAP
        map_rows<C>(shared.q, s.q, p.T - t0);
        __syncthreads();
        const Op* q = shared.q;
#else
        const Op* q = s.q;
#endif
        if (FW_F) multiply_gates(x, s.f, p.T - t0);
        const float total = FW_F ? x.before[BLOCKS - 1] * x.total[BLOCKS - 1] : 1.f;
        const auto start = [&](int b, int t) { return FW_F ? x.start[t] * x.before[b] : 1.f; };
        write_tokens<FW_F, false>(dw, s.dy, q, total, at, start);
#if FW_SUMS
        dn.write(q, total, [&](int b, int t) { return start(b, t) * s.reads[t]; });
#endif
        if (t0 == border.token) {
            store_memory(dw, adjoint_of(p.adjoints, p.K * p.V, border.place), at, p);
            if (FW_SUMS) dn.store(adjoint_of(p.adjoint_sums, p.K, border.place), p, at);
            border.go_on(p);
        }
        __syncwarp();
    }
}
