/*
The folders of checkpoints in a run, and how a new one takes its place so that whatever kills the program, whenever, the
run goes on from a whole checkpoint with the log that belongs to it:

  RUN/checkpoints/step_N        model.safetensors and optimizer.safetensors
                  step_N.tmp    being written
                  step_N.new    whole, taking its place; a resumed run finishes that
                  step_N.aside  args.json and logs from before the run went back to step N

A run that goes back to step N keeps the checkpoints after N, and its old log in step_N.aside, until its first new
checkpoint is whole. Should it end before, resuming puts the old log back in its place.

Entries of any other name are not ours. None is removed, and a folder that holds one stays.
*/
#ifndef CHECKPOINT_FOLDER_H
#define CHECKPOINT_FOLDER_H

#include <dirent.h>
#include <limits.h>

#include "logger.h"
#include "safetensors.h"

enum { CHECKPOINT_NAME_DIGITS = 9, CHECKPOINT_FILES = 2, CHECKPOINT_ASIDE = 3 };

static inline const char* checkpoint_file_name(size_t i) {
    static const char* const names[CHECKPOINT_FILES] = {"model.safetensors", "optimizer.safetensors"};
    return names[i];
}

static inline const char* checkpoint_aside_name(size_t i) {
    static const char* const names[CHECKPOINT_ASIDE] = {"args.json", "train.log", "eval.log"};
    return names[i];
}

// ----------------------------------------------------------------------------
// names

// The number in "step_000000500" with the suffix after it, or -1 for any other name.
static inline long long checkpoint_name_step(const char* name, const char* suffix) {
    if (strncmp(name, "step_", 5) != 0) { return -1; }
    size_t digits = strspn(name + 5, "0123456789");
    bool ours = digits == CHECKPOINT_NAME_DIGITS || (digits > CHECKPOINT_NAME_DIGITS && digits < 19 && name[5] != '0');
    return ours && strcmp(name + 5 + digits, suffix) == 0 ? atoll(name + 5) : -1;
}

static inline char* checkpoint_step_folder(const char* run, long long step, const char* suffix) {
    return text("%s/checkpoints/step_%0*lld%s", run, CHECKPOINT_NAME_DIGITS, step, suffix);
}

// Steps of the entries with such a name in RUN/checkpoints, ascending; release with free().
static inline long long* checkpoint_list(const char* run, const char* suffix, size_t* count) {
    char* path = text("%s/checkpoints", run);
    long long* steps = NULL;
    *count = 0;
    DIR* dir = opendir(path);
    for (struct dirent* entry; dir && (entry = readdir(dir));) {
        long long step = checkpoint_name_step(entry->d_name, suffix);
        if (step < 0) { continue; }
        steps = (long long*)xrealloc(steps, (*count + 1) * sizeof *steps);
        size_t at = (*count)++;
        for (; at > 0 && steps[at - 1] > step; at--) { steps[at] = steps[at - 1]; }
        steps[at] = step;
    }
    if (dir) { closedir(dir); }
    free(path);
    return steps;
}

// How many of a checkpoint's files a folder holds.
static inline size_t checkpoint_files_in(const char* folder) {
    size_t found = 0;
    for (size_t i = 0; i < CHECKPOINT_FILES; i++) {
        char* path = text("%s/%s", folder, checkpoint_file_name(i));
        found += file_exists(path);
        free(path);
    }
    return found;
}

// The run of a resolved path to a step folder; NULL for any other path.
static inline char* checkpoint_run_of_step(const char* path) {
    const char *slash = strrchr(path, '/'), *parent = "/checkpoints";
    size_t tail = strlen(parent);
    if (!slash || checkpoint_name_step(slash + 1, "") < 0) { return NULL; }
    if ((size_t)(slash - path) <= tail || strncmp(slash - tail, parent, tail) != 0) { return NULL; }
    return text("%.*s", (int)(slash - path - (ptrdiff_t)tail), path);
}

// The run folder of a path that is one, or that leads to one of its step folders, whatever links and dots are in it.
// Release with free().
static inline char* checkpoint_run_folder(const char* path) {
    char* given = xstrdup(path);
    for (size_t n = strlen(given); n > 1 && given[n - 1] == '/'; n--) { given[n - 1] = '\0'; }
    char *real = realpath(given, NULL), *run = real ? checkpoint_run_of_step(real) : NULL;
    char *as_given = checkpoint_run_of_step(given), *real_given = as_given ? realpath(as_given, NULL) : NULL;
    // the user's own words where they say the same, or where only RUN/checkpoints is a link
    bool keep = as_given && (!run || (real_given && strcmp(real_given, run) == 0));
    char* result = xstrdup(keep ? as_given : run ? run : given);
    free(given), free(real), free(run), free(as_given), free(real_given);
    return result;
}

// Does the path lead to a step folder, not to a run?
static inline bool checkpoint_is_step(const char* path) {
    char *real = realpath(path, NULL), *run = checkpoint_run_of_step(real ? real : path),
         *as_given = checkpoint_run_of_step(path);
    bool step = run || as_given;
    free(real), free(run), free(as_given);
    return step;
}

// ----------------------------------------------------------------------------
// removing what is ours

// Removes a checkpoint's files, also half-written ones, and their folder unless it holds anything else.
static inline void checkpoint_remove(const char* folder) {
    for (size_t i = 0; i < CHECKPOINT_FILES; i++) {
        char *path = text("%s/%s", folder, checkpoint_file_name(i)), *half = text("%s.tmp", path);
        unlink(path);
        unlink(half);
        free(path), free(half);
    }
    rmdir(folder);
}

// Removes what a killed program left half-written in RUN/checkpoints.
static inline void checkpoint_remove_stale(const char* run) {
    size_t count;
    long long* steps = checkpoint_list(run, ".tmp", &count);
    for (size_t i = 0; i < count; i++) {
        char* stale = checkpoint_step_folder(run, steps[i], ".tmp");
        checkpoint_remove(stale);
        free(stale);
    }
    free(steps);
}

// Removes all checkpoints up to a step but the `keep` newest.
static inline void checkpoint_prune(const char* run, size_t step, size_t keep) {
    size_t count, kept = 0;
    long long* steps = checkpoint_list(run, "", &count);
    while (count-- > 0) {
        if (steps[count] > (long long)step) { continue; }
        char* folder = checkpoint_step_folder(run, steps[count], "");
        // one without files has lost them to a removal that was interrupted
        bool empty = checkpoint_files_in(folder) == 0;
        if (empty || kept++ >= keep) { checkpoint_remove(folder); }
        free(folder);
    }
    free(steps);
}

// ----------------------------------------------------------------------------
// links in the run folder

// RUN/NAME becomes a link to a checkpoint's file, or a copy where the file system has no links.
static inline void checkpoint_publish(const char* run, const char* folder, const char* name) {
    char *from = text("%s/%s", folder, name), *to = text("%s/%s", run, name), *temporary = text("%s.tmp", to);
    unlink(temporary);
    if (link(from, temporary) != 0) {
        char buffer[1 << 16];
        FILE *source = fopen(from, "rb"), *copy = fopen(temporary, "wb");
        size_t n = 0;
        while (source && copy && (n = fread(buffer, 1, sizeof buffer, source)) > 0 && fwrite(buffer, 1, n, copy) == n) {
        }
        bool good = source && copy && n == 0 && !ferror(source);
        if (source) { fclose(source); }
        if (copy && fclose(copy) != 0) { good = false; }
        if (!good) {
            int error = errno;
            unlink(temporary);
            fatal("%s: cannot write: %s; the checkpoint itself is whole in %s", to, strerror(error), folder);
        }
    }
    if (rename(temporary, to) != 0) { fatal("%s: cannot replace: %s", to, strerror(errno)); }
    free(from);
    free(to);
    free(temporary);
}

// Links the run folder's files to its newest checkpoint where a kill has prevented that. Files of a later step, which
// somebody has kept there alone, stay.
static inline void checkpoint_publish_again(const char* run, const char* folder, long long step) {
    for (size_t i = 0; i < CHECKPOINT_FILES; i++) {
        const char* name = checkpoint_file_name(i);
        char *from = text("%s/%s", folder, name), *to = text("%s/%s", run, name);
        struct stat a, b;
        bool same = stat(from, &a) == 0 && stat(to, &b) == 0 && a.st_ino == b.st_ino && a.st_dev == b.st_dev;
        SafeTensors there;
        bool later = false;
        if (!same && safetensors_try(&there, to)) {
            const char* saved = safetensors_metadata(&there, "step");
            later = saved && atoll(saved) > step;
        }
        if (!same) { safetensors_close(&there); }
        if (!same && !later) { checkpoint_publish(run, folder, name); }
        free(from), free(to);
    }
}

// ----------------------------------------------------------------------------
// going back to an earlier step

// Steps of the run's checkpoints after a step, "8, 12"; NULL where there are none. Release with free().
static inline char* checkpoint_later(const char* run, long long step) {
    size_t count;
    long long* steps = checkpoint_list(run, "", &count);
    char* list = NULL;
    for (size_t i = 0; i < count; i++) {
        char* folder = checkpoint_step_folder(run, steps[i], "");
        if (steps[i] > step && checkpoint_files_in(folder) > 0) {
            char* longer = list ? text("%s, %lld", list, steps[i]) : text("%lld", steps[i]);
            free(list);
            list = longer;
        }
        free(folder);
    }
    free(steps);
    return list;
}

// Removes a folder of kept logs, whose suffix tells whether it is whole.
static inline void checkpoint_remove_aside(const char* run, const char* suffix) {
    size_t count;
    long long* steps = checkpoint_list(run, suffix, &count);
    for (size_t i = 0; i < count; i++) {
        char* folder = checkpoint_step_folder(run, steps[i], suffix);
        for (size_t k = 0; k < CHECKPOINT_ASIDE; k++) {
            char* path = text("%s/%s", folder, checkpoint_aside_name(k));
            unlink(path);
            free(path);
        }
        rmdir(folder);
        free(folder);
    }
    free(steps);
}

static inline void checkpoint_copy_aside(const char* from, const char* to) {
    for (size_t k = 0; k < CHECKPOINT_ASIDE; k++) {
        char *source = text("%s/%s", from, checkpoint_aside_name(k)),
             *copy = text("%s/%s", to, checkpoint_aside_name(k));
        if (file_exists(source)) {
            size_t bytes;
            char* content = read_text(source, &bytes);
            write_atomically(copy, content, bytes);
            free(content);
        }
        free(source), free(copy);
    }
}

// Keeps arguments and logs as they are now, until the first checkpoint after `step` is whole.
static inline void checkpoint_set_aside(const char* run, long long step) {
    char *folder = checkpoint_step_folder(run, step, ".aside"), *half = text("%s.tmp", folder);
    checkpoint_remove_aside(run, ".aside.tmp");
    make_directories(half);
    checkpoint_copy_aside(run, half);
    if (rename(half, folder) != 0) { fatal("%s: cannot rename to %s: %s", half, folder, strerror(errno)); }
    safetensors_sync_folder(folder);
    free(folder), free(half);
}

// ----------------------------------------------------------------------------
// taking its place

// The checkpoint of a step, whole in step_N.new, becomes the run's newest. If the run went back before, what came
// after the step that it went back to goes now. May be interrupted anywhere and called again.
static inline void checkpoint_take_place(const char* run, long long step) {
    char *fresh = checkpoint_step_folder(run, step, ".new"), *folder = checkpoint_step_folder(run, step, "");
    size_t asides, count;
    long long *back = checkpoint_list(run, ".aside", &asides), *steps = checkpoint_list(run, "", &count);
    for (size_t i = 0; asides > 0 && i < count; i++) {
        if (steps[i] <= back[0] || steps[i] == step) { continue; }
        char* later = checkpoint_step_folder(run, steps[i], "");
        checkpoint_remove(later);
        free(later);
    }
    checkpoint_remove_aside(run, ".aside");
    if (!file_exists(folder) && rename(fresh, folder) != 0) {
        fatal("%s: cannot rename to %s: %s; the checkpoint is whole, resume", fresh, folder, strerror(errno));
    }
    for (size_t i = 0; i < CHECKPOINT_FILES && file_exists(fresh); i++) {
        char *from = text("%s/%s", fresh, checkpoint_file_name(i)),
             *to = text("%s/%s", folder, checkpoint_file_name(i));
        if (rename(from, to) != 0 && errno != ENOENT) {
            fatal("%s: cannot replace: %s; move it away and resume: the checkpoint is whole in %s", to, strerror(errno),
                  fresh);
        }
        free(from), free(to);
    }
    rmdir(fresh);
    safetensors_sync_folder(folder);
    for (size_t i = 0; i < CHECKPOINT_FILES; i++) { checkpoint_publish(run, folder, checkpoint_file_name(i)); }
    free(fresh), free(folder), free(back), free(steps);
}

// Finishes, or takes back, what a killed program was about to do in a run that is locked.
static inline void checkpoint_recover(const char* run) {
    size_t fresh, asides;
    long long* steps = checkpoint_list(run, ".new", &fresh);
    for (size_t i = 0; i < fresh; i++) {
        char* folder = checkpoint_step_folder(run, steps[i], ".new");
        if (checkpoint_files_in(folder) > 0) { checkpoint_take_place(run, steps[i]); }
        free(folder);
    }
    free(steps);
    steps = checkpoint_list(run, ".aside", &asides);
    if (asides > 0) {
        char* kept = checkpoint_step_folder(run, steps[0], ".aside");
        checkpoint_copy_aside(kept, run);
        printf("restored the log of %s: going back to step %lld ended before a new checkpoint\n", run, steps[0]);
        checkpoint_remove_aside(run, ".aside");
        free(kept);
    }
    checkpoint_remove_aside(run, ".aside.tmp");
    free(steps);
}

#endif
