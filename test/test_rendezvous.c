/*
The control channel with real processes on loopback: what it carries, who may join, and that every rank ends, with one
line that says why, when one of them dies or gives up.
*/
#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // gettid
#endif
#include "test_util.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "../llmc/ranks/rendezvous.h"

// SOON: seconds within which a rank has ended that was told to or has noticed something. Far more than it takes, since
// other programs may have the cores, and less than any wait of the ranks themselves.
enum { MAX_PROCESSES = 16, OUTPUT_BYTES = 4096, SOON = 15, LONG = 120 };

// What all processes of a test share.
typedef struct {
    atomic_size_t arrived;  // ranks that have come to a point of the test
    atomic_size_t signals;  // that the main threads of the ranks took
} Shared;

static Shared* shared;
static char folder[64];
static RendezvousConfig job;  // of every rank; a test changes it for a rank that is wrong
static pid_t processes[MAX_PROCESSES];
static size_t num_processes;

// A port below those that the kernel gives to outgoing connections.
static int free_port(void) {
    static int next;
    for (;;) {
        int port = 20000 + (int)((unsigned)getpid() * 37u + (unsigned)next++) % 10000;
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
        bool is_free = bind(fd, (struct sockaddr*)&any, sizeof any) == 0;
        close(fd);
        if (is_free) { return port; }
    }
}

static int set_up(void** state) {
    (void)state;
    scratch_folder(folder);
    memset(shared, 0, sizeof *shared);
    job = (RendezvousConfig){.size = 4, .address = "127.0.0.1", .port = free_port(), .job = "job 7", .timeout = LONG};
    num_processes = 0;
    return 0;
}

static int tear_down(void** state) {
    (void)state;
    for (size_t i = 0; i < num_processes; i++) {
        if (processes[i] > 0) { kill(processes[i], SIGKILL); }
    }
    while (waitpid(-1, NULL, 0) > 0) {}
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command);
}

static void pause_for(double seconds) {
    double end = wall_seconds() + seconds;
    while (wall_seconds() < end) { usleep(5000); }
}

static void wait_for_arrivals(size_t n) {
    double end = wall_seconds() + LONG;
    while (atomic_load(&shared->arrived) < n && wall_seconds() < end) { usleep(1000); }
    assert_true(atomic_load(&shared->arrived) >= n);
}

static bool is_asleep(pid_t process) {
    char path[64], line[512], state = '?';
    snprintf(path, sizeof path, "/proc/%d/stat", (int)process);
    FILE* f = fopen(path, "r");
    if (!f) { return false; }
    if (fgets(line, sizeof line, f)) { sscanf(strrchr(line, ')'), ") %c", &state); }
    fclose(f);
    return state == 'S';
}

// Ends of connections with rank 0's port on which nothing is on its way.
static size_t quiet_ends(void) {
    static const char* const tables[] = {"/proc/net/tcp", "/proc/net/tcp6"};
    char row[512];
    size_t n = 0;
    for (size_t i = 0; i < 2; i++) {
        FILE* f = fopen(tables[i], "r");
        while (f && fgets(row, sizeof row, f)) {
            unsigned ours, theirs, state, out, in, port = (unsigned)job.port;
            bool parsed = sscanf(row, " %*d: %*[^:]:%x %*[^:]:%x %x %x:%x", &ours, &theirs, &state, &out, &in) == 5;
            n += parsed && (ours == port || theirs == port) && state == TCP_ESTABLISHED && out == 0 && in == 0;
        }
        if (f) { fclose(f); }
    }
    return n;
}

// Waits until so many ranks have come to rank 0: both connections of each are there, and all that was said on them has
// been read, since nobody does anything.
static void wait_until_come(size_t ranks) {
    double end = wall_seconds() + LONG;
    for (size_t quiet = 0; quiet < 3; usleep(1000)) {
        bool all = quiet_ends() == 4 * ranks;
        for (size_t p = 0; p < num_processes; p++) { all = all && (processes[p] == 0 || is_asleep(processes[p])); }
        quiet = all && quiet_ends() == 4 * ranks ? quiet + 1 : 0;
        if (wall_seconds() > end) { fail_msg("%zu ranks have not come to rank 0", ranks); }
    }
}

// Starts a rank: opens, runs body, exits with its result. Returns the number of the process.
static size_t start(size_t rank, int (*body)(void)) {
    size_t p = num_processes++;
    assert_true(p < MAX_PROCESSES);
    job.rank = rank;
    fflush(NULL);
    processes[p] = fork();
    if (processes[p] != 0) { return p; }
    char* path = text("%s/%zu", folder, p);
    if (!freopen(path, "w", stderr)) { _exit(98); }
    setvbuf(stderr, NULL, _IOLBF, 0);
    free(path);
#ifdef __SANITIZE_ADDRESS__
    fatal_hook = leave_without_leak_check;  // what a failing program still holds is no leak
#endif
    rendezvous_open(&job);
    exit(body());
}

// The exit status of a process that must end within so many seconds; -signal when one killed it.
static int end_of(size_t process, double seconds) {
    int status = 0;
    double end = wall_seconds() + seconds;
    while (waitpid(processes[process], &status, WNOHANG) == 0) {
        if (wall_seconds() > end) {
            print_error("process %zu has not ended within %g s\n", process, seconds);
            fail();
        }
        usleep(2000);
    }
    processes[process] = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static void assert_output(size_t process, const char* const* words) {
    char* path = text("%s/%zu", folder, process);
    FILE* f = fopen(path, "r");
    assert_non_null(f);
    char output[OUTPUT_BYTES];
    output[fread(output, 1, sizeof output - 1, f)] = '\0';
    fclose(f);
    free(path);
    char* newline = strchr(output, '\n');
    bool good = strncmp(output, "error: ", 7) == 0 && newline && newline[1] == '\0';
    for (; *words; words++) { good = good && strstr(output, *words); }
    if (!good) {
        print_error("process %zu printed: %s\n", process, output);
        fail();
    }
}

// Checks that a process ends in time with status 1 after one line "error: ..." that has all these words.
#define assert_fails(process, seconds, ...)               \
    do {                                                  \
        const char* const words_[] = {__VA_ARGS__, NULL}; \
        size_t process_ = (process);                      \
        assert_int_equal(end_of(process_, (seconds)), 1); \
        assert_output(process_, words_);                  \
    } while (0)

static void assert_all_succeed(double seconds) {
    for (size_t p = 0; p < num_processes; p++) {
        if (processes[p] != 0) { assert_int_equal(end_of(p, seconds), 0); }
    }
}

static void start_all(int (*body)(void)) {
    for (size_t rank = 0; rank < job.size; rank++) { start(rank, body); }
}

// ----------------------------------------------------------------------------
// messages

static unsigned char pattern(size_t rank, size_t i, size_t round) {
    return (unsigned char)(31 * rank + i + (i >> 8) * 7 + round);
}

// One all_gather and one broadcast; whether all bytes are right. In place every other time.
static bool exchange(size_t bytes, size_t round) {
    unsigned char* all = (unsigned char*)xcalloc(job.size, bytes);
    unsigned char* mine = round % 2 ? all + job.rank * bytes : (unsigned char*)xcalloc(bytes, 1);
    for (size_t i = 0; i < bytes; i++) { mine[i] = pattern(job.rank, i, round); }
    rendezvous_all_gather(all, mine, bytes);
    bool good = true;
    for (size_t r = 0; r < job.size; r++) {
        for (size_t i = 0; i < bytes; i++) { good = good && all[r * bytes + i] == pattern(r, i, round); }
    }
    for (size_t i = 0; i < bytes; i++) { all[i] = pattern(job.rank + 5, i, round); }
    rendezvous_broadcast(all, bytes);
    for (size_t i = 0; i < bytes; i++) { good = good && all[i] == pattern(5, i, round); }
    if (round % 2 == 0) { free(mine); }
    free(all);
    return good;
}

static int exchange_sizes(void) {
    static const size_t sizes[] = {1, 2, 16, 1000, 65536, 1 << 20, 3};
    bool good = true;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) { good = exchange(sizes[i], i) && good; }
    rendezvous_close();
    return !good;
}

static int exchange_often(void) {
    Random r = {11};  // the same on every rank
    bool good = true;
    for (size_t round = 0; round < 2000; round++) { good = exchange(1 + random_below(&r, 64), round) && good; }
    rendezvous_close();
    return !good;
}

static int only_close(void) {
    rendezvous_close();
    return 0;
}

static void test_messages(void** state) {
    (void)state;
    static const size_t sizes[] = {2, 4, 9};
    for (size_t i = 0; i < 3; i++) {
        job.size = sizes[i];
        start_all(exchange_sizes);
        assert_all_succeed(LONG);
        num_processes = 0;
        start_all(exchange_often);  // the same port again, at once
        assert_all_succeed(LONG);
        num_processes = 0;
    }
}

static void test_names_of_rank_0(void** state) {
    (void)state;
    static const char* const names[] = {"localhost", "::1"};
    struct sockaddr_in6 one = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    int fd = socket(AF_INET6, SOCK_STREAM, 0);
    size_t count = fd >= 0 && bind(fd, (struct sockaddr*)&one, sizeof one) == 0 ? 2 : 1;  // a host without IPv6
    close(fd);
    job.size = 2;
    for (size_t i = 0; i < count; i++) {
        job.address = names[i];
        start_all(exchange_sizes);
        assert_all_succeed(LONG);
        num_processes = 0;
    }
}

static int call_the_wrong_way(void) {
    char all[4 * 16] = "";
    if (job.rank == 2) {
        rendezvous_all_gather(all, "123456789", 9);
    } else {
        rendezvous_all_gather(all, "123456789abcdef", 16);
    }
    return 0;
}

static void test_different_calls(void** state) {
    (void)state;
    job.size = 3;
    start_all(call_the_wrong_way);
    assert_fails(0, SOON, "rank 2 sends all_gather of 9 bytes", "expected all_gather of 16");
    for (size_t r = 1; r < 3; r++) { assert_int_equal(end_of(r, SOON), 1); }
}

// ----------------------------------------------------------------------------
// joining

static void test_any_order(void** state) {
    (void)state;
    for (size_t rank = job.size; rank-- > 0;) {
        start(rank, exchange_sizes);
        pause_for(0.3);
    }
    assert_all_succeed(LONG);
}

static void test_missing_ranks(void** state) {
    (void)state;
    job.timeout = 3;  // enough for the three that do come
    job.size = 8;
    size_t zero = start(0, only_close), two = start(2, only_close), seven = start(7, only_close);
    const char* missing = "ranks 1, 3-6 of 8 have not come within 3 s to 127.0.0.1:";
    assert_fails(zero, SOON, "rank 0: ", missing, "check that they were started");
    assert_fails(two, SOON, "rank 0 of 8 (host ", missing);
    assert_fails(seven, SOON, "rank 0 of 8 (host ", missing);
    job.size = 2, job.timeout = 1;
    assert_fails(start(0, only_close), SOON, "rank 1 of 2 have not come within 1 s");
    assert_fails(start(1, only_close), SOON, "rank 0 could not be reached at 127.0.0.1:", "within 1 s",
                 "Connection refused", "MASTER_ADDR");
    job.address = "no-such-host.invalid";
    assert_fails(start(1, only_close), LONG, "could not be reached at no-such-host.invalid:", "within 1 s (");
}

static void test_refusals(void** state) {
    (void)state;
    job.size = 3;
    size_t zero = start(0, exchange_sizes), one = start(1, exchange_sizes);
    wait_until_come(1);
    const RendezvousConfig right = job;
    job.job = "job 8";
    assert_fails(start(2, only_close), SOON,
                 "rank 2: another job (of 3 ranks, this one has 3) waits at 127.0.0.1:", "MASTER_PORT");
    job = right;
    job.size = 5;
    assert_fails(start(2, only_close), SOON, "rank 2: was told of 5 ranks", "of 3;", "WORLD_SIZE");
    job = right;
    assert_fails(start(1, only_close), SOON, "another process, on host ", "has rank 1 of 3");
    size_t two = start(2, exchange_sizes);
    assert_int_equal(end_of(two, SOON), 0);
    assert_int_equal(end_of(zero, SOON), 0);
    assert_int_equal(end_of(one, SOON), 0);
}

// A connection to the port of rank 0, once it listens.
static int stranger(const char* says, size_t bytes) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)job.port)};
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    for (size_t tries = 0; tries < 500; tries++) {
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(fd, (struct sockaddr*)&address, sizeof address) == 0) {
            if (bytes > 0) { assert_int_equal(send(fd, says, bytes, MSG_NOSIGNAL), bytes); }
            return fd;
        }
        close(fd);
        usleep(10000);
    }
    print_error("nobody listens on port %d\n", job.port);
    fail();
    return -1;
}

static void test_strangers(void** state) {
    (void)state;
    job.size = 3;
    size_t zero = start(0, exchange_sizes);
    static const char http[] = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    static const char zeros[1000];
    char hello[104] = "BAMCRDV\n\1\0\0";  // of ours as far as it goes, but of no job
    int fds[200];
    size_t n = 0;
    int garbage[] = {stranger(http, sizeof http - 1), stranger(zeros, sizeof zeros), stranger(hello, sizeof hello)};
    for (size_t i = 0; i < 3; i++) {
        char answer[256];
        ssize_t last;
        while ((last = recv(garbage[i], answer, sizeof answer, 0)) > 0) {}  // sent away at once
        close(garbage[i]);
    }
    struct linger reset = {1, 0};
    for (size_t i = 0; i < 20; i++) {
        int fd = stranger("B", i % 2);
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
        close(fd);
    }
    for (; n < 170; n++) { fds[n] = stranger(hello, n % 3 ? n % 100 : 0); }  // silent in the middle of a word
    size_t one = start(1, exchange_sizes);
    for (; n < 200; n++) { fds[n] = stranger("", 0); }
    size_t two = start(2, exchange_sizes);
    assert_int_equal(end_of(zero, SOON), 0);
    assert_int_equal(end_of(one, SOON), 0);
    assert_int_equal(end_of(two, SOON), 0);
    while (n > 0) { close(fds[--n]); }
}

static void test_port_taken(void** state) {
    (void)state;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)job.port)};
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(fd, (struct sockaddr*)&address, sizeof address), 0);
    assert_int_equal(listen(fd, 8), 0);
    assert_fails(start(0, only_close), SOON, "is taken by another program", "set MASTER_PORT");
    size_t one = start(1, only_close);
    int guest = accept(fd, NULL, NULL);
    assert_true(guest >= 0);
    assert_int_equal(send(guest, "220 mail\r\n", 10, MSG_NOSIGNAL), 10);
    assert_fails(one, SOON, "rank 1: another program than rank 0 listens at 127.0.0.1:", "MASTER_PORT");
    close(guest);
    job.timeout = 1;
    assert_fails(start(1, only_close), SOON, "could not be reached", "connected, but no answer");  // a silent program
    close(fd);
}

// ----------------------------------------------------------------------------
// the watch

static size_t victim;
static bool others_compute;

// One rank gets killed while the others wait for it in a call, or compute.
static int lose_one(void) {
    char all[MAX_PROCESSES] = "";
    rendezvous_all_gather(all, "a", 1);
    atomic_fetch_add(&shared->arrived, 1);
    while (others_compute || job.rank == victim) { pause(); }
    rendezvous_all_gather(all, "b", 1);
    return 0;
}

static void test_killed(void** state) {
    (void)state;
    for (size_t i = 0; i < 6; i++) {
        victim = i / 2, others_compute = i % 2;
        atomic_store(&shared->arrived, 0);
        start_all(lose_one);
        wait_for_arrivals(job.size);
        pause_for(0.1);
        kill(processes[victim], SIGKILL);
        char* line = text("error: rank %zu of 4 (host ", victim);
        for (size_t r = 0; r < job.size; r++) {
            if (r == victim) {
                assert_int_equal(end_of(r, SOON), -SIGKILL);
            } else {
                assert_fails(r, SOON, line, ") ended without a word\n");
            }
        }
        free(line);
        num_processes = 0;
    }
}

static void test_killed_while_others_come(void** state) {
    (void)state;
    job.size = 4;
    size_t zero = start(0, only_close), one = start(1, only_close), two = start(2, only_close);
    wait_until_come(2);
    kill(processes[one], SIGKILL);
    assert_fails(zero, SOON, "rank 1 of 4 (host ", "ended without a word");
    assert_fails(two, SOON, "rank 1 of 4 (host ", "ended without a word");
}

static bool caller_hangs;

// The one that gives up may hang, at the very end, when the others have nothing more to do.
static int give_up(void) {
    char all[MAX_PROCESSES] = "";
    rendezvous_all_gather(all, "a", 1);
    if (job.rank == victim) {
        if (caller_hangs) { pause_for(0.5); }
        fprintf(stderr, "error: no memory\n");
        rendezvous_abort("no\nmemory");
        rendezvous_abort("a second time");
        while (caller_hangs) { pause(); }
        return 1;
    }
    if (caller_hangs) { rendezvous_close(); }
    rendezvous_all_gather(all, "b", 1);
    return 0;
}

static void test_abort(void** state) {
    (void)state;
    for (size_t i = 0; i < 4; i++) {
        victim = i % 3, caller_hangs = i == 3;
        start_all(give_up);
        char* line = text("error: rank %zu of 4 (host ", victim);
        for (size_t r = 0; r < job.size; r++) {
            if (r == victim) {
                assert_fails(r, SOON, "error: no memory\n");
            } else {
                assert_fails(r, SOON, line, "): no memory\n");
            }
        }
        free(line);
        num_processes = 0;
    }
}

static int close_late(void) {
    if (job.rank == victim) { pause_for(1); }
    rendezvous_close();
    rendezvous_abort("after the end it says nothing");
    return 0;
}

static int never_close(void) {
    atomic_fetch_add(&shared->arrived, 1);
    if (job.rank == victim) { pause(); }
    rendezvous_close();
    return 0;
}

static void test_close(void** state) {
    (void)state;
    for (victim = 0; victim < 3; victim++) {
        double begin = wall_seconds();
        start_all(close_late);
        for (size_t r = job.size; r-- > 0;) { assert_int_equal(end_of(r, SOON), 0); }
        assert_true(wall_seconds() - begin >= 1);
        num_processes = 0;
    }
    for (victim = 0; victim < 2; victim++) {  // dies while the others wait for the end
        atomic_store(&shared->arrived, 0);
        start_all(never_close);
        wait_for_arrivals(job.size);
        pause_for(0.2);
        kill(processes[victim], SIGKILL);
        for (size_t r = 0; r < job.size; r++) {
            if (r == victim) {
                assert_int_equal(end_of(r, SOON), -SIGKILL);
            } else {
                assert_fails(r, SOON, "ended without a word");
            }
        }
        num_processes = 0;
    }
}

static void take_signal(int number) {
    (void)number;
    if (gettid() == getpid()) { atomic_fetch_add(&shared->signals, 1); }
}

// A signal that the main thread blocks for now stays pending: the watch does not take it.
static int hold_signal(void) {
    sigset_t held, pending;
    sigemptyset(&held);
    sigaddset(&held, SIGUSR1);
    sigprocmask(SIG_BLOCK, &held, NULL);
    kill(getpid(), SIGUSR1);
    pause_for(0.1);
    sigpending(&pending);
    sigprocmask(SIG_UNBLOCK, &held, NULL);
    rendezvous_close();
    return !sigismember(&pending, SIGUSR1);
}

static void test_signals(void** state) {
    (void)state;
    struct sigaction action = {.sa_handler = take_signal}, before[2];  // without SA_RESTART: calls are interrupted
    sigaction(SIGUSR1, &action, &before[0]);
    sigaction(SIGTERM, &action, &before[1]);
    for (size_t rank = 1; rank < job.size; rank++) { start(rank, exchange_often); }
    size_t sent = 0;
    double begin = wall_seconds();
    for (size_t running = 1; running > 0 && wall_seconds() < begin + LONG;) {
        if (wall_seconds() > begin + 0.3 && num_processes < job.size) { start(0, exchange_often); }
        running = num_processes < job.size;
        for (size_t p = 0; p < num_processes; p++) {
            siginfo_t info = {0};
            if (waitid(P_PID, (id_t)processes[p], &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0) {
                continue;
            }
            running++;
            sent += kill(processes[p], sent % 2 ? SIGUSR1 : SIGTERM) == 0;
        }
        usleep(300);
    }
    assert_all_succeed(LONG);
    num_processes = 0;
    start_all(hold_signal);
    assert_all_succeed(LONG);
    sigaction(SIGUSR1, &before[0], NULL);
    sigaction(SIGTERM, &before[1], NULL);
    assert_true(sent > 100);
    assert_true(atomic_load(&shared->signals) > 100);
}

#define WITH_FOLDER(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        WITH_FOLDER(test_messages),        WITH_FOLDER(test_names_of_rank_0),
        WITH_FOLDER(test_different_calls), WITH_FOLDER(test_any_order),
        WITH_FOLDER(test_missing_ranks),   WITH_FOLDER(test_refusals),
        WITH_FOLDER(test_strangers),       WITH_FOLDER(test_port_taken),
        WITH_FOLDER(test_killed),          WITH_FOLDER(test_killed_while_others_come),
        WITH_FOLDER(test_abort),           WITH_FOLDER(test_close),
        WITH_FOLDER(test_signals),
    };
    shared = (Shared*)mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) { return 1; }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
