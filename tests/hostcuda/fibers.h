// The threads of a block as fibers on one CPU thread, one block at a time. A fiber runs until it meets the others: at a barrier or
// in a warp operation it parks, and the schedule picks who runs next. Whoever completes a meeting makes all its fibers ready again.
//
// Schedules: 0 first in, first out; 1 last in, first out, blocks backwards; 2 uniformly random; 3 random warp priorities, so that a
// warp runs far ahead of the others (finds writes that overtake reads).
//
// Caught, with the line: divergent barriers, deadlocks, lanes outside their mask, unmapped memory, cp.async without wait.
// Shared memory starts as 0xFF in each block, which is NaN. With -fsanitize=thread the fibers are the sanitizer's threads.
#pragma once

#ifndef __x86_64__
#error "cuhost_switch is written for x86-64"
#endif

#ifdef __SANITIZE_THREAD__
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
}
#define CUHOST_TSAN(x) x
#else
#define CUHOST_TSAN(x)
#endif
#define CUHOST_INTERNAL __attribute__((no_sanitize("thread"), noinline, unused)) static

// Saves the registers that a call preserves and goes on with another stack.
extern "C" void cuhost_switch(void** save, void* to);
asm(R"(
.text
.type cuhost_switch,@function
cuhost_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

namespace cuhost {

constexpr int MAX_THREADS = 1024, WARPS = 32, LANES = 32, BARRIERS = 16, MAX_COPIES = 256, MAX_SHARED = 64;
constexpr size_t STACK = 256 << 10, PAGE = 4096, ALTERNATE_STACK = 64 << 10;
constexpr int FIFO = 0, REVERSE = 1, RANDOM = 2, PRIORITIES = 3;

using Call = void (*)(void** args);
using Combine = void (*)(void** payloads, unsigned arrived);  // payloads by lane

struct Copy {  // a cp.async in flight: the first `read` bytes of `size`, the rest zero
    void* target;
    const void* source;
    int size, read, group;
};

struct Fiber {
    void* stack_pointer;
    void* tsan;
    uint3 index;
    int linear, line;
    bool done;
    Copy copies[MAX_COPIES];
    int copy_count, copy_group;
};

struct Meeting {  // of the lanes of a mask in one warp operation
    unsigned mask, arrived;
    int operation, generation;
    char order[2];  // of even and odd generations, for the thread sanitizer
    Combine combine;
    void* payloads[LANES];
};

struct Barrier {
    int arrived, waiting, line, generation;
    int votes[3], results[2][3];  // count, or, and; results of even and odd generations
    int who[MAX_THREADS];
    char order[2];
};

struct SharedVariable {
    void* address;
    long block;
};

struct State {
    Fiber fibers[MAX_THREADS], main;
    Meeting meetings[WARPS][LANES];  // by the lowest lane of the mask
    unsigned live[WARPS];
    Barrier barriers[BARRIERS];

    int policy, queue[MAX_THREADS], queue_head, queue_size;
    int warp_order[WARPS];
    unsigned ready[WARPS];
    uint64_t random;

    int threads, alive;
    Call call;
    void** args;
    uint3 block_index;
    dim3 block_size, grid_size;
    long block;  // counts the blocks of all launches
    char block_start, block_end;  // what the sanitizer orders blocks by

    char *stacks, *dynamic;
    size_t dynamic_capacity, dynamic_size;
    SharedVariable shared[MAX_SHARED];
    int shared_count;

    char error[512];
    bool failed, active;
    sigjmp_buf after_fault;
};

static State& state = *(State*)calloc(1, sizeof(State));
static Fiber* current;

CUHOST_INTERNAL void go(Fiber* to) {
    Fiber* from = current;
    if (to == from) return;
    current = to;
    CUHOST_TSAN(__tsan_switch_to_fiber(to->tsan, 1);)
    cuhost_switch(&from->stack_pointer, to->stack_pointer);
}

// Ends the launch; the first failure is the one reported.
CUHOST_INTERNAL void fail(int line, const char* format, ...) {
    char what[320];
    va_list values;
    va_start(values, format);
    vsnprintf(what, sizeof what, format, values);
    va_end(values);
    if (!state.failed) {
        const uint3& b = state.block_index;
        int thread = current ? current->linear : -1;
        snprintf(state.error, sizeof state.error, "line %d, block (%u,%u,%u) thread %d: %s", line, b.x, b.y, b.z, thread, what);
    }
    state.failed = true;
    go(&state.main);
    __builtin_unreachable();
}

// ---- the schedule

static uint64_t draw() {  // xorshift
    state.random ^= state.random << 13;
    state.random ^= state.random >> 7;
    return state.random ^= state.random << 17;
}

CUHOST_INTERNAL void shuffle_warps() {
    for (int w = 0; w < WARPS; w++) state.warp_order[w] = w;
    for (int w = (state.threads + LANES - 1) / LANES - 1; w > 0; w--) {
        std::swap(state.warp_order[w], state.warp_order[draw() % (w + 1)]);
    }
}

CUHOST_INTERNAL void make_ready(int thread) {
    if (state.policy == PRIORITIES) {
        state.ready[thread / LANES] |= 1u << thread % LANES;
    } else {
        state.queue[(state.queue_head + state.queue_size++) % MAX_THREADS] = thread;
    }
}

CUHOST_INTERNAL Fiber* pick_by_priority() {
    uint64_t random = draw();
    if (!(random >> 54)) shuffle_warps();  // once in about a thousand picks
    for (int w : state.warp_order) {
        if (uint64_t lanes = state.ready[w]) {
            int first = random % LANES, lane = (__builtin_ctzll((lanes | lanes << 32) >> first) + first) % LANES;
            state.ready[w] &= ~(1u << lane);
            return &state.fibers[w * LANES + lane];
        }
    }
    return nullptr;
}

CUHOST_INTERNAL Fiber* pick() {
    if (state.policy == PRIORITIES) return pick_by_priority();
    if (!state.queue_size) return nullptr;
    if (state.policy == REVERSE) return &state.fibers[state.queue[(state.queue_head + --state.queue_size) % MAX_THREADS]];
    if (state.policy == RANDOM) {
        int chosen = (state.queue_head + draw() % state.queue_size) % MAX_THREADS;
        std::swap(state.queue[chosen], state.queue[state.queue_head]);
    }
    int thread = state.queue[state.queue_head];
    state.queue_head = (state.queue_head + 1) % MAX_THREADS;
    state.queue_size--;
    return &state.fibers[thread];
}

CUHOST_INTERNAL void park(int line, const char* what) {
    current->line = line;
    if (Fiber* next = pick()) {
        go(next);
        return;
    }
    char waiting[256];
    int length = 0, shown = 0;
    for (int i = 0; i < state.threads && shown < 6; i++) {
        if (state.fibers[i].done) continue;
        length += snprintf(waiting + length, sizeof waiting - length, " t%d@line %d", i, state.fibers[i].line);
        shown++;
    }
    fail(line, "deadlock in %s: %d of %d threads alive, waiting:%s", what, state.alive, state.threads, waiting);
}

CUHOST_INTERNAL void give_way() {
    make_ready(current->linear);
    go(pick());
}

}  // namespace cuhost
