/*
State of the rendezvous and its watch; private to rendezvous.c. The watch connection of a rank is silent but for two
messages: END, the line to print before ending, and GOODBYE. One that closes without either means that the process
died, since its kernel closes it whatever killed it; TCP's own probes find a host that vanished.
*/
#ifndef RENDEZVOUS_WATCH_H
#define RENDEZVOUS_WATCH_H

#include "rendezvous.h"

#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

enum { HOST_BYTES = 64, TEXT_BYTES = 1020 };

static const double CLOSE_SECONDS = 30;  // rendezvous_close() waits no longer
static const double GRACE_SECONDS = 5;   // for a thread that is about to end the process

typedef enum { WATCH_END = 1, WATCH_GOODBYE } WatchKind;

typedef struct {
    uint32_t kind;
    char text[TEXT_BYTES];
} WatchMessage;

typedef struct {
    int data, watch;   // sockets, -1 where there is none
    uint64_t process;  // of the rank's Hello
    char host[HOST_BYTES];
    bool left;             // has said GOODBYE
    size_t received;       // bytes of
    WatchMessage message;  // the message that is coming in
} Peer;

// Who ends the job: the first to set it speaks, the others keep silent.
typedef enum { NOT_ENDING, ENDED_BY_CALLER, ENDED_BY_WATCH } Ending;

static struct {
    bool is_open, has_watcher;
    size_t rank, size;
    double timeout, deadline;  // to wait in open
    char* address;
    char* where;  // "HOST:PORT" of rank 0, for messages
    char port[16];
    char host[HOST_BYTES];
    uint64_t job, process;
    Peer* peers;  // [size]; rank 0 has connections to all others, the others to peers[0]
    pthread_t watcher;
    int wake;  // eventfd that makes the watch thread look at closing and ending
    atomic_bool closing;
    atomic_int ending;
} self;

// ----------------------------------------------------------------------------
// small things

static void sleep_seconds(double seconds) {
    struct timespec t = {(time_t)seconds, (long)(1e9 * (seconds - (double)(time_t)seconds))};
    while (nanosleep(&t, &t) != 0 && errno == EINTR) {}
}

// poll() for at most so many seconds; a signal only makes it return early.
static void wait_for(struct pollfd* fds, size_t count, double seconds) {
    int milliseconds = seconds > 3600 ? 3600000 : seconds > 0 ? (int)(1000 * seconds) + 1 : 0;
    if (poll(fds, count, milliseconds) > 0) { return; }
    for (size_t i = 0; i < count; i++) { fds[i].revents = 0; }
}

static bool is_transient(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

// ----------------------------------------------------------------------------
// the watch

// All there is room for at once in a connection that carries nothing else, so it neither blocks nor comes in parts.
static void watch_send(const WatchMessage* message) {
    for (size_t r = 0; r < self.size; r++) {
        if (self.peers[r].watch >= 0) {
            send(self.peers[r].watch, message, sizeof *message, MSG_NOSIGNAL | MSG_DONTWAIT);
        }
    }
}

__attribute__((format(printf, 2, 3))) static void watch_text(WatchMessage* message, const char* format, ...) {
    memset(message, 0, sizeof *message);
    message->kind = WATCH_END;
    va_list args;
    va_start(args, format);
    vsnprintf(message->text, sizeof message->text, format, args);
    va_end(args);
}

// The watch's way out. stderr without its lock and no atexit(): the main thread may hold the one, or hang in a driver.
__attribute__((noreturn)) static void end_job(const WatchMessage* message) {
    int before = NOT_ENDING;
    if (atomic_compare_exchange_strong(&self.ending, &before, ENDED_BY_WATCH)) {
        if (self.rank == 0) { watch_send(message); }
        dprintf(STDERR_FILENO, "error: %s\n", message->text);
    } else {
        sleep_seconds(GRACE_SECONDS);  // the caller is on its way out with a line of its own
    }
    _exit(1);
}

// Reads what there is on the watch of a rank.
static void watch_receive(size_t rank) {
    Peer* p = &self.peers[rank];
    ssize_t n = recv(p->watch, (char*)&p->message + p->received, sizeof p->message - p->received, MSG_DONTWAIT);
    if (n < 0 && is_transient(errno)) { return; }
    if (n <= 0) {
        WatchMessage died;
        if (n == 0 || errno == ECONNRESET || errno == EPIPE) {
            watch_text(&died, "rank %zu of %zu (host %s) ended without a word", rank, self.size, p->host);
        } else {
            watch_text(&died, "rank %zu of %zu (host %s) does not answer any more: %s", rank, self.size, p->host,
                       strerror(errno));
        }
        end_job(&died);
    }
    p->received += (size_t)n;
    if (p->received < sizeof p->message) { return; }
    p->received = 0;
    p->left = p->message.kind == WATCH_GOODBYE;
    if (p->left) { return; }
    p->message.text[TEXT_BYTES - 1] = '\0';
    one_line(p->message.text);
    end_job(&p->message);
}

static bool all_have_left(void) {
    for (size_t r = 0; r < self.size; r++) {
        if (self.peers[r].watch >= 0 && !self.peers[r].left) { return false; }
    }
    return true;
}

// Until the orderly end. Rank 0 says GOODBYE last, so that nobody takes its end for a death.
static void* watch(void* unused) {
    (void)unused;
    const WatchMessage goodbye = {WATCH_GOODBYE, ""};
    struct pollfd* fds = (struct pollfd*)xcalloc(self.size + 1, sizeof *fds);
    double deadline = INFINITY;
    while (wall_seconds() < deadline && !(deadline < INFINITY && all_have_left())) {
        for (size_t r = 0; r < self.size; r++) {  // poll() passes over negative ones
            fds[r] = (struct pollfd){self.peers[r].left ? -1 : self.peers[r].watch, POLLIN, 0};
        }
        fds[self.size] = (struct pollfd){self.wake, POLLIN, 0};
        wait_for(fds, self.size + 1, deadline - wall_seconds());
        for (size_t r = 0; r < self.size; r++) {
            if (fds[r].revents) { watch_receive(r); }
        }
        uint64_t count;
        if (!fds[self.size].revents || read(self.wake, &count, sizeof count) < 0) { continue; }
        if (atomic_load(&self.ending) != NOT_ENDING) {
            sleep_seconds(GRACE_SECONDS);
            _exit(1);
        }
        if (atomic_load(&self.closing) && deadline == INFINITY) {
            deadline = wall_seconds() + CLOSE_SECONDS;
            if (self.rank != 0) { watch_send(&goodbye); }
        }
    }
    if (self.rank == 0) { watch_send(&goodbye); }
    free(fds);
    return NULL;
}

static void wake_watch(void) {
    uint64_t one = 1;
    ssize_t n = write(self.wake, &one, sizeof one);
    (void)n;  // cannot fail: the count is far from its end
}

// Signals are for the thread that handles them, so this one blocks them all.
static void start_watch(void) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&self.watcher, NULL, watch, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) { fatal("cannot start the thread that watches the ranks: %s; raise ulimit -u", strerror(error)); }
    self.has_watcher = true;
}

void rendezvous_abort(const char* reason) {
    if (!self.is_open) { return; }
    int before = NOT_ENDING;
    if (!atomic_compare_exchange_strong(&self.ending, &before, ENDED_BY_CALLER)) {
        if (before == ENDED_BY_WATCH) { sleep_seconds(GRACE_SECONDS); }  // it exits once it has told the others
        return;
    }
    WatchMessage message;
    watch_text(&message, "rank %zu of %zu (host %s): %s", self.rank, self.size, self.host, reason);
    one_line(message.text);
    watch_send(&message);
    if (self.has_watcher) { wake_watch(); }
}

#endif
