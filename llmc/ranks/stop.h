/*
The wish to stop a run: signals, and the agreement of all ranks to stop at the same step.

The first signal asks to save and leave; a second one ends the program at once, unless it comes with the first:
launchers repeat signals. When the other ranks are dead nobody agrees to stop: then an alarm ends this rank, once the
patience that was set for what it is doing is over.
*/
#ifndef STOP_H
#define STOP_H

#include "ranks.h"
#include "signals.h"

// Written by handlers on their own thread, read by the training loop, and the other way round.
static volatile sig_atomic_t stop_signal;    // that came to this rank
static volatile sig_atomic_t stop_patience;  // seconds that the other ranks may take to agree; 0: any time

static void on_stop_signal(int number) {
    static time_t first;
    if (stop_signal && time(NULL) - first > 1) { signal(number, SIG_DFL), raise(number); }
    if (stop_signal) { return; }
    first = time(NULL);
    stop_signal = number;
    if (stop_patience) { alarm((unsigned)stop_patience); }
}

static void on_stop_alarm(int number) {
    static const char message[] =
        "error: asked to stop, but the other ranks do not answer; resume from the last checkpoint\n";
    if (!stop_patience) { return; }  // set after the signal came
    ssize_t written = write(STDERR_FILENO, message, sizeof message - 1);
    (void)written;
    _exit(128 + number);
}

static inline void stop_catch_signals(void) {
    signals_to_stop_by(on_stop_signal);
    signal(SIGUSR1, on_stop_signal);
    signal(SIGALRM, on_stop_alarm);
}

static inline const char* stop_signal_name(int number) {
    switch (number) {
        case SIGINT: return "SIGINT";
        case SIGTERM: return "SIGTERM";
        case SIGHUP: return "SIGHUP";
        default: return "SIGUSR1";
    }
}

// From here on the ranks agree within so many seconds; 0: they may take any time, as when rank 0 saves.
static inline void stop_be_patient(double seconds) {
    stop_patience = 0;
    alarm(0);
    if (ranks.size == 1 || seconds == 0) { return; }
    stop_patience = (sig_atomic_t)(seconds + 1);
    if (stop_signal) { alarm((unsigned)stop_patience); }
}

// The signal that any rank was asked to stop by, 0 for none. Collective.
static inline int stop_agreed(void) { return ranks_max(stop_signal); }

#endif
