/*
How the ranks of a job find each other; private to rendezvous.c. Each opens two connections to rank 0, for data and for
the watch, and says on each what it is. Rank 0 hears everyone who comes without waiting for anyone, answers those that
know the protocol and drops the rest.
*/
#ifndef RENDEZVOUS_JOIN_H
#define RENDEZVOUS_JOIN_H

#include "rendezvous_watch.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>

enum { VERSION = 1, MAX_VISITORS = 128, LIST_BYTES = 160, ERROR_BYTES = 256 };
static const char MAGIC[8] = "BAMCRDV\n";
static const double HINT_SECONDS = 30;     // between two lines of a rank that waits
static const double VISITOR_SECONDS = 10;  // to say hello, or to answer it
static const double CONNECT_SECONDS = 5;   // a try of one address

typedef enum { CHANNEL_DATA, CHANNEL_WATCH } Channel;

// What a rank says first on each connection. No padding, so that no byte of it is left unset.
typedef struct {
    char magic[8];
    uint32_t version, channel, size, rank;
    uint64_t job;      // hash of its text
    uint64_t process;  // random: tells a second process of the same rank from the first
    char host[HOST_BYTES];
} Hello;

typedef enum { WELCOME, REFUSED_VERSION, REFUSED_JOB, REFUSED_SIZE, REFUSED_TWICE } Answer;

typedef struct {
    char magic[8];
    uint32_t version, answer;
    uint64_t size;
    char host[HOST_BYTES];  // of rank 0, or of the process that took the rank before
} Reply;

// ----------------------------------------------------------------------------
// sockets

static void close_socket(int* fd) {
    if (*fd >= 0) { close(*fd); }
    *fd = -1;
}

static void set_option(int fd, int level, int name, int value) { setsockopt(fd, level, name, &value, sizeof value); }

// Data: short messages at once. Watch: a host that no longer answers is given up after 45 s. The limit on
// unacknowledged bytes is for the watch alone, because on data it would also cut off a rank that computes for long.
static void set_up_socket(int fd, Channel channel) {
    set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 15);
    set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 10);
    set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
    if (channel == CHANNEL_WATCH) { set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 45000); }
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
}

// ----------------------------------------------------------------------------
// rank 0 waits for the others

static bool has_come(size_t rank) { return rank == 0 || self.peers[rank].watch >= 0; }

// "ranks 3, 5-7" that have not come; how many as result.
static size_t list_missing(char list[LIST_BYTES]) {
    size_t missing = 0, used = 0;
    for (size_t first = 1, end; first < self.size; first = end) {
        end = first + 1;
        if (has_come(first)) { continue; }
        while (end < self.size && !has_come(end)) { end++; }
        char item[64];
        int n = end - first == 1 ? snprintf(item, sizeof item, "%s%zu", missing ? ", " : "", first)
                                 : snprintf(item, sizeof item, "%s%zu-%zu", missing ? ", " : "", first, end - 1);
        missing += end - first;
        bool fits = used + (size_t)n + sizeof "ranks , ..." <= LIST_BYTES;
        if (fits) { used += (size_t)snprintf(list + used, LIST_BYTES - used, "%s%s", used ? "" : "ranks ", item); }
        if (!fits && list[used - 1] != '.') { used += (size_t)snprintf(list + used, LIST_BYTES - used, ", ..."); }
    }
    if (missing == 1) { memmove(list + 4, list + 5, strlen(list + 5) + 1); }  // "rank 3"
    return missing;
}

typedef struct {
    int fd;
    double deadline;
    size_t received;
    Hello hello;
} Visitor;

static void fail_to_listen(int error) {
    if (error == EADDRINUSE) {
        fatal("rank 0: port %s is taken by another program on host %s; set MASTER_PORT to a free one, on all ranks",
              self.port, self.host);
    }
    fatal("rank 0: cannot listen on port %s: %s; set MASTER_PORT to another one, such as 29500, on all ranks",
          self.port, strerror(error));
}

// On every interface, not on self.address: the name of a host often leads to 127.0.1.1 on the host itself.
static int start_to_listen(void) {
    int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), error = errno;
    if (fd >= 0) {
        struct sockaddr_in6 any = {
            .sin6_family = AF_INET6, .sin6_addr = IN6ADDR_ANY_INIT, .sin6_port = htons((uint16_t)atoi(self.port))};
        set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);
        set_option(fd, IPPROTO_IPV6, IPV6_V6ONLY, 0);
        if (bind(fd, (struct sockaddr*)&any, sizeof any) == 0 && listen(fd, SOMAXCONN) == 0) { return fd; }
        error = errno;
        close(fd);
    }
    if (error != EAFNOSUPPORT && error != EADDRNOTAVAIL) { fail_to_listen(error); }
    fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);  // a host without IPv6
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(self.port))};
    set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    if (bind(fd, (struct sockaddr*)&any, sizeof any) != 0 || listen(fd, SOMAXCONN) != 0) { fail_to_listen(errno); }
    return fd;
}

// Two connections a rank are more than the usual limit of 1024 files where there are hundreds.
static void raise_file_limit(void) {
    struct rlimit limit;
    rlim_t need = 2 * self.size + MAX_VISITORS + 256;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= need) { return; }
    if (limit.rlim_max < need) {
        fatal("rank 0: %zu ranks need %ju open files, found a limit of %ju; raise it with ulimit -n", self.size,
              (uintmax_t)need, (uintmax_t)limit.rlim_max);
    }
    limit.rlim_cur = need;
    setrlimit(RLIMIT_NOFILE, &limit);
}

static void send_reply(int fd, Answer answer, const char* host) {
    Reply reply = {.version = VERSION, .answer = answer, .size = self.size};
    memcpy(reply.magic, MAGIC, sizeof MAGIC);
    snprintf(reply.host, sizeof reply.host, "%s", host);
    send(fd, &reply, sizeof reply, MSG_NOSIGNAL | MSG_DONTWAIT);
}

// Takes a visitor's connection over if it is one of ours; says whether it did.
static bool admit(int fd, Hello* hello) {
    hello->host[HOST_BYTES - 1] = '\0';
    Answer refusal = hello->version != VERSION  ? REFUSED_VERSION
                     : hello->job != self.job   ? REFUSED_JOB
                     : hello->size != self.size ? REFUSED_SIZE
                                                : WELCOME;
    if (refusal != WELCOME) {
        send_reply(fd, refusal, self.host);
        return false;
    }
    if (hello->rank == 0 || hello->rank >= self.size) { return false; }
    Peer* p = &self.peers[hello->rank];
    if (p->data >= 0 && p->process != hello->process) {
        send_reply(fd, REFUSED_TWICE, p->host);
        return false;
    }
    if (p->watch >= 0) { return false; }
    if (hello->channel == CHANNEL_WATCH) {
        if (p->data < 0) { return false; }  // lost in between: it comes again with both
        p->watch = fd;
    } else {
        close_socket(&p->data);
        p->data = fd;
        p->process = hello->process;
        memcpy(p->host, hello->host, HOST_BYTES);
    }
    set_up_socket(fd, hello->channel == CHANNEL_WATCH ? CHANNEL_WATCH : CHANNEL_DATA);
    send_reply(fd, WELCOME, self.host);
    return true;
}

// Reads what a visitor has to say; says whether its connection is dealt with and its place free.
static bool hear(Visitor* v) {
    Hello* h = &v->hello;
    ssize_t n = recv(v->fd, (char*)h + v->received, sizeof *h - v->received, MSG_DONTWAIT);
    if (n < 0 && is_transient(errno)) { return false; }
    if (n > 0) {
        v->received += (size_t)n;
        bool is_ours = memcmp(h->magic, MAGIC, v->received < sizeof MAGIC ? v->received : sizeof MAGIC) == 0;
        bool is_other_version = v->received >= 12 && h->version != VERSION;
        if (is_ours && !is_other_version && v->received < sizeof *h) { return false; }
        if (is_ours && admit(v->fd, h)) { return true; }
    }
    close(v->fd);
    return true;
}

// A new connection among the visitors, in place of the oldest one when there are too many. Returns their number.
static size_t accept_visitor(int listener, Visitor* visitors, size_t count) {
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)) { sleep_seconds(0.1); }
    if (fd < 0) { return count; }
    if (count == MAX_VISITORS) {
        close(visitors[0].fd);
        memmove(visitors, visitors + 1, --count * sizeof *visitors);
    }
    visitors[count] = (Visitor){.fd = fd, .deadline = wall_seconds() + VISITOR_SECONDS};
    return count + 1;
}

// One round of waiting, for at most so many seconds; fds has room for all. Returns the number of visitors.
static size_t receive_visitors(int listener, struct pollfd* fds, Visitor* visitors, size_t count, double seconds) {
    struct pollfd *ranks = fds, *guests = fds + self.size, *door = guests + count;
    for (size_t r = 0; r < self.size; r++) {
        ranks[r] = (struct pollfd){has_come(r) ? self.peers[r].watch : self.peers[r].data, POLLIN, 0};
    }
    for (size_t i = 0; i < count; i++) { guests[i] = (struct pollfd){visitors[i].fd, POLLIN, 0}; }
    *door = (struct pollfd){listener, POLLIN, 0};
    wait_for(fds, self.size + count + 1, count > 0 && seconds > 1 ? 1 : seconds);
    // Those that went away first: a rank may be back among the visitors already.
    for (size_t r = 1; r < self.size; r++) {
        if (!ranks[r].revents) { continue; }
        if (has_come(r)) {
            watch_receive(r);
        } else {
            close_socket(&self.peers[r].data);  // nothing is sent this early, so it is the end of the connection
        }
    }
    size_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        Visitor* v = &visitors[i];
        if (guests[i].revents && hear(v)) { continue; }
        if (wall_seconds() >= v->deadline) {
            close(v->fd);
            continue;
        }
        if (kept != i) { visitors[kept] = *v; }
        kept++;
    }
    return door->revents ? accept_visitor(listener, visitors, kept) : kept;
}

static void receive_ranks(void) {
    raise_file_limit();
    int listener = start_to_listen();
    Visitor* visitors = (Visitor*)xcalloc(MAX_VISITORS, sizeof *visitors);
    struct pollfd* fds = (struct pollfd*)xcalloc(self.size + MAX_VISITORS + 1, sizeof *fds);
    char missing[LIST_BYTES];
    size_t count = 0;
    double hint = wall_seconds() + HINT_SECONDS;
    while (list_missing(missing) > 0) {
        double now = wall_seconds();
        if (now >= self.deadline) {
            char* reason = text("%s of %zu have not come within %g s to %s; check that they were started and reach it",
                                missing, self.size, self.timeout, self.where);
            rendezvous_abort(reason);
            fatal("rank 0: %s", reason);
        }
        if (now >= hint) {
            fprintf(stderr, "waiting for %s of %zu at %s\n", missing, self.size, self.where);
            hint = now + HINT_SECONDS;
        }
        count = receive_visitors(listener, fds, visitors, count, fmin(hint, self.deadline) - now);
    }
    for (size_t i = 0; i < count; i++) { close(visitors[i].fd); }
    close(listener);
    free(visitors);
    free(fds);
}

// ----------------------------------------------------------------------------
// the others come to rank 0

static const char* why(int error) { return error == 0 ? "the connection was closed" : strerror(error); }

// Waits until the socket is ready for events or the deadline has come.
static bool wait_until(int fd, short events, double deadline) {
    struct pollfd one = {fd, events, 0};
    while (wall_seconds() < deadline && one.revents == 0) { wait_for(&one, 1, deadline - wall_seconds()); }
    return one.revents != 0;
}

// A connected socket, or -1 with errno.
static int connect_to(const struct addrinfo* a) {
    int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), error = 0;
    if (fd < 0) { return -1; }
    set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);  // must not keep rank 0 from its port by using it as a source
    if (connect(fd, a->ai_addr, a->ai_addrlen) != 0) {
        error = errno;
        socklen_t length = sizeof error;
        if (error == EINPROGRESS || error == EINTR) {
            if (!wait_until(fd, POLLOUT, wall_seconds() + CONNECT_SECONDS)) {
                error = ETIMEDOUT;
            } else {
                getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
            }
        }
    }
    // While nobody listens, TCP may connect a socket to itself when its own port is the one it calls.
    struct sockaddr_storage ours = {0}, theirs = {0};
    socklen_t n = sizeof ours, m = sizeof theirs;
    if (error == 0 && getsockname(fd, (struct sockaddr*)&ours, &n) == 0 &&
        getpeername(fd, (struct sockaddr*)&theirs, &m) == 0 && n == m && memcmp(&ours, &theirs, n) == 0) {
        error = ECONNREFUSED;
    }
    if (error == 0) { return fd; }
    close(fd);
    errno = error;
    return -1;
}

// A connection to rank 0 by any of its addresses, or -1 with the reason in error. Looks the name up every time: in a
// cluster that is just starting it may not be known yet.
static int connect_to_rank_0(char error[ERROR_BYTES]) {
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    struct addrinfo* addresses = NULL;
    int status = getaddrinfo(self.address, self.port, &hints, &addresses), fd = -1;
    if (status != 0) {
        snprintf(error, ERROR_BYTES, "%s", status == EAI_SYSTEM ? strerror(errno) : gai_strerror(status));
        return -1;
    }
    for (const struct addrinfo* a = addresses; a && fd < 0; a = a->ai_next) {
        fd = connect_to(a);
        if (fd < 0) { snprintf(error, ERROR_BYTES, "%s", strerror(errno)); }
    }
    freeaddrinfo(addresses);
    return fd;
}

static void check_reply(Reply* reply) {
    reply->host[HOST_BYTES - 1] = '\0';
    if (memcmp(reply->magic, MAGIC, sizeof MAGIC) != 0) {
        fatal("rank %zu: another program than rank 0 listens at %s; set MASTER_PORT to a free port, on all ranks",
              self.rank, self.where);
    }
    switch (reply->version == VERSION ? (Answer)reply->answer : REFUSED_VERSION) {
        case WELCOME: return;
        case REFUSED_VERSION:
            fatal("rank %zu: rank 0 at %s speaks version %u, this program %d; start the same build everywhere",
                  self.rank, self.where, reply->version, VERSION);
        case REFUSED_JOB:
            fatal("rank %zu: another job (of %ju ranks, this one has %zu) waits at %s; set MASTER_PORT to a free port",
                  self.rank, (uintmax_t)reply->size, self.size, self.where);
        case REFUSED_SIZE:
            fatal("rank %zu: was told of %zu ranks, rank 0 at %s of %ju; set WORLD_SIZE to the same on all", self.rank,
                  self.size, self.where, (uintmax_t)reply->size);
        case REFUSED_TWICE:
            fatal("another process, on host %s, has rank %zu of %zu; give every process its own RANK", reply->host,
                  self.rank, self.size);
    }
    fatal("rank %zu: rank 0 at %s gave an unknown answer (%u)", self.rank, self.where, reply->answer);
}

// Opens one channel to rank 0; -1 with the reason in error when it may work later.
static int open_channel(Channel channel, char error[ERROR_BYTES]) {
    int fd = connect_to_rank_0(error);
    if (fd < 0) { return -1; }
    Hello hello = {.version = VERSION,
                   .channel = channel,
                   .size = (uint32_t)self.size,
                   .rank = (uint32_t)self.rank,
                   .job = self.job,
                   .process = self.process};
    memcpy(hello.magic, MAGIC, sizeof MAGIC);
    memcpy(hello.host, self.host, HOST_BYTES);
    set_up_socket(fd, channel);
    Reply reply = {.answer = WELCOME};
    // A silent program is asked again, but with the watch rank 0 may count on us already.
    double deadline = channel == CHANNEL_DATA ? fmin(wall_seconds() + VISITOR_SECONDS, self.deadline) : self.deadline;
    ssize_t n = send(fd, &hello, sizeof hello, MSG_NOSIGNAL);
    for (size_t received = 0; n > 0;) {
        if (!wait_until(fd, POLLIN, deadline)) {
            n = -1;
            errno = ETIMEDOUT;
            break;
        }
        n = recv(fd, (char*)&reply + received, sizeof reply - received, MSG_DONTWAIT);
        if (n < 0 && is_transient(errno)) {
            n = 1;
            continue;
        }
        if (n > 0) { received += (size_t)n; }
        size_t head = received < sizeof MAGIC ? received : sizeof MAGIC;
        if (received == sizeof reply || memcmp(reply.magic, MAGIC, head) != 0) {
            check_reply(&reply);
            snprintf(self.peers[0].host, HOST_BYTES, "%s", reply.host);
            return fd;
        }
    }
    snprintf(error, ERROR_BYTES, "connected, but no answer: %s", why(n < 0 ? errno : 0));
    close(fd);
    return -1;
}

static void come_to_rank_0(void) {
    Peer* p = &self.peers[0];
    char error[ERROR_BYTES] = "";
    double hint = wall_seconds() + HINT_SECONDS;
    for (double pause = 0.02;; pause = fmin(1.5 * pause, 1)) {
        p->data = open_channel(CHANNEL_DATA, error);
        if (p->data >= 0) { p->watch = open_channel(CHANNEL_WATCH, error); }
        if (p->watch >= 0) { return; }
        close_socket(&p->data);
        double now = wall_seconds();
        if (now + pause >= self.deadline) {
            fatal(
                "rank 0 could not be reached at %s within %g s (%s); check that it was started, MASTER_ADDR, "
                "MASTER_PORT and firewalls",
                self.where, self.timeout, error);
        }
        if (now >= hint) {
            fprintf(stderr, "rank %zu of %zu: waiting for rank 0 at %s (%s)\n", self.rank, self.size, self.where,
                    error);
            hint = now + HINT_SECONDS;
        }
        sleep_seconds(pause);
    }
}

#endif
