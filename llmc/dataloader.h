/*
The token stream of a folder of shards (shard.h), cut into batches of B x T tokens for each rank.

Stream     All files FOLDER/[!.]*.bin, in byte order of their names, are one stream of tokens; a batch may begin
           in one shard and end in another, so shard boundaries neither lose nor repeat tokens, whatever T is.
Layout     [0, val_tokens) validation; then val_padding tokens skipped (none when val_tokens is 0); then the
           training tokens, up to the end.
Training   A step at position p has S = accumulation * world * B * T tokens. Micro-batch m of rank r is the B*T
           tokens from p + (m * world + r) * B * T on; targets are the inputs shifted by one. The tokens of a
           step are therefore the same for every rank count and accumulation of equal S. p grows by S a step.
Epochs     When fewer than S + 1 training tokens are left, the next step starts a new epoch at the first training
           token: every token is an input at most once an epoch, and k * S + 1 training tokens give k steps.
           The tail that was left out is in `dropped`, for the log.
Validation Batch i of rank r is the B*T tokens from (i * world + r) * B * T on. The last target is the token
           after the slice, which is skipped or is the first training token.
Vocabulary Shards without one in the header: uint16 means GPT-2 (50257 ids, BOS 50256, no EOS), uint32 means
           Llama 3 (128256 ids, BOS 128000, EOS 128001). Every token read is checked against it.

Shards are memory-mapped; a thread reads the next micro-batches ahead of the training loop. The thread never
ends the program: what it finds wrong is reported by the dataloader_next that would have served it. Cutting a
shard short while a run has it mapped kills the run (SIGBUS).
*/
#ifndef DATALOADER_H
#define DATALOADER_H

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>

#include "shard.h"
#include "util.h"

enum { DATALOADER_AHEAD = 4 };          // micro-batches in memory, the one in use included
enum { DATALOADER_OTHER_MAPS = 2048 };  // of memory, beside the shards: libraries, threads, large allocations

typedef struct {
    const char* folder;
    size_t B, T;
    size_t rank, world;
    size_t accumulation;  // micro-batches of each rank in a step
    size_t val_tokens;    // a multiple of world * B * T
    size_t val_padding;
    size_t vocab_size;          // 0 = the shards' own
    bool overfit_single_batch;  // every step is step 0
} DataLoaderConfig;

// Where the next step starts: all that a checkpoint must keep. Valid for every rank count and step size.
typedef struct {
    uint64_t epoch;     // epochs finished
    uint64_t position;  // in the stream
} DataLoaderState;

// Counts of tokens, for logs.
typedef struct {
    size_t total, validation, padding, training;
    size_t per_step, steps_per_epoch, dropped_per_epoch;
    size_t shards;
} DataLoaderTokens;

typedef struct {
    char* path;
    const unsigned char* map;
    size_t map_bytes;
    size_t begin, end;  // its tokens' positions in the stream
} DataShard;

// A token outside the vocabulary; shard is NULL when there is none.
typedef struct {
    const DataShard* shard;
    size_t index;
    uint32_t id;
} DataFault;

typedef struct {
    int32_t* tokens;        // [B*T + 1]
    DataLoaderState after;  // the loader's state once this micro-batch is served
    bool ends_step, wrapped;
    size_t dropped;
    DataFault fault;
} DataBatch;

// Not to be copied or moved between dataloader_open and dataloader_close.
typedef struct {
    // the batch of the last dataloader_next or dataloader_val_batch, valid until the next call of either
    const int32_t *inputs, *targets;  // [B, T]; targets == inputs + 1
    bool wrapped;                     // the last dataloader_next began a new epoch ...
    size_t dropped;                   // ... and these last tokens of the old one were never served
    // the data
    size_t vocab_size, token_bytes;
    int bos, eos;  // -1 = none
    uint32_t tokenizer_hash;
    // private
    DataLoaderConfig config;
    DataShard* shards;
    size_t shard_count;
    size_t batch_tokens, step_tokens, train_begin, total_tokens;
    DataLoaderState state;
    bool mid_step;
    int32_t* val_tokens;  // [B*T + 1]
    // the ring between the reading thread and dataloader_next
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    bool running, stop, in_use;  // in_use: the oldest batch is lent to the caller
    DataBatch ring[DATALOADER_AHEAD];
    size_t oldest, filled;
    DataLoaderState ahead;  // the reading thread's own place
    size_t ahead_micro;
} DataLoader;

// ----------------------------------------------------------------------------
// opening the shards

static inline int dataloader_compare_paths(const void* a, const void* b) {
    return strcmp(((const DataShard*)a)->path, ((const DataShard*)b)->path);
}

// dataset/prepare gives its shards their names from the last to the first.
static inline void dataloader_check_finished(const DataLoader* dl, const char* unfinished) {
    if (!unfinished) { return; }
    size_t n = strlen(unfinished) - strlen("000000.bin.tmp");
    bool others = false, first = false;
    for (size_t i = 0; i < dl->shard_count; i++) {
        const char* path = dl->shards[i].path;
        others |= strncmp(path, unfinished, n) == 0;
        first |= strncmp(path, unfinished, n) == 0 && strcmp(path + n, "000000.bin") == 0;
    }
    if (!others || first) { return; }
    fatal(
        "%s: dataset/prepare was interrupted while it gave the shards their names, expected all of them; run it again",
        unfinished);
}

static inline void dataloader_list(DataLoader* dl) {
    const char* folder = dl->config.folder;
    DIR* dir = opendir(folder);
    if (!dir) {
        fatal("%s: %s, expected a folder of token shards; make one with dataset/prepare or correct --dataset", folder,
              strerror(errno));
    }
    char* unfinished = NULL;  // the first shard of a dataset that is not in place, or not yet
    for (struct dirent* entry; (entry = readdir(dir)) != NULL;) {
        const char* name = entry->d_name;
        if (name[0] == '.') { continue; }
        if (!unfinished && ends_with(name, "_000000.bin.tmp")) { unfinished = text("%s/%s", folder, name); }
        if (strlen(name) < 5 || !ends_with(name, ".bin")) { continue; }
        dl->shards = (DataShard*)xrealloc(dl->shards, (dl->shard_count + 1) * sizeof(DataShard));
        memset(&dl->shards[dl->shard_count], 0, sizeof(DataShard));
        dl->shards[dl->shard_count++].path = text("%s/%s", folder, name);
    }
    closedir(dir);
    if (dl->shard_count == 0) {
        fatal("%s: no *.bin file, expected token shards; make them with dataset/prepare or correct --dataset", folder);
    }
    qsort(dl->shards, dl->shard_count, sizeof(DataShard), dataloader_compare_paths);
    dataloader_check_finished(dl, unfinished);
    free(unfinished);
}

// Each shard is one of the pieces of memory that the system lets a process map, limit in all; 0 = unknown.
static inline void dataloader_check_maps(const char* folder, size_t shards, size_t limit) {
    if (limit == 0 || shards + DATALOADER_OTHER_MAPS <= limit) { return; }
    fatal(
        "%s: %zu shards, expected at most %zu, since a process may map %zu pieces of memory (vm.max_map_count); write "
        "larger shards with dataset/prepare --shard_size, or raise the limit: sysctl -w vm.max_map_count=%zu",
        folder, shards, limit > DATALOADER_OTHER_MAPS ? limit - DATALOADER_OTHER_MAPS : 0, limit,
        shards + 2 * DATALOADER_OTHER_MAPS);
}

static inline size_t dataloader_map_limit(void) {
    size_t limit = 0;
    FILE* f = fopen("/proc/sys/vm/max_map_count", "re");
    if (!f) { return 0; }
    if (fscanf(f, "%zu", &limit) != 1) { limit = 0; }
    fclose(f);
    return limit;
}

__attribute__((noreturn)) static inline void dataloader_open_failed(const char* path, int error) {
    bool descriptors = error == EMFILE || error == ENFILE;
    fatal("%s: %s; %s", path, strerror(error),
          descriptors ? "close other files or raise the limit, ulimit -n"
                      : "make the file readable, or move it out of the folder if it is no shard of this dataset");
}

__attribute__((noreturn)) static inline void dataloader_map_failed(const char* path, int error, size_t shards) {
    if (error != ENOMEM) {
        fatal("%s: cannot be mapped into memory: %s; copy it to a local disk", path, strerror(error));
    }
    fatal(
        "%s: cannot be mapped into memory, with %zu shards in all: %s; raise ulimit -v or vm.max_map_count, or write "
        "larger and fewer shards with dataset/prepare --shard_size",
        path, shards, strerror(error));
}

static inline ShardInfo dataloader_map(DataShard* shard, size_t shards) {
    int fd = open(shard->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a named pipe does not wait for its other end
    struct stat status;
    if (fd < 0 || fstat(fd, &status) != 0) { dataloader_open_failed(shard->path, errno); }
    if (!S_ISREG(status.st_mode)) {
        fatal("%s: not a file, expected a token shard, as every *.bin of the folder; move it elsewhere", shard->path);
    }
    int32_t words[SHARD_HEADER_WORDS] = {0};
    if (pread(fd, words, sizeof words, 0) < 0) { dataloader_open_failed(shard->path, errno); }
    ShardInfo info = shard_header_read(shard->path, words, (size_t)status.st_size);
    shard->map_bytes = (size_t)status.st_size;
    void* map = mmap(NULL, shard->map_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    if (map == MAP_FAILED) { dataloader_map_failed(shard->path, errno, shards); }
    close(fd);
    madvise(map, shard->map_bytes, MADV_SEQUENTIAL);
    shard->map = (const unsigned char*)map;
    return info;
}

static inline void dataloader_check_same(const DataLoader* dl, const DataShard* shard, const char* what,
                                         long long found, long long expected) {
    if (found != expected) {
        fatal("%s: %s %lld, expected %lld as in %s; keep the shards of one tokenizer in a folder", shard->path, what,
              found, expected, dl->shards[0].path);
    }
}

static inline void dataloader_set_vocabulary(DataLoader* dl, const ShardInfo* info) {
    bool narrow = info->token_bytes == 2, unknown = info->vocab_size == 0;
    const char* path = dl->shards[0].path;
    dl->token_bytes = info->token_bytes;
    dl->tokenizer_hash = info->tokenizer_hash;
    dl->vocab_size = unknown ? (narrow ? 50257 : 128256) : info->vocab_size;
    dl->bos = unknown && info->bos < 0 ? (narrow ? 50256 : 128000) : info->bos;
    dl->eos = unknown && info->eos < 0 ? (narrow ? -1 : 128001) : info->eos;
    if (dl->config.vocab_size) { dl->vocab_size = dl->config.vocab_size; }
    if (dl->vocab_size > INT32_MAX) {
        fatal("%s: vocabulary of %zu, expected at most %d; write it again with dataset/prepare", path, dl->vocab_size,
              INT32_MAX);
    }
    int vocab = (int)dl->vocab_size;
    if (dl->bos < -1 || dl->bos >= vocab || dl->eos < -1 || dl->eos >= vocab) {
        fatal("%s: BOS %d and EOS %d, expected ids below the vocabulary of %d; use the tokenizer's own vocabulary size",
              path, dl->bos, dl->eos, vocab);
    }
}

static inline void dataloader_open_shards(DataLoader* dl) {
    ShardInfo first = {0, 0, 0, 0, 0, 0};
    dataloader_check_maps(dl->config.folder, dl->shard_count, dataloader_map_limit());
    for (size_t i = 0; i < dl->shard_count; i++) {
        DataShard* shard = &dl->shards[i];
        ShardInfo info = dataloader_map(shard, dl->shard_count);
        if (i == 0) { first = info; }
        dataloader_check_same(dl, shard, "bytes per token:", (long long)info.token_bytes, (long long)first.token_bytes);
        dataloader_check_same(dl, shard, "vocabulary", (long long)info.vocab_size, (long long)first.vocab_size);
        dataloader_check_same(dl, shard, "BOS", info.bos, first.bos);
        dataloader_check_same(dl, shard, "EOS", info.eos, first.eos);
        dataloader_check_same(dl, shard, "tokenizer hash", info.tokenizer_hash, first.tokenizer_hash);
        shard->begin = dl->total_tokens;
        shard->end = dl->total_tokens += info.token_count;
    }
    dataloader_set_vocabulary(dl, &first);
}

static inline size_t dataloader_product(size_t a, size_t b) {
    size_t product;
    if (__builtin_mul_overflow(a, b, &product) || product > SIZE_MAX / 16) {
        fatal("%zu x %zu tokens in a step, expected fewer; lower --batch_size, --sequence_length or --tokens_per_step",
              a, b);
    }
    return product;
}

static inline void dataloader_check_sizes(DataLoader* dl) {
    const DataLoaderConfig* c = &dl->config;
    if (c->B == 0 || c->T == 0 || c->world == 0 || c->accumulation == 0) {
        fatal(
            "batches of %zu x %zu tokens, %zu ranks, %zu micro-batches a step: expected at least 1 of each; "
            "raise --batch_size, --sequence_length or --tokens_per_step",
            c->B, c->T, c->world, c->accumulation);
    }
    assert(c->rank < c->world);
    dl->batch_tokens = dataloader_product(c->B, c->T);
    size_t all_ranks = dataloader_product(dl->batch_tokens, c->world);
    dl->step_tokens = dataloader_product(all_ranks, c->accumulation);
    assert(c->val_tokens % all_ranks == 0);
}

// Requires validation + padding + one step + 1 tokens.
static inline void dataloader_check_tokens(DataLoader* dl) {
    const DataLoaderConfig* c = &dl->config;
    size_t needed = dl->step_tokens + 1, padding = c->val_tokens ? c->val_padding : 0;
    bool too_many = __builtin_add_overflow(needed, c->val_tokens, &needed);
    too_many |= __builtin_add_overflow(needed, padding, &needed);
    if (too_many || dl->total_tokens < needed) {
        fatal(
            "%s: %zu tokens in %zu shards, expected at least %zu (val_tokens %zu + val_tokens_padding %zu + a step "
            "of %zu + 1); add data or lower these",
            c->folder, dl->total_tokens, dl->shard_count, too_many ? SIZE_MAX : needed, c->val_tokens, padding,
            dl->step_tokens);
    }
    dl->train_begin = c->val_tokens + padding;
}

// ----------------------------------------------------------------------------
// reading

// Copy n tokens and say whether all are below vocab.
static inline bool dataloader_widen_u16(int32_t* __restrict out, const uint16_t* __restrict in, size_t n,
                                        uint32_t vocab) {
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        bad |= in[i] >= vocab;
        out[i] = in[i];
    }
    return !bad;
}

static inline bool dataloader_widen_u32(int32_t* __restrict out, const uint32_t* __restrict in, size_t n,
                                        uint32_t vocab) {
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        bad |= in[i] >= vocab;
        out[i] = (int32_t)in[i];
    }
    return !bad;
}

// The shard that holds a position below total_tokens; empty shards hold none.
static inline size_t dataloader_shard_at(const DataLoader* dl, size_t position) {
    size_t low = 0, high = dl->shard_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (dl->shards[middle].end > position) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

// Fills out[B*T + 1] from the stream; touches nothing that changes after dataloader_open.
static inline DataFault dataloader_read(const DataLoader* dl, int32_t* out, size_t position) {
    DataFault fault = {NULL, 0, 0};
    uint32_t vocab = (uint32_t)dl->vocab_size;
    size_t left = dl->batch_tokens + 1;
    assert(position + left <= dl->total_tokens);
    for (size_t s = dataloader_shard_at(dl, position); left > 0; s++) {
        const DataShard* shard = &dl->shards[s];
        size_t first = position - shard->begin, here = shard->end - position, n = left < here ? left : here;
        const unsigned char* data = shard->map + SHARD_HEADER_BYTES + first * dl->token_bytes;
        bool valid = dl->token_bytes == 2 ? dataloader_widen_u16(out, (const uint16_t*)(const void*)data, n, vocab)
                                          : dataloader_widen_u32(out, (const uint32_t*)(const void*)data, n, vocab);
        if (!valid) {
            size_t i = 0;
            while ((uint32_t)out[i] < vocab) { i++; }
            fault.shard = shard;
            fault.index = first + i;
            fault.id = (uint32_t)out[i];
            return fault;
        }
        out += n;
        position += n;
        left -= n;
    }
    return fault;
}

static inline void dataloader_report(const DataLoader* dl, const DataFault* fault) {
    if (!fault->shard) { return; }
    fatal(
        "%s: token id %u at token %zu (byte %zu), expected ids below the vocabulary of %zu; write it again with "
        "dataset/prepare",
        fault->shard->path, fault->id, fault->index, SHARD_HEADER_BYTES + fault->index * dl->token_bytes,
        dl->vocab_size);
}

// ----------------------------------------------------------------------------
// reading ahead

static inline void dataloader_read_ahead(DataLoader* dl, DataBatch* batch) {
    DataLoaderState* at = &dl->ahead;
    batch->wrapped = dl->ahead_micro == 0 && at->position + dl->step_tokens + 1 > dl->total_tokens;
    batch->dropped = 0;
    if (batch->wrapped) {
        batch->dropped = dl->total_tokens - 1 - at->position;
        at->position = dl->train_begin;
        at->epoch++;
    }
    size_t part = dl->ahead_micro * dl->config.world + dl->config.rank;
    batch->fault = dataloader_read(dl, batch->tokens, at->position + part * dl->batch_tokens);
    batch->ends_step = ++dl->ahead_micro == dl->config.accumulation;
    if (batch->ends_step) {
        dl->ahead_micro = 0;
        if (!dl->config.overfit_single_batch) { at->position += dl->step_tokens; }
    }
    batch->after = *at;
}

static inline void* dataloader_thread(void* argument) {
    DataLoader* dl = (DataLoader*)argument;
    pthread_mutex_lock(&dl->mutex);
    while (!dl->stop) {
        if (dl->filled == DATALOADER_AHEAD) {
            pthread_cond_wait(&dl->changed, &dl->mutex);
            continue;
        }
        DataBatch* batch = &dl->ring[(dl->oldest + dl->filled) % DATALOADER_AHEAD];
        pthread_mutex_unlock(&dl->mutex);
        dataloader_read_ahead(dl, batch);
        pthread_mutex_lock(&dl->mutex);
        dl->filled++;
        pthread_cond_broadcast(&dl->changed);
    }
    pthread_mutex_unlock(&dl->mutex);
    return NULL;
}

static inline void dataloader_start(DataLoader* dl) {
    dl->ahead = dl->state;
    dl->ahead_micro = dl->oldest = dl->filled = 0;
    dl->stop = dl->in_use = false;
    int error = pthread_create(&dl->thread, NULL, dataloader_thread, dl);
    if (error) { fatal("cannot start the thread that reads data: %s; raise the process limit", strerror(error)); }
    dl->running = true;
}

static inline void dataloader_stop(DataLoader* dl) {
    if (!dl->running) { return; }
    pthread_mutex_lock(&dl->mutex);
    dl->stop = true;
    pthread_cond_broadcast(&dl->changed);
    pthread_mutex_unlock(&dl->mutex);
    pthread_join(dl->thread, NULL);
    dl->running = false;
}

// ----------------------------------------------------------------------------
// the interface

// Opens and checks every shard of the folder; ends the program on anything that could not be trained on.
static inline void dataloader_open(DataLoader* dl, const DataLoaderConfig* config) {
    memset(dl, 0, sizeof *dl);
    dl->config = *config;
    dataloader_check_sizes(dl);
    dataloader_list(dl);
    dataloader_open_shards(dl);
    dataloader_check_tokens(dl);
    dl->config.folder = NULL;  // the caller's, and no longer needed
    dl->state.position = dl->train_begin;
    dl->val_tokens = (int32_t*)xcalloc(dl->batch_tokens + 1, sizeof(int32_t));
    for (size_t i = 0; i < DATALOADER_AHEAD; i++) {
        dl->ring[i].tokens = (int32_t*)xcalloc(dl->batch_tokens + 1, sizeof(int32_t));
    }
    pthread_mutex_init(&dl->mutex, NULL);
    pthread_cond_init(&dl->changed, NULL);
}

// The next training micro-batch of this rank, in dl->inputs and dl->targets.
static inline void dataloader_next(DataLoader* dl) {
    if (!dl->running) { dataloader_start(dl); }
    pthread_mutex_lock(&dl->mutex);
    if (dl->in_use) {
        dl->oldest = (dl->oldest + 1) % DATALOADER_AHEAD;
        dl->filled--;
        pthread_cond_broadcast(&dl->changed);
    }
    while (dl->filled == 0) { pthread_cond_wait(&dl->changed, &dl->mutex); }
    dl->in_use = true;
    const DataBatch* batch = &dl->ring[dl->oldest];
    pthread_mutex_unlock(&dl->mutex);
    dataloader_report(dl, &batch->fault);
    dl->inputs = batch->tokens;
    dl->targets = batch->tokens + 1;
    dl->wrapped = batch->wrapped;
    dl->dropped = batch->dropped;
    dl->mid_step = !batch->ends_step;
    dl->state = batch->after;
}

// Validation batches of each rank.
static inline size_t dataloader_val_batches(const DataLoader* dl) {
    return dl->config.val_tokens / (dl->batch_tokens * dl->config.world);
}

// This rank's validation batch i, in dl->inputs and dl->targets; training goes on undisturbed.
static inline void dataloader_val_batch(DataLoader* dl, size_t i) {
    assert(i < dataloader_val_batches(dl));
    DataFault fault = dataloader_read(dl, dl->val_tokens, (i * dl->config.world + dl->config.rank) * dl->batch_tokens);
    dataloader_report(dl, &fault);
    dl->inputs = dl->val_tokens;
    dl->targets = dl->val_tokens + 1;
}

// The place between two steps: dataloader_next has been called a multiple of `accumulation` times.
static inline DataLoaderState dataloader_state(const DataLoader* dl) {
    assert(!dl->mid_step);
    return dl->state;
}

// From here on the loader serves what it would have served after the state was taken; source names the file
// that the state comes from.
static inline void dataloader_restore(DataLoader* dl, DataLoaderState state, const char* source) {
    if (state.position < dl->train_begin || state.position >= dl->total_tokens) {
        fatal(
            "%s: position %llu in the data, expected one of the training tokens %zu ... %zu; resume with the dataset "
            "and val_tokens of the run",
            source, (unsigned long long)state.position, dl->train_begin, dl->total_tokens - 1);
    }
    dataloader_stop(dl);
    dl->state = state;
    if (dl->config.overfit_single_batch) { dl->state.position = dl->train_begin; }
    dl->mid_step = false;
}

static inline DataLoaderTokens dataloader_tokens(const DataLoader* dl) {
    DataLoaderTokens t;
    t.total = dl->total_tokens;
    t.validation = dl->config.val_tokens;
    t.padding = dl->train_begin - t.validation;
    t.training = dl->total_tokens - dl->train_begin;
    t.per_step = dl->step_tokens;
    t.steps_per_epoch = (t.training - 1) / dl->step_tokens;
    t.dropped_per_epoch = (t.training - 1) % dl->step_tokens;
    t.shards = dl->shard_count;
    return t;
}

// Hash of the current batch's B*T + 1 tokens.
static inline uint64_t dataloader_hash_batch(const DataLoader* dl) {
    return fnv1a(dl->inputs, (dl->batch_tokens + 1) * sizeof(int32_t));
}

// The same of a micro-batch of the step that was served last, read again in the place of a validation batch.
static inline uint64_t dataloader_hash_again(DataLoader* dl, size_t micro) {
    size_t step = dl->config.overfit_single_batch ? 0 : dl->step_tokens;
    size_t part = micro * dl->config.world + dl->config.rank;
    DataFault fault =
        dataloader_read(dl, dl->val_tokens, (size_t)dataloader_state(dl).position - step + part * dl->batch_tokens);
    dataloader_report(dl, &fault);
    return fnv1a(dl->val_tokens, (dl->batch_tokens + 1) * sizeof(int32_t));
}

static inline void dataloader_close(DataLoader* dl) {
    dataloader_stop(dl);
    pthread_mutex_destroy(&dl->mutex);
    pthread_cond_destroy(&dl->changed);
    for (size_t i = 0; i < DATALOADER_AHEAD; i++) { free(dl->ring[i].tokens); }
    for (size_t i = 0; i < dl->shard_count; i++) {
        munmap((void*)(uintptr_t)dl->shards[i].map, dl->shards[i].map_bytes);
        free(dl->shards[i].path);
    }
    free(dl->shards);
    free(dl->val_tokens);
    memset(dl, 0, sizeof *dl);
}

#endif
