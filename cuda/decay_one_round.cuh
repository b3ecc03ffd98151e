// The gradients of a chunk of one round. The results stay in the accumulators that they are summed in, 16 tokens and 16 channels to
// a warp; only what spans the gates goes through shared memory, to the lanes that hold a channel's gates.
#pragma once
#include "decay_gradients.cuh"

// 16 tokens and 16 channels of a chunk's operands, two neighbours at a time, as accumulators have them.
__device__ __forceinline__ void load_couples(float2 (&x)[4], const Operand* at, int ld) {
    if constexpr (FW_PRECISION == 0) {
        Block block;
        load_block<true, false>(block, at, ld);
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[i] = make_float2(__uint_as_float(block.hi[i] << 16), __uint_as_float(block.hi[i] & 0xFFFF0000u));
    } else {
        int g = lane_id() >> 2, t = lane_id() & 3;
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = load_operands(at + (g + 8 * (i % 2)) * ld + 8 * (i / 2) + 2 * t);
    }
}

// The transpose of a right side as a left side.
__device__ __forceinline__ void left_from_right(Block& left, const Block& right) {
    constexpr int EACH = FW_PRECISION == 0 ? 1 : 2;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int to = EACH * i + j, from = EACH * (2 * (i % 2) + i / 2) + j;
            left.hi[to] = right.hi[from];
            if constexpr (FW_PRECISION == 2) left.lo[to] = right.lo[from];
        }
}

__device__ __forceinline__ float2 couple_of(const Acc& acc, int i) {
    return make_float2(acc.c[i / 2][i % 2 * 2], acc.c[i / 2][i % 2 * 2 + 1]);
}

__device__ __forceinline__ float2 plus(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
__device__ __forceinline__ float2 times(float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); }
__device__ __forceinline__ float2 times(float a, float2 b) { return make_float2(a * b.x, a * b.y); }

// dv of a token's couple of channels, from the gradient of w v; returns what they add to dw.
__device__ __forceinline__ float put_value_gradients(const Params& p, int t, int column, float2 dwv) {
    if (t >= p.T) return 0.f;
    const int first = blockIdx.x * FW_V;
    float w = 1.f, dw = 0.f;
    if (FW_W) {
        const float2 v = to_float2(load_pair(row_of<const FW_IN>(p.v, t) + first, column, p.V - first, true, 0.f));
        w = *row_of<const float>(p.w, t);
        dw = v.x * dwv.x + v.y * dwv.y;
    }
    store_pair(row_of<FW_IN>(p.dv, t) + first, column, p.V - first, true, w * dwv.x, w * dwv.y);
    return dw;
}

// dQ^ and dK^, or Y^ and dV^, by the memory and by pairs, and the sum of W * dW, of 16 channels.
struct Results {
    Acc reads, writes, pairs, past;

    template <bool KEY, bool IN_HALVES>
    __device__ __forceinline__ void multiply_memories(const Shared& s, int chunk, int own) {
        constexpr int ACROSS = KEY ? FW_V : FW_K;
        constexpr bool GATED = KEY ? FW_F != 0 : FW_Z != 0, READS = KEY || GATED;
        Block left, right;
        clear(reads);
        clear(writes);
        clear(pairs);
        clear(past);
#pragma unroll(ACROSS <= 64 && FW_PRECISION == 0 ? ACROSS / 16 : 1)
        for (int across = 0; across < ACROSS; across += 16) {
            const int at = KEY ? across * FW_LDK + own : own * FW_LDK + across;
            Block memory;
            const float* between = (KEY ? s.scales.value[Scales::MIDDLE] : s.scales.key[Scales::MIDDLE]) + across;
            if (READS) {
                load_block<true, false>(left, (KEY ? s.dy : s.q) + across, ACROSS + 8);
                if (IN_HALVES) to_other_half(left, between, 1);
                load_block<false, KEY>(memory, s.memory[chunk] + at, FW_LDK);
                multiply(reads, left, memory);
            }
            load_block<true, false>(left, (KEY ? s.v[chunk] : s.k[chunk]) + across, ACROSS + 8);
            if (IN_HALVES) to_other_half(left, between, 0);
            load_block<false, KEY>(right, s.adjoint + at, FW_LDK);
            multiply(writes, left, right);
            if (GATED) {
                left_from_right(left, memory);
                if (IN_HALVES) to_other_half(left, between, 0), to_other_half(left, between, 1);
                multiply(past, left, right);
            }
        }
    }
};

// The gradients of one side's operands, 16 channels a warp at a time, and what spans the side's gates; where one of them is small,
// without the pairs. IN_HALVES: the memory is in the frame of the first half of the chunk and its adjoint in that of the second;
// results go to those of their tokens.
template <bool KEY, bool IN_HALVES>
__device__ __forceinline__ void take_side(const Params& p, Shared& s, int start, int chunk, bool small) {
    constexpr int OWN = KEY ? FW_K : FW_V, LD = OWN + 8;
    constexpr bool GATED = KEY ? FW_F != 0 : FW_Z != 0;
    const int warp = threadIdx.x >> 5, g = lane_id() >> 2, t = lane_id() & 3;
#pragma unroll 1
    for (int own = 16 * (KEY ? warp : FW_WARPS - 1 - warp); own < OWN; own += 16 * FW_WARPS) {
        Results x;
        x.multiply_memories<KEY, IN_HALVES>(s, chunk, own);
        float* sums = (KEY ? s.key[0] : s.value[0]) + own;
        float* past = (KEY ? s.past_key : s.past_value) + own;
        if (GATED && small) {
            float2 reads[4];
            load_couples(reads, (KEY ? s.q : s.dy) + own, LD);
#pragma unroll
            for (int i = 0; i < 4; i++)
                *(float2*)(sums + (g + 8 * (i % 2)) * LD + 8 * (i / 2) + 2 * t) = times(reads[i], couple_of(x.reads, i));
        }
        if (IN_HALVES) {
            const float* between = (KEY ? s.scales.key[Scales::MIDDLE] : s.scales.value[Scales::MIDDLE]) + own;
            multiply_scores<KEY, 0>(s, chunk, own, x.reads, x.pairs);
            to_other_half(x.reads, between, 1);
            to_other_half(x.pairs, between, 0);
            to_other_half(x.writes, between, 0);
            to_other_half(x.past, between, 0);
            to_other_half(x.past, between, 1);
            multiply_scores<KEY, 1>(s, chunk, own, x.reads, x.pairs);
        } else {
            multiply_scores<KEY>(s, chunk, own, x.reads, x.pairs);
        }
        if (GATED && g / 2 == t) {
            past[g] = g % 2 ? x.past.c[0][1] : x.past.c[0][0];
            past[g + 8] = g % 2 ? x.past.c[1][3] : x.past.c[1][2];
        }
        float2 reads[4], writes[4];
        float strength[2] = {};
        load_couples(reads, (KEY ? s.q : s.dy) + own, LD);
        load_couples(writes, (KEY ? s.k[chunk] : s.v[chunk]) + own, LD);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int late = i % 2, token = g + 8 * late, column = 8 * (i / 2) + 2 * t;
            float2 dread = couple_of(x.reads, i), dwrite = couple_of(x.writes, i), dpair = couple_of(x.pairs, i);
            float2 read_factor = make_float2(1.f, 1.f), write_factor = read_factor;
            if (GATED) {
                float* at = sums + token * LD + column;
                read_factor = *(const float2*)(at + 32 * LD);
                write_factor = make_float2(reciprocal(read_factor.x), reciprocal(read_factor.y));
                if (!small)
                    *(float2*)at = make_float2(reads[i].x * dread.x - writes[i].x * dpair.x,
                                               reads[i].y * dread.y - writes[i].y * dpair.y);
                *(float2*)(at + 16 * LD) = times(writes[i], dwrite);
            }
            const float self = s.self[KEY][token];
            dwrite = times(write_factor, plus(plus(dwrite, dpair), times(self, reads[i])));
            if (KEY) {
                dread = times(read_factor, plus(dread, times(self, writes[i])));
                put_key_gradients(s, p, start, token, own + column, dread, dwrite);
            } else {
                strength[late] += put_value_gradients(p, start + token, own + column, dwrite);
            }
        }
        if (KEY || !FW_W) continue;
#pragma unroll
        for (int late = 0; late < 2; late++) {
            float sum = strength[late] + __shfl_xor_sync(~0u, strength[late], 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const int at = start + g + 8 * late;
            if (t == 0 && at < p.T) *row_of<float>(p.dw, at, blockIdx.x * FW_STRENGTHS + own / 16) = sum;
        }
    }
}

// Adds the pairs of tokens on the two sides of each of a lane's gates one by one.
template <class J>
__device__ __forceinline__ void add_pairs(float2 (&sums)[8], const Shared& s, const J& job, int chunk) {
    constexpr int LD = (J::key ? FW_K : FW_V) + 8;
    const int column = job.active ? job.column : 0, first = 8 * job.late;
    const Operand *reads = (J::key ? s.q : s.dy) + column, *writes = (J::key ? s.k[chunk] : s.v[chunk]) + column;
    const Operand* scores = J::key ? s.dscores : s.scores;
    auto pair = [&](int reader, int writer) {  // 0 unless the writer comes first
        return times(to_float(scores[reader * FW_LDP + writer]), load_operands(writes + writer * LD));
    };
#pragma unroll 1
    for (int reader = first; reader < FW_CHUNK; reader++) {
        const float2 read = load_operands(reads + reader * LD);
        float2 earlier = make_float2(0.f, 0.f);  // writes before the gate, as this token reads them
#pragma unroll 1
        for (int writer = 0; writer < first; writer++) earlier = plus(earlier, pair(reader, writer));
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (first + j <= reader) sums[j] = plus(sums[j], times(read, earlier));
            earlier = plus(earlier, pair(reader, first + j));
        }
    }
}

// The same for a round of a chunk that takes several, whose tokens run outward from the middle.
template <class J>
__device__ __forceinline__ void add_pairs(float (&log_gate)[2][8], const Shared& s, const J& job, int chunk) {
    float2 sums[8];
#pragma unroll
    for (int j = 0; j < 8; j++)
        sums[j] = job.late ? make_float2(log_gate[0][j], log_gate[1][j]) : make_float2(log_gate[0][7 - j], log_gate[1][7 - j]);
    add_pairs(sums, s, job, chunk);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float2 sum = job.late ? sums[j] : sums[7 - j];
        log_gate[0][j] = sum.x;
        log_gate[1][j] = sum.y;
    }
}

// The gradients of a lane's gates: a gate is spanned by what goes past the chunk, by reads from the memory at its token and after
// it, by writes before it, and by pairs of tokens on its two sides.
template <class J>
__device__ __forceinline__ void take_gates(const Params& p, const Shared& s, const J& job, const float (&gate)[2][8], int start,
                                           int chunk, bool small) {
    constexpr int LD = (J::key ? FW_K : FW_V) + 8;
    if constexpr (!J::gated) return;
    const int column = job.active ? job.column : 0;
    const float *after = (J::key ? s.key[0] : s.value[0]) + column, *before = after + 16 * LD;
    const float* other = (job.late ? before : after) + job.other_token(0) * LD;  // all of it spans the lane's gates
    after += job.token(0) * LD, before += job.token(0) * LD;
    const float2 past = *(const float2*)((J::key ? s.past_key : s.past_value) + column);
    float2 all = make_float2(0.f, 0.f), sums[8];
#pragma unroll
    for (int j = 0; j < 8; j++) all = plus(all, *(const float2*)(other + j * LD));
    float2 run = plus(past, all);
#pragma unroll
    for (int j = 7; j >= 0; j--) sums[j] = run = plus(run, *(const float2*)(after + j * LD));
    run = make_float2(0.f, 0.f);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        sums[j] = plus(sums[j], run);
        run = plus(run, *(const float2*)(before + j * LD));
    }
    if (small) add_pairs(sums, s, job, chunk);
    const Tensor& to = J::key ? p.df : p.dz;
    store_eight<float>(p, job, to, start, J::key ? blockIdx.x : 0, [&](int j) {
        return make_float2(sums[j].x * reciprocal(gate[0][j]), sums[j].y * reciprocal(gate[1][j]));
    });
}
