/*
A progress bar with time left: on a terminal one line of at most 80 columns that is redrawn on stderr, elsewhere a
plain line now and then. Work is counted in any unit in which it takes even time.
*/
#ifndef PROGRESS_H
#define PROGRESS_H

#include "logger.h"

enum { PROGRESS_BAR_CELLS = 18 };

typedef struct {
    const char* what;
    char detail[80];
    double total, done;
    double started, drawn;
    bool terminal, visible;
} ProgressBar;

// "passkey [####--------------]  25 % | length 3640, 5/20 | 1m20s left"; out of PROGRESS_BUFFER bytes, returned.
static inline const char* format_progress_bar(char out[PROGRESS_BUFFER], const char* what, double share,
                                              const char* detail, double seconds_left) {
    char bar[PROGRESS_BAR_CELLS + 1], duration[16];
    share = share > 1 ? 1 : share > 0 ? share : 0;
    for (int i = 0; i < PROGRESS_BAR_CELLS; i++) { bar[i] = i + 0.5 < share * PROGRESS_BAR_CELLS ? '#' : '-'; }
    bar[PROGRESS_BAR_CELLS] = '\0';
    bool known = seconds_left >= 0 && seconds_left < 3e8;
    snprintf(out, PROGRESS_BUFFER, "%.10s [%s] %3.0f %% | %.24s | %s left", what, bar, 100 * share, detail,
             known ? format_duration(duration, seconds_left) : "?");
    return out;
}

static inline double progress_seconds_left(const ProgressBar* p) {
    return p->done > 0 ? (wall_seconds() - p->started) * (p->total - p->done) / p->done : NAN;
}

static inline void progress_start(ProgressBar* p, const char* what, double total) {
    memset(p, 0, sizeof *p);
    p->what = what, p->total = total;
    p->started = wall_seconds();
    p->drawn = p->started;
    p->terminal = is_terminal(stderr);
}

// Takes the line away before something else is printed.
static inline void progress_clear(ProgressBar* p) {
    if (p->visible) { fprintf(stderr, "\r%*s\r", PROGRESS_COLUMNS - 1, ""); }
    p->visible = false;
}

// Adds work that is done and redraws the line if it is time.
static inline void progress_add(ProgressBar* p, double work) {
    const double terminal_every = 0.1, plain_every = 30;
    char line[PROGRESS_BUFFER];
    double now = wall_seconds();
    p->done += work;
    if (now - p->drawn < (p->terminal ? terminal_every : plain_every)) { return; }
    p->drawn = now;
    format_progress_bar(line, p->what, p->done / p->total, p->detail, progress_seconds_left(p));
    if (p->terminal) {
        fprintf(stderr, "\r%-*s", PROGRESS_COLUMNS - 1, line);
        p->visible = true;
    } else {
        printf("%s\n", line);
        fflush(stdout);
    }
}

#endif
