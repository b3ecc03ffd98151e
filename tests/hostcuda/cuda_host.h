// cuda_host.h - run CUDA device code (.cu written for NVRTC) on the CPU: g++ -x c++ -include cuda_host.h k.cu
// One block at a time; each CUDA thread is a fiber; sync points are switch points. half/bf16/float4 come from NVIDIA's headers.
#pragma once
#define CUDA_HOST_EMU 1
#include <cstdint>
#include <cstdio>
#include <cstdarg>
#include <cstring>
#include <cstdlib>
#include <cmath>
#include <utility>
#include <type_traits>
#include <csetjmp>
#include <csignal>
#include <sys/mman.h>
#include <immintrin.h>
#include <vector_types.h>
#include <vector_functions.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#undef __forceinline__
#undef __align__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __shared__ static          // the loader adds CUHOST_SHARED(name) and rewrites `extern __shared__`
#define __constant__ static
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#ifdef __SANITIZE_THREAD__          // happens-before race detection: fibers are TSan "threads"
extern "C" { void* __tsan_get_current_fiber(); void* __tsan_create_fiber(unsigned); void __tsan_switch_to_fiber(void*, unsigned); void __tsan_acquire(void*); void __tsan_release(void*); }
#define CH_TSAN(x) x
#else
#define CH_TSAN(x)
#endif
#define CH_NS __attribute__((no_sanitize("thread"), noinline, unused))
namespace cuhost {
constexpr int MAXT = 1024; constexpr size_t STACK = 256 << 10;
using CollFn = void (*)(void** p, unsigned lanes);
constexpr int MAX_COPIES = 256;
struct Copy { void* d; const void* s; int size, n, grp; };
struct Fiber { void* sp; void* tsan; uint3 tid; int lin; bool done; int line; Copy cp[MAX_COPIES]; int ncp, cgrp; };
struct Group { unsigned mask, arrived; int op; CollFn fn; void* p[32]; };
struct Bar { int arrived, nw, line, gen; int acc[3], res[2][3]; int who[MAXT]; };
struct State {
  Fiber f[MAXT]; Fiber main; Group g[32][32]; unsigned live[32]; Bar bar[16];
  int q[MAXT], qh, qn, n, alive, policy; int word[32]; unsigned rdy[32]; uint64_t rng, switches; char* stacks; char err[512]; bool failed, active;
  void (*call)(void**); void** args; uint3 bid; dim3 bdim, gdim; char* dyn; size_t ndyn; sigjmp_buf jb;
  struct { void* p; long blk; } sh[64]; int nsh; long blk; char blk_in, blk_out;
};
static State& S() { static State* s = (State*)calloc(1, sizeof(State)); return *s; }
static State& st = S();
static Fiber* cur;
#ifndef __x86_64__
#error "port cuhost_switch (or use ucontext) for this CPU"
#endif
extern "C" void cuhost_switch(void** save, void* to);
asm(".text\n.type cuhost_switch,@function\ncuhost_switch:\n pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    " movq %rsp,(%rdi)\n movq %rsi,%rsp\n popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
CH_NS static void go(Fiber* to) { Fiber* me = cur; if (to == me) return; cur = to; st.switches++;
  CH_TSAN(__tsan_switch_to_fiber(to->tsan, 1);) cuhost_switch(&me->sp, to->sp); }
CH_NS static void fail(int line, const char* fmt, ...) {
  va_list ap; va_start(ap, fmt); char b[320]; vsnprintf(b, sizeof b, fmt, ap); va_end(ap);
  if (!st.failed) snprintf(st.err, sizeof st.err, "line %d, block (%u,%u,%u) thread %d: %s", line, st.bid.x, st.bid.y, st.bid.z, cur ? cur->lin : -1, b);
  st.failed = true; go(&st.main); __builtin_unreachable(); }
static uint64_t rnd() { st.rng ^= st.rng << 13; st.rng ^= st.rng >> 7; return st.rng ^= st.rng << 17; }
CH_NS static void push(int i) { if (st.policy == 3) st.rdy[i >> 5] |= 1u << (i & 31); else st.q[(st.qh + st.qn++) % MAXT] = i; }
CH_NS static void new_prio() { for (int i = 0; i < 32; i++) st.word[i] = i; for (int i = (st.n + 31) / 32 - 1; i > 0; i--) std::swap(st.word[i], st.word[rnd() % (i + 1)]); }
CH_NS static Fiber* pick() {                 // 0 FIFO, 1 reverse (LIFO), 2 uniform random, 3 random warp priorities (warps run ahead)
  if (st.policy == 3) { uint64_t r = rnd(); if (!(r >> 54)) new_prio();
    for (int k = 0; k < 32; k++) if (uint64_t m = st.rdy[st.word[k]]) { int s = r & 31, l = (__builtin_ctzll((m | m << 32) >> s) + s) & 31; st.rdy[st.word[k]] &= ~(1u << l); return &st.f[st.word[k] * 32 + l]; }
    return nullptr; }
  if (!st.qn) return nullptr;
  if (st.policy == 1) return &st.f[st.q[(st.qh + --st.qn) % MAXT]];
  if (st.policy == 2) { int a = (st.qh + rnd() % st.qn) % MAXT; std::swap(st.q[a], st.q[st.qh]); }
  int i = st.q[st.qh]; st.qh = (st.qh + 1) % MAXT; st.qn--; return &st.f[i]; }
CH_NS static void block_here(int line, const char* what) {      // current fiber is parked: run another
  cur->line = line; Fiber* nx = pick(); if (nx) { go(nx); return; }
  char b[256]; int o = 0, shown = 0;
  for (int i = 0; i < st.n && shown < 6; i++) if (!st.f[i].done) o += snprintf(b + o, sizeof b - o, " t%d@line %d", i, st.f[i].line), shown++;
  fail(line, "deadlock in %s: %d of %d threads alive, waiting:%s", what, st.alive, st.n, b); }
CH_NS static void bar_release(Bar& b) {
  for (int k = 0; k < 3; k++) b.res[b.gen & 1][k] = b.acc[k]; b.acc[0] = b.acc[1] = 0; b.acc[2] = 1; b.gen++;
  int n = b.nw; b.arrived = b.nw = 0; for (int i = 0; i < n; i++) push(b.who[i]); }
CH_NS static int barrier(int id, int count, int line, int pred = 0, int what = 0, bool wait = true) {
  Bar& b = st.bar[id]; int g = b.gen; CH_TSAN(__tsan_release(&b);)
  if (b.arrived && b.line != line && id == 0) fail(line, "divergent __syncthreads: others wait at line %d", b.line);
  if (!b.arrived) { b.acc[0] = b.acc[1] = 0; b.acc[2] = 1; } b.line = line; b.arrived++; if (wait) b.who[b.nw++] = cur->lin;
  b.acc[0] += !!pred; b.acc[1] |= !!pred; b.acc[2] &= !!pred;
  if (b.arrived == (count < 0 ? st.alive : count)) bar_release(b);
  if (!wait) return 0;
  block_here(line, "barrier"); CH_TSAN(__tsan_acquire(&b);)
  return b.res[g & 1][what]; }
CH_NS static void coll_done(Group& g, int w, int self) {
  void* p[32]; unsigned a = g.arrived; memcpy(p, g.p, sizeof p); CH_TSAN(__tsan_acquire(&g);)
  if (g.fn) g.fn(p, a);
  CH_TSAN(__tsan_release(&g);)
  g.arrived = 0; for (int l = 0; l < 32; l++) if (a >> l & 1 && w * 32 + l != self) push(w * 32 + l); }
CH_NS static void collective(unsigned mask, int op, void* payload, CollFn fn, int line) {
  int l = cur->lin & 31, w = cur->lin >> 5;
  if (!(mask >> l & 1)) fail(line, "warp op by lane %d which is not in its mask %08x", l, mask);
  Group& g = st.g[w][__builtin_ctz(mask)];
  if (!g.arrived) { g.mask = mask; g.op = op; g.fn = fn; }
  else if (g.mask != mask || g.op != op) fail(line, "warp %d: lanes meet in different warp ops (op %d/%d mask %08x/%08x)", w, g.op, op, g.mask, mask);
  g.p[l] = payload; g.arrived |= 1u << l; CH_TSAN(__tsan_release(&g);)
  if (g.arrived == (mask & st.live[w])) { coll_done(g, w, -1); }
  block_here(line, "warp op"); CH_TSAN(__tsan_acquire(&g);) }
CH_NS static void yield_() { push(cur->lin); go(pick()); }
CH_NS static void fiber_main() {
  CH_TSAN(__tsan_acquire(&st.blk_in);)
  st.call(st.args);
  if (cur->ncp) fail(0, "thread ends with cp.async copies that were never waited for");
  CH_TSAN(__tsan_release(&st.blk_out);)
  cur->done = true; st.alive--; int w = cur->lin >> 5; st.live[w] &= ~(1u << (cur->lin & 31));
  for (auto& g : st.g[w]) if (g.arrived && g.arrived == (g.mask & st.live[w])) coll_done(g, w, cur->lin);
  if (st.alive && st.bar[0].arrived == st.alive) bar_release(st.bar[0]);
  if (!st.alive) go(&st.main);
  block_here(0, "exit"); __builtin_unreachable(); }
CH_NS static void on_segv(int, siginfo_t* si, void*) {
  if (!st.active) { signal(SIGSEGV, SIG_DFL); return; }
  if (!st.failed) snprintf(st.err, sizeof st.err, "block (%u,%u,%u) thread %d: invalid access at %p (out of bounds / stack overflow)", st.bid.x, st.bid.y, st.bid.z, cur->lin, si->si_addr);
  st.failed = true; siglongjmp(st.jb, 1); }
CH_NS static void shared_enter(void* p, size_t n) {            // poison once per block: catches reads of uninitialised shared
  for (int i = 0; i < st.nsh; i++) if (st.sh[i].p == p) { if (st.sh[i].blk == st.blk) return; st.sh[i].blk = st.blk; goto poison; }
  if (st.nsh < 64) st.sh[st.nsh++] = {p, st.blk};
poison: volatile char* c = (volatile char*)p; for (size_t i = 0; i < n; i++) c[i] = (char)0xFF; }
CH_NS static char* make_stacks() {
  char* p = (char*)mmap(nullptr, STACK * MAXT, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (int i = 0; i < MAXT; i++) mprotect(p + i * STACK, 4096, PROT_NONE);
  return p; }
CH_NS static int launch(void (*call)(void**), dim3 grid, dim3 block, size_t smem, void** args, int policy, uint64_t seed) {
  st.n = block.x * block.y * block.z; st.failed = false; st.err[0] = 0; st.switches = 0;
  if (st.n < 1 || st.n > MAXT) { snprintf(st.err, sizeof st.err, "block of %d threads", st.n); return 1; }
  if (smem > st.ndyn) { if (st.dyn) munmap(st.dyn, st.ndyn + 4096); size_t m = (smem + 4095) & ~4095ul; st.dyn = (char*)mmap(nullptr, m + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); mprotect(st.dyn + m, 4096, PROT_NONE); st.ndyn = m; }
  st.call = call; st.args = args; st.bdim = block; st.gdim = grid; st.policy = policy; st.rng = seed * 0x9E3779B97F4A7C15ull + 0x1234567ull; rnd();
  stack_t alt{}, oldalt; static char altstk[64 << 10]; alt.ss_sp = altstk; alt.ss_size = sizeof altstk; sigaltstack(&alt, &oldalt);
  struct sigaction sa{}, old, oldb; sa.sa_sigaction = on_segv; sa.sa_flags = SA_SIGINFO | SA_ONSTACK; sigaction(SIGSEGV, &sa, &old); sigaction(SIGBUS, &sa, &oldb);
  unsigned csr = _mm_getcsr(); _mm_setcsr(csr | 0x8040);        // FTZ|DAZ as CuPy's default -ftz=true
  CH_TSAN(st.main.tsan = __tsan_get_current_fiber();)
  cur = &st.main; st.active = true; long nb = (long)grid.x * grid.y * grid.z;
  for (long b0 = 0; b0 < nb && !st.failed; b0++) {
    long b = policy == 1 ? nb - 1 - b0 : b0; st.blk++;
    st.bid = {unsigned(b % grid.x), unsigned(b / grid.x % grid.y), unsigned(b / ((long)grid.x * grid.y))};
    memset(st.g, 0, sizeof st.g); for (auto& B : st.bar) B.arrived = B.nw = B.gen = 0; st.qh = st.qn = 0; st.alive = st.n; memset(st.rdy, 0, sizeof st.rdy); if (policy == 3) new_prio();
    if (smem) { char* d = st.dyn + st.ndyn - ((smem + 15) & ~15ul); shared_enter(d, smem); }
    for (int w = 0; w < 32; w++) { int r = st.n - w * 32; st.live[w] = r >= 32 ? ~0u : r > 0 ? (1u << r) - 1 : 0; }
    for (int i = 0; i < st.n; i++) {
      Fiber& f = st.f[i]; f.lin = i; f.done = false; f.line = 0; f.ncp = f.cgrp = 0; f.tid = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
      CH_TSAN(if (!f.tsan) f.tsan = __tsan_create_fiber(0);)
      void** sp = (void**)(((uintptr_t)st.stacks + (i + 1) * STACK - i * 832 % 65536) & ~15ul); *--sp = nullptr; *--sp = (void*)fiber_main; f.sp = sp - 6; push(i); }
    CH_TSAN(__tsan_release(&st.blk_in);)
    if (!sigsetjmp(st.jb, 1)) go(pick()); else { cur = &st.main; }
    CH_TSAN(__tsan_acquire(&st.blk_out);)
  }
  st.active = false; _mm_setcsr(csr); sigaction(SIGSEGV, &old, nullptr); sigaction(SIGBUS, &oldb, nullptr); sigaltstack(&oldalt, nullptr);
  return st.failed; }
template <class... A, size_t... I> inline void invoke_(void (*k)(A...), void** a, std::index_sequence<I...>) { k(*(std::remove_cv_t<A>*)a[I]...); }
template <class... A> inline void invoke(void (*k)(A...), void** a) { invoke_(k, a, std::index_sequence_for<A...>{}); }
inline int lane() { return cur->lin & 31; }
template <class T> inline T poison() { T t; memset((void*)&t, 0xFF, sizeof t); return t; }
template <class T> struct Shfl { T in, out; int src; };
template <class T> inline T shfl(unsigned m, T v, int src, int op, int line) {
  Shfl<T> s{v, v, src};
  collective(m, op * 16 + sizeof(T), &s, [](void** p, unsigned a) { for (int l = 0; l < 32; l++) if (a >> l & 1) { auto* q = (Shfl<T>*)p[l]; q->out = a >> q->src & 1 ? ((Shfl<T>*)p[q->src])->in : poison<T>(); } }, line);
  return s.out; }
struct Vote { unsigned in, out; };
inline unsigned vote(unsigned m, unsigned v, int op, int line, CollFn f) { Vote s{v, 0}; collective(m, op, &s, f, line); return s.out; }
inline Vote& V(void** p, int l) { return *(Vote*)p[l]; }
}  // namespace cuhost
#define threadIdx (cuhost::cur->tid)
#define blockIdx (cuhost::st.bid)
#define blockDim (cuhost::st.bdim)
#define gridDim (cuhost::st.gdim)
#define warpSize 32
#define CUHOST_SHARED(x) cuhost::shared_enter((void*)&x, sizeof x)
#define CUHOST_DYN(T) ((T*)(cuhost::st.dyn + cuhost::st.ndyn - ((cuhost_smem + 15) & ~15ul)))
static size_t cuhost_smem;
#define LN int line_ = __builtin_LINE()
inline void __syncthreads(LN) { cuhost::barrier(0, -1, line_); }
inline int __syncthreads_count(int p, LN) { return cuhost::barrier(0, -1, line_, p, 0); }
inline int __syncthreads_or(int p, LN) { return cuhost::barrier(0, -1, line_, p, 1); }
inline int __syncthreads_and(int p, LN) { return cuhost::barrier(0, -1, line_, p, 2); }
inline void named_bar_sync(int id, int nthreads, LN) { cuhost::barrier(id, nthreads, line_); }      // bar.sync id, n
inline void named_bar_arrive(int id, int nthreads, LN) { cuhost::barrier(id, nthreads, line_, 0, 0, false); }
inline void __syncwarp(unsigned m = ~0u, LN) { cuhost::collective(m, 1, nullptr, nullptr, line_); }
template <class T> inline T __shfl_sync(unsigned m, T v, int s, int w = 32, LN) { int l = cuhost::lane(); return cuhost::shfl(m, v, (l & ~(w - 1)) | (s & (w - 1)), 2, line_); }
template <class T> inline T __shfl_up_sync(unsigned m, T v, unsigned d, int w = 32, LN) { int l = cuhost::lane(), j = l - (int)d; return cuhost::shfl(m, v, j < (l & ~(w - 1)) ? l : j, 3, line_); }
template <class T> inline T __shfl_down_sync(unsigned m, T v, unsigned d, int w = 32, LN) { int l = cuhost::lane(); return cuhost::shfl(m, v, (l & (w - 1)) + (int)d >= w ? l : l + (int)d, 4, line_); }
template <class T> inline T __shfl_xor_sync(unsigned m, T v, int x, int w = 32, LN) { int l = cuhost::lane(), j = l ^ x; return cuhost::shfl(m, v, j > (l | (w - 1)) ? l : j, 5, line_); }
#define CH_EACH for (int l = 0; l < 32; l++) if (a >> l & 1)
#define CH_RED(NAME, T, OP, INIT, EXPR, R) inline R NAME(unsigned m, T v, LN) { return (R)cuhost::vote(m, (unsigned)v, OP, line_, [](void** p, unsigned a) { T r = INIT; CH_EACH { T x = (T)cuhost::V(p, l).in; EXPR; } CH_EACH cuhost::V(p, l).out = (unsigned)r; }); }
CH_RED(__ballot_sync, int, 6, 0, r |= (x ? 1u << l : 0u), unsigned)
CH_RED(__any_sync, int, 7, 0, r |= !!x, int)
CH_RED(__all_sync, int, 8, 1, r &= !!x, int)
CH_RED(__reduce_add_sync, unsigned, 9, 0, r += x, unsigned)
CH_RED(__reduce_max_sync, int, 10, INT32_MIN, r = x > r ? x : r, int)
CH_RED(__reduce_min_sync, int, 11, INT32_MAX, r = x < r ? x : r, int)
inline unsigned __match_any_sync(unsigned m, unsigned v, LN) { return cuhost::vote(m, v, 12, line_, [](void** p, unsigned a) { CH_EACH { unsigned r = 0; for (int k = 0; k < 32; k++) if (a >> k & 1 && cuhost::V(p, k).in == cuhost::V(p, l).in) r |= 1u << k; cuhost::V(p, l).out = r; } }); }
inline unsigned __activemask() { return cuhost::st.live[cuhost::cur->lin >> 5]; }
// ---- atomics (fibers never preempt; __atomic so that TSan knows)
template <class T, class F> inline T ch_rmw(T* p, F f) { T o, n; __atomic_load(p, &o, __ATOMIC_RELAXED); do n = f(o); while (!__atomic_compare_exchange(p, &o, &n, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)); return o; }
template <class T> using ch_id = typename std::common_type<T>::type;
template <class T> inline T atomicAdd(T* p, ch_id<T> v) { return ch_rmw(p, [=](T o) { return T(o + v); }); }
template <class T> inline T atomicSub(T* p, ch_id<T> v) { return ch_rmw(p, [=](T o) { return T(o - v); }); }
template <class T> inline T atomicMax(T* p, ch_id<T> v) { return ch_rmw(p, [=](T o) { return o > v ? o : v; }); }
template <class T> inline T atomicMin(T* p, ch_id<T> v) { return ch_rmw(p, [=](T o) { return o < v ? o : v; }); }
template <class T> inline T atomicExch(T* p, ch_id<T> v) { return ch_rmw(p, [=](T) { return v; }); }
template <class T> inline T atomicOr(T* p, ch_id<T> v) { return ch_rmw(p, [=](T o) { return T(o | v); }); }
template <class T> inline T atomicAnd(T* p, ch_id<T> v) { return ch_rmw(p, [=](T o) { return T(o & v); }); }
template <class T> inline T atomicCAS(T* p, ch_id<T> c, ch_id<T> v) { cuhost::yield_(); return ch_rmw(p, [=](T o) { return o == c ? v : o; }); }
inline void __threadfence_block() {}
inline void __threadfence() {}
inline void __nanosleep(unsigned) { cuhost::yield_(); }
[[noreturn]] inline void __trap(LN) { cuhost::fail(line_, "__trap()"); __builtin_unreachable(); }
// ---- scalar intrinsics
template <class A, class B> inline std::common_type_t<A, B> min(A a, B b) { using T = std::common_type_t<A, B>; return T(b) < T(a) ? T(b) : T(a); }
template <class A, class B> inline std::common_type_t<A, B> max(A a, B b) { using T = std::common_type_t<A, B>; return T(a) < T(b) ? T(b) : T(a); }
template <class D, class X> inline D ch_bits(X s) { static_assert(sizeof(D) == sizeof(X), ""); D d; memcpy(&d, &s, sizeof d); return d; }
inline int __float_as_int(float x) { return ch_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return ch_bits<unsigned>(x); }
inline float __int_as_float(int x) { return ch_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return ch_bits<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.f / a; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
template <class T> inline T __ldg(const T* p) { return *p; }
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) { float2 x = __bfloat1622float2(a), y = __bfloat1622float2(b), z = __bfloat1622float2(c); return __floats2bfloat162_rn(fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y)); }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) { float2 x = __half22float2(a), y = __half22float2(b), z = __half22float2(c); return __floats2half2_rn(fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y)); }
// ---- what -fsanitize=bounds,alignment calls
namespace cuhost { struct SourceLocation { const char* file; unsigned line, column; }; }
extern "C" __attribute__((visibility("hidden"), used)) inline void __ubsan_handle_out_of_bounds_abort(void* where, void* index) {
  cuhost::fail(((cuhost::SourceLocation*)where)->line, "index %ld is out of bounds", (long)index); }
extern "C" __attribute__((visibility("hidden"), used)) inline void __ubsan_handle_type_mismatch_v1_abort(void* where, void* address) {
  cuhost::fail(((cuhost::SourceLocation*)where)->line, "misaligned access at %p", address); }
// ---- loader ABI; the fibers' stacks are the process's, shared by all modules
extern "C" __attribute__((visibility("default"))) void* cuhost_make_stacks() { return cuhost::make_stacks(); }
extern "C" __attribute__((visibility("default"))) void cuhost_use_stacks(void* p) { cuhost::st.stacks = (char*)p; }
extern "C" __attribute__((visibility("default"))) const char* cuhost_error() { return cuhost::st.err; }
extern "C" __attribute__((visibility("default"))) unsigned long long cuhost_switches() { return cuhost::st.switches; }
#define CUHOST_KERNEL(ID, ...) extern "C" __attribute__((visibility("default"))) int cuhost_launch_##ID(const unsigned* g, const unsigned* b, size_t sm, void** a, int pol, unsigned long long seed) { \
  cuhost_smem = sm; return cuhost::launch([](void** p) { cuhost::invoke(&__VA_ARGS__, p); }, dim3(g[0], g[1], g[2]), dim3(b[0], b[1], b[2]), sm, a, pol, seed); }
