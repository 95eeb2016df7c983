/*
Streams and events. Work runs at once, when it is called, in every stream, which hides a forgotten wait between streams.
With EMU_LATE=1 collectives, with EMU_LATE=2 kernels and matrix products wait in their stream until something demands
them: other work of that stream, an event or a synchronization. What forgot to wait for them then reads what was there
before, or overwrites what they were to read.
*/
#include <stdlib.h>
#include <time.h>

#include <deque>

#include "emulator.h"

namespace emu {

struct Stream {
    unsigned flags;
};

struct Event {
    timespec time;
    uint64_t after;  // the last delayed work that it stands for
};

struct Delayed {
    uint64_t number;
    cudaStream_t stream;
    std::function<void()> run;
};

static std::deque<Delayed> delayed;
static uint64_t last_number;

static bool is_legacy(cudaStream_t s) { return s == NULL || s == cudaStreamLegacy; }
static bool is_handle(cudaStream_t s) { return !is_legacy(s) && s != cudaStreamPerThread; }
static bool is_blocking(cudaStream_t s) {
    return !is_handle(s) || !(reinterpret_cast<Stream*>(s)->flags & cudaStreamNonBlocking);
}

// Does b's work wait for a's? The legacy stream and the blocking ones wait for each other.
static bool in_order(cudaStream_t a, cudaStream_t b) {
    return a == b || (is_legacy(a) && is_blocking(b)) || (is_legacy(b) && is_blocking(a));
}

static uint64_t last_before(cudaStream_t stream) {
    uint64_t last = 0;
    for (const Delayed& d : delayed) {
        if (in_order(d.stream, stream)) { last = d.number; }
    }
    return last;
}

// All up to a number, whatever their streams: the ranks need their collectives in one order.
static void finish(uint64_t number) {
    while (!delayed.empty() && delayed.front().number <= number) {
        Delayed first = std::move(delayed.front());
        delayed.pop_front();
        if (!device_failed()) { first.run(); }
    }
}

void before_work(cudaStream_t stream) {
    if (!delayed.empty()) { finish(last_before(stream)); }
}

void finish_delayed() { finish(last_number); }

void run_late(cudaStream_t stream, std::function<void()> work) { delayed.push_back({++last_number, stream, work}); }

static Event* event_of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }
static cudaError_t ok() { return set_error(cudaSuccess); }

}  // namespace emu

using emu::event_of;
using emu::ok;

extern "C" {

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    emu::Stream* s = static_cast<emu::Stream*>(malloc(sizeof(emu::Stream)));
    s->flags = flags;
    *stream = reinterpret_cast<cudaStream_t>(s);
    return ok();
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
    return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = *greatest = 0;
    return ok();
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    emu::before_work(stream);
    free(static_cast<void*>(stream));
    return ok();
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    emu::before_work(stream);
    return ok();
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaStreamSynchronize(stream); }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t event, unsigned) {
    emu::finish(event_of(event)->after);
    return ok();
}
cudaError_t cudaDeviceSynchronize() {
    emu::finish_delayed();
    return ok();
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
    *event = reinterpret_cast<cudaEvent_t>(calloc(1, sizeof(emu::Event)));
    return ok();
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(static_cast<void*>(event));
    return ok();
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    clock_gettime(CLOCK_MONOTONIC, &event_of(event)->time);
    event_of(event)->after = emu::last_before(stream);
    return ok();
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    emu::finish(event_of(event)->after);
    return ok();
}
cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaEventSynchronize(event); }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    const timespec *a = &event_of(start)->time, *b = &event_of(end)->time;
    double ns = static_cast<double>(b->tv_nsec - a->tv_nsec);
    *milliseconds = static_cast<float>(1e3 * static_cast<double>(b->tv_sec - a->tv_sec) + 1e-6 * ns);
    return ok();
}

}  // extern "C"
