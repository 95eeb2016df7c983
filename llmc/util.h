/*
Host utilities that every other file may use: fatal errors, checked allocation, time, paths, text.
Contract: anything a user can cause ends in fatal(): one line on stderr, exit status 1. assert() is
for our own bugs only. Compiles as C11 and as C++.
*/
#ifndef UTIL_H
#define UTIL_H

#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifdef __cplusplus
#define EXTERN_C extern "C"
#else
#define EXTERN_C extern
#endif

// fatal_hook is called before a fatal exit. fatal_report, where there are several processes, says the error in the
// place of fatal() and ends the others; fatal_told: an error has been said; warnings_off: another process gives the
// warnings. Weak, so that the translation units of a program share one variable without a source file of its own.
EXTERN_C void (*fatal_hook)(void);
__attribute__((weak)) void (*fatal_hook)(void);
EXTERN_C void (*fatal_report)(const char* message);
__attribute__((weak)) void (*fatal_report)(const char* message);
EXTERN_C bool fatal_told;
__attribute__((weak)) bool fatal_told;
EXTERN_C bool warnings_off;
__attribute__((weak)) bool warnings_off;

// Makes a message one line: names and values in it may come from anywhere, and control characters could drive the
// terminal.
static inline void one_line(char* message) {
    for (char* c = message; *c; c++) {
        if ((unsigned char)*c < ' ' || *c == 127) { *c = *c == '\n' || *c == '\r' || *c == '\t' ? ' ' : '?'; }
    }
}

// Prints "error: MESSAGE" on one line and exits with status 1. Says what, where, expected, what to do.
__attribute__((format(printf, 1, 2), noreturn)) static inline void fatal(const char* format, ...) {
    fflush(stdout);
    char message[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    one_line(message);
    if (fatal_report) {
        fatal_report(message);
    } else {
        fprintf(stderr, "error: %s\n", message);
    }
    fflush(stderr);
    fatal_told = true;
    if (fatal_hook) { fatal_hook(); }
    exit(1);
}

// Prints "warning: MESSAGE" on one line and goes on.
__attribute__((format(printf, 1, 2))) static inline void warn(const char* format, ...) {
    if (warnings_off) { return; }
    fflush(stdout);
    char message[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    one_line(message);
    fprintf(stderr, "warning: %s\n", message);
}

// ----------------------------------------------------------------------------
// memory

static inline size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Part i of n elements is part_begin(n, i, parts) .. part_begin(n, i + 1, parts): equal parts of whole cache
// lines of fp32, and what is left over in the last.
static inline size_t part_begin(size_t n, size_t part, size_t parts) {
    return part == parts ? n : n / parts / 16 * 16 * part;
}

// count * size bytes of zeroed host memory; never returns NULL. Release with free().
static inline void* xcalloc(size_t count, size_t size) {
    void* p = calloc(count ? count : 1, size ? size : 1);
    if (!p) { fatal("out of memory: %zu x %zu bytes asked for", count, size); }
    return p;
}

static inline void* xrealloc(void* old, size_t bytes) {
    void* p = realloc(old, bytes ? bytes : 1);
    if (!p) { fatal("out of memory: %zu bytes asked for", bytes); }
    return p;
}

static inline char* xstrdup(const char* s) {
    size_t n = strlen(s) + 1;
    return (char*)memcpy(xrealloc(NULL, n), s, n);
}

// Fowler, Noll and Vo's hash FNV-1a, 64 bits.
static inline uint64_t fnv1a(const void* data, size_t bytes) {
    uint64_t hash = 14695981039346656037ull;
    for (size_t i = 0; i < bytes; i++) { hash = (hash ^ ((const unsigned char*)data)[i]) * 1099511628211ull; }
    return hash;
}

// ----------------------------------------------------------------------------
// time and text

// Seconds on a clock that never goes backwards.
static inline double wall_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// A new string as sprintf would print it; release with free().
__attribute__((format(printf, 1, 2))) static inline char* text(const char* format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    char* s = (char*)xrealloc(NULL, (size_t)n + 1);
    va_start(args, format);
    vsnprintf(s, (size_t)n + 1, format, args);
    va_end(args);
    return s;
}

static inline bool ends_with(const char* s, const char* suffix) {
    size_t n = strlen(s), m = strlen(suffix);
    return n >= m && strcmp(s + n - m, suffix) == 0;
}

// "1h02m", "3m20s" or "12s", for time left and time taken; buffer of at least 16 bytes, returned.
static inline const char* format_duration(char buffer[16], double seconds) {
    unsigned s = seconds > 0 && seconds < 3.6e8 ? (unsigned)(seconds + 0.5) : 0;
    if (s >= 3600) {
        snprintf(buffer, 16, "%uh%02um", s / 3600, s / 60 % 60);
    } else if (s >= 60) {
        snprintf(buffer, 16, "%um%02us", s / 60, s % 60);
    } else {
        snprintf(buffer, 16, "%us", s);
    }
    return buffer;
}

// "1,234,567"; buffer of at least 32 bytes, returned.
static inline const char* format_count(char buffer[32], size_t n) {
    char digits[24];
    int length = snprintf(digits, sizeof digits, "%zu", n), out = 0;
    for (int i = 0; i < length; i++) {
        if (i > 0 && (length - i) % 3 == 0) { buffer[out++] = ','; }
        buffer[out++] = digits[i];
    }
    buffer[out] = '\0';
    return buffer;
}

// "1.52 GB", "188 MB"; buffer of at least 16 bytes, returned.
static inline const char* format_bytes(char buffer[16], size_t bytes) {
    double megabytes = (double)bytes / 1e6;
    if (megabytes >= 999.5) {
        snprintf(buffer, 16, "%.2f GB", megabytes / 1e3);
    } else {
        snprintf(buffer, 16, megabytes >= 10 ? "%.0f MB" : "%.2f MB", megabytes);
    }
    return buffer;
}

// ----------------------------------------------------------------------------
// files

static inline bool file_exists(const char* path) { return access(path, F_OK) == 0; }

// Creates a directory and its parents; an existing one is fine.
static inline void make_directories(const char* path) {
    char* p = xstrdup(path);
    for (char* s = p + 1;; s++) {
        char c = *s;
        if (c != '/' && c != '\0') { continue; }
        *s = '\0';
        if (mkdir(p, 0777) != 0 && errno != EEXIST) { fatal("cannot create directory %s: %s", p, strerror(errno)); }
        *s = c;
        if (c == '\0') { break; }
    }
    free(p);
}

#endif
