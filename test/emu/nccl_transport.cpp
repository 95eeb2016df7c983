/*
Shared memory, steps and failures of nccl.cpp; see nccl_transport.h. Waiting is by futex, and never for ever: each
rank holds a lock on one byte of the segment, which the kernel takes away when its process ends, however that happens.
(kill(pid, 0) would still find a process that nobody has waited for.)
*/
#include "nccl_transport.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace emu {

enum { NO_FAILURE, FAILURE_WRITING, FAILURE_TOLD };
enum { SPINS = 200, NAP_NS = 20 * 1000 * 1000 };
const size_t HEADER_BYTES = (sizeof(SharedState) + 4095) / 4096 * 4096;
const size_t SEGMENT_BYTES = HEADER_BYTES + size_t{2} * MAX_RANKS * SLOT_BYTES;  // pages not used cost nothing

static thread_local char last_message[MESSAGE_BYTES];
const char* last_nccl_message() { return last_message; }

// ----------------------------------------------------------------------------
// waking, failing

static double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

static double timeout_seconds() {
    const char* value = getenv("EMU_NCCL_TIMEOUT");
    double seconds = value ? strtod(value, NULL) : 0;
    return seconds > 0 ? seconds : 60;
}

static void wake_all(SharedState* s) {
    s->changes++;
    syscall(SYS_futex, &s->changes, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

// True if it slept the whole time.
static bool nap(SharedState* s, uint32_t changes) {
    timespec t = {0, NAP_NS};
    return syscall(SYS_futex, &s->changes, FUTEX_WAIT, changes, &t, NULL, 0) != 0 && errno == ETIMEDOUT;
}

void comm_give_up(ncclComm_t c, ncclResult_t result, const char* message) {
    c->result = result;
    snprintf(last_message, sizeof last_message, "%s", message);
    SharedState* s = c->shared;
    uint32_t none = NO_FAILURE;
    if (!s || !s->failure.compare_exchange_strong(none, FAILURE_WRITING)) { return; }
    snprintf(s->message, sizeof s->message, "%s", message);
    s->failure = FAILURE_TOLD;
    wake_all(s);
}

ncclResult_t comm_fail(ncclComm_t c, ncclResult_t result, const char* format, ...) {
    char text[MESSAGE_BYTES - 64], line[MESSAGE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    snprintf(line, sizeof line, "NCCL rank %d of %d: %s", c->rank, c->ranks, text);
    fprintf(stderr, "emulator: %s\n", line);
    comm_give_up(c, result, line);
    return result;
}

// ----------------------------------------------------------------------------
// the segment

// The lock on byte `rank`: taken for this process, or asked for.
static bool lock_rank(int file, int rank) {
    struct flock lock = {F_WRLCK, SEEK_SET, rank, 1, 0};
    return fcntl(file, F_SETLK, &lock) == 0;
}

static bool has_ended(int file, int rank) {
    struct flock lock = {F_WRLCK, SEEK_SET, rank, 1, 0};
    return fcntl(file, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

unsigned char* slot_of(const ncclComm_t c, int rank, unsigned slot) {
    unsigned char* slots = reinterpret_cast<unsigned char*>(c->shared) + HEADER_BYTES;
    return slots + (static_cast<size_t>(rank) * 2 + slot) * SLOT_BYTES;
}

ncclResult_t transport_attach(ncclComm_t c) {
    c->file = shm_open(c->name, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (c->file < 0 || ftruncate(c->file, static_cast<off_t>(SEGMENT_BYTES)) != 0) {
        return comm_fail(c, ncclSystemError, "no shared memory: %s", strerror(errno));
    }
    void* p = mmap(NULL, SEGMENT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, c->file, 0);
    if (p == MAP_FAILED) { return comm_fail(c, ncclSystemError, "cannot map shared memory: %s", strerror(errno)); }
    c->shared = static_cast<SharedState*>(p);

    Peer* me = &c->shared->peers[c->rank];
    uint32_t absent = ABSENT, ranks = 0, wanted = static_cast<uint32_t>(c->ranks);
    if (!c->shared->ranks.compare_exchange_strong(ranks, wanted) && ranks != wanted) {
        return comm_fail(c, ncclInvalidUsage, "the communicator has %u ranks for others", ranks);
    }
    if (!lock_rank(c->file, c->rank) || !me->state.compare_exchange_strong(absent, ATTACHED)) {
        return comm_fail(c, ncclInvalidUsage, "this rank is taken by another process");
    }
    me->pid = getpid();
    me->device = c->device;
    return ncclSuccess;
}

void transport_unlink(const ncclComm_t c) { shm_unlink(c->name); }

void transport_leave(ncclComm_t c) {
    if (c->shared) {
        c->shared->peers[c->rank].state = LEFT;
        wake_all(c->shared);
        munmap(static_cast<void*>(c->shared), SEGMENT_BYTES);
    }
    if (c->file >= 0) { close(c->file); }
}

// ----------------------------------------------------------------------------
// steps

// A rank that has not arrived at this one's step; -1 if all have.
static int missing_rank(const ncclComm_t c) {
    for (int r = 0; r < c->ranks; r++) {
        if (static_cast<int32_t>(c->shared->peers[r].step - c->step) < 0) { return r; }
    }
    return -1;
}

// Has a rank that the others wait for left or ended? -1 if none has.
static int lost_rank(const ncclComm_t c, bool look_at_locks) {
    for (int r = 0; r < c->ranks; r++) {
        const Peer* peer = &c->shared->peers[r];
        uint32_t state = peer->state;
        bool lost = state == LEFT || (state == ATTACHED && look_at_locks && has_ended(c->file, r));
        // asked last: it may have arrived just before it left
        if (r != c->rank && lost && static_cast<int32_t>(peer->step - c->step) < 0) { return r; }
    }
    return -1;
}

// Why the step cannot be finished, as a failure; ncclInProgress if it still may.
static ncclResult_t check_wait(ncclComm_t c, int missing, bool look_at_locks, double waited) {
    const SharedState* s = c->shared;
    if (s->failure == FAILURE_TOLD) {
        return comm_fail(c, ncclRemoteError, "%s: given up, since %s", c->doing, s->message);
    }
    int lost = lost_rank(c, look_at_locks);
    if (lost >= 0) {
        const Peer* peer = &s->peers[lost];
        return comm_fail(c, ncclRemoteError, "%s: rank %d (process %d) has %s", c->doing, lost, peer->pid,
                         peer->state == LEFT ? "destroyed the communicator" : "ended");
    }
    if (waited > timeout_seconds()) {
        return comm_fail(c, ncclSystemError, "%s: rank %d has not come within %g s (EMU_NCCL_TIMEOUT)", c->doing,
                         missing, timeout_seconds());
    }
    return ncclInProgress;
}

ncclResult_t transport_step(ncclComm_t c) {
    SharedState* s = c->shared;
    s->peers[c->rank].step = ++c->step;
    wake_all(s);
    for (int i = 0; i < SPINS && missing_rank(c) >= 0; i++) { __builtin_ia32_pause(); }
    bool slept = false;
    for (double start = now();;) {
        uint32_t changes = s->changes;
        int missing = missing_rank(c);
        if (missing < 0) { return ncclSuccess; }  // even if one has failed since: all must see the same
        ncclResult_t result = check_wait(c, missing, slept, now() - start);
        if (result != ncclInProgress) {
            s->peers[c->rank].step = --c->step;  // who comes late must not believe that all are there
            return result;
        }
        slept = nap(s, changes);
    }
}

}  // namespace emu
