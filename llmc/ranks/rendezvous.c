/*
The control channel of ranks that were started without MPI: data, opening and closing. rendezvous_join.h brings the
ranks together, rendezvous_watch.h ends them together. Only the calling thread uses the data connections, only the
watch thread reads those of the watch.
*/
#define _GNU_SOURCE  // accept4
#include "rendezvous_join.h"

#include <sys/random.h>

typedef enum { DATA_GO = 1, DATA_GATHER, DATA_ALL, DATA_BROADCAST } DataKind;

// In front of every message of data, so that ranks that do not call the same are found out.
typedef struct {
    uint64_t kind, bytes;
} DataHeader;

// ----------------------------------------------------------------------------
// data

// The connection of a rank broke. If the rank died, the watch ends this process in a moment, with the better line.
__attribute__((noreturn)) static void lose(size_t rank, int error) {
    sleep_seconds(GRACE_SECONDS);
    fatal("the connection to rank %zu (host %s) is lost: %s", rank, self.peers[rank].host, why(error));
}

static void data_send(size_t rank, DataKind kind, const void* data, size_t bytes) {
    DataHeader header = {kind, bytes};
    struct iovec parts[2] = {{&header, sizeof header}, {(void*)data, bytes}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    for (size_t left = sizeof header + bytes; left > 0;) {
        ssize_t n = sendmsg(self.peers[rank].data, &message, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) { continue; }
        if (n <= 0) { lose(rank, errno); }
        left -= (size_t)n;
        for (size_t i = 0, sent = (size_t)n; i < 2 && sent > 0; i++) {
            size_t step = sent < parts[i].iov_len ? sent : parts[i].iov_len;
            parts[i].iov_base = (char*)parts[i].iov_base + step;
            parts[i].iov_len -= step;
            sent -= step;
        }
    }
}

static void receive_bytes(size_t rank, void* data, size_t bytes) {
    for (size_t received = 0; received < bytes;) {
        ssize_t n = recv(self.peers[rank].data, (char*)data + received, bytes - received, MSG_WAITALL);
        if (n < 0 && errno == EINTR) { continue; }
        if (n <= 0) { lose(rank, n < 0 ? errno : 0); }
        received += (size_t)n;
    }
}

static void data_receive(size_t rank, DataKind kind, void* data, size_t bytes) {
    static const char* const names[] = {"nothing", "go", "all_gather", "all_gather", "broadcast"};
    DataHeader header;
    receive_bytes(rank, &header, sizeof header);
    if (header.kind != (uint64_t)kind || header.bytes != bytes) {
        fatal("rank %zu sends %s of %ju bytes, expected %s of %zu; start the same build and flags everywhere", rank,
              header.kind <= DATA_BROADCAST ? names[header.kind] : "garbage", (uintmax_t)header.bytes, names[kind],
              bytes);
    }
    receive_bytes(rank, data, bytes);
}

void rendezvous_all_gather(void* all, const void* mine, size_t bytes) {
    assert(self.is_open && bytes > 0 && bytes <= RENDEZVOUS_MAX_BYTES);
    if (self.rank != 0) {
        data_send(0, DATA_GATHER, mine, bytes);
        data_receive(0, DATA_ALL, all, self.size * bytes);
        return;
    }
    memmove(all, mine, bytes);
    for (size_t r = 1; r < self.size; r++) { data_receive(r, DATA_GATHER, (char*)all + r * bytes, bytes); }
    for (size_t r = 1; r < self.size; r++) { data_send(r, DATA_ALL, all, self.size * bytes); }
}

void rendezvous_broadcast(void* data, size_t bytes) {
    assert(self.is_open && bytes > 0 && bytes <= RENDEZVOUS_MAX_BYTES);
    if (self.rank != 0) { data_receive(0, DATA_BROADCAST, data, bytes); }
    for (size_t r = 1; self.rank == 0 && r < self.size; r++) { data_send(r, DATA_BROADCAST, data, bytes); }
}

// ----------------------------------------------------------------------------
// open and close

static void set_self(const RendezvousConfig* c) {
    assert(!self.is_open && c->size >= 2 && c->size <= UINT32_MAX && c->rank < c->size);
    assert(c->port > 0 && c->port < 65536);
    self.rank = c->rank;
    self.size = c->size;
    self.timeout = c->timeout;
    self.deadline = wall_seconds() + c->timeout;
    self.address = xstrdup(c->address);
    self.where = text(strchr(c->address, ':') ? "[%s]:%d" : "%s:%d", c->address, c->port);
    snprintf(self.port, sizeof self.port, "%d", c->port);
    if (gethostname(self.host, HOST_BYTES) != 0) { snprintf(self.host, HOST_BYTES, "unknown"); }
    self.host[HOST_BYTES - 1] = '\0';
    self.job = fnv1a(c->job, strlen(c->job));
    if (getrandom(&self.process, sizeof self.process, 0) < 0) { self.process = (uint64_t)getpid(); }
    self.peers = (Peer*)xcalloc(c->size, sizeof(Peer));
    for (size_t r = 0; r < c->size; r++) { self.peers[r].data = self.peers[r].watch = -1; }
    self.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (self.wake < 0) { fatal("cannot create an eventfd: %s; raise ulimit -n", strerror(errno)); }
    atomic_store(&self.closing, false);
    atomic_store(&self.ending, NOT_ENDING);
    self.is_open = true;
}

void rendezvous_open(const RendezvousConfig* config) {
    set_self(config);
    if (self.rank == 0) {
        receive_ranks();
        start_watch();
        for (size_t r = 1; r < self.size; r++) { data_send(r, DATA_GO, NULL, 0); }
    } else {
        come_to_rank_0();
        start_watch();
        data_receive(0, DATA_GO, NULL, 0);
    }
}

void rendezvous_close(void) {
    if (!self.is_open) { return; }
    atomic_store(&self.closing, true);
    wake_watch();
    pthread_join(self.watcher, NULL);
    self.is_open = self.has_watcher = false;
    for (size_t r = 0; r < self.size; r++) {
        close_socket(&self.peers[r].data);
        close_socket(&self.peers[r].watch);
    }
    close(self.wake);
    free(self.peers);
    free(self.address);
    free(self.where);
}
