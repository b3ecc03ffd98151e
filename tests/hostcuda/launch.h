// A launch: block after block, each with fresh fibers and shared memory full of garbage.
#pragma once

namespace cuhost {

// ---- shared memory

inline void* dynamic_shared() { return state.dynamic + state.dynamic_capacity - ((state.dynamic_size + 15) & ~15ul); }

// On the first touch in a block: garbage, so that reading what nobody wrote shows.
CUHOST_INTERNAL void enter_shared(void* address, size_t size) {
    SharedVariable* known = nullptr;
    for (int i = 0; i < state.shared_count; i++) {
        if (state.shared[i].address == address) known = &state.shared[i];
    }
    if (known && known->block == state.block) return;
    if (known) known->block = state.block;
    else if (state.shared_count < MAX_SHARED) state.shared[state.shared_count++] = {address, state.block};
    else fail(0, "more than %d shared variables", MAX_SHARED);
    volatile char* bytes = (volatile char*)address;
    for (size_t i = 0; i < size; i++) bytes[i] = (char)0xFF;
}

// Ends at an unmapped page.
CUHOST_INTERNAL void reserve_dynamic(size_t size) {
    state.dynamic_size = size;
    if (size <= state.dynamic_capacity) return;
    if (state.dynamic) munmap(state.dynamic, state.dynamic_capacity + PAGE);
    size_t pages = (size + PAGE - 1) / PAGE * PAGE;
    state.dynamic = (char*)mmap(nullptr, pages + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(state.dynamic + pages, PAGE, PROT_NONE);
    state.dynamic_capacity = pages;
}

// ---- blocks

CUHOST_INTERNAL char* make_stacks() {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char* stacks = (char*)mmap(nullptr, STACK * MAX_THREADS, PROT_READ | PROT_WRITE, flags, -1, 0);
    for (int i = 0; i < MAX_THREADS; i++) mprotect(stacks + i * STACK, PAGE, PROT_NONE);
    return stacks;
}

CUHOST_INTERNAL void run_thread() {
    CUHOST_TSAN(__tsan_acquire(&state.block_start);)
    state.call(state.args);
    if (current->copy_count) fail(0, "thread ends with cp.async copies that were never waited for");
    CUHOST_TSAN(__tsan_release(&state.block_end);)
    current->done = true;
    state.alive--;
    int warp = current->linear / LANES;
    state.live[warp] &= ~(1u << current->linear % LANES);
    for (Meeting& m : state.meetings[warp]) {
        if (m.arrived && m.arrived == (m.mask & state.live[warp])) finish(m, warp, current->linear);
    }
    if (state.alive && state.barriers[0].arrived == state.alive) release(state.barriers[0]);
    if (!state.alive) go(&state.main);
    park(0, "exit");
    __builtin_unreachable();
}

CUHOST_INTERNAL void on_fault(int, siginfo_t* info, void*) {
    if (!state.active) {
        signal(SIGSEGV, SIG_DFL);
        return;
    }
    const uint3& b = state.block_index;
    if (!state.failed) {
        const char* what = "block (%u,%u,%u) thread %d: invalid access at %p (out of bounds or stack overflow)";
        snprintf(state.error, sizeof state.error, what, b.x, b.y, b.z, current->linear, info->si_addr);
    }
    state.failed = true;
    siglongjmp(state.after_fault, 1);
}

// The stack of a fiber that has not run: what cuhost_switch pops, then run_thread. Offsets differ, to spread over the cache's sets.
CUHOST_INTERNAL void* fresh_stack(int thread) {
    uintptr_t top = (uintptr_t)state.stacks + (thread + 1) * STACK - thread * 832 % 65536;
    void** pointer = (void**)(top & ~15ul);
    *--pointer = nullptr;
    *--pointer = (void*)run_thread;
    return pointer - 6;
}

CUHOST_INTERNAL void reset_block(long block) {
    const dim3 &grid = state.grid_size, &size = state.block_size;
    state.block++;
    state.block_index = {unsigned(block % grid.x), unsigned(block / grid.x % grid.y), unsigned(block / ((long)grid.x * grid.y))};
    memset(state.meetings, 0, sizeof state.meetings);
    memset(state.ready, 0, sizeof state.ready);
    for (Barrier& b : state.barriers) b.arrived = b.waiting = b.generation = 0;
    state.queue_head = state.queue_size = 0;
    state.alive = state.threads;
    if (state.policy == PRIORITIES) shuffle_warps();
    if (state.dynamic_size) enter_shared(dynamic_shared(), state.dynamic_size);
    for (int w = 0; w < WARPS; w++) {
        int lanes = state.threads - w * LANES;
        state.live[w] = lanes >= LANES ? ~0u : lanes > 0 ? (1u << lanes) - 1 : 0;
    }
    for (int i = 0; i < state.threads; i++) {
        Fiber& f = state.fibers[i];
        f.linear = i;
        f.done = false;
        f.line = f.copy_count = f.copy_group = 0;
        f.index = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
        CUHOST_TSAN(if (!f.tsan) f.tsan = __tsan_create_fiber(0);)
        f.stack_pointer = fresh_stack(i);
        make_ready(i);
    }
}

CUHOST_INTERNAL void run_blocks() {
    long blocks = (long)state.grid_size.x * state.grid_size.y * state.grid_size.z;
    for (long i = 0; i < blocks && !state.failed; i++) {
        reset_block(state.policy == REVERSE ? blocks - 1 - i : i);
        CUHOST_TSAN(__tsan_release(&state.block_start);)
        if (!sigsetjmp(state.after_fault, 1)) go(pick());
        else current = &state.main;
        CUHOST_TSAN(__tsan_acquire(&state.block_end);)
    }
}

CUHOST_INTERNAL int launch(Call call, dim3 grid, dim3 block, size_t shared, void** args, int policy, uint64_t seed) {
    state.threads = block.x * block.y * block.z;
    state.failed = false;
    state.error[0] = 0;
    if (state.threads < 1 || state.threads > MAX_THREADS) {
        snprintf(state.error, sizeof state.error, "block of %d threads", state.threads);
        return 1;
    }
    reserve_dynamic(shared);
    state.call = call;
    state.args = args;
    state.block_size = block;
    state.grid_size = grid;
    state.policy = policy;
    state.random = seed * 0x9E3779B97F4A7C15ull + 0x1234567ull;
    draw();

    static char alternate[ALTERNATE_STACK];
    stack_t handler_stack{}, old_stack;
    handler_stack.ss_sp = alternate;
    handler_stack.ss_size = sizeof alternate;
    sigaltstack(&handler_stack, &old_stack);
    struct sigaction handler{}, old_segv, old_bus;
    handler.sa_sigaction = on_fault;
    handler.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &handler, &old_segv);
    sigaction(SIGBUS, &handler, &old_bus);
    unsigned rounding = _mm_getcsr();
    _mm_setcsr(rounding | 0x8040);  // subnormal numbers count as 0, as with the -ftz=true that CuPy compiles with
    CUHOST_TSAN(state.main.tsan = __tsan_get_current_fiber();)
    current = &state.main;
    state.active = true;

    run_blocks();

    state.active = false;
    _mm_setcsr(rounding);
    sigaction(SIGSEGV, &old_segv, nullptr);
    sigaction(SIGBUS, &old_bus, nullptr);
    sigaltstack(&old_stack, nullptr);
    return state.failed;
}

template <class... A, size_t... I>
inline void invoke_indexed(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(*(std::remove_cv_t<A>*)args[I]...);
}

template <class... A>
inline void invoke(void (*kernel)(A...), void** args) {
    invoke_indexed(kernel, args, std::index_sequence_for<A...>{});
}

}  // namespace cuhost
