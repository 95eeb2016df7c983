/*
Barriers of a block: __syncthreads and its reductions (number 0), and the named barriers of PTX (bar.sync,
bar.arrive). A barrier counts the block's threads as CUDA defines it: a thread that has ended while others go into
__syncthreads is an error, although some hardware forgives it.
*/
#include "emulator.h"

namespace emu {

static void release(Barrier* b, int id) {
    Worker* w = worker;
    for (int i = 0; i < w->warp_count; i++) {
        for (unsigned m = b->waiting[i]; m; m &= m - 1) {
            w->fibers[static_cast<unsigned>(i) * WARP + lowest(m)].barrier_result = b->value;
        }
        make_ready(static_cast<unsigned>(i), b->waiting[i]);
        b->waiting[i] = b->seen[i] = 0;
    }
    checker::barrier_released(id, b->threads, w->threads);
    b->arrived = b->threads = 0;
}

static void combine(Barrier* b, BarrierOperation operation, int predicate) {
    if (operation == BARRIER_COUNT) { b->value += predicate != 0; }
    if (operation == BARRIER_AND) { b->value &= predicate != 0; }
    if (operation == BARRIER_OR) { b->value |= predicate != 0; }
}

static void arrive(int id, int threads, BarrierOperation operation, int predicate, bool waits) {
    Worker* w = worker;
    Fiber* f = current_fiber();
    if (id < 0 || id >= BARRIERS) { kernel_fault("barrier %d: expected a number from 0 to %d", id, BARRIERS - 1); }
    if (threads % WARP != 0) { kernel_fault("barrier %d for %d threads: expected a multiple of 32", id, threads); }
    Barrier* b = &w->barriers[id];
    if (b->arrived == 0) {
        b->threads = threads;
        b->operation = operation;
        b->value = operation == BARRIER_AND;
    } else if (b->threads != threads || b->operation != operation) {
        kernel_fault("barrier %d is used by %d threads and by %d, or with two operations", id, b->threads, threads);
    }
    if (b->seen[f->linear / WARP] & bit(f->lane)) {
        kernel_fault("barrier %d: this thread arrives twice before the others have arrived once", id);
    }
    b->seen[f->linear / WARP] |= bit(f->lane);
    combine(b, operation, predicate);
    b->arrived++;
    checker::barrier_arrived(id, f->linear, threads, waits);
    if (waits) { b->waiting[f->linear / WARP] |= bit(f->lane); }

    if (b->arrived == (threads ? threads : w->threads)) {
        release(b, id);
        if (waits) { keep_running(f); }
    } else if (waits) {
        wait_for_turn(f, id ? "bar.sync" : "__syncthreads", static_cast<unsigned>(id));
    }
    if (!waits && config().seed >= 2) { yield(); }
}

void bar_sync(int id, int threads) { arrive(id, threads, BARRIER_PLAIN, 0, true); }
void bar_arrive(int id, int threads) { arrive(id, threads, BARRIER_PLAIN, 0, false); }

int bar_reduce(BarrierOperation operation, int predicate) {
    arrive(0, 0, operation, predicate, true);
    return current_fiber()->barrier_result;
}

// Those who wait can never be released: say so at once rather than as a deadlock of the rest.
void barriers_thread_exited() {
    const Barrier* b = &worker->barriers[0];
    if (b->arrived > 0) { kernel_fault("ends while %d threads wait in __syncthreads", b->arrived); }
}

}  // namespace emu
