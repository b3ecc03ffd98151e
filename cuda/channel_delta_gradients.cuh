// The gradients of a chunk that end in channels of K, in the order that channel_delta_backward.cu takes them.
#pragma once
#include "channel_delta_parts.cuh"
#include "erase_gradients.cuh"

// Two channels of four tokens from t on to a gradient of this block, which begins at `first`.
template <class T>
__device__ __forceinline__ void store_four(void* first, const View& x, const Params& p, int t, int channel,
                                           const float2 (&value)[4]) {
    T* to = (T*)first + t * x.t + channel;
    const int columns = p.K - channel;
    if (FW_ALIGNED && t + 4 <= p.T && columns > 0) {
#pragma unroll
        for (int i = 0; i < 4; i++) store_couple(to + i * x.t, value[i].x, value[i].y);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (t + i < p.T && columns > 0) to[i * x.t] = from_float<T>(value[i].x);
        if (t + i < p.T && columns > 1) to[i * x.t + 1] = from_float<T>(value[i].y);
    }
}

// A lane has two channels of four tokens. Lanes 8 apart have the same channels of the next four: f is called with what they have
// before them, in order, or behind them.
template <bool BEHIND, class F>
__device__ __forceinline__ float2 scan(float2 x, float2 none, F f) {
    const int lane = threadIdx.x & 31, quarter = BEHIND ? 3 - (lane >> 3) : lane >> 3;
    const auto from = [&](float2 y, int distance) {
        return BEHIND ? make_float2(__shfl_down_sync(~0u, y.x, distance), __shfl_down_sync(~0u, y.y, distance))
                      : make_float2(__shfl_up_sync(~0u, y.x, distance), __shfl_up_sync(~0u, y.y, distance));
    };
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
        const float2 other = from(x, 8 * distance);
        if (quarter >= distance) x = f(x, other);
    }
    x = from(x, 8);
    return quarter ? x : none;
}

__device__ __forceinline__ float2 add(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
__device__ __forceinline__ float2 add_product(float2 a, float2 b, float2 c) {
    return make_float2(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y));
}

__device__ __forceinline__ float2 inverse(float2 x) { return make_float2(reciprocal(x.x), reciprocal(x.y)); }

// dq, dk, dp and df of the warp's channels from j on, chunk c of a near part. With F_t the products of f, a gate's log has the sum of
// what spans it: of reads from it on, less the pairs that begin there too, and of writes before it.
__device__ __forceinline__ void store_near(const Part& part, const Sums& sums, const Params& p, const Place& at, int c, int j, int t0) {
    const int own = 2 * (at.lane & 7), first = (at.lane >> 3) * 4, channel = j + own, t = t0 + c * C + first;
    float2 gate[4], start[4], reads[4], writes[4], dq[4], dk[4], dp[4], whole = ones(), later = make_float2(0.f, 0.f), earlier = later;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        gate[i] = couple(part.in.f + (c * C + first + i) * FLOAT_ROW + channel);
        start[i] = whole = product(whole, gate[i]);
    }
    const float2 before = scan<false>(whole, ones(), product);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = (c * C + first + i) * KEY_ROW + channel, place = (first + i) * SUM_ROW + own;
        const float2 read = couple(sums.q + place), erased = couple(sums.p + place), ends = couple(sums.k + place);
        const float2 pairs = couple(sums.pairs + place), key = couple(part.in.k + row), scale = product(before, start[i]);
        dq[i] = product(scale, read), dp[i] = product(scale, erased);
        dk[i] = product(inverse(scale), add(ends, pairs));
        if (FW_E == 1) dk[i] = add(dk[i], dp[i]);
        reads[i] = add_product(couple(part.in.q + row), read, product(couple(part.s.p + row), erased));
        reads[i] = make_float2(fmaf(-key.x, pairs.x, reads[i].x), fmaf(-key.y, pairs.y, reads[i].y));
        writes[i] = product(key, ends);
        later = add(later, reads[i]), earlier = add(earlier, writes[i]);
    }
    const Firsts& firsts = part.s.first;
    store_four<Key>(firsts.dq, p.dq, p, t, channel, dq);
    store_four<Key>(firsts.dk, p.dk, p, t, channel, dk);
    if (FW_E == 2) store_four<float>(firsts.de, p.de, p, t, channel, dp);
    later = scan<true>(later, make_float2(0.f, 0.f), add);
    earlier = add(scan<false>(earlier, make_float2(0.f, 0.f), add), couple(sums.passing + own));
    float2 df[4];
#pragma unroll
    for (int i = 3; i >= 0; i--) df[i] = later = add(later, reads[i]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        df[i] = product(add(df[i], earlier), inverse(gate[i]));
        earlier = add(earlier, writes[i]);
    }
    store_four<float>(firsts.df, p.df, p, t, channel, df);
}

// A number of an input row as it came, 0 where there is none.
template <class T>
__device__ __forceinline__ float raw(const View& x, const Params& p, const Place& at, int t, int channel) {
    return t < p.T && channel < p.K ? to_float(::at<const T>(x, at.b, at.h, t)[channel]) : 0.f;
}

template <class T>
__device__ __forceinline__ void store_raw(const View& x, const Params& p, const Place& at, int t, int channel, float value) {
    if (t < p.T && channel < p.K) ::at<T>(x, at.b, at.h, t)[blockIdx.y * x.tile + channel] = from_float<T>(value);
}

// The same of a far part, a lane for a channel. No product of gates is divided by one: the gradient of gate r is a sum of products that
// leave it out.
__device__ __forceinline__ void store_far(const Part& part, Sums& sums, const Params& p, const Place& at, int c, int j, int t0) {
    const int own = at.lane, channel = j + own, first = t0 + c * C;
    if (own >= C) return;
    const float* f = part.in.f + c * C * FLOAT_ROW + channel;
    const auto key_of = [&](int t) { return raw<In>(p.k, p, at, first + t, channel); };
    float q[C], erasing[C];
#pragma unroll
    for (int t = 0; t < C; t++) {
        q[t] = raw<In>(p.q, p, at, first + t, channel);
        erasing[t] = FW_E == 2 ? raw<float>(p.e, p, at, first + t, channel) : key_of(t);
    }
    float df[C], x[C], start[C], run = 1.f;
#pragma unroll
    for (int t = 0; t < C; t++) df[t] = run, start[t] = run *= f[t * FLOAT_ROW];  // df: start before t
    const float passing = sums.passing[own];
    float later = 0.f, end = 1.f;
#pragma unroll
    for (int t = C - 1; t >= 0; t--) {  // reads of the memory that span t, and what passes the chunk
        float &dq = sums.q[t * SUM_ROW + own], &dp = sums.p[t * SUM_ROW + own];
        later = q[t] * dq + erasing[t] * dp + (t + 1 < C ? f[(t + 1) * FLOAT_ROW] : 0.f) * later;
        dq *= start[t], dp *= start[t];
        df[t] *= later + end * passing;
        x[t] = end;
        end *= f[t * FLOAT_ROW];
    }
    float earlier = 0.f;
#pragma unroll
    for (int t = 0; t < C; t++) {  // writes into the memory that span t
        float& dk = sums.k[t * SUM_ROW + own];
        df[t] += x[t] * earlier;
        earlier = f[t * FLOAT_ROW] * earlier + (FW_E == 2 ? key_of(t) : erasing[t]) * dk;
        dk *= x[t];
    }
    const Op *scores = part.s.scores[c], *erase = part.s.dkeys[0];
#pragma unroll 1
    for (int s = 0; s < C; s++) {  // pairs of which s is the key
        const float key = key_of(s);
        float left = key, sum = 0.f;
#pragma unroll
        for (int t = 0; t < C; t++) {
            if (t > s) left *= f[t * FLOAT_ROW];
            x[t] = left;
        }
#pragma unroll
        for (int t = C - 1; t >= 0; t--) {
            if (t < s) continue;
            const float read = to_float(scores[t * PAIR_ROW + s]), erased = t > s ? to_float(erase[t * PAIR_ROW + s]) : 0.f;
            sums.q[t * SUM_ROW + own] += read * x[t];
            sums.p[t * SUM_ROW + own] += erased * x[t];
            sum = read * q[t] + erased * erasing[t] + (t + 1 < C ? f[(t + 1) * FLOAT_ROW] : 0.f) * sum;
            if (t > s) df[t] += x[t > 0 ? t - 1 : 0] * sum;
        }
        sums.k[s * SUM_ROW + own] += sum;
    }
#pragma unroll
    for (int t = 0; t < C; t++) {
        const float dp = sums.p[t * SUM_ROW + own], dk = sums.k[t * SUM_ROW + own];
        store_raw<Key>(p.dq, p, at, first + t, channel, sums.q[t * SUM_ROW + own]);
        store_raw<Key>(p.dk, p, at, first + t, channel, FW_E == 2 ? dk : dk + dp);
        if (FW_E == 2) store_raw<float>(p.de, p, at, first + t, channel, dp);
        store_raw<float>(p.df, p, at, first + t, channel, df[t]);
    }
}

// The products that end in columns of K: a warp takes 16 of them from products to gradients.
template <bool NEAR>
__device__ __forceinline__ void key_side(const Part& part, const Params& p, const Place& at, int c, int t0) {
    BackwardShared& s = part.s;
    const Chunk chunk = part.chunk(c);
    const Op *dy_rows = part.in.dy + c * C * VALUE_ROW, *dr_columns = s.dr[0], *u_columns = s.u[c];
    Sums& sums = s.columns[at.warp];
    float de[2] = {};
    each_turn<WARPS * 16, FW_K>(at.warp * 16, [&](int j) {
        float dq[2][4] = {}, dp[2][4] = {}, dk[2][4] = {}, passing[2][4] = {};
#pragma unroll(P == EXACT ? 1 : FW_V / 16)  // unrolled, fp32 has more fragments than registers
        for (int i = 0; i < FW_V; i += 16) {
            Right<P> b[2];
            right_from<P, true>(b, s.memory[c] + i * KEY_ROW + j, KEY_ROW);
            const Left<P> dy = left_from<P, false>(dy_rows + i, VALUE_ROW);
            const Left<P> dr = left_from<P, true>(dr_columns + i * PAIR_ROW, PAIR_ROW);
            multiply<P>(dq[0], dy, b[0]);
            multiply<P>(dq[1], dy, b[1]);
            multiply<P>(dp[0], dr, b[0]);
            multiply<P>(dp[1], dr, b[1]);
            const Left<P> adjoint = left_from<P, true>(s.dmemory[0] + i * KEY_ROW + j, KEY_ROW);  // of which the diagonal counts
            multiply<P>(passing[0], adjoint, b[0]);
            multiply<P>(passing[1], adjoint, b[1]);
            const Left<P> u = left_from<P, true>(u_columns + i * PAIR_ROW, PAIR_ROW);
            multiply_from<P, true>(dk, u, s.dmemory[0] + i * KEY_ROW + j, KEY_ROW);
        }
        if (FW_E == 1) {
            float key[2][4];
            load_straight(key, chunk.p + j, KEY_ROW);
#pragma unroll
            for (int i = 0; i < 8; i++) de[i >> 1 & 1] += key[i >> 2][i & 3] * dp[i >> 2][i & 3];
        }
#pragma unroll
        for (int i = 0; i < 8; i++) dp[i >> 2][i & 3] *= -chunk.erasing[lane_row() + (i >> 1 & 1) * 8];
        const int place = lane_row() - lane_column();
        if (place == 0 || place == 1) {
            sums.passing[lane_row()] = place ? passing[0][1] : passing[0][0];
            sums.passing[lane_row() + 8] = place ? passing[1][3] : passing[1][2];
        }
        if constexpr (NEAR) {
            float pairs[2][4] = {};
            Right<P> b[2];
            right_from<P, true>(b, chunk.k + j, KEY_ROW);
            const Left<P> reads = left_from<P, false>(chunk.scores, PAIR_ROW), erased = left_from<P, false>(s.dkeys[0], PAIR_ROW);
            multiply<P>(dq[0], reads, b[0]);
            multiply<P>(dq[1], reads, b[1]);
            multiply<P>(dp[0], erased, b[0]);
            multiply<P>(dp[1], erased, b[1]);
            multiply_from<P, true>(pairs, left_from<P, true>(chunk.scores, PAIR_ROW), chunk.q + j, KEY_ROW);
            multiply_from<P, true>(pairs, left_from<P, true>(s.dkeys[0], PAIR_ROW), chunk.p + j, KEY_ROW);
            put_square<false>(sums.pairs, SUM_ROW, pairs[0], pairs[1]);
        }
        put_square<false>(sums.q, SUM_ROW, dq[0], dq[1]);
        put_square<false>(sums.p, SUM_ROW, dp[0], dp[1]);
        put_square<false>(sums.k, SUM_ROW, dk[0], dk[1]);
        __syncwarp();
        if constexpr (NEAR) store_near(part, sums, p, at, c, j, t0);
        else store_far(part, sums, p, at, c, j, t0);
        __syncwarp();
    });
    if (FW_E == 1) sum_halves(s.erased[c][at.warp], de[0], de[1]);
}
