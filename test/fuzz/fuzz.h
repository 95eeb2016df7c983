/*
What the fuzz targets share. A target defines fuzz_one(), which feeds an input to the code under test as the programs
would, and fuzz_seeds(), which hands good inputs to fuzz_seed(): the corpus to start from, written with
FUZZ_SEEDS=FOLDER in the environment, so that none is kept in the repository.

fatal() is a good answer to a bad input. It jumps back (in C++ targets it throws) in the place of ending the program,
and so does exit(). What the program would have left to the kernel is then cleaned up here, or a million refused inputs
would look like a leak: memory by the sanitizer's hooks, streams and mappings by the linker's --wrap, descriptors by
number. Everything else is a fault: sanitizers, assertions, 5 s, 1 GB, an error of more than one line.
*/
#ifndef FUZZ_H
#define FUZZ_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // memfd_create, close_range
#endif

#include <fcntl.h>
#include <setjmp.h>
#include <sys/mman.h>

#include "../../llmc/util.h"

static void fuzz_one(const uint8_t* data, size_t size);
static void fuzz_seeds(void);
// Called after a jump, before memory is freed: for threads.
static void (*fuzz_cleanup)(void);

// ----------------------------------------------------------------------------
// what a run holds

enum { FUZZ_SLOTS = 1 << 18, FUZZ_FEW = 256 };

static __thread bool fuzz_runs;  // only what the fuzzing thread takes is noted
static int fuzz_first_descriptor;
static const volatile void* fuzz_memory[FUZZ_SLOTS];  // a hash table without removal of the places taken
static uint32_t fuzz_taken[FUZZ_SLOTS];               // the places, to empty it quickly
static size_t fuzz_taken_count;
static FILE* fuzz_streams[FUZZ_FEW];
static struct {
    void* address;
    size_t bytes;
} fuzz_maps[FUZZ_FEW];

static inline size_t fuzz_slot(const volatile void* p) {
    size_t slot = ((uintptr_t)p >> 4) * 0x9E3779B97F4A7C15ull >> 46;
    while (fuzz_memory[slot] && fuzz_memory[slot] != p) { slot = (slot + 1) % FUZZ_SLOTS; }
    return slot;
}

static const char fuzz_freed = 0;  // where a pointer stood

EXTERN_C int __sanitizer_install_malloc_and_free_hooks(void (*)(const volatile void*, size_t),
                                                       void (*)(const volatile void*));

static void fuzz_on_malloc(const volatile void* p, size_t bytes) {
    (void)bytes;
    if (!fuzz_runs || !p || fuzz_taken_count > FUZZ_SLOTS / 2) { return; }
    size_t slot = fuzz_slot(p);
    if (!fuzz_memory[slot]) { fuzz_taken[fuzz_taken_count++] = (uint32_t)slot; }
    fuzz_memory[slot] = p;
}

static void fuzz_on_free(const volatile void* p) {
    if (!fuzz_runs || !p) { return; }
    size_t slot = fuzz_slot(p);
    if (fuzz_memory[slot]) { fuzz_memory[slot] = &fuzz_freed; }
}

static void fuzz_forget(void) {
    for (size_t i = 0; i < fuzz_taken_count; i++) { fuzz_memory[fuzz_taken[i]] = NULL; }
    fuzz_taken_count = 0;
    memset(fuzz_streams, 0, sizeof fuzz_streams);
    memset(fuzz_maps, 0, sizeof fuzz_maps);
}

EXTERN_C FILE* __real_fopen(const char* path, const char* mode);
EXTERN_C int __real_fclose(FILE* f);
EXTERN_C void* __real_mmap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset);
EXTERN_C int __real_munmap(void* address, size_t bytes);
EXTERN_C void __real_exit(int status) __attribute__((noreturn));

EXTERN_C FILE* __wrap_fopen(const char* path, const char* mode);
FILE* __wrap_fopen(const char* path, const char* mode) {
    FILE* f = __real_fopen(path, mode);
    for (size_t i = 0; f && fuzz_runs && i < FUZZ_FEW; i++) {
        if (fuzz_streams[i]) { continue; }
        fuzz_streams[i] = f;
        break;
    }
    return f;
}

EXTERN_C int __wrap_fclose(FILE* f);
int __wrap_fclose(FILE* f) {
    for (size_t i = 0; i < FUZZ_FEW; i++) {
        if (fuzz_streams[i] == f) { fuzz_streams[i] = NULL; }
    }
    return __real_fclose(f);
}

EXTERN_C void* __wrap_mmap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset);
void* __wrap_mmap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) {
    void* map = __real_mmap(address, bytes, protection, flags, fd, offset);
    for (size_t i = 0; map != MAP_FAILED && fuzz_runs && i < FUZZ_FEW; i++) {
        if (fuzz_maps[i].address) { continue; }
        fuzz_maps[i].address = map, fuzz_maps[i].bytes = bytes;
        break;
    }
    return map;
}

EXTERN_C int __wrap_munmap(void* address, size_t bytes);
int __wrap_munmap(void* address, size_t bytes) {
    for (size_t i = 0; i < FUZZ_FEW; i++) {
        if (fuzz_maps[i].address == address) { fuzz_maps[i].address = NULL; }
    }
    return __real_munmap(address, bytes);
}

// ----------------------------------------------------------------------------
// the end of a run

#ifdef __cplusplus
struct FuzzEnd {};
static void fuzz_end(void) { throw FuzzEnd(); }
#else
static jmp_buf fuzz_back;
static void fuzz_end(void) { longjmp(fuzz_back, 1); }
#endif

EXTERN_C void __wrap_exit(int status) __attribute__((noreturn));
void __wrap_exit(int status) {
#ifndef __cplusplus
    if (fuzz_runs) { fuzz_end(); }
#endif
    __real_exit(status);
}

// What is to be done at the end of the program is not for the end of a run.
EXTERN_C int __wrap_atexit(void (*handler)(void));
int __wrap_atexit(void (*handler)(void)) {
    (void)handler;
    return 0;
}

EXTERN_C void __wrap__exit(int status) __attribute__((noreturn));
void __wrap__exit(int status) { __wrap_exit(status); }

static void fuzz_report(const char* message) {
    for (const char* c = message; *c; c++) {
        if ((unsigned char)*c < ' ') {
            fprintf(stderr, "an error of more than one line, or with control characters: %s\n", message);
            abort();
        }
    }
    if (getenv("FUZZ_SHOW")) { fprintf(stderr, "error: %s\n", message); }
}

// Gives back what a run that ended in fatal() still holds.
static void fuzz_clean_up(void) {
    if (fuzz_cleanup) { fuzz_cleanup(); }
    for (size_t i = 0; i < FUZZ_FEW; i++) {
        if (fuzz_streams[i]) { __real_fclose(fuzz_streams[i]); }
        if (fuzz_maps[i].address) { __real_munmap(fuzz_maps[i].address, fuzz_maps[i].bytes); }
    }
    fuzz_runs = false;
#ifndef __cplusplus  // exceptions have freed it
    for (size_t i = 0; i < fuzz_taken_count; i++) {
        const volatile void* p = fuzz_memory[fuzz_taken[i]];
        if (p != &fuzz_freed) { free((void*)(uintptr_t)p); }
    }
#endif
}

EXTERN_C int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    fuzz_runs = true;
#ifdef __cplusplus
    try {
        fuzz_one(data, size);
    } catch (const FuzzEnd&) { fuzz_clean_up(); }
#else
    if (setjmp(fuzz_back) == 0) {
        fuzz_one(data, size);
    } else {
        fuzz_clean_up();
    }
#endif
    fuzz_runs = false;
    fuzz_forget();
    close_range((unsigned)fuzz_first_descriptor, ~0u, 0);
    return 0;
}

// ----------------------------------------------------------------------------
// for the targets

static char fuzz_folder[128];  // for files that need a name

// The bytes as a regular file; returns its path, which is good until the run ends.
__attribute__((unused)) static const char* fuzz_file(const void* data, size_t size) {
    static char path[64];
    int fd = memfd_create("fuzz", 0);
    if (fd < 0 || write(fd, data, size) != (ssize_t)size || lseek(fd, 0, SEEK_SET) != 0) { abort(); }
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return path;
}

// A file of that name in fuzz_folder.
__attribute__((unused)) static void fuzz_named_file(const char* name, const void* data, size_t size) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", fuzz_folder, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0 || write(fd, data, size) != (ssize_t)size || close(fd) != 0) { abort(); }
}

// The input's first byte, which it loses; 0 when it is empty.
__attribute__((unused)) static uint8_t fuzz_take(const uint8_t** data, size_t* size) {
    if (*size == 0) { return 0; }
    --*size;
    return *(*data)++;
}

// An input for the corpus: `choice`, the byte that most targets take first, and the rest.
__attribute__((unused)) static void fuzz_seed(uint8_t choice, const void* data, size_t size) {
    static int number;
    char path[512];
    snprintf(path, sizeof path, "%s/seed_%03d", getenv("FUZZ_SEEDS"), number++);
    FILE* f = fopen(path, "wb");
    if (!f || fputc(choice, f) == EOF || fwrite(data, 1, size, f) != size || fclose(f) != 0) { abort(); }
}

__attribute__((unused)) static void fuzz_seed_text(uint8_t choice, const char* s) { fuzz_seed(choice, s, strlen(s)); }

EXTERN_C int LLVMFuzzerInitialize(int* argc, char*** argv);
int LLVMFuzzerInitialize(int* argc, char*** argv) {
    (void)argc, (void)argv;
    const char* parent = getenv("TMPDIR");
    snprintf(fuzz_folder, sizeof fuzz_folder, "%.100s/fuzz_XXXXXX", parent ? parent : "/tmp");
    if (!freopen("/dev/null", "w", stdout) || !mkdtemp(fuzz_folder)) { abort(); }
    if (getenv("FUZZ_SEEDS")) {
        fuzz_seeds();
        __real_exit(0);
    }
    static char buffer[BUFSIZ];
    setvbuf(stdout, buffer, _IOFBF, sizeof buffer);  // its buffer is no part of a run
    warnings_off = true;
    fatal_hook = fuzz_end;
    fatal_report = fuzz_report;
    __sanitizer_install_malloc_and_free_hooks(fuzz_on_malloc, fuzz_on_free);
    fuzz_first_descriptor = dup(0);
    close(fuzz_first_descriptor);
    return 0;
}

#endif
