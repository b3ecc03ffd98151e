// Where fibers meet: barriers of a block, operations of a warp.
//
// What the thread sanitizer orders fibers by alternates between two objects: a fiber may resume from one meeting after others have
// arrived at the next, and must not be ordered behind what those did in between.
#pragma once

namespace cuhost {

CUHOST_INTERNAL void clear_votes(Barrier& b) {
    b.votes[0] = b.votes[1] = 0;
    b.votes[2] = 1;
}

CUHOST_INTERNAL void release(Barrier& b) {
    for (int i = 0; i < 3; i++) b.results[b.generation & 1][i] = b.votes[i];
    clear_votes(b);
    b.generation++;
    int waiting = b.waiting;
    b.arrived = b.waiting = 0;
    for (int i = 0; i < waiting; i++) make_ready(b.who[i]);
}

// count: threads that must arrive, -1 for all that are alive. Returns the vote `result`: 0 count, 1 or, 2 and.
CUHOST_INTERNAL int barrier(int id, int count, int line, int predicate = 0, int result = 0, bool wait = true) {
    Barrier& b = state.barriers[id];
    int generation = b.generation;
    CUHOST_TSAN(__tsan_release(&b.order[generation & 1]);)
    if (b.arrived && b.line != line && id == 0) fail(line, "divergent __syncthreads: others wait at line %d", b.line);
    if (!b.arrived) clear_votes(b);
    b.line = line;
    b.arrived++;
    if (wait) b.who[b.waiting++] = current->linear;
    b.votes[0] += !!predicate;
    b.votes[1] |= !!predicate;
    b.votes[2] &= !!predicate;
    if (b.arrived == (count < 0 ? state.alive : count)) release(b);
    if (!wait) return 0;
    park(line, "barrier");
    CUHOST_TSAN(__tsan_acquire(&b.order[generation & 1]);)
    return b.results[generation & 1][result];
}

// All lanes have arrived: combines their payloads and makes them ready, except `leaving`.
CUHOST_INTERNAL void finish(Meeting& m, int warp, int leaving) {
    void* payloads[LANES];
    unsigned arrived = m.arrived;
    memcpy(payloads, m.payloads, sizeof payloads);
    CUHOST_TSAN(__tsan_acquire(&m.order[m.generation & 1]);)
    if (m.combine) m.combine(payloads, arrived);
    CUHOST_TSAN(__tsan_release(&m.order[m.generation & 1]);)
    m.generation++;
    m.arrived = 0;
    for (int lane = 0; lane < LANES; lane++) {
        int thread = warp * LANES + lane;
        if (arrived >> lane & 1 && thread != leaving) make_ready(thread);
    }
}

// The lanes of `mask` meet; `combine` runs once with all payloads, then everyone goes on.
CUHOST_INTERNAL void collective(unsigned mask, int operation, void* payload, Combine combine, int line) {
    int lane = current->linear % LANES, warp = current->linear / LANES;
    if (!(mask >> lane & 1)) fail(line, "warp op by lane %d which is not in its mask %08x", lane, mask);
    Meeting& m = state.meetings[warp][__builtin_ctz(mask)];
    if (!m.arrived) {
        m.mask = mask;
        m.operation = operation;
        m.combine = combine;
    } else if (m.mask != mask || m.operation != operation) {
        const char* what = "warp %d: lanes meet in different warp ops (op %d/%d mask %08x/%08x)";
        fail(line, what, warp, m.operation, operation, m.mask, mask);
    }
    m.payloads[lane] = payload;
    m.arrived |= 1u << lane;
    int generation = m.generation;
    CUHOST_TSAN(__tsan_release(&m.order[generation & 1]);)
    if (m.arrived == (mask & state.live[warp])) finish(m, warp, -1);
    park(line, "warp op");
    CUHOST_TSAN(__tsan_acquire(&m.order[generation & 1]);)
}

}  // namespace cuhost
