/*
Writes a stream of tokens as shards FOLDER/NAME_000000.bin, NAME_000001.bin, ... of shard_size tokens, the last one
shorter; NAME is the folder's. All shards are NAME_*.bin.tmp until shard_writer_commit(), so that a folder holds a whole
dataset or none. shard_writer_abandon() may be called from another thread at any time.
*/
#ifndef SHARD_WRITER_H
#define SHARD_WRITER_H

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>

#include "../llmc/shard.h"

enum { SHARD_MAX_COUNT = 1000000 };  // six digits, so that the names sort in stream order

typedef struct {
    const char* folder;
    char* name;
    size_t shard_size;
    ShardInfo info;  // token_count: of the shard being written
    FILE* file;
    size_t shards, renamed, tokens;
    bool made_folder, committed;
    int folder_fd;         // holds a lock on the folder
    pthread_mutex_t lock;  // recursive; over every change of the files
} ShardWriter;

static inline char* shard_path(const ShardWriter* w, size_t index, const char* suffix) {
    return text("%s/%s_%06zu.bin%s", w->folder, w->name, index, suffix);
}

// Removes the folder's files that end in suffix; returns how many other entries there are.
static inline size_t remove_files(const char* folder, const char* suffix) {
    DIR* directory = opendir(folder);
    if (!directory) { fatal("%s: %s; expected a folder that can be written", folder, strerror(errno)); }
    size_t others = 0;
    for (struct dirent* entry; (entry = readdir(directory));) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) { continue; }
        if (!ends_with(entry->d_name, suffix)) {
            others++;
            continue;
        }
        char* path = text("%s/%s", folder, entry->d_name);
        if (unlink(path) != 0) { fatal("%s: cannot be removed: %s", path, strerror(errno)); }
        free(path);
    }
    closedir(directory);
    return others;
}

// "data/x/" gives "x".
static inline char* folder_name(const char* folder) {
    size_t end = strlen(folder);
    while (end > 0 && folder[end - 1] == '/') { end--; }
    size_t start = end;
    while (start > 0 && folder[start - 1] != '/') { start--; }
    char* name = text("%.*s", (int)(end - start), folder + start);
    if (!*name || strcmp(name, ".") == 0 || strcmp(name, "..") == 0) {
        fatal("--out %s: the shards are called after the folder, which has no name here; expected e.g. data/stories",
              folder);
    }
    return name;
}

// Makes and locks the folder, and removes what an interrupted run left. Refuses one with other content unless
// overwrite; then the old *.bin go when the new shards are complete.
static inline void shard_writer_open(ShardWriter* w, const char* folder, size_t shard_size, ShardInfo info,
                                     bool overwrite) {
    memset(w, 0, sizeof *w);
    w->folder = folder;
    w->name = folder_name(folder);
    w->shard_size = shard_size;
    w->info = info;
    pthread_mutexattr_t recursive;
    pthread_mutexattr_init(&recursive);
    pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&w->lock, &recursive);
    bool existed = file_exists(folder);
    make_directories(folder);
    w->folder_fd = open(folder, O_RDONLY | O_DIRECTORY);
    if (w->folder_fd < 0) { fatal("--out %s: %s; expected a folder", folder, strerror(errno)); }
    if (flock(w->folder_fd, LOCK_EX | LOCK_NB) != 0) {
        fatal("--out %s: another dataset/prepare is writing there; wait for it or choose another folder", folder);
    }
    size_t others = remove_files(folder, ".bin.tmp");
    if (others > 0 && !overwrite) {
        fatal("--out %s: the folder is not empty; give --overwrite to replace its shards, or another folder", folder);
    }
    w->made_folder = !existed;
}

__attribute__((noreturn)) static inline void shard_write_failed(const ShardWriter* w) {
    fatal("%s: cannot write shard %zu: %s; free some space or choose another folder", w->folder, w->shards - 1,
          strerror(errno));
}

static inline void shard_begin(ShardWriter* w) {
    if (w->shards == SHARD_MAX_COUNT) {
        fatal("%s: more than %d shards; give a larger --shard_size", w->folder, SHARD_MAX_COUNT);
    }
    pthread_mutex_lock(&w->lock);
    char* path = shard_path(w, w->shards++, ".tmp");
    w->file = fopen(path, "wb");
    free(path);
    pthread_mutex_unlock(&w->lock);
    w->info.token_count = 0;
    int32_t header[SHARD_HEADER_WORDS];
    shard_header_write(header, &w->info);
    if (!w->file || fwrite(header, sizeof header, 1, w->file) != 1) { shard_write_failed(w); }
}

static inline void shard_end(ShardWriter* w) {
    int32_t header[SHARD_HEADER_WORDS];
    shard_header_write(header, &w->info);
    bool written = fseek(w->file, 0, SEEK_SET) == 0 && fwrite(header, sizeof header, 1, w->file) == 1 &&
                   fflush(w->file) == 0 && fsync(fileno(w->file)) == 0;
    if (!written || fclose(w->file) != 0) { shard_write_failed(w); }
    w->file = NULL;
}

// tokens: n tokens of info.token_bytes each. A full shard is closed at once; the next begins with its first token.
static inline void shard_writer_append(ShardWriter* w, const void* tokens, size_t n) {
    const char* next = (const char*)tokens;
    while (n > 0) {
        if (!w->file) { shard_begin(w); }
        size_t room = w->shard_size - w->info.token_count, now = n < room ? n : room;
        if (fwrite(next, w->info.token_bytes, now, w->file) != now) { shard_write_failed(w); }
        next += now * w->info.token_bytes;
        n -= now;
        w->info.token_count += now;
        w->tokens += now;
        if (w->info.token_count == w->shard_size) { shard_end(w); }
    }
}

// Gives the finished shards their names, in place of any older ones.
static inline void shard_writer_commit(ShardWriter* w) {
    if (w->file) { shard_end(w); }
    pthread_mutex_lock(&w->lock);
    remove_files(w->folder, ".bin");
    for (size_t i = 0; i < w->shards; i++) {
        char *temporary = shard_path(w, i, ".tmp"), *final = shard_path(w, i, "");
        if (rename(temporary, final) != 0) {
            fatal("%s: cannot be renamed to %s: %s", temporary, final, strerror(errno));
        }
        w->renamed++;
        free(temporary);
        free(final);
    }
    fsync(w->folder_fd);
    w->committed = true;
    pthread_mutex_unlock(&w->lock);
}

// Removes what was written since shard_writer_open(), and the folder if that made it. Keeps the lock on the files, so
// that no other thread writes more: the program has to end.
static inline void shard_writer_abandon(ShardWriter* w) {
    if (!w->folder) { return; }
    pthread_mutex_lock(&w->lock);
    for (size_t i = 0; i < w->shards && !w->committed; i++) {
        char* path = shard_path(w, i, i < w->renamed ? "" : ".tmp");
        unlink(path);
        free(path);
    }
    if (w->made_folder && !w->committed) { rmdir(w->folder); }
}

#endif
