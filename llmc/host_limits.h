/*
What this process may use of the machine: cores and memory, by its affinity and by the limits of its control groups, as
containers and batch systems set them. Linux's two versions of control groups, also side by side; of nested groups the
tightest limit counts. A file that is missing or not understood limits nothing.

Include after defining _GNU_SOURCE. root stands before every path, "" for the machine itself: tests give a folder with
files of their own.
*/
#ifndef HOST_LIMITS_H
#define HOST_LIMITS_H

#include <limits.h>
#include <math.h>
#include <sched.h>

#include "util.h"

typedef struct {
    double cpus;         // processors' worth of time, INFINITY without a limit
    uint64_t cpu_group;  // tells the group that sets it from any other of this machine
    size_t memory;       // bytes that can still be taken, SIZE_MAX without a limit
} Limits;

// The first bytes of a small file, a NUL after them; false when it cannot be read.
static inline bool limits_read_file(char* out, size_t bytes, const char* folder, const char* name) {
    char* path = text("%s/%s", folder, name);
    FILE* f = fopen(path, "r");
    size_t n = f ? fread(out, 1, bytes - 1, f) : 0;
    out[n] = '\0';
    if (f) { fclose(f); }
    free(path);
    return n > 0;
}

// The number in a file of its own; -1 where there is none ("max", too).
static inline double limits_number(const char* folder, const char* name) {
    char content[64];
    double x = -1;
    return limits_read_file(content, sizeof content, folder, name) && sscanf(content, "%lf", &x) == 1 ? x : -1;
}

// The number behind a word at the start of a line, as in memory.stat and /proc/meminfo; 0 where there is none.
static inline double limits_row(const char* content, const char* word) {
    size_t n = strlen(word);
    for (const char* line = content; line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        double x;
        if (strncmp(line, word, n) == 0 && sscanf(line + n, "%lf", &x) == 1) { return x; }
    }
    return 0;
}

// ----------------------------------------------------------------------------
// one control group

static inline void limits_add_cpus(Limits* limits, const char* folder) {
    char content[128];
    double quota = -1, period = 0;
    if (limits_read_file(content, sizeof content, folder, "cpu.max")) {
        if (sscanf(content, "%lf %lf", &quota, &period) != 2) { return; }
    } else {
        quota = limits_number(folder, "cpu.cfs_quota_us"), period = limits_number(folder, "cpu.cfs_period_us");
    }
    struct stat status;
    if (!(quota > 0 && period > 0 && quota / period < limits->cpus) || stat(folder, &status) != 0) { return; }
    limits->cpus = quota / period;
    uint64_t identity[] = {(uint64_t)status.st_dev, (uint64_t)status.st_ino};
    limits->cpu_group = fnv1a(identity, sizeof identity);
}

// What the group has read of files counts as used, but gives way to whoever asks for memory.
static inline void limits_add_memory(Limits* limits, const char* folder) {
    char content[8192];
    double most = limits_number(folder, "memory.max"), used = limits_number(folder, "memory.current");
    bool second = most >= 0;
    if (!second) {
        most = limits_number(folder, "memory.limit_in_bytes"), used = limits_number(folder, "memory.usage_in_bytes");
    }
    if (!(most >= 0 && most < 0x1p62)) { return; }
    if (limits_read_file(content, sizeof content, folder, "memory.stat")) {
        used -= limits_row(content, second ? "inactive_file " : "total_inactive_file ") +
                limits_row(content, second ? "active_file " : "total_active_file ");
    }
    double left = used > 0 ? most - used : most;
    size_t bytes = left > 0 ? (size_t)left : 0;
    if (bytes < limits->memory) { limits->memory = bytes; }
}

// ----------------------------------------------------------------------------
// where the groups are

static inline bool limits_has_word(const char* list, const char* word) {
    for (size_t n = strlen(word); *list; list += strcspn(list, ",\n"), list += *list != '\0') {
        if (strncmp(list, word, n) == 0 && (list[n] == ',' || list[n] == '\n' || list[n] == '\0')) { return true; }
    }
    return false;
}

// This process's group in the hierarchy of a controller, "" in that of version 2, as /proc/self/cgroup has it; a new
// string, NULL when there is none.
static inline char* limits_own_group(const char* root, const char* controller) {
    char *path = text("%s/proc/self/cgroup", root), *line = NULL, *group = NULL;
    size_t capacity = 0;
    FILE* f = fopen(path, "r");
    free(path);
    while (f && !group && getline(&line, &capacity, f) > 0) {
        char* list = strchr(line, ':');
        char* name = list ? strchr(list + 1, ':') : NULL;
        if (!name) { continue; }
        *name++ = '\0';
        if (*controller ? !limits_has_word(list + 1, controller) : list[1] != '\0') { continue; }
        name[strcspn(name, "\n")] = '\0';
        group = xstrdup(name);
    }
    if (f) { fclose(f); }
    free(line);
    return group;
}

// The part of a group's path below the one that is mounted; "" where the mount does not show the group.
static inline const char* limits_below_mount(const char* group, const char* mounted) {
    size_t n = strcmp(mounted, "/") == 0 ? 0 : strlen(mounted);
    bool inside = strncmp(group, mounted, n) == 0 && (group[n] == '/' || group[n] == '\0');
    return inside && !strstr(group, "/..") && strcmp(group + n, "/") != 0 ? group + n : "";
}

// Takes in the limits of this process's group in one hierarchy, and of all groups that hold it.
static inline void limits_add_hierarchy(Limits* limits, const char* root, const char* controller,
                                        void (*add)(Limits* limits, const char* folder)) {
    char *path = text("%s/proc/self/mountinfo", root), *line = NULL, *group = limits_own_group(root, controller);
    size_t capacity = 0;
    FILE* f = group ? fopen(path, "r") : NULL;
    while (f && getline(&line, &capacity, f) > 0) {
        char mounted[PATH_MAX], point[PATH_MAX], kind[32], options[1024] = "";
        char* rest = strstr(line, " - ");
        if (!rest || sscanf(line, "%*s %*s %*s %4095s %4095s", mounted, point) != 2) { continue; }
        if (sscanf(rest, " - %31s %*s %1023s", kind, options) < 1) { continue; }
        bool wanted = *controller ? strcmp(kind, "cgroup") == 0 && limits_has_word(options, controller)
                                  : strcmp(kind, "cgroup2") == 0;
        if (!wanted) { continue; }
        char* folder = text("%s%s%s", root, point, limits_below_mount(group, mounted));
        size_t top = strlen(root) + strlen(point);
        for (add(limits, folder); strlen(folder) > top; add(limits, folder)) { *strrchr(folder, '/') = '\0'; }
        free(folder);
    }
    if (f) { fclose(f); }
    free(line), free(group), free(path);
}

static inline Limits limits_read(const char* root) {
    Limits limits = {INFINITY, 0, SIZE_MAX};
    limits_add_hierarchy(&limits, root, "", limits_add_cpus);
    limits_add_hierarchy(&limits, root, "", limits_add_memory);
    limits_add_hierarchy(&limits, root, "cpu", limits_add_cpus);
    limits_add_hierarchy(&limits, root, "memory", limits_add_memory);
    return limits;
}

// ----------------------------------------------------------------------------
// what follows from them

// Threads that `sharing` processes of one group can each keep busy in so much time: rounded up, as one that waits a
// part of the time still does the rest.
static inline size_t limits_threads(double cpus, size_t sharing, size_t cores) {
    double share = ceil(cpus / (double)sharing);
    size_t threads = share < (double)cores ? (size_t)share : cores;
    return threads > 0 ? threads : 1;
}

// Cores that this process's affinity lets it use.
static inline size_t limits_cores(void) {
    cpu_set_t cores;
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    if (sched_getaffinity(0, sizeof cores, &cores) == 0) { return (size_t)CPU_COUNT(&cores); }
    return online > 0 ? (size_t)online : 1;
}

// Bytes of the whole machine that can be used without swapping; SIZE_MAX when unknown.
static inline size_t limits_machine_memory(const char* root) {
    char content[4096];
    double kilobytes = 0;
    char* folder = text("%s/proc", root);
    if (limits_read_file(content, sizeof content, folder, "meminfo")) {
        kilobytes = limits_row(content, "MemAvailable:");
    }
    free(folder);
    return kilobytes > 0 ? (size_t)kilobytes * 1024 : SIZE_MAX;
}

// Bytes that this process can use: what the machine has left, or its control groups.
static inline size_t limits_memory(const char* root) {
    size_t machine = limits_machine_memory(root), group = limits_read(root).memory;
    return group < machine ? group : machine;
}

// "1.5 of 8 CPUs, 2.10 GB of memory left by the control group"; false, and nothing, when no limit is in the way.
static inline bool limits_describe(char* buffer, size_t bytes, const char* root) {
    Limits limits = limits_read(root);
    char memory[16];
    size_t cores = limits_cores();
    bool cpus = limits.cpus < (double)cores, left = limits.memory < limits_machine_memory(root);
    if (!cpus && !left) { return false; }
    int n = 0;
    if (cpus) { n = snprintf(buffer, bytes, "%.4g of %zu CPUs%s", limits.cpus, cores, left ? ", " : ""); }
    if (left) {
        n += snprintf(buffer + n, bytes - (size_t)n, "%s of memory left", format_bytes(memory, limits.memory));
    }
    snprintf(buffer + n, bytes - (size_t)n, " by the control group");
    return true;
}

#endif
