/*
The emulator's inside: how a core runs one block. Every CUDA thread is a fiber with a stack of its own; fibers of a
block share one core and give way only in a barrier, a warp collective or __nanosleep(), so between two of those a
thread runs undisturbed. Which fiber goes next is the seed's choice: a missing barrier then shows as a wrong result
under some order.

scheduler.cpp   fibers, the choice of the next thread, start and end of a block, deadlocks
barrier.cpp     __syncthreads and named barriers
warp.cpp        warp collectives: shuffles, votes, reductions, mma, ldmatrix
async_copy.cpp  cp.async; atomics.cpp: atomics
launch.cpp      launch checks, distribution of blocks, settings
memory.cpp      device memory and copies; streams.cpp: streams, events; runtime.cpp: the rest of the CUDA runtime
cublaslt.cpp    matrix products
nccl.cpp        collectives between processes; nccl_transport.cpp: their shared memory
checker.cpp     races, bounds and uninitialised reads, in the checker build only
*/
#ifndef EMULATOR_H
#define EMULATOR_H

#include <vector>

#include "cuda_emulator.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
enum { EMU_ASAN = 1 };
#else
enum { EMU_ASAN = 0 };
#define ASAN_POISON_MEMORY_REGION(address, bytes) (static_cast<void>(address), static_cast<void>(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) (static_cast<void>(address), static_cast<void>(bytes))
#endif

#include "checker.h"

namespace emu {

enum { WARP = 32, MAX_THREADS = 1024, MAX_WARPS = MAX_THREADS / WARP, BARRIERS = 16 };
const size_t DEFAULT_SHARED = 48 << 10;
const size_t ARENA_BYTES = 256 << 10;  // shared memory of a core, with room for gaps between the variables
const size_t STACK_BYTES = EMU_ASAN || CHECKER ? 512 << 10 : 128 << 10;
const unsigned FULL_MASK = 0xffffffffu;

struct Stack {
    char *bottom, *top;
};

// A copy in flight: its destination gets the data when the thread waits for the group.
struct AsyncCopy {
    void* dst;
    const void* src;
    int bytes, source_bytes;
    unsigned char data[16];
};

struct Fiber : Thread {
    Stack* stack;          // NULL before the thread's first step
    void* stack_pointer;   // while it does not run
    void* asan_stack;      // AddressSanitizer's record of the stack
    const char* waits_in;  // name of the barrier or collective, for the deadlock report
    unsigned waits_for;    // barrier number or lane mask
    int barrier_result;    // of __syncthreads_count and the like
    std::vector<AsyncCopy> copies;
    std::vector<size_t> groups;  // number of copies up to the end of each committed group
};

// A warp collective: finish() computes every lane's result when the last lane has arrived, since a fast lane may
// be gone before a slow one reads.
struct Collective {
    const char* name;
    void (*finish)(void* const* arguments, unsigned lanes);
};

// Lanes of one mask on their way into a collective.
struct Gathering {
    unsigned mask, arrived;  // mask 0: free
    const Collective* kind;
    void* arguments[WARP];
};

struct Warp {
    unsigned lanes, ready, unstarted, exited;  // bit per lane
    int gatherings;
    Gathering gathering[WARP];
};

struct Barrier {
    int threads, arrived, value;  // threads 0: the whole block
    BarrierOperation operation;
    unsigned seen[MAX_WARPS], waiting[MAX_WARPS];  // bit per lane
};

// One core.
struct Worker {
    Block block;
    Fiber* fibers;
    Warp* warps;
    Barrier barriers[BARRIERS];
    unsigned runnable;  // bit per warp with lanes that are ready or not started
    int threads, warp_count, exited;
    std::vector<Stack*> free_stacks;
    size_t stacks;
    unsigned char* arena;
    size_t arena_used, shared_bytes, shared_limit;  // the arena also holds gaps
    uint32_t random;
    const char* kernel;
    void (*body)(void*);
    void* arguments;
    void *main_stack_pointer, *main_asan_stack;
    const void* main_bottom;
    size_t main_bytes;
    bool failed;
    char message[1024];
};

extern __thread Worker* worker;  // of this core
inline Fiber* current_fiber() { return static_cast<Fiber*>(current); }
inline Warp* warp_of(const Thread* t) { return &worker->warps[t->linear / WARP]; }
inline unsigned bit(unsigned lane) { return 1u << lane; }
inline unsigned lowest(unsigned mask) { return static_cast<unsigned>(__builtin_ctz(mask)); }

// scheduler.cpp
Worker* start_worker();  // this core's worker, made at the first call
void run_block(Worker* w, uint3 index, dim3 blocks, dim3 threads, size_t dynamic_bytes);
void make_ready(unsigned warp, unsigned lanes);
void keep_running(Fiber* f);  // f, which was made ready, goes on; in random order it may lose its turn
void wait_for_turn(Fiber* f, const char* reason, unsigned detail);

// barrier.cpp, warp.cpp: the end of a thread may complete what others wait for
void barriers_thread_exited();
void collectives_thread_exited(Fiber* f);
void gather(const Collective* kind, unsigned mask, void* argument);

// launch.cpp
cudaError_t set_error(cudaError_t error);  // returns it, or the launch failure that outlasts all
bool device_failed();
void device_fault(const char* message);            // prints it; from now on every call fails
size_t shared_memory_limit(const void* function);  // bytes of dynamic shared memory that it may ask for

// streams.cpp
void finish_delayed();  // all streams

// memory.cpp
enum Containment { OUTSIDE, INSIDE, BEYOND_END };
Containment find_allocation(const void* p, size_t bytes, bool* on_device);
void open_device_memory();  // calls nest
void close_device_memory();

}  // namespace emu

#endif
