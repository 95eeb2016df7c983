/*
A thread that signal handlers run on. Where a signal interrupts oneDNN's matrix products the stack pointer may be in
the heap, and the kilobytes of registers that the kernel saves there (AVX-512, AMX) would overwrite what lies below.
*/
#ifndef SIGNALS_H
#define SIGNALS_H

#include <pthread.h>
#include <signal.h>

#include "util.h"

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
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGALRM};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) { sigaddset(&signals, numbers[i]); }
    pthread_sigmask(SIG_UNBLOCK, &signals, NULL);
    if (pthread_create(&thread, NULL, take_signals, NULL) != 0) { fatal("cannot start a thread; raise ulimit -u"); }
    pthread_detach(thread);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
}

#endif
