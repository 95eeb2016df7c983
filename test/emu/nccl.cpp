/*
NCCL's collectives between emulated programs, one process a rank, on one machine. A collective runs when it is called,
or at the end of its group, or later (streams.cpp). Ranks exchange chunks through shared memory (nccl_transport.h);
every rank sums all contributions itself, in the order of the ranks, in fp32 for bf16, so that all have the same bits.
What would hang, or be garbage, on GPUs is refused with a line on stderr, and then the communicator has failed for every
rank.
*/
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include <algorithm>
#include <vector>

#include "emulator.h"
#include "nccl_transport.h"

using emu::Call;
using emu::comm_fail;

namespace {

enum Kind { INIT, ALL_REDUCE, REDUCE_SCATTER, REDUCE, BROADCAST, ALL_GATHER };
const char* const KIND_NAMES[] = {"ncclCommInitRank", "ncclAllReduce", "ncclReduceScatter",
                                  "ncclReduce",       "ncclBroadcast", "ncclAllGather"};

struct Operation {
    Call call;
    const char* send;
    char* recv;
    ncclComm_t comm;
    cudaStream_t stream;
};

thread_local std::vector<Operation> group;
thread_local int group_depth;
thread_local ncclResult_t group_result = ncclSuccess;

// ----------------------------------------------------------------------------
// types and operations

struct Type {
    const char* name;
    size_t bytes;  // 0: not supported here
};
const Type TYPES[ncclNumTypes] = {{"int8", 1},    {"uint8", 1},    {"int32", 4},   {"uint32", 4},
                                  {"int64", 8},   {"uint64", 8},   {"float16", 0}, {"float32", 4},
                                  {"float64", 8}, {"bfloat16", 2}, {"float8", 0},  {"float8", 0}};
// product is not supported
const char* const OPERATION_NAMES[ncclNumOps] = {"sum", NULL, "max", "min", "average"};

struct Bfloat16 {
    uint16_t raw;
};
template <class T>
T value_of(T x) {
    return x;
}
float value_of(Bfloat16 x) { return emu::bits<float>(static_cast<uint32_t>(x.raw) << 16); }
template <class T, class A>
void store(T* to, A x) {
    *to = static_cast<T>(x);
}
void store(Bfloat16* to, float x) {
    __nv_bfloat16 rounded = __float2bfloat16_rn(x);
    memcpy(&to->raw, &rounded, sizeof rounded);
}

// Integers wrap around, as on the device.
template <class A>
A combine(int op, A a, A b) {
    if constexpr (std::is_integral<A>::value) {
        switch (op) {
            case ncclMax: return std::max(a, b);
            case ncclMin: return std::min(a, b);
            default: return static_cast<A>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
        }
    } else {
        switch (op) {
            case ncclMax: return fmax(a, b);
            case ncclMin: return fmin(a, b);
            default: return a + b;
        }
    }
}

template <class T>
void reduce_typed(char* out, const unsigned char* const* in, int ranks, size_t n, int op) {
    for (size_t i = 0; i < n; i++) {
        auto sum = value_of(reinterpret_cast<const T*>(in[0])[i]);
        for (int r = 1; r < ranks; r++) { sum = combine(op, sum, value_of(reinterpret_cast<const T*>(in[r])[i])); }
        if (op == ncclAvg) { sum = static_cast<decltype(sum)>(sum / static_cast<decltype(sum)>(ranks)); }
        store(reinterpret_cast<T*>(out) + i, sum);
    }
}

void reduce(char* out, const unsigned char* const* in, int ranks, size_t n, const Call* call) {
    switch (call->type) {
        case ncclInt8: return reduce_typed<int8_t>(out, in, ranks, n, call->op);
        case ncclUint8: return reduce_typed<uint8_t>(out, in, ranks, n, call->op);
        case ncclInt32: return reduce_typed<int32_t>(out, in, ranks, n, call->op);
        case ncclUint32: return reduce_typed<uint32_t>(out, in, ranks, n, call->op);
        case ncclInt64: return reduce_typed<int64_t>(out, in, ranks, n, call->op);
        case ncclUint64: return reduce_typed<uint64_t>(out, in, ranks, n, call->op);
        case ncclFloat64: return reduce_typed<double>(out, in, ranks, n, call->op);
        case ncclBfloat16: return reduce_typed<Bfloat16>(out, in, ranks, n, call->op);
        default: return reduce_typed<float>(out, in, ranks, n, call->op);
    }
}

// ----------------------------------------------------------------------------
// checks

void describe(char* text, size_t bytes, const Call* c) {
    char root[32] = "";
    if (c->kind == INIT) {
        snprintf(text, bytes, "%s of %lu ranks", KIND_NAMES[c->kind], c->count);
        return;
    }
    if (c->root >= 0) { snprintf(root, sizeof root, ", root %d", c->root); }
    snprintf(text, bytes, "%s of %lu %s%s%s%s", KIND_NAMES[c->kind], c->count, TYPES[c->type].name,
             c->op >= 0 ? ", " : "", c->op >= 0 ? OPERATION_NAMES[c->op] : "", root);
}

bool same_call(const Call* a, const Call* b) {
    return a->kind == b->kind && a->type == b->type && a->op == b->op && a->root == b->root && a->count == b->count;
}

// After a step that began with calls: every rank sees every other's, so all find the same difference.
ncclResult_t compare_calls(ncclComm_t c, unsigned slot) {
    const Call* mine = &c->shared->peers[c->rank].call[slot];
    for (int r = 0; r < c->ranks; r++) {
        const Call* other = &c->shared->peers[r].call[slot];
        if (same_call(mine, other)) { continue; }
        char here[128], there[128];
        describe(here, sizeof here, mine);
        describe(there, sizeof there, other);
        return comm_fail(c, ncclInvalidUsage, "call %lu is %s, but rank %d calls %s", c->calls, here, r, there);
    }
    return ncclSuccess;
}

// Elements of the send and the receive buffer; 0 where this rank has none.
struct Extents {
    size_t send, recv;
};
Extents extents(const Call* call, const ncclComm_t c) {
    size_t n = call->count, all = n * static_cast<size_t>(c->ranks);
    bool root = call->root == c->rank;
    switch (call->kind) {
        case REDUCE_SCATTER: return {all, n};
        case ALL_GATHER: return {n, all};
        case REDUCE: return {n, root ? n : 0};
        case BROADCAST: return {root ? n : 0, n};
        default: return {n, n};
    }
}

ncclResult_t check_buffer(const Operation* o, const char* name, const char* p, size_t elements) {
    size_t element = TYPES[o->call.type].bytes, bytes = elements * element;
    bool on_device;
    if (bytes == 0) { return ncclSuccess; }
    emu::Containment where = emu::find_allocation(p, bytes, &on_device);
    const char* fault = NULL;
    if (where == emu::OUTSIDE || !on_device) { fault = "is not in device memory"; }
    if (where == emu::BEYOND_END) { fault = "ends before its last element"; }
    if (reinterpret_cast<uintptr_t>(p) % element != 0) { fault = "is not aligned to its type"; }
    if (!fault) { return ncclSuccess; }
    char call[128];
    describe(call, sizeof call, &o->call);
    return comm_fail(o->comm, ncclInvalidArgument, "%s: the %s buffer of %zu bytes %s", call, name, bytes, fault);
}

// Buffers may be the same only as NCCL's in-place calls want it.
ncclResult_t check_overlap(const Operation* o) {
    size_t element = TYPES[o->call.type].bytes, block = o->call.count * element;
    Extents n = extents(&o->call, o->comm);
    const char *send = o->send, *recv = o->recv, *in_place = recv;
    if (o->call.kind == REDUCE_SCATTER) { in_place = recv - static_cast<size_t>(o->comm->rank) * block; }
    if (o->call.kind == ALL_GATHER) { in_place = recv + static_cast<size_t>(o->comm->rank) * block; }
    bool apart = send + n.send * element <= recv || recv + n.recv * element <= send;
    if (n.send == 0 || n.recv == 0 || apart || send == in_place) { return ncclSuccess; }
    char call[128];
    describe(call, sizeof call, &o->call);
    return comm_fail(o->comm, ncclInvalidArgument, "%s: the buffers overlap, and not as an in-place call", call);
}

ncclResult_t check_operation(const Operation* o) {
    const Call* call = &o->call;
    ncclComm_t c = o->comm;
    const char* name = KIND_NAMES[call->kind];
    if (c->result != ncclSuccess) { return c->result; }
    if (c->finalized) { return comm_fail(c, ncclInvalidUsage, "%s after ncclCommFinalize", name); }
    if (emu::device_failed()) { return comm_fail(c, ncclUnhandledCudaError, "%s after a fault of a kernel", name); }
    if (call->type < 0 || call->type >= ncclNumTypes || TYPES[call->type].bytes == 0) {
        return comm_fail(c, ncclInvalidArgument, "%s: type %d is unknown to the emulator", name, call->type);
    }
    if (call->op != -1 && (call->op < 0 || call->op >= ncclNumOps || !OPERATION_NAMES[call->op])) {
        return comm_fail(c, ncclInvalidArgument, "%s: operation %d is unknown to the emulator", name, call->op);
    }
    bool rooted = call->kind == REDUCE || call->kind == BROADCAST;
    if (rooted && (call->root < 0 || call->root >= c->ranks)) {
        return comm_fail(c, ncclInvalidArgument, "%s: there is no rank %d to be the root", name, call->root);
    }
    Extents n = extents(call, c);
    ncclResult_t result = check_buffer(o, "send", o->send, n.send);
    if (result == ncclSuccess) { result = check_buffer(o, "receive", o->recv, n.recv); }
    return result == ncclSuccess ? check_overlap(o) : result;
}

// ----------------------------------------------------------------------------
// execution

// This rank's contribution of elements [begin, begin + n) goes into its slot.
void write_slot(const Operation* o, size_t begin, size_t n) {
    const Call* call = &o->call;
    ncclComm_t c = o->comm;
    size_t element = TYPES[call->type].bytes;
    unsigned char* slot = emu::slot_of(c, c->rank, emu::next_slot(c));
    if (call->kind == BROADCAST && call->root != c->rank) { return; }
    size_t blocks = call->kind == REDUCE_SCATTER ? static_cast<size_t>(c->ranks) : 1;
    for (size_t b = 0; b < blocks; b++) {
        memcpy(slot + b * n * element, o->send + (b * call->count + begin) * element, n * element);
    }
}

void write_result(char* to, size_t bytes, const unsigned char* from) {
    memcpy(to, from, bytes);
    emu::checker::host_wrote(to, bytes);
}

void read_slots(const Operation* o, size_t begin, size_t n) {
    const Call* call = &o->call;
    ncclComm_t c = o->comm;
    size_t element = TYPES[call->type].bytes, bytes = n * element;
    const unsigned char* slots[emu::MAX_RANKS];
    for (int r = 0; r < c->ranks; r++) { slots[r] = emu::slot_of(c, r, emu::last_slot(c)); }
    char* to = o->recv + begin * element;
    if (call->kind == ALL_GATHER) {
        for (int r = 0; r < c->ranks; r++) {
            write_result(to + static_cast<size_t>(r) * call->count * element, bytes, slots[r]);
        }
        return;
    }
    if (call->kind == BROADCAST) { return write_result(to, bytes, slots[call->root]); }
    if (call->kind == REDUCE && call->root != c->rank) { return; }
    if (call->kind == REDUCE_SCATTER) {
        for (int r = 0; r < c->ranks; r++) { slots[r] += static_cast<size_t>(c->rank) * bytes; }
    }
    reduce(to, slots, c->ranks, n, call);
    emu::checker::host_wrote(to, bytes);
}

// One step a chunk, one also when there is nothing to send: all must agree on that as well.
ncclResult_t exchange(const Operation* o) {
    ncclComm_t c = o->comm;
    size_t blocks = o->call.kind == REDUCE_SCATTER ? static_cast<size_t>(c->ranks) : 1;
    size_t chunk = emu::SLOT_BYTES / (blocks * TYPES[o->call.type].bytes);
    for (size_t begin = 0; begin == 0 || begin < o->call.count; begin += chunk) {
        size_t n = std::min(chunk, o->call.count - begin);
        c->shared->peers[c->rank].call[emu::next_slot(c)] = o->call;
        if (n > 0) { write_slot(o, begin, n); }
        ncclResult_t result = emu::transport_step(c);
        if (result == ncclSuccess) { result = compare_calls(c, emu::last_slot(c)); }
        if (result != ncclSuccess) { return result; }
        if (n > 0) { read_slots(o, begin, n); }
    }
    return ncclSuccess;
}

ncclResult_t execute(const Operation* o) {
    ncclComm_t c = o->comm;
    ncclResult_t result = check_operation(o);  // again: in a group, an earlier one may have failed
    if (result != ncclSuccess) { return result; }
    c->calls++;
    int n = snprintf(c->doing, sizeof c->doing, "call %lu, ", c->calls);
    describe(c->doing + n, sizeof c->doing - static_cast<size_t>(n), &o->call);
    emu::open_device_memory();
    result = exchange(o);
    emu::close_device_memory();
    return result;
}

// Now, or, with EMU_LATE, when the stream's order demands it; an error is then one of the device.
ncclResult_t submit(const Operation* o) {
    ncclResult_t result = check_operation(o);
    if (result != ncclSuccess) { return result; }
    if (emu::config().late != emu::COLLECTIVES_LATE) {
        emu::before_work(o->stream);
        return execute(o);
    }
    Operation copy = *o;
    emu::run_late(o->stream, [copy] {
        if (execute(&copy) != ncclSuccess) { emu::device_fault("a collective that was run late has failed"); }
    });
    return ncclSuccess;
}

ncclResult_t collective(Call call, const void* send, void* recv, ncclComm_t comm, cudaStream_t stream) {
    Operation o = {call, static_cast<const char*>(send), static_cast<char*>(recv), comm, stream};
    if (!comm) { return ncclInvalidArgument; }
    if (group_depth == 0) { return submit(&o); }
    ncclResult_t result = check_operation(&o);
    if (result == ncclSuccess) { group.push_back(o); }
    if (group_result == ncclSuccess) { group_result = result; }
    return result;
}

// ----------------------------------------------------------------------------
// communicators

const char ID_PREFIX[] = "/emu_nccl_";

// NCCL refuses two ranks on one device; that is how a forgotten cudaSetDevice shows.
ncclResult_t check_devices(ncclComm_t c) {
    const char* allowed = getenv("EMU_NCCL_SAME_DEVICE");
    for (int r = 0; r < c->ranks && !(allowed && *allowed == '1'); r++) {
        if (r != c->rank && c->shared->peers[r].device == c->device) {
            return comm_fail(c, ncclInvalidUsage, "rank %d uses device %d as well (EMU_DEVICES, cudaSetDevice)", r,
                             c->device);
        }
    }
    return ncclSuccess;
}

ncclResult_t init(ncclComm_t c) {
    snprintf(c->doing, sizeof c->doing, "%s of %d ranks", KIND_NAMES[INIT], c->ranks);
    ncclResult_t result = emu::transport_attach(c);
    if (result == ncclSuccess) {
        c->shared->peers[c->rank].call[emu::next_slot(c)] = {INIT, -1, -1, -1, static_cast<uint64_t>(c->ranks)};
        result = emu::transport_step(c);
    }
    emu::transport_unlink(c);  // all are in, or never will be
    return result == ncclSuccess ? check_devices(c) : result;
}

void destroy(ncclComm_t c) {
    emu::transport_leave(c);
    delete c;
}

}  // namespace

// ----------------------------------------------------------------------------
// the library's names

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
    if (!version) { return ncclInvalidArgument; }
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess: return "no error";
        case ncclUnhandledCudaError: return "unhandled CUDA error";
        case ncclSystemError: return "system error";
        case ncclInternalError: return "internal error";
        case ncclInvalidArgument: return "invalid argument";
        case ncclInvalidUsage: return "invalid usage";
        case ncclRemoteError: return "remote process exited or there was a network error";
        case ncclInProgress: return "operation in progress";
        default: return "unknown result code";
    }
}
const char* ncclGetLastError(ncclComm_t) { return emu::last_nccl_message(); }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    uint64_t random[2];
    if (!id) { return ncclInvalidArgument; }
    if (getrandom(random, sizeof random, 0) != static_cast<ssize_t>(sizeof random)) { return ncclSystemError; }
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%s%016lx%016lx", ID_PREFIX, random[0], random[1]);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
    if (!comm) { return ncclInvalidArgument; }
    *comm = NULL;
    if (ranks < 1 || ranks > emu::MAX_RANKS || rank < 0 || rank >= ranks) {
        fprintf(stderr, "emulator: ncclCommInitRank: rank %d of %d, expected up to %d ranks\n", rank, ranks,
                static_cast<int>(emu::MAX_RANKS));
        return ncclInvalidArgument;
    }
    if (strncmp(id.internal, ID_PREFIX, strlen(ID_PREFIX)) != 0 || !memchr(id.internal, '\0', emu::NAME_BYTES)) {
        fprintf(stderr, "emulator: ncclCommInitRank: the id does not come from ncclGetUniqueId\n");
        return ncclInvalidArgument;
    }
    ncclComm_t c = new ncclComm();
    c->rank = rank;
    c->ranks = ranks;
    c->file = -1;
    cudaGetDevice(&c->device);
    memcpy(c->name, id.internal, sizeof c->name);
    ncclResult_t result = init(c);
    if (result == ncclSuccess) {
        *comm = c;
    } else {
        destroy(c);
    }
    return result;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
    return ncclCommInitRank(comm, ranks, id, rank);
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
    if (!comm || !count) { return ncclInvalidArgument; }
    *count = comm->ranks;
    return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
    if (!comm || !rank) { return ncclInvalidArgument; }
    *rank = comm->rank;
    return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
    if (!comm || !device) { return ncclInvalidArgument; }
    *device = comm->device;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
    if (!comm || !result) { return ncclInvalidArgument; }
    *result = comm->result;
    if (*result == ncclSuccess && comm->shared->failure != 0) { *result = ncclRemoteError; }
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    if (!comm) { return ncclInvalidArgument; }
    comm->finalized = true;
    return comm->result;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    emu::finish_delayed();
    if (comm) { destroy(comm); }
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    if (!comm) { return ncclSuccess; }
    char message[64];
    emu::finish_delayed();
    snprintf(message, sizeof message, "rank %d has called ncclCommAbort", comm->rank);
    emu::comm_give_up(comm, ncclSystemError, message);
    destroy(comm);
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    return collective({ALL_REDUCE, type, op, -1, count}, send, recv, comm, stream);
}
ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
    return collective({REDUCE_SCATTER, type, op, -1, count}, send, recv, comm, stream);
}
ncclResult_t ncclReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
    return collective({REDUCE, type, op, root, count}, send, recv, comm, stream);
}
ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
    return collective({BROADCAST, type, -1, root, count}, send, recv, comm, stream);
}
ncclResult_t ncclAllGather(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    return collective({ALL_GATHER, type, -1, -1, count}, send, recv, comm, stream);
}

ncclResult_t ncclGroupStart() {
    group_depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
    if (group_depth == 0) {
        fprintf(stderr, "emulator: ncclGroupEnd without ncclGroupStart\n");
        return ncclInvalidUsage;
    }
    if (--group_depth > 0) { return ncclSuccess; }
    ncclResult_t result = group_result;
    for (size_t i = 0; i < group.size() && result == ncclSuccess; i++) { result = submit(&group[i]); }
    group.clear();
    group_result = ncclSuccess;
    return result;
}

}  // extern "C"
