/*
Between the processes of an emulated NCCL communicator: one segment of shared memory, in which the ranks advance in
steps. Before a step each rank writes its slot, after it each may read all slots. There are two slots a rank, used in
turn: nobody can begin step n + 2 before all have arrived at n + 1, and so have read what was written for n.
*/
#ifndef NCCL_TRANSPORT_H
#define NCCL_TRANSPORT_H

#include <stddef.h>
#include <stdint.h>

#include <atomic>

#include <nccl.h>

namespace emu {

enum { MAX_RANKS = 16, NAME_BYTES = 64, MESSAGE_BYTES = 512 };
const size_t SLOT_BYTES = 256 << 10;

// What all ranks must agree on.
struct Call {
    int32_t kind, type, op, root;  // -1 where the kind has none
    uint64_t count;
};

enum PeerState : uint32_t { ABSENT, ATTACHED, LEFT };

// Memory of zeros is its first state, so no rank has to come before the others.
struct Peer {
    std::atomic<uint32_t> state, step;
    int32_t pid, device;
    Call call[2];  // of the step, as the slots
};

struct SharedState {
    std::atomic<uint32_t> ranks, changes, failure;  // changes: futex, counts whatever may end a wait
    char message[MESSAGE_BYTES];                    // of the first failure
    Peer peers[MAX_RANKS];
};

}  // namespace emu

struct ncclComm {
    int rank, ranks, device, file;
    emu::SharedState* shared;
    uint32_t step;
    uint64_t calls;
    ncclResult_t result;  // of the first failure, which is the last word of a communicator
    bool finalized;
    char name[emu::NAME_BYTES];
    char doing[160];  // for reports
};

namespace emu {

// Joins the segment as c->rank of c->ranks; c->name is set. Fails if the rank is taken.
ncclResult_t transport_attach(ncclComm_t c);
void transport_unlink(const ncclComm_t c);
void transport_leave(ncclComm_t c);

// Arrives at the next step and waits for all ranks. A rank that has ended, failed, left or does not come in time is an
// error in all others.
ncclResult_t transport_step(ncclComm_t c);
inline unsigned next_slot(const ncclComm_t c) { return (c->step + 1) & 1; }
inline unsigned last_slot(const ncclComm_t c) { return c->step & 1; }
unsigned char* slot_of(const ncclComm_t c, int rank, unsigned slot);

// Prints a line, ends the communicator for every rank, returns `result`.
ncclResult_t comm_fail(ncclComm_t c, ncclResult_t result, const char* format, ...)
    __attribute__((format(printf, 3, 4)));
// The same without a line.
void comm_give_up(ncclComm_t c, ncclResult_t result, const char* message);
const char* last_nccl_message();

}  // namespace emu

#endif
