/*
A thread that signal handlers run on. Where a signal interrupts oneDNN's matrix products the stack pointer may be in
the heap, and the kilobytes of registers that the kernel saves there (AVX-512, AMX) would overwrite what lies below.
*/
#ifndef SIGNALS_H
#define SIGNALS_H

#include <pthread.h>
#include <signal.h>

#include "../util.h"

static void* take_signals(void* unused) {
    while (pause() < 0) {}  // returns after each handler
    return unused;
}

// From here on this thread, and those that it starts, get none of the signals that the program may handle. To be
// called before there are other threads.
static inline void signals_to_own_thread(void) {
    pthread_t thread;
    sigset_t signals;
    sigemptyset(&signals);
    static const int numbers[] = {SIGINT, SIGTERM, SIGUSR1, SIGHUP, SIGALRM};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) { sigaddset(&signals, numbers[i]); }
    pthread_sigmask(SIG_UNBLOCK, &signals, NULL);
    if (pthread_create(&thread, NULL, take_signals, NULL) != 0) { fatal("cannot start a thread; raise ulimit -u"); }
    pthread_detach(thread);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
}

// Sets the handler of the signals that ask a program to stop. SIGHUP, with which a terminal ends, stays ignored where
// it was ignored at the start, as under nohup. What is printed for a terminal or a pipe that is gone must not end the
// program before it has saved.
static inline void signals_to_stop_by(void (*handler)(int)) {
    signal(SIGINT, handler);
    signal(SIGTERM, handler);
    struct sigaction hangup;
    if (sigaction(SIGHUP, NULL, &hangup) == 0 && hangup.sa_handler != SIG_IGN) { signal(SIGHUP, handler); }
    signal(SIGPIPE, SIG_IGN);
}

#endif
