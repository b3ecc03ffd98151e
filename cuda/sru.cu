// The scan of simple recurrent units over time and its gradients. A thread owns one unit of one sequence through all steps:
//
//     f = sigmoid(F + v_f c')      c = f c' + (1 - f) u      c' the state before, 0 where a text begins
//     r = sigmoid(R + v_r c')      h = r c + (1 - r) x       a padded step leaves c = c' and h = 0
//
// Memory bandwidth bounds the speed: the forward reads u, F, R, x and writes h, and saves c in fp32 for the backward. The backward
// reads those five and dh, writes four gradients, and computes f and r again. Only c waits for the step before, so the loads of
// FW_STEPS steps are in flight while the steps before them are computed. v_f and v_r get one sum per sequence, added up by torch.
//
// Macros: FW_IN (type of u, F, R, h), FW_X (type of x), FW_PADDING, FW_RESETS (0, 1), FW_KEEP (forward: 1 writes c), FW_STEPS.
#include "common.cuh"

struct View {  // element (t, b, d) is at p[t * stride_t + b * stride_b + d]
    void* p;
    long long stride_t, stride_b;
};

struct Params {
    View u, forget, reset, x, h, c;           // c: after each step
    View du, dforget, dreset, dx, dh;
    View padding, resets;                     // bool, without d
    const float *v_forget, *v_reset, *first;  // (D), (D), (B,D)
    float *last, *dfirst, *dv_forget, *dv_reset;
    const float* dlast;
    int T, B, D;
};

template <class T>
__device__ __forceinline__ T* at(const View& x, int t, int b, int d) {
    return (T*)x.p + t * x.stride_t + b * x.stride_b + d;
}

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

struct Step {
    float u, forget, reset, x;
    bool skipped, begins;
};

__device__ __forceinline__ Step load(const Params& p, int t, int b, int d) {
    Step s;
    s.u = to_float(*at<const FW_IN>(p.u, t, b, d));
    s.forget = to_float(*at<const FW_IN>(p.forget, t, b, d));
    s.reset = to_float(*at<const FW_IN>(p.reset, t, b, d));
    s.x = to_float(*at<const FW_X>(p.x, t, b, d));
    s.skipped = FW_PADDING && *at<const bool>(p.padding, t, b, 0);
    s.begins = FW_RESETS && *at<const bool>(p.resets, t, b, 0);
    return s;
}

extern "C" __global__ void __launch_bounds__(32) sru_forward(const Params p) {
    const int unit = blockIdx.x * 32 + threadIdx.x;
    if (unit >= p.B * p.D) return;
    const int b = unit / p.D, d = unit % p.D;
    const float v_forget = p.v_forget[d], v_reset = p.v_reset[d];
    float c = p.first[unit];
    Step now[FW_STEPS], next[FW_STEPS];
#pragma unroll
    for (int i = 0; i < FW_STEPS; i++) {
        if (i < p.T) next[i] = load(p, i, b, d);
    }
    for (int start = 0; start < p.T; start += FW_STEPS) {
#pragma unroll
        for (int i = 0; i < FW_STEPS; i++) {
            now[i] = next[i];
            if (start + FW_STEPS + i < p.T) next[i] = load(p, start + FW_STEPS + i, b, d);
        }
#pragma unroll
        for (int i = 0; i < FW_STEPS; i++) {
            if (start + i < p.T) {
                const Step s = now[i];
                const float past = s.begins ? 0.f : c;
                const float f = sigmoid(s.forget + v_forget * past), r = sigmoid(s.reset + v_reset * past);
                c = s.skipped ? past : s.u + f * (past - s.u);
                *at<FW_IN>(p.h, start + i, b, d) = from_float<FW_IN>(s.skipped ? 0.f : s.x + r * (c - s.x));
#if FW_KEEP
                *at<float>(p.c, start + i, b, d) = c;
#endif
            }
        }
    }
    p.last[unit] = c;
}

struct StepBack {
    Step step;
    float dh, before;
};

__device__ __forceinline__ StepBack load_back(const Params& p, int t, int b, int d, int unit) {
    return {load(p, t, b, d), to_float(*at<const FW_IN>(p.dh, t, b, d)),
            t ? *at<const float>(p.c, t - 1, b, d) : p.first[unit]};
}

extern "C" __global__ void __launch_bounds__(32) sru_backward(const Params p) {
    const int unit = blockIdx.x * 32 + threadIdx.x;
    if (unit >= p.B * p.D) return;
    const int b = unit / p.D, d = unit % p.D;
    const float v_forget = p.v_forget[d], v_reset = p.v_reset[d];
    float dc = p.dlast[unit], c = p.last[unit], dv_forget = 0.f, dv_reset = 0.f;
    StepBack now[FW_STEPS], next[FW_STEPS];
#pragma unroll
    for (int i = 0; i < FW_STEPS; i++) {
        if (i < p.T) next[i] = load_back(p, p.T - 1 - i, b, d, unit);
    }
    for (int end = p.T - 1; end >= 0; end -= FW_STEPS) {
#pragma unroll
        for (int i = 0; i < FW_STEPS; i++) {
            now[i] = next[i];
            if (end - FW_STEPS - i >= 0) next[i] = load_back(p, end - FW_STEPS - i, b, d, unit);
        }
#pragma unroll
        for (int i = 0; i < FW_STEPS; i++) {
            const int t = end - i;
            if (t >= 0) {
                const Step s = now[i].step;
                const float past = s.begins ? 0.f : now[i].before, dh = s.skipped ? 0.f : now[i].dh;
                const float f = sigmoid(s.forget + v_forget * past), r = sigmoid(s.reset + v_reset * past);
                const float dnew = s.skipped ? 0.f : dc + dh * r;
                const float dforget = dnew * (past - s.u) * f * (1.f - f), dreset = dh * (c - s.x) * r * (1.f - r);
                *at<FW_IN>(p.du, t, b, d) = from_float<FW_IN>(dnew * (1.f - f));
                *at<FW_IN>(p.dforget, t, b, d) = from_float<FW_IN>(dforget);
                *at<FW_IN>(p.dreset, t, b, d) = from_float<FW_IN>(dreset);
                *at<FW_X>(p.dx, t, b, d) = from_float<FW_X>(dh * (1.f - r));
                dv_forget += dforget * past;
                dv_reset += dreset * past;
                dc = s.skipped ? dc : dnew * f + v_forget * dforget + v_reset * dreset;
                dc = s.begins ? 0.f : dc;
                c = now[i].before;
            }
        }
    }
    p.dfirst[unit] = dc;
    p.dv_forget[unit] = dv_forget;
    p.dv_reset[unit] = dv_reset;
}
