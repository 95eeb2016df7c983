/*
A file that is written line by line and appears under its name only when it is whole: until output_close() it is
NAME.tmp.PID, which is removed when the program ends before. What a link names is replaced, not the link; a device or a
named pipe is written as it is.
*/
#ifndef OUTPUT_FILE_H
#define OUTPUT_FILE_H

#include "util.h"

typedef struct {
    FILE* file;
    const char* path;
    char *target, *temporary;  // temporary: NULL = written as it is
} OutputFile;

enum { OUTPUT_FILES = 4 };
static char* output_unfinished[OUTPUT_FILES];

static inline void output_remove_unfinished(void) {
    for (int i = 0; i < OUTPUT_FILES; i++) {
        if (output_unfinished[i]) { unlink(output_unfinished[i]); }
    }
}

static inline OutputFile output_open(const char* path) {
    static bool registered;
    if (!registered) { atexit(output_remove_unfinished); }
    registered = true;
    struct stat status;
    bool there = stat(path, &status) == 0, replaced = !there || S_ISREG(status.st_mode);
    if (there && S_ISDIR(status.st_mode)) { fatal("%s: is a folder, expected the name of a file to write", path); }
    OutputFile o = {NULL, path, there ? realpath(path, NULL) : NULL, NULL};
    if (!o.target) { o.target = xstrdup(path); }
    if (replaced) { o.temporary = text("%s.tmp.%ld", o.target, (long)getpid()); }
    o.file = fopen(replaced ? o.temporary : o.target, "w");
    if (!o.file) { fatal("%s: cannot write: %s; choose another place", path, strerror(errno)); }
    int slot = 0;
    while (output_unfinished[slot]) { slot++; }
    assert(slot < OUTPUT_FILES);
    output_unfinished[slot] = o.temporary;
    return o;
}

// Ends the program when the disk has refused something.
static inline void output_check(const OutputFile* o) {
    if (ferror(o->file)) {
        fatal("%s: cannot write: %s; free space or choose another place", o->path, strerror(errno));
    }
}

static inline void output_close(OutputFile* o) {
    output_check(o);
    bool good = fflush(o->file) == 0 && !ferror(o->file) && (!o->temporary || fsync(fileno(o->file)) == 0);
    good = fclose(o->file) == 0 && good;
    if (!good || (o->temporary && rename(o->temporary, o->target) != 0)) {
        fatal("%s: cannot write: %s; free space or choose another place", o->path, strerror(errno));
    }
    for (int i = 0; i < OUTPUT_FILES; i++) {
        if (output_unfinished[i] == o->temporary) { output_unfinished[i] = NULL; }
    }
    free(o->target);
    free(o->temporary);
    memset(o, 0, sizeof *o);
}

#endif
