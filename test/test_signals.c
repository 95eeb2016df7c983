/*
Handlers of signals run on a thread of their own, so that matrix products, whose generated code may keep the stack
pointer in the heap, survive thousands of signals.
*/
#include "precision_util.h"

#include <sys/time.h>

#include "../llmc/backend.h"
#include "../llmc/ranks/signals.h"

enum { PATIENCE = 60000 };  // milliseconds that signals may take on a busy machine

static volatile sig_atomic_t caught;
static volatile pthread_t handler_thread;

static void on_signal(int number) {
    (void)number;
    handler_thread = pthread_self();
    caught++;
}

static void test_own_thread(void** state) {
    (void)state;
    static const int numbers[] = {SIGINT, SIGTERM, SIGUSR1, SIGHUP, SIGALRM};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        caught = 0;
        signal(numbers[i], on_signal);
        kill(getpid(), numbers[i]);
        for (int wait = 0; wait < PATIENCE && !caught; wait++) { usleep(1000); }
        assert_int_equal(caught, 1);
        assert_false(pthread_equal(handler_thread, pthread_self()));
    }
}

// A signal that asks to stop is taken, but SIGHUP not where it was ignored before.
static void test_hangup(void** state) {
    (void)state;
    void (*const before[])(int) = {SIG_DFL, SIG_IGN};
    for (size_t i = 0; i < 2; i++) {
        struct sigaction now;
        signal(SIGHUP, before[i]);
        signals_to_stop_by(on_signal);
        sigaction(SIGHUP, NULL, &now);
        assert_true(now.sa_handler == (i == 0 ? on_signal : SIG_IGN));
        sigaction(SIGTERM, NULL, &now);
        assert_true(now.sa_handler == on_signal);
        sigaction(SIGPIPE, NULL, &now);
        assert_true(now.sa_handler == SIG_IGN);
    }
}

static void test_products(void** state) {
    (void)state;
    enum { N = 128, C = 128, OC = 512 };
    size_t bytes = matmul_workspace(N, C, OC);
    floatX *inp = xcalloc(N * C, sizeof(floatX)), *weight = xcalloc(OC * C, sizeof(floatX));
    floatX *out = xcalloc(N * OC, sizeof(floatX)), *dinp = xcalloc(N * C, sizeof(floatX));
    float* dweight = xcalloc(OC * C, sizeof(float));
    void* workspace = xcalloc(bytes, 1);
    struct itimerval often = {{0, 100}, {0, 100}}, never = {{0, 0}, {0, 0}};
    signal(SIGALRM, on_signal);
    for (size_t p = 0; p < precision_count(); p++) {
        cpu_precision = precisions[p];
        caught = 0;
        setitimer(ITIMER_REAL, &often, NULL);
        for (double started = wall_seconds(); caught < 2000 && wall_seconds() - started < PATIENCE / 1000;) {
            matmul_forward(out, inp, weight, workspace, N, C, OC);
            matmul_backward(dinp, dweight, out, inp, weight, workspace, N, C, OC);
        }
        setitimer(ITIMER_REAL, &never, NULL);
        assert_true(caught >= 2000);
    }
    free(inp);
    free(weight);
    free(out);
    free(dinp);
    free(dweight);
    free(workspace);
}

int main(void) {
    signals_to_own_thread();
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_own_thread), cmocka_unit_test(test_hangup),
                                       cmocka_unit_test(test_products)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
