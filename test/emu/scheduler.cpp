/*
Fibers and the scheduler of one core. See emulator.h.

A thread that has not started yet runs on the fiber of the one that just ended, without a switch, so kernels
without barriers cost little more than a loop. AddressSanitizer is told of every change of stack.
*/
#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <atomic>
#include <map>
#include <string>

#include "emulator.h"

#if !defined(__x86_64__)
#error "the emulator switches stacks with x86-64 instructions; leave the CUDA tests out on this machine"
#endif

// Saves what a function call must preserve, stores the stack pointer in *save and continues on the stack `load`.
extern "C" void emu_switch_stack(void** save, void* load);
asm(R"(
    .text
    .globl emu_switch_stack
    .type emu_switch_stack, @function
emu_switch_stack:
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
    .size emu_switch_stack, .-emu_switch_stack
)");

namespace emu {

__thread Thread* current;
__thread Worker* worker;

// ----------------------------------------------------------------------------
// stacks

static char* map_memory(size_t bytes, int protection) {
    void* p = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        perror("emulator: no memory for stacks");
        abort();
    }
    return static_cast<char*>(p);
}

static Stack* take_stack(Worker* w) {
    if (!w->free_stacks.empty()) {
        Stack* s = w->free_stacks.back();
        w->free_stacks.pop_back();
        ASAN_UNPOISON_MEMORY_REGION(s->bottom, STACK_BYTES);
        return s;
    }
    // a guard page below; tops are staggered, else all fibers would compete for the same cache sets
    const size_t guard = 4096;
    char* p = map_memory(guard + STACK_BYTES, PROT_READ | PROT_WRITE);
    mprotect(p, guard, PROT_NONE);
    size_t stagger = w->stacks++ * 192 % 4096;
    return new Stack{p + guard, p + guard + STACK_BYTES - stagger};
}

Worker* start_worker() {
    if (worker) { return worker; }
    Worker* w = new Worker();
    w->fibers = new Fiber[MAX_THREADS]();
    w->warps = new Warp[MAX_WARPS]();
    const size_t guard = 4096;
    w->arena = reinterpret_cast<unsigned char*>(map_memory(ARENA_BYTES + 2 * guard, PROT_NONE)) + guard;
    mprotect(w->arena, ARENA_BYTES, PROT_READ | PROT_WRITE);
    checker::set_shared_memory(w->arena, ARENA_BYTES);
    worker = w;
    return w;
}

// ----------------------------------------------------------------------------
// the choice of the next thread

static uint32_t next_random(Worker* w) {  // Marsaglia 2003, xorshift32
    w->random ^= w->random << 13;
    w->random ^= w->random >> 17;
    w->random ^= w->random << 5;
    return w->random;
}

// One of the set bits of mask, which is not 0.
static unsigned choose_bit(Worker* w, unsigned mask) {
    unsigned seed = config().seed;
    if (seed == 0) { return lowest(mask); }
    if (seed == 1) { return 31 - static_cast<unsigned>(__builtin_clz(mask)); }
    unsigned r = next_random(w) % 32;
    unsigned turned = r ? mask >> r | mask << (32 - r) : mask;
    return (lowest(turned) + r) % 32;
}

// Takes a thread that can run, preferably from this warp; NULL when there is none.
static Fiber* take_next(Worker* w, unsigned warp) {
    if (!w->runnable) { return NULL; }
    bool wander = config().seed >= 2 && next_random(w) % 8 == 0;
    if (!(w->runnable & bit(warp)) || wander) { warp = choose_bit(w, w->runnable); }
    Warp* p = &w->warps[warp];
    unsigned lane = choose_bit(w, p->ready | p->unstarted);
    p->ready &= ~bit(lane);
    p->unstarted &= ~bit(lane);
    if (!(p->ready | p->unstarted)) { w->runnable &= ~bit(warp); }
    return &w->fibers[warp * WARP + lane];
}

void make_ready(unsigned warp, unsigned lanes) {
    worker->warps[warp].ready |= lanes;
    if (lanes) { worker->runnable |= bit(warp); }
}

// ----------------------------------------------------------------------------
// switching

static void fiber_main();

// save_asan NULL: the stack that is left will not be returned to.
static void switch_stack(void** save, void** save_asan, void* to, const void* to_bottom, size_t to_bytes) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(save_asan, to_bottom, to_bytes);
#else
    (void)save_asan, (void)to_bottom, (void)to_bytes;
#endif
    emu_switch_stack(save, to);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(save_asan ? *save_asan : NULL, NULL, NULL);
#endif
}

static void switch_to_fiber(Worker* w, void** save, void** save_asan, Fiber* f) {
    if (!f->stack) {
        f->stack = take_stack(w);
        void** sp = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(f->stack->top) & ~uintptr_t{63});
        *--sp = NULL;
        *--sp = reinterpret_cast<void*>(fiber_main);  // the return address leaves rsp % 16 == 8, as a call would
        for (int i = 0; i < 6; i++) { *--sp = NULL; }
        f->stack_pointer = sp;
    }
    current = f;
    switch_stack(save, save_asan, f->stack_pointer, f->stack->bottom, STACK_BYTES);
}

// Leaves the fiber for good.
[[noreturn]] static void return_to_main(Worker* w) {
    static thread_local void* never;
    current = NULL;
    switch_stack(&never, NULL, w->main_stack_pointer, w->main_bottom, w->main_bytes);
    abort();
}

// ----------------------------------------------------------------------------
// faults

void kernel_fault(const char* format, ...) {
    Worker* w = worker;
    const Fiber* f = current_fiber();
    uint3 b = w->block.index, t = f->index;
    int n = snprintf(w->message, sizeof w->message, "%.200s block (%u,%u,%u) thread (%u,%u,%u): ", w->kernel, b.x, b.y,
                     b.z, t.x, t.y, t.z);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(w->message + n, sizeof w->message - static_cast<size_t>(n), format, arguments);
    va_end(arguments);
    w->failed = true;
    return_to_main(w);
}

// Nobody can run and somebody has not ended: says how many threads wait where.
[[noreturn]] static void deadlock(Worker* w) {
    struct Group {
        int count, first;
    };
    std::map<std::string, Group> groups;
    for (int i = 0; i < w->threads; i++) {
        const Fiber* f = &w->fibers[i];
        char place[128] = "ended";
        if (!(warp_of(f)->exited & bit(f->lane))) {
            snprintf(place, sizeof place, "in %s(0x%x)", f->waits_in ? f->waits_in : "?", f->waits_for);
        }
        Group* g = &groups.insert({place, Group{0, i}}).first->second;
        g->count++;
    }
    std::string report;
    for (const auto& g : groups) {
        report += "; " + std::to_string(g.second.count) + " threads " + g.first + ", first thread " +
                  std::to_string(g.second.first);
    }
    kernel_fault("deadlock: divergent barrier or collective%s", report.c_str());
}

// ----------------------------------------------------------------------------
// waiting, ending

void wait_for_turn(Fiber* f, const char* reason, unsigned detail) {
    Worker* w = worker;
    f->waits_in = reason;
    f->waits_for = detail;
    Fiber* next = take_next(w, f->linear / WARP);
    if (!next) { deadlock(w); }
    if (next != f) { switch_to_fiber(w, &f->stack_pointer, &f->asan_stack, next); }
    f->waits_in = NULL;
}

void keep_running(Fiber* f) {
    Worker* w = worker;
    if (config().seed >= 2 && next_random(w) % 4 == 0) {
        wait_for_turn(f, "a pause", 0);
        return;
    }
    Warp* p = warp_of(f);
    p->ready &= ~bit(f->lane);
    if (!(p->ready | p->unstarted)) { w->runnable &= ~bit(f->linear / WARP); }
}

void yield() {
    Fiber* f = current_fiber();
    if (!worker->runnable) { return; }
    unsigned warp = f->linear / WARP;
    Fiber* next = take_next(worker, warp);
    make_ready(warp, bit(f->lane));
    switch_to_fiber(worker, &f->stack_pointer, &f->asan_stack, next);
}

static void fiber_main() {
#ifdef __SANITIZE_ADDRESS__
    const void* bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(NULL, &bottom, &bytes);
    if (!worker->main_bottom) {
        worker->main_bottom = bottom;
        worker->main_bytes = bytes;
    }
#endif
    Worker* w = worker;
    for (;;) {
        w->body(w->arguments);
        Fiber* f = current_fiber();
        f->copies.clear();
        f->groups.clear();
        warp_of(f)->exited |= bit(f->lane);
        w->exited++;
        collectives_thread_exited(f);
        barriers_thread_exited();
        Fiber* next = take_next(w, f->linear / WARP);
        if (!next && w->exited < w->threads) { deadlock(w); }
        Stack* stack = f->stack;
        f->stack = NULL;
        if (next && !next->stack) {
            next->stack = stack;
            current = next;
            continue;
        }
        w->free_stacks.push_back(stack);
        if (!next) { return_to_main(w); }
        static thread_local void* never;
        switch_to_fiber(w, &never, NULL, next);
        abort();
    }
}

// ----------------------------------------------------------------------------
// blocks

static void prepare_shared_memory(Worker* w, size_t dynamic_bytes) {
    const size_t gap = EMU_ASAN || CHECKER ? 128 : 0;
    ASAN_UNPOISON_MEMORY_REGION(w->arena, ARENA_BYTES);
    if (config().poison) { memset(w->arena, 0xff, dynamic_bytes); }
    ASAN_POISON_MEMORY_REGION(w->arena, ARENA_BYTES);
    ASAN_UNPOISON_MEMORY_REGION(w->arena, dynamic_bytes);
    w->block.dynamic = w->arena;
    w->shared_bytes = dynamic_bytes;
    w->arena_used = (dynamic_bytes + 127) / 128 * 128 + gap;
}

void* allocate_shared(SharedSlot* slot, size_t bytes, size_t alignment) {
    Worker* w = worker;
    const size_t gap = EMU_ASAN || CHECKER ? 64 : 0;
    size_t offset = (w->arena_used + alignment - 1) / alignment * alignment;
    w->shared_bytes += bytes;
    if (w->shared_bytes > w->shared_limit || offset + bytes > ARENA_BYTES) {
        kernel_fault("%zu bytes of shared memory, allowed %zu", w->shared_bytes, w->shared_limit);
    }
    void* p = w->arena + offset;
    w->arena_used = offset + bytes + gap;
    ASAN_UNPOISON_MEMORY_REGION(p, bytes);
    if (config().poison) { memset(p, 0xff, bytes); }
    checker::shared_allocated(p, bytes);
    slot->serial = w->block.serial;
    slot->address = p;
    return p;
}

static void prepare_threads(Worker* w, dim3 threads) {
    uint3 index = {0, 0, 0};
    for (int i = 0; i < w->threads; i++) {
        Fiber* f = &w->fibers[i];
        f->index = index;
        f->linear = static_cast<unsigned>(i);
        f->lane = f->linear % WARP;
        f->block = &w->block;
        f->waits_in = NULL;
        if (++index.x == threads.x) {
            index.x = 0;
            if (++index.y == threads.y) {
                index.y = 0;
                index.z++;
            }
        }
    }
    w->runnable = 0;
    for (int i = 0; i < w->warp_count; i++) {
        int lanes = w->threads - i * WARP < WARP ? w->threads - i * WARP : WARP;
        Warp* p = &w->warps[i];
        p->lanes = p->unstarted = FULL_MASK >> (WARP - lanes);
        p->ready = p->exited = 0;
        p->gatherings = 0;
        w->runnable |= bit(static_cast<unsigned>(i));
    }
}

void run_block(Worker* w, uint3 index, dim3 blocks, dim3 threads, size_t dynamic_bytes) {
    static std::atomic<uint64_t> serials{1};
    w->block = {index, threads, blocks, serials.fetch_add(1, std::memory_order_relaxed), NULL};
    w->threads = static_cast<int>(threads.x * threads.y * threads.z);
    w->warp_count = (w->threads + WARP - 1) / WARP;
    w->exited = 0;
    uint64_t hash = (config().seed + 1) * 0x9E3779B97F4A7C15ull;
    hash = (hash ^ (index.x + (uint64_t{index.y} << 20) + (uint64_t{index.z} << 40))) * 0xBF58476D1CE4E5B9ull;
    w->random = static_cast<uint32_t>(hash >> 29) | 1;
    memset(static_cast<void*>(w->barriers), 0, sizeof w->barriers);
    prepare_shared_memory(w, dynamic_bytes);
    prepare_threads(w, threads);
    checker::block_started(dynamic_bytes);

    w->main_bottom = NULL;
    switch_to_fiber(w, &w->main_stack_pointer, &w->main_asan_stack, take_next(w, 0));
    current = NULL;
    ASAN_UNPOISON_MEMORY_REGION(w->arena, ARENA_BYTES);
}

}  // namespace emu
