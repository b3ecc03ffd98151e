// Where the parts are that the backward of the two families with erase reads and writes.
#pragma once
#include "erase.cuh"

static_assert(FW_SPAN == FW_PART, "a part at a time");

using Key = typename KeyGradient<FW_PARTIAL>::type;

// Where a block's sequence, head and tile of V begin: worked out once, by one thread, and read where an address is needed.
struct Firsts {
    void *q, *k, *v, *f, *e, *w, *dy, *dq, *dk, *dv, *df, *de, *dw;
};

template <class T>
__device__ __forceinline__ void* first_of(const View& x, const Place& at, int column) {
    return ::at<T>(x, at.b, at.h, 0) + blockIdx.y * x.tile + column;
}

__device__ __forceinline__ void find_firsts(Firsts& first, const Params& p, const Place& at) {
    const int column = blockIdx.y * FW_V;
    first.q = first_of<In>(p.q, at, 0), first.k = first_of<In>(p.k, at, 0);
    first.v = first_of<In>(p.v, at, column), first.dy = first_of<In>(p.dy, at, column), first.dv = first_of<In>(p.dv, at, column);
    first.dq = first_of<Key>(p.dq, at, 0), first.dk = first_of<Key>(p.dk, at, 0);
    first.f = first_of<float>(p.f, at, 0), first.e = first_of<float>(p.e, at, 0), first.w = first_of<float>(p.w, at, 0);
    first.df = first_of<float>(p.df, at, 0), first.de = first_of<float>(p.de, at, 0), first.dw = first_of<float>(p.dw, at, 0);
}

// A view of one sequence, head and tile, which begins at `first`.
__device__ __forceinline__ View view_from(void* first, const View& x) { return {first, 0, 0, x.t, 0}; }

__device__ __forceinline__ bool whole_part(const Params& p, int t0) {
    return t0 + FW_SPAN <= p.T && p.K == FW_K && p.V - (int)blockIdx.y * FW_V >= FW_V;
}
