/*
What every program does first: standard streams that exist, and what they could not print told at the end; and, where
OpenMP's threads work, the choice of how they wait.
*/
#ifndef STARTUP_H
#define STARTUP_H

#include <fcntl.h>
#include <limits.h>
#ifdef _OPENMP
#include <sys/auxv.h>
#endif

#include "util.h"

// At exit: text that standard output did not take is an error, unless another one has been told already.
static inline void startup_check_output(void) {
    if (fatal_told) { return; }
    errno = 0;
    bool failed = ferror(stdout) != 0;
    if (fflush(stdout) != 0 || fclose(stdout) != 0) { failed = true; }
    if (!failed) { return; }
    fprintf(stderr,
            "error: cannot write to standard output: %s; what it shows is incomplete, send it where there is room\n",
            errno ? strerror(errno) : "a write failed");
    _exit(1);
}

// A missing standard stream becomes /dev/null: else the next file to be opened takes its number and gets its text.
static inline void startup_streams(void) {
    int fd;
    do { fd = open("/dev/null", O_RDWR); } while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd < 0) { fatal("cannot open /dev/null: %s", strerror(errno)); }
    close(fd);
    if (atexit(startup_check_output) != 0) { fatal("out of memory: at the start"); }
}

/*
OpenMP's threads wait for each other by spinning, 3 ms or more, before they sleep. That is right while each has a core
for itself. As soon as anything else wants one, a thread that waits keeps the one that it waits for from running, at
every one of a step's hundreds of meetings. Five thousand rounds, some 50 us, cost nothing alone and little beside
others. libgomp reads its settings before main: so the program starts itself again with them, unless the user has made
any. By its path, so that it keeps its name; AT_BASE is 0 when the loader itself was started, with the program as its
argument.
*/
static inline void startup_choose_waiting(char** argv) {
#ifdef _OPENMP
    static const char* const settings[] = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"};
    enum { SETTINGS = sizeof settings / sizeof *settings };
    for (size_t i = 0; i < SETTINGS; i++) {
        if (getenv(settings[i])) { return; }
    }
    char path[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    if (n <= 0 || getauxval(AT_BASE) == 0 || setenv("GOMP_SPINCOUNT", "5000", 0) != 0) { return; }
    path[n] = '\0';
    execv(path, argv);
    execv("/proc/self/exe", argv);  // the file has been replaced or removed since
    unsetenv("GOMP_SPINCOUNT");
#else
    (void)argv;
#endif
}

#endif
