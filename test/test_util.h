/*
What every test shares: cmocka, random arrays, error measures, a scratch folder, and a way to check that
a call ends the program with one line of the right content.
*/
#ifndef TEST_UTIL_H
#define TEST_UTIL_H

// clang-format off: cmocka needs these in this order
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
#include <cmocka.h>
#ifdef __cplusplus
}
#endif
// clang-format on
#include <fcntl.h>
#include <math.h>
#include <sys/wait.h>

#include "../llmc/random.h"
#include "../llmc/util.h"

__attribute__((weak)) void omp_set_num_threads(int);  // absent in a build without OpenMP

static inline void set_threads(int n) {
    if (omp_set_num_threads) { omp_set_num_threads(n); }
}

static inline float* random_array(size_t n, double scale, Random* r) {
    float* x = (float*)xcalloc(n, sizeof(float));
    for (size_t i = 0; i < n; i++) { x[i] = (float)(scale * random_normal(r)); }
    return x;
}

// max |got - want| / max |want|; NaN anywhere gives infinity. The measure of DESIGN: errors relative to the
// tensor's largest value, since single elements may be as small as rounding allows.
static inline double relative_error(const float* got, const double* want, size_t n) {
    double error = 0, largest = 1e-30;
    for (size_t i = 0; i < n; i++) {
        double e = fabs((double)got[i] - want[i]);
        if (!(e <= error)) { error = isnan(e) ? INFINITY : e; }
        if (fabs(want[i]) > largest) { largest = fabs(want[i]); }
    }
    return error / largest;
}

#define assert_error_below(error, tolerance)                                                \
    do {                                                                                    \
        double error_ = (error), tolerance_ = (tolerance);                                  \
        if (!(error_ <= tolerance_)) {                                                      \
            print_error("%s: %s = %g, allowed %g\n", __func__, #error, error_, tolerance_); \
            fail();                                                                         \
        }                                                                                   \
    } while (0)

// A fresh folder for this process under $TMPDIR, which the test runner removes; buffer of at least 64 bytes.
static inline const char* scratch_folder(char* buffer) {
    const char* parent = getenv("TMPDIR");
    snprintf(buffer, 64, "%.40s/test_XXXXXX", parent ? parent : "/tmp");
    if (!mkdtemp(buffer)) { fatal("cannot create %s: %s", buffer, strerror(errno)); }
    return buffer;
}

static inline void leave_without_leak_check(void) { _exit(1); }

// Runs f(argument) in a child process and checks that it exits with status 1 after exactly one line on
// stderr that starts with "error: " and contains every word of the NULL-terminated list.
static inline void expect_fatal(void (*f)(void*), void* argument, const char* const* words) {
    int pipe_ends[2];
    assert_int_equal(pipe(pipe_ends), 0);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        dup2(pipe_ends[1], 2);
        close(pipe_ends[0]);
#ifdef __SANITIZE_ADDRESS__
        fatal_hook = leave_without_leak_check;  // what a failing program still holds is no leak
#endif
        f(argument);
        _exit(0);
    }
    close(pipe_ends[1]);
    char output[4096];
    size_t n = 0;
    for (ssize_t got; n < sizeof output - 1 && (got = read(pipe_ends[0], output + n, sizeof output - 1 - n)) > 0;) {
        n += (size_t)got;
    }
    output[n] = '\0';
    close(pipe_ends[0]);
    int status;
    waitpid(child, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 1) {
        print_error("expected exit status 1, got wait status %d; stderr: %s\n", status, output);
        fail();
    }
    char* newline = strchr(output, '\n');
    bool one_line = strncmp(output, "error: ", 7) == 0 && newline && newline[1] == '\0';
    if (!one_line) {
        print_error("expected one line 'error: ...', got: %s\n", output);
        fail();
    }
    for (; *words; words++) {
        if (!strstr(output, *words)) {
            print_error("expected '%s' in: %s\n", *words, output);
            fail();
        }
    }
}

#endif
