/*
The race checker: every load and store of a kernel, with what happened before it. Kernels are compiled with
-fsanitize=thread, whose calls arrive here instead of in the ThreadSanitizer runtime.

Each thread has a clock that advances at every barrier. A byte of shared memory remembers who wrote and read it last
and at which clock; an access races if the other's clock is not known to have passed. Known is: everything before
the block's last barrier (`block_clock`), before a barrier of the own warp (`warp_clock`), and what came through named
barriers (`named_clock`, a full vector, only for threads that used one). Blocks of one launch are never ordered, so
one block must not touch what another has written, but by atomics.

Memory has a state as well: not allocated, never written, written. One block at a time, on one core.
*/
#include "checker.h"

#ifdef EMU_RACE

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <set>
#include <utility>
#include <vector>

#include "emulator.h"

namespace emu {
namespace checker {

enum State : uint8_t { INVALID, UNWRITTEN, WRITTEN };
enum { MAX_REPORTS = 12, GRAIN = 2 };  // bytes of device memory that share one record

struct SharedRecord {
    uint32_t write_clock, read_clock[2];
    int16_t writer, reader[2];  // -1: nobody since the last ordered access
    State state;
    bool in_flight, atomic;
};

struct DeviceRecord {
    uint32_t write_block, read_block;  // serial of the block
    uint32_t write_clock, read_clock;
    int16_t writer, reader;
    bool atomic, several_blocks_read;
};

typedef std::vector<uint32_t> VectorClock;

static unsigned char *shared_base, *device_base;
static size_t shared_bytes, shared_used, device_bytes;  // used: by the last block
static SharedRecord* shared_records;
static DeviceRecord* device_records;
static State* device_states;

static uint32_t clocks[MAX_THREADS], block_clock[MAX_THREADS], warp_clock[MAX_THREADS][WARP];
static VectorClock named_clock[MAX_THREADS];  // empty: not used since the last barrier of the block
static VectorClock arriving[BARRIERS];
static bool waiting[BARRIERS][MAX_THREADS];
static uint32_t first_block, this_block;
static size_t error_count;
static std::set<std::pair<const void*, const char*>> reported;

// One access, for the report.
struct Event {
    const void* address;
    size_t bytes;
    Access access;
    const Thread* thread;  // NULL: host code
    const void* instruction;
};

// ----------------------------------------------------------------------------
// reports

// "file.cu:12" of an instruction, by addr2line.
static void source_line(char* line, size_t bytes, const void* instruction) {
    char program[256], command[512];
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    program[n > 0 ? n : 0] = '\0';
    snprintf(line, bytes, "?");
    snprintf(command, sizeof command, "addr2line -s -e '%s' 0x%zx", program, reinterpret_cast<size_t>(instruction) - 1);
    FILE* f = popen(command, "r");
    if (!f) { return; }
    if (fgets(line, static_cast<int>(bytes), f)) { line[strcspn(line, "\n")] = '\0'; }
    pclose(f);
}

// Counts an error and prints it unless this instruction has shown it before.
static void report(const char* what, const Event* e, int other) {
    error_count++;
    if (reported.size() >= MAX_REPORTS || !reported.insert({e->instruction, what}).second) { return; }
    char line[256];
    source_line(line, sizeof line, e->instruction);
    const unsigned char* p = static_cast<const unsigned char*>(e->address);
    bool shared = p >= shared_base && p < shared_base + shared_bytes;
    const char* verb = e->access == READ ? "read" : e->access == WRITE ? "write" : "atomic update";
    fprintf(stderr, "emulator: %s: %zu-byte %s of %s memory at %s", what, e->bytes, verb, shared ? "shared" : "device",
            line);
    if (e->thread) {
        uint3 b = e->thread->block->index;
        fprintf(stderr, " by block (%u,%u,%u) thread %u", b.x, b.y, b.z, e->thread->linear);
    }
    if (other >= 0) { fprintf(stderr, ", against thread %d", other); }
    fprintf(stderr, "\n");
}

// ----------------------------------------------------------------------------
// accesses

// Has what thread `other` did at its clock `then` happened before now, as seen by `thread`?
static bool ordered(int other, uint32_t then, unsigned thread) {
    unsigned o = static_cast<unsigned>(other);
    if (o == thread || then <= block_clock[o]) { return true; }
    if (o / WARP == thread / WARP && then <= warp_clock[thread][o % WARP]) { return true; }
    return !named_clock[thread].empty() && then <= named_clock[thread][o];
}

// Checks one byte of shared memory; false ends the report of this access.
static bool shared_byte(SharedRecord* r, const Event* e) {
    unsigned thread = e->thread->linear;
    bool both_atomic = e->access == ATOMIC && r->atomic;
    if (r->state == INVALID) {
        report("out of bounds", e, -1);
        return false;
    }
    if (e->access != WRITE && r->state == UNWRITTEN) { report("uninitialised read", e, -1); }
    if (r->in_flight) {
        report("access to the destination of a cp.async in flight", e, r->writer);
        r->in_flight = false;
    }
    if (r->writer >= 0 && !both_atomic && !ordered(r->writer, r->write_clock, thread)) {
        report(e->access == READ ? "read-after-write race" : "write-after-write race", e, r->writer);
        r->writer = -1;
    }
    r->state = WRITTEN;
    if (e->access == READ) {
        int slot = r->reader[0] < 0 || ordered(r->reader[0], r->read_clock[0], thread) ? 0 : 1;
        r->reader[slot] = static_cast<int16_t>(thread);
        r->read_clock[slot] = clocks[thread];
        return true;
    }
    for (int k = 0; k < 2; k++) {
        if (r->reader[k] >= 0 && !ordered(r->reader[k], r->read_clock[k], thread)) {
            report("write-after-read race", e, r->reader[k]);
            break;
        }
    }
    r->writer = static_cast<int16_t>(thread);
    r->write_clock = clocks[thread];
    r->reader[0] = r->reader[1] = -1;
    r->atomic = e->access == ATOMIC;
    return true;
}

static void device_write_check(DeviceRecord* r, const Event* e) {
    if (r->read_block >= first_block && e->access == WRITE) {
        if (r->read_block != this_block || r->several_blocks_read) {
            report("race between blocks: another block read this", e, -1);
        } else if (!ordered(r->reader, r->read_clock, e->thread->linear)) {
            report("write-after-read race", e, r->reader);
        }
        r->read_block = 0;
    }
    r->write_block = this_block;
    r->writer = static_cast<int16_t>(e->thread->linear);
    r->write_clock = clocks[e->thread->linear];
    r->atomic = e->access == ATOMIC;
}

static void device_grain(DeviceRecord* r, const Event* e) {
    unsigned thread = e->thread->linear;
    bool both_atomic = e->access == ATOMIC && r->atomic;
    if (r->write_block >= first_block && !both_atomic) {
        if (r->write_block != this_block) {
            report("race between blocks: another block wrote this", e, -1);
            r->write_block = 0;
        } else if (!ordered(r->writer, r->write_clock, thread)) {
            report(e->access == READ ? "read-after-write race" : "write-after-write race", e, r->writer);
            r->write_block = 0;
        }
    }
    if (e->access != READ) {
        device_write_check(r, e);
        return;
    }
    bool earlier_launch = r->read_block < first_block;
    r->several_blocks_read = !earlier_launch && (r->several_blocks_read || r->read_block != this_block);
    if (r->read_block != this_block || ordered(r->reader, r->read_clock, thread)) {
        r->read_block = this_block;
        r->reader = static_cast<int16_t>(thread);
        r->read_clock = clocks[thread];
    }
}

static void device_access(const Event* e, size_t offset) {
    if (!e->thread) {
        report("host code touches device memory", e, -1);
        return;
    }
    for (size_t i = offset; i < offset + e->bytes; i++) {
        if (device_states[i] == INVALID) {
            report("out of bounds", e, -1);
            return;
        }
        if (e->access != WRITE && device_states[i] == UNWRITTEN) { report("uninitialised read", e, -1); }
        device_states[i] = WRITTEN;
        if (i == offset || i % GRAIN == 0) { device_grain(&device_records[i / GRAIN], e); }
    }
}

static inline void access_memory(const Event* e) {
    const unsigned char* p = static_cast<const unsigned char*>(e->address);
    size_t shared = static_cast<size_t>(p - shared_base), device = static_cast<size_t>(p - device_base);
    if (shared < shared_bytes && e->thread) {
        for (size_t i = 0; i < e->bytes && shared_byte(&shared_records[shared + i], e); i++) {}
    } else if (device < device_bytes) {
        device_access(e, device);
    }
}

void note(const void* p, size_t bytes, Access access, const Thread* t, const void* instruction) {
    Event e = {p, bytes, access, t, instruction};
    access_memory(&e);
}

void note_in_flight(const void* p, size_t bytes, bool in_flight) {
    size_t offset = static_cast<size_t>(static_cast<const unsigned char*>(p) - shared_base);
    for (size_t i = 0; i < bytes; i++) { shared_records[offset + i].in_flight = in_flight; }
}

// ----------------------------------------------------------------------------
// memory

template <class T>
static T* untouched_pages(size_t count) {
    void* p = mmap(NULL, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        perror("emulator: no addresses for the checker's records");
        abort();
    }
    return static_cast<T*>(p);
}

void set_shared_memory(unsigned char* base, size_t bytes) {
    shared_base = base;
    shared_bytes = bytes;
    shared_records = untouched_pages<SharedRecord>(bytes);
}

void set_device_memory(unsigned char* base, size_t bytes) {
    device_base = base;
    device_bytes = bytes;
    device_records = untouched_pages<DeviceRecord>(bytes / GRAIN);
    device_states = untouched_pages<State>(bytes);
}

static void set_states(const void* p, size_t bytes, State state) {
    size_t offset = static_cast<size_t>(static_cast<const unsigned char*>(p) - device_base);
    if (device_base && offset < device_bytes) { memset(device_states + offset, state, bytes); }
}

void device_allocated(const void* p, size_t bytes) { set_states(p, bytes, UNWRITTEN); }
void device_freed(const void* p, size_t bytes) { set_states(p, bytes, INVALID); }
void host_wrote(const void* p, size_t bytes) { set_states(p, bytes, WRITTEN); }

void shared_allocated(const void* p, size_t bytes) {
    size_t offset = static_cast<size_t>(static_cast<const unsigned char*>(p) - shared_base);
    const SharedRecord fresh = {0, {0, 0}, -1, {-1, -1}, UNWRITTEN, false, false};
    for (size_t i = 0; i < bytes; i++) { shared_records[offset + i] = fresh; }
    shared_used = max(shared_used, offset + bytes);
}

// ----------------------------------------------------------------------------
// time

void launch_started() {
    first_block = this_block + 1;
    error_count = 0;
}

size_t errors() { return error_count; }

void block_started(size_t dynamic_bytes) {
    this_block++;
    for (size_t i = 0; i < shared_used; i++) { shared_records[i].state = INVALID; }
    shared_used = 0;
    shared_allocated(shared_base, dynamic_bytes);
    for (int i = 0; i < MAX_THREADS; i++) {
        clocks[i] = 1;
        block_clock[i] = 0;
        named_clock[i].clear();
    }
    memset(warp_clock, 0, sizeof warp_clock);
    memset(waiting, 0, sizeof waiting);
    for (VectorClock& v : arriving) { v.clear(); }
}

// into = the later of into and everything that `thread` knows.
static void join_knowledge(VectorClock* into, unsigned thread) {
    if (into->empty()) { into->assign(MAX_THREADS, 0); }
    VectorClock& v = *into;
    for (size_t i = 0; i < MAX_THREADS; i++) {
        uint32_t named = named_clock[thread].empty() ? 0 : named_clock[thread][i];
        v[i] = max(v[i], max(block_clock[i], named));
    }
    unsigned first = thread / WARP * WARP;
    for (unsigned i = 0; i < WARP; i++) { v[first + i] = max(v[first + i], warp_clock[thread][i]); }
    v[thread] = max(v[thread], clocks[thread]);
}

void barrier_arrived(int id, unsigned linear, int threads, bool waits) {
    if (threads == 0) { return; }
    join_knowledge(&arriving[id], linear);
    clocks[linear]++;
    waiting[id][linear] = waits;
}

void barrier_released(int id, int threads, int block_threads) {
    for (int i = 0; i < block_threads; i++) {
        if (threads == 0) {
            block_clock[i] = clocks[i]++;
            named_clock[i].clear();
        } else if (waiting[id][i]) {
            named_clock[i] = arriving[id];
            waiting[id][i] = false;
        }
    }
    if (threads != 0) { arriving[id].clear(); }
}

void warp_synchronized(unsigned first_thread, unsigned lanes) {
    uint32_t known[WARP] = {0};
    VectorClock named;
    for (unsigned m = lanes; m; m &= m - 1) {
        unsigned thread = first_thread + lowest(m);
        for (int i = 0; i < WARP; i++) { known[i] = max(known[i], warp_clock[thread][i]); }
        known[lowest(m)] = max(known[lowest(m)], clocks[thread]);
        if (!named_clock[thread].empty()) { join_knowledge(&named, thread); }
    }
    for (unsigned m = lanes; m; m &= m - 1) {
        unsigned thread = first_thread + lowest(m);
        memcpy(warp_clock[thread], known, sizeof known);
        if (!named.empty()) { named_clock[thread] = named; }
        clocks[thread]++;
    }
}

}  // namespace checker
}  // namespace emu

// ----------------------------------------------------------------------------
// what -fsanitize=thread calls

#define TSAN_ACCESS(name, bytes, access)                                                               \
    extern "C" void __tsan_##name(void* p) {                                                           \
        emu::checker::note(p, bytes, emu::checker::access, emu::current, __builtin_return_address(0)); \
    }
#define TSAN_SIZE(bytes)                            \
    TSAN_ACCESS(read##bytes, bytes, READ)           \
    TSAN_ACCESS(write##bytes, bytes, WRITE)         \
    TSAN_ACCESS(unaligned_read##bytes, bytes, READ) \
    TSAN_ACCESS(unaligned_write##bytes, bytes, WRITE)
TSAN_SIZE(1)
TSAN_SIZE(2)
TSAN_SIZE(4)
TSAN_SIZE(8)
TSAN_SIZE(16)

extern "C" {
void __tsan_read_range(void* p, unsigned long bytes) {
    emu::checker::note(p, bytes, emu::checker::READ, emu::current, __builtin_return_address(0));
}
void __tsan_write_range(void* p, unsigned long bytes) {
    emu::checker::note(p, bytes, emu::checker::WRITE, emu::current, __builtin_return_address(0));
}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}

// Atomics of host code, such as the guards of static variables; their order is sequential.
#define TSAN_ATOMIC(bits, T)                                                                                           \
    extern "C" T __tsan_atomic##bits##_load(const volatile T* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); } \
    extern "C" void __tsan_atomic##bits##_store(volatile T* p, T v, int) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); } \
    extern "C" T __tsan_atomic##bits##_exchange(volatile T* p, T v, int) {                                             \
        return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                                            \
    }                                                                                                                  \
    extern "C" T __tsan_atomic##bits##_fetch_add(volatile T* p, T v, int) {                                            \
        return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                                             \
    }
TSAN_ATOMIC(8, uint8_t)
TSAN_ATOMIC(32, uint32_t)
TSAN_ATOMIC(64, uint64_t)

#endif
