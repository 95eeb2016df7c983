/*
results.json of a run folder, which any number of evaluations may fill at the same time: every finished piece of work is
added under a lock to what the file holds at that moment, and the file is replaced whole.

{ "passkey": { "('equidistant', 20, 5, 0)": { seq_lens, accs, greedy, natural, depths, hits, "of": {...} } },
  "perplexity": [ { window_size, seq_len, ntokens, dataset_dir, perplexity, positions, ..., "of": {...} } ],
  "passkey_others": [ { "key": "('equidistant', 20, 5, 0)", seq_lens, ..., "of": {...} } ],
  "perplexity_others": [ { window_size, ..., "of": {...} } ] }

The arrays of a passkey entry run in parallel, by ascending length. "of" says what was measured: step and hash of the
weights, precision, for passkeys seed and keys, and what the evaluation changed of the model's positions. There is one
entry for each of these configurations, and nothing is ever removed. The published programs know the first two sections
only, where a key or a setting has one entry: the first configuration that was measured of the newest weights as they
were trained. All others are in *_others, those of changed positions always.
*/
#ifndef RESULTS_H
#define RESULTS_H

#include <sys/file.h>

#include "../logger.h"

enum { RESULTS_POLL_MICROSECONDS = 20000, RESULTS_PATIENCE_SECONDS = 5 };

typedef struct {
    char *path, *lock_path;
    cJSON* root;  // what the file held when it was read last, with our changes
    int lock;     // descriptor, while the file is being changed
} Results;

// ----------------------------------------------------------------------------
// the file

static inline cJSON* results_section(cJSON* root, const char* name, bool array, const char* path) {
    cJSON* section = cJSON_GetObjectItemCaseSensitive(root, name);
    if (!section || cJSON_IsNull(section)) {
        cJSON_DeleteItemFromObjectCaseSensitive(root, name);
        section = array ? cJSON_CreateArray() : cJSON_CreateObject();
        cJSON_AddItemToObject(root, name, section);
    }
    if (!(array ? cJSON_IsArray(section) : cJSON_IsObject(section))) {
        fatal("%s: \"%s\" is no %s; repair the file or move it away", path, name, array ? "array" : "object");
    }
    return section;
}

static inline void results_read(Results* r) {
    cJSON_Delete(r->root);
    r->root = file_exists(r->path) ? read_json(r->path) : cJSON_CreateObject();
    if (!cJSON_IsObject(r->root)) {
        fatal("%s: expected an object of results; repair the file or move it away", r->path);
    }
    results_section(r->root, "passkey", false, r->path);
    results_section(r->root, "perplexity", true, r->path);
    results_section(r->root, "passkey_others", true, r->path);
    results_section(r->root, "perplexity_others", true, r->path);
}

// The results of a run folder, empty ones where there is no file yet.
static inline Results results_open(const char* folder) {
    Results r = {text("%s/results.json", folder), text("%s/.results.lock", folder), NULL, -1};
    results_read(&r);
    return r;
}

static inline void results_close(Results* r) {
    cJSON_Delete(r->root);
    free(r->path);
    free(r->lock_path);
    memset(r, 0, sizeof *r);
}

// Ends the program when results could not be written later: the disk may still fill up, the rest is known before.
static inline void results_check_writable(const Results* r) {
    char* copy = xstrdup(r->path);
    const char* folder = dirname(copy);
    int fd = open(r->lock_path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0 || access(folder, W_OK | X_OK) != 0 || (file_exists(r->path) && access(r->path, W_OK) != 0)) {
        fatal("%s: results cannot be written there: %s; fix the permissions, or evaluate a copy of the run", folder,
              strerror(errno));
    }
    close(fd);
    free(copy);
}

// Waits for its turn. Where the file system has no locks it goes on, with a warning, as results are worth more.
static inline void results_lock(Results* r) {
    static bool warned;
    double started = wall_seconds();
    bool told = false;
    // a file of its own: the results are replaced, and NFS locks no folders
    r->lock = open(r->lock_path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (r->lock < 0) { fatal("%s: %s; fix the permissions of the run folder", r->lock_path, strerror(errno)); }
    while (flock(r->lock, LOCK_EX | LOCK_NB) != 0) {
        if (errno != EWOULDBLOCK && errno != EINTR) {
            if (!warned) {
                warn("%s: cannot lock: %s; evaluate this run by one program at a time", r->lock_path, strerror(errno));
            }
            warned = true;
            return;
        }
        if (!told && wall_seconds() - started > RESULTS_PATIENCE_SECONDS) {
            warn("%s: another evaluation of this run has held the lock for %d s; waiting", r->lock_path,
                 RESULTS_PATIENCE_SECONDS);
            told = true;
        }
        usleep(RESULTS_POLL_MICROSECONDS);
    }
}

// Between these two the file is ours: begin reads it again, so pointers into the results are void; commit writes it.
static inline void results_begin(Results* r) {
    results_lock(r);
    results_read(r);
}

static inline void results_commit(Results* r) {
    write_json_atomically(r->path, r->root);
    close(r->lock);
    r->lock = -1;
}

// ----------------------------------------------------------------------------
// what was measured

static inline cJSON* results_array(const cJSON* entry, const char* name) {
    return cJSON_GetObjectItemCaseSensitive(entry, name);
}

static inline bool results_same_field(const cJSON* a, const cJSON* b, const char* name) {
    const cJSON *x = cJSON_GetObjectItemCaseSensitive(a, name), *y = cJSON_GetObjectItemCaseSensitive(b, name);
    return (!x && !y) || (x && y && cJSON_Compare(x, y, true));
}

// The same step; entries of older versions do not know the hash of the weights.
static inline bool results_same_weights(const cJSON* a, const cJSON* b) {
    bool both = cJSON_HasObjectItem(a, "weights") && cJSON_HasObjectItem(b, "weights");
    return results_same_field(a, b, "step") && (!both || results_same_field(a, b, "weights"));
}

// Whether every field of a is in b, but for that hash.
static inline bool results_fields_in(const cJSON* a, const cJSON* b) {
    const cJSON* x;
    cJSON_ArrayForEach(x, a) {
        if (strcmp(x->string, "weights") != 0 && !results_same_field(a, b, x->string)) { return false; }
    }
    return true;
}

static inline bool results_same_of(const cJSON* a, const cJSON* b) {
    return cJSON_IsObject(a) && cJSON_IsObject(b) && results_same_weights(a, b) && results_fields_in(a, b) &&
           results_fields_in(b, a);
}

static inline const cJSON* results_of_entry(const cJSON* entry) {
    return cJSON_GetObjectItemCaseSensitive(entry, "of");
}

static inline unsigned long long results_step(const cJSON* of) {
    const char* step = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(of, "step"));
    return step ? strtoull(step, NULL, 10) : 0;
}

// Whether results `measured` leave the published place to results `of`: they are of older weights, or of those that
// were no longer the run's when these were opened (outdated, may be NULL).
static inline bool results_yield(const cJSON* measured, const cJSON* of, const cJSON* outdated) {
    if (results_same_weights(measured, of)) { return false; }
    return results_step(measured) < results_step(of) || (outdated && results_same_weights(measured, outdated));
}

// Whether this is the model as it was trained, for which the published places are.
static inline bool results_as_trained(const cJSON* of) { return !cJSON_HasObjectItem(of, "positions"); }

// ----------------------------------------------------------------------------
// passkey

static const char* const RESULTS_PASSKEY_ARRAYS[] = {"seq_lens", "accs", "greedy", "natural", "depths", "hits"};
enum { RESULTS_PASSKEY_ARRAY_COUNT = 6, RESULTS_PASSKEY_NUMBERS = 4 };  // the first are numbers, the others arrays

// The key of a configuration: the text of a Python tuple. Release with free().
static inline char* results_passkey_key(const char* sampling, size_t samples, size_t pred_digits,
                                        size_t prefix_digits) {
    return text("('%s', %zu, %zu, %zu)", sampling, samples, pred_digits, prefix_digits);
}

static inline bool results_passkey_is_whole(const cJSON* entry) {
    int count = -1;
    for (int i = 0; i < RESULTS_PASSKEY_ARRAY_COUNT; i++) {
        const cJSON *array = results_array(entry, RESULTS_PASSKEY_ARRAYS[i]), *item;
        if (!cJSON_IsArray(array) || (count >= 0 && cJSON_GetArraySize(array) != count)) { return false; }
        count = cJSON_GetArraySize(array);
        double last = 0;
        cJSON_ArrayForEach(item, array) {
            bool good =
                i < RESULTS_PASSKEY_NUMBERS ? cJSON_IsNumber(item) && isfinite(item->valuedouble) : cJSON_IsArray(item);
            if (!good || (i == 0 && item->valuedouble <= last)) { return false; }
            last = item->valuedouble;
        }
    }
    return cJSON_IsObject(results_of_entry(entry));
}

static inline bool results_is_passkey_of(const cJSON* entry, const cJSON* of) {
    return results_passkey_is_whole(entry) && results_same_of(results_of_entry(entry), of);
}

static inline cJSON* results_new_passkey(const cJSON* of) {
    cJSON* entry = cJSON_CreateObject();
    for (int i = 0; i < RESULTS_PASSKEY_ARRAY_COUNT; i++) { cJSON_AddArrayToObject(entry, RESULTS_PASSKEY_ARRAYS[i]); }
    cJSON_AddItemToObject(entry, "of", cJSON_Duplicate(of, true));
    return entry;
}

// The place among the others, -1 if it is not there.
static inline int results_find_other_passkey(const cJSON* root, const char* key, const cJSON* of) {
    int i = 0;
    const cJSON* entry;
    cJSON_ArrayForEach(entry, results_array(root, "passkey_others")) {
        const char* its_key = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(entry, "key"));
        if (its_key && strcmp(its_key, key) == 0 && results_is_passkey_of(entry, of)) { return i; }
        i++;
    }
    return -1;
}

// The entry at the published place of a key, NULL if there is none.
static inline cJSON* results_published_passkey(const cJSON* root, const char* key) {
    return cJSON_GetObjectItemCaseSensitive(results_array(root, "passkey"), key);
}

// The entry of this configuration, NULL if there is none.
static inline cJSON* results_find_passkey(const cJSON* root, const char* key, const cJSON* of) {
    cJSON* published = results_published_passkey(root, key);
    if (published && results_is_passkey_of(published, of)) { return published; }
    return cJSON_GetArrayItem(results_array(root, "passkey_others"), results_find_other_passkey(root, key, of));
}

// Whether the published place of a key is for this configuration: it is free, or holds what yields, or what is not
// whole, as an entry of the published program.
static inline bool results_takes_passkey(const cJSON* root, const char* key, const cJSON* of, const cJSON* outdated) {
    const cJSON* published = results_published_passkey(root, key);
    if (!results_as_trained(of)) { return false; }
    return !published || !results_passkey_is_whole(published) ||
           results_yield(results_of_entry(published), of, outdated);
}

static inline void results_add_other_passkey(cJSON* root, const char* key, cJSON* entry) {
    if (!cJSON_IsObject(entry)) {  // damaged by hand
        cJSON* wrapped = cJSON_CreateObject();
        cJSON_AddItemToObject(wrapped, "value", entry);
        entry = wrapped;
    }
    cJSON_DeleteItemFromObjectCaseSensitive(entry, "key");
    cJSON_AddStringToObject(entry, "key", key);
    cJSON_AddItemToArray(results_array(root, "passkey_others"), entry);
}

// The entry of this configuration, made where there is none, at the published place if that is for it.
static inline cJSON* results_passkey(cJSON* root, const char* key, const cJSON* of, const cJSON* outdated) {
    cJSON *entry = results_find_passkey(root, key, of), *section = results_array(root, "passkey");
    bool published = entry && entry == results_published_passkey(root, key);
    bool takes = !published && results_takes_passkey(root, key, of, outdated);
    if (entry && !takes) { return entry; }
    entry = entry ? cJSON_DetachItemViaPointer(results_array(root, "passkey_others"), entry) : results_new_passkey(of);
    if (takes) {
        cJSON* old = cJSON_DetachItemFromObjectCaseSensitive(section, key);
        if (old) { results_add_other_passkey(root, key, old); }
        cJSON_DeleteItemFromObjectCaseSensitive(entry, "key");
        cJSON_AddItemToObject(section, key, entry);
    } else {
        results_add_other_passkey(root, key, entry);
    }
    return entry;
}

// The place of a length in the entry's arrays, -1 if it is not there; *place receives where it belongs.
static inline int results_find_length(const cJSON* entry, size_t length, int* place) {
    int i = 0;
    const cJSON* item;
    cJSON_ArrayForEach(item, results_array(entry, "seq_lens")) {
        if (item->valuedouble >= (double)length) { break; }
        i++;
    }
    if (place) { *place = i; }
    return item && item->valuedouble == (double)length ? i : -1;
}

static inline double results_accuracy(const cJSON* entry, const char* measure, int place) {
    const cJSON* item = cJSON_GetArrayItem(results_array(entry, measure), place);
    return item ? item->valuedouble : NAN;
}

// What is stored for one length.
typedef struct {
    size_t length, samples;
    double forced, greedy, natural;  // accuracies
    const double* depths;            // [samples] 0..1
    const int* hits;                 // [samples] teacher forced
} PasskeyResult;

// By moving what follows to the end: cJSON_InsertItemInArray() of Debian 12 fails but at the ends.
static inline void results_insert(cJSON* array, int place, cJSON* value) {
    int behind = cJSON_GetArraySize(array) - place;
    cJSON_AddItemToArray(array, value);
    for (int i = 0; i < behind; i++) { cJSON_AddItemToArray(array, cJSON_DetachItemFromArray(array, place)); }
}

// Adds a length to the entry, or replaces it.
static inline void results_put_length(cJSON* entry, const PasskeyResult* r) {
    int place, found = results_find_length(entry, r->length, &place);
    cJSON* values[RESULTS_PASSKEY_ARRAY_COUNT] = {cJSON_CreateNumber((double)r->length),
                                                  cJSON_CreateNumber(r->forced),
                                                  cJSON_CreateNumber(r->greedy),
                                                  cJSON_CreateNumber(r->natural),
                                                  cJSON_CreateDoubleArray(r->depths, (int)r->samples),
                                                  cJSON_CreateIntArray(r->hits, (int)r->samples)};
    for (int i = 0; i < RESULTS_PASSKEY_ARRAY_COUNT; i++) {
        cJSON* array = results_array(entry, RESULTS_PASSKEY_ARRAYS[i]);
        if (found >= 0) {
            cJSON_ReplaceItemInArray(array, found, values[i]);
        } else {
            results_insert(array, place, values[i]);
        }
    }
}

// ----------------------------------------------------------------------------
// perplexity

// "data/NAME" as the published program writes it, "NAME" in entries of older versions.
static inline const char* results_dataset(const cJSON* entry) {
    const char* name = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(entry, "dataset_dir"));
    return name && strncmp(name, "data/", 5) == 0 ? name + 5 : name;
}

// Whether documents were joined. The published program does not say: it takes articles of wikipedia alone.
static inline bool results_is_joined(const cJSON* entry) {
    const char* policy = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(entry, "bos"));
    const char* name = results_dataset(entry);
    return policy ? strstr(policy, "joined") != NULL : !name || strcmp(name, "wikipedia") != 0;
}

// Whether two entries are of one setting, of which the published section holds one.
static inline bool results_same_setting(const cJSON* a, const cJSON* b) {
    const char *x = results_dataset(a), *y = results_dataset(b);
    return results_same_field(a, b, "window_size") && results_same_field(a, b, "seq_len") &&
           results_same_field(a, b, "ntokens") && (x && y ? strcmp(x, y) == 0 : x == y) &&
           results_is_joined(a) == results_is_joined(b);
}

// Whether an entry has every value that is printed of it.
static inline bool results_perplexity_is_whole(const cJSON* entry) {
    static const char* const arrays[] = {"perplexity", "positions", "standard_error"};
    int count = cJSON_GetArraySize(results_array(entry, "perplexity"));
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        const cJSON* array = results_array(entry, arrays[i]);
        if (!cJSON_IsArray(array) || cJSON_GetArraySize(array) != count) { return false; }
    }
    return count > 0 && cJSON_IsNumber(cJSON_GetObjectItemCaseSensitive(entry, "mean")) &&
           cJSON_IsObject(results_of_entry(entry));
}

// Whether an entry is the result of this configuration, or of an entry of it.
static inline bool results_is_perplexity_of(const cJSON* entry, const cJSON* configuration) {
    return results_perplexity_is_whole(entry) && results_same_setting(entry, configuration) &&
           results_same_field(entry, configuration, "articles") &&
           results_same_of(results_of_entry(entry), results_of_entry(configuration));
}

// The entry at the published place of this setting, NULL if there is none.
static inline cJSON* results_published_perplexity(const cJSON* root, const cJSON* configuration) {
    cJSON* entry;
    cJSON_ArrayForEach(entry, results_array(root, "perplexity")) {
        if (results_same_setting(entry, configuration)) { return entry; }
    }
    return NULL;
}

static inline cJSON* results_find_perplexity_in(const cJSON* root, const char* section, const cJSON* configuration) {
    cJSON* entry;
    cJSON_ArrayForEach(entry, results_array(root, section)) {
        if (results_is_perplexity_of(entry, configuration)) { return entry; }
    }
    return NULL;
}

// The whole entry of this configuration, NULL if there is none.
static inline cJSON* results_find_perplexity(const cJSON* root, const cJSON* configuration) {
    cJSON* published = results_find_perplexity_in(root, "perplexity", configuration);
    return published ? published : results_find_perplexity_in(root, "perplexity_others", configuration);
}

// Of one configuration that with more articles stays at the published place.
static inline bool results_takes_perplexity(const cJSON* published, const cJSON* entry, const cJSON* outdated) {
    if (!results_as_trained(results_of_entry(entry))) { return false; }
    if (!published || !results_perplexity_is_whole(published)) { return true; }
    const cJSON *measured = results_of_entry(published), *of = results_of_entry(entry);
    const cJSON* theirs = cJSON_GetObjectItemCaseSensitive(published, "articles");
    const cJSON* ours = cJSON_GetObjectItemCaseSensitive(entry, "articles");
    bool more = cJSON_IsNumber(theirs) && cJSON_IsNumber(ours) && ours->valuedouble > theirs->valuedouble;
    return results_yield(measured, of, outdated) || (more && results_same_of(measured, of));
}

// Adds an entry, or replaces that of the same configuration; takes the entry over.
static inline void results_put_perplexity(cJSON* root, cJSON* entry, const cJSON* outdated) {
    cJSON *section = results_array(root, "perplexity"), *others = results_array(root, "perplexity_others");
    cJSON* same = results_find_perplexity_in(root, "perplexity", entry);
    if (same) {
        cJSON_ReplaceItemViaPointer(section, same, entry);
        return;
    }
    same = results_find_perplexity_in(root, "perplexity_others", entry);
    if (same) { cJSON_Delete(cJSON_DetachItemViaPointer(others, same)); }
    cJSON* published = results_published_perplexity(root, entry);
    if (!results_takes_perplexity(published, entry, outdated)) {
        cJSON_AddItemToArray(others, entry);
    } else if (published) {
        cJSON_AddItemToArray(others, cJSON_Duplicate(published, true));
        cJSON_ReplaceItemViaPointer(section, published, entry);
    } else {
        cJSON_AddItemToArray(section, entry);
    }
}

#endif
