/*
Writes a stream of tokens as shards FOLDER/NAME_000000.bin, NAME_000001.bin, ... of shard_size tokens, the last one
shorter; NAME is the folder's. All shards are NAME_*.bin.tmp until shard_writer_commit(), so that a folder holds a whole
dataset or none. Of what is in the folder only shards that a writer of this name wrote are ever removed.
shard_writer_abandon() may be called from another thread at any time.

The loader maps every shard, and the system lets a process map some 65,000 files: from every SHARD_GROW_EVERY-th shard
on they are SHARD_GROWTH times larger, whatever shard_size is.
*/
#ifndef SHARD_WRITER_H
#define SHARD_WRITER_H

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>

#include "../llmc/shard.h"

enum { SHARD_GROW_EVERY = 4096, SHARD_GROWTH = 8 };
enum { SHARD_MAX_COUNT = 60000 };  // that the loader can map; six digits, so that the names sort in stream order

typedef struct {
    const char* folder;
    char* name;
    size_t shard_size;
    ShardInfo info;  // token_count: of the shard being written
    FILE* file;
    size_t room;                     // tokens that still fit into it
    size_t shards, renamed, tokens;  // shards: begun; renamed: the last so many
    bool made_folder, committed;
    int folder_fd;         // holds a lock on the folder
    pthread_mutex_t lock;  // recursive; over every change of the files
} ShardWriter;

static inline char* shard_path(const ShardWriter* w, size_t index, const char* suffix) {
    return text("%s/%s_%06zu.bin%s", w->folder, w->name, index, suffix);
}

// Tokens of a shard when the first has `first`.
static inline size_t shard_tokens_at(size_t first, size_t index) {
    size_t tokens = first;
    for (size_t i = index / SHARD_GROW_EVERY; i > 0 && tokens < INT32_MAX; i--) { tokens *= SHARD_GROWTH; }
    return tokens < INT32_MAX ? tokens : INT32_MAX;
}

// ----------------------------------------------------------------------------
// what is in the folder already

// NAME_000000 and what follows the digits.
static inline bool shard_name_is_ours(const ShardWriter* w, const char* entry, const char* suffix) {
    size_t n = strlen(w->name);
    if (strncmp(entry, w->name, n) != 0 || entry[n] != '_') { return false; }
    size_t digits = strspn(entry + n + 1, "0123456789");
    return digits >= 6 && strcmp(entry + n + 1 + digits, suffix) == 0;
}

// Has the file the header of a writer, with a vocabulary? One that is not finished may have none yet.
static inline bool shard_header_is_ours(const char* path, bool finished) {
    int32_t words[4];
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) { return false; }
    bool file = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
    bool read_all = file && pread(fd, words, sizeof words, 0) == (ssize_t)sizeof words;
    close(fd);
    if (!read_all) { return file && !finished && info.st_size == 0; }
    bool narrow = words[0] == SHARD_MAGIC_U16 && words[1] == SHARD_VERSION_U16;
    bool wide = words[0] == SHARD_MAGIC_U32 && words[1] == SHARD_VERSION_U32;
    return (narrow || wide) && words[3] != 0;
}

typedef struct {
    size_t left;        // entries that were not removed
    size_t other_bins;  // of these, files that are not ours but that train_gpt would read as shards
    char* first_other;  // of these
    char* false_shard;  // has the name of one of ours but not the content
} FolderContent;

static inline void folder_content_free(FolderContent* c) {
    free(c->first_other);
    free(c->false_shard);
}

// Looks at every entry of the folder; removes our files that end in `remove`, unless that is NULL.
static inline FolderContent folder_content(const ShardWriter* w, const char* remove) {
    FolderContent c = {0, 0, NULL, NULL};
    DIR* directory = opendir(w->folder);
    if (!directory) { fatal("%s: %s; expected a folder that can be written", w->folder, strerror(errno)); }
    for (struct dirent* entry; (entry = readdir(directory));) {
        const char* name = entry->d_name;
        if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0) { continue; }
        bool finished = shard_name_is_ours(w, name, ".bin");
        bool named = finished || shard_name_is_ours(w, name, ".bin.tmp");
        char* path = text("%s/%s", w->folder, name);
        bool ours = named && shard_header_is_ours(path, finished), goes = ours && remove && ends_with(name, remove);
        if (goes && unlink(path) != 0) { fatal("%s: cannot be removed: %s", path, strerror(errno)); }
        c.left += !goes && name[0] != '.';  // the system leaves such files: .DS_Store, .nfs0001
        if (named && !ours && !c.false_shard) { c.false_shard = xstrdup(path); }
        bool other_bin = !ours && name[0] != '.' && ends_with(name, ".bin");
        if (other_bin && !c.first_other) { c.first_other = xstrdup(path); }
        c.other_bins += other_bin;
        free(path);
    }
    closedir(directory);
    return c;
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
// overwrite; then the old shards go when the new ones are complete.
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
    FolderContent found = folder_content(w, NULL);
    if (found.false_shard) {
        fatal(
            "%s: has the name of a shard, but dataset/prepare did not write it; move it away or choose another folder",
            found.false_shard);
    }
    folder_content_free(&found);
    found = folder_content(w, ".bin.tmp");
    if (found.left > 0 && !overwrite) {
        fatal("--out %s: the folder is not empty; give --overwrite to replace its shards, or another folder", folder);
    }
    folder_content_free(&found);
    w->made_folder = !existed;
}

__attribute__((noreturn)) static inline void shard_write_failed(const ShardWriter* w) {
    fatal("%s: cannot write shard %zu: %s; free some space or choose another folder", w->folder, w->shards - 1,
          strerror(errno));
}

static inline void shard_begin(ShardWriter* w) {
    if (w->shards == SHARD_MAX_COUNT) {
        fatal("%s: more than %d shards, which the loader could not map; give a larger --shard_size", w->folder,
              SHARD_MAX_COUNT);
    }
    pthread_mutex_lock(&w->lock);
    w->room = shard_tokens_at(w->shard_size, w->shards);
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
        size_t now = n < w->room ? n : w->room;
        if (fwrite(next, w->info.token_bytes, now, w->file) != now) { shard_write_failed(w); }
        next += now * w->info.token_bytes;
        n -= now;
        w->info.token_count += now;
        w->tokens += now;
        w->room -= now;
        if (w->room == 0) { shard_end(w); }
    }
}

static inline void shard_warn_of_others(const FolderContent* c) {
    if (c->other_bins == 0) { return; }
    char more[48] = "";
    if (c->other_bins > 1) { snprintf(more, sizeof more, " and %zu more", c->other_bins - 1); }
    warn(
        "%s%s: left in place, since dataset/prepare did not write it; train_gpt reads every *.bin, so move it "
        "elsewhere",
        c->first_other, more);
}

// Gives the finished shards their names, in place of any older ones. The first comes last: a folder without it, but
// with others, is known to be incomplete.
static inline void shard_writer_commit(ShardWriter* w) {
    if (w->file) { shard_end(w); }
    pthread_mutex_lock(&w->lock);
    FolderContent found = folder_content(w, ".bin");
    for (size_t i = w->shards; i-- > 0;) {
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
    shard_warn_of_others(&found);
    folder_content_free(&found);
    if (w->shards <= SHARD_GROW_EVERY) { return; }
    warn("%s: %zu shards, the later ones larger than %zu tokens, as the loader maps each; give a larger --shard_size",
         w->folder, w->shards, w->shard_size);
}

// Removes what was written since shard_writer_open(), and the folder if that made it. Keeps the lock on the files, so
// that no other thread writes more: the program has to end.
static inline void shard_writer_abandon(ShardWriter* w) {
    if (!w->folder) { return; }
    pthread_mutex_lock(&w->lock);
    for (size_t i = 0; i < w->shards && !w->committed; i++) {
        char* path = shard_path(w, i, w->shards - i <= w->renamed ? "" : ".tmp");
        unlink(path);
        free(path);
    }
    if (w->made_folder && !w->committed) { rmdir(w->folder); }
}

#endif
