/*
results.json of a run folder: read, merged, written whole after every finished piece of work.

{ "passkey": { "('equidistant', 20, 5, 0)": { seq_lens, accs, greedy, natural, depths, hits, "of": {...} } },
  "perplexity": [ { window_size, seq_len, ntokens, dataset_dir, perplexity, positions, ..., "of": {...} } ] }

The arrays of a passkey entry run in parallel, by ascending length. "of" says what was measured (step of the weights,
precision, seed, ...): results of other weights are never mixed with these, they are measured again.
*/
#ifndef RESULTS_H
#define RESULTS_H

#include "logger.h"

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

// The file's results, or empty ones where there is no file yet. Release with cJSON_Delete().
static inline cJSON* results_open(const char* path) {
    cJSON* root = file_exists(path) ? read_json(path) : cJSON_CreateObject();
    if (!cJSON_IsObject(root)) { fatal("%s: expected an object of results; repair the file or move it away", path); }
    results_section(root, "passkey", false, path);
    results_section(root, "perplexity", true, path);
    return root;
}

// ----------------------------------------------------------------------------
// passkey

static const char* const RESULTS_PASSKEY_ARRAYS[] = {"seq_lens", "accs", "greedy", "natural", "depths", "hits"};
enum { RESULTS_PASSKEY_ARRAY_COUNT = 6 };

// The key of a configuration: the text of a Python tuple. Release with free().
static inline char* results_passkey_key(const char* sampling, size_t samples, size_t pred_digits,
                                        size_t prefix_digits) {
    return text("('%s', %zu, %zu, %zu)", sampling, samples, pred_digits, prefix_digits);
}

static inline bool results_passkey_is_whole(const cJSON* entry) {
    int count = -1;
    for (int i = 0; i < RESULTS_PASSKEY_ARRAY_COUNT; i++) {
        const cJSON* array = cJSON_GetObjectItemCaseSensitive(entry, RESULTS_PASSKEY_ARRAYS[i]);
        if (!cJSON_IsArray(array) || (count >= 0 && cJSON_GetArraySize(array) != count)) { return false; }
        count = cJSON_GetArraySize(array);
    }
    return true;
}

// The entry of a key, a new one if there is none. One of other weights or settings, or one that does not have all
// arrays, is replaced by an empty one; *replaced tells. of is copied.
static inline cJSON* results_passkey(cJSON* root, const char* key, const cJSON* of, bool* replaced) {
    cJSON* section = cJSON_GetObjectItemCaseSensitive(root, "passkey");
    cJSON* entry = cJSON_GetObjectItemCaseSensitive(section, key);
    const cJSON* measured = cJSON_GetObjectItemCaseSensitive(entry, "of");
    *replaced = entry && !(results_passkey_is_whole(entry) && cJSON_Compare(measured, of, true));
    if (entry && !*replaced) { return entry; }
    cJSON_DeleteItemFromObjectCaseSensitive(section, key);
    entry = cJSON_AddObjectToObject(section, key);
    for (int i = 0; i < RESULTS_PASSKEY_ARRAY_COUNT; i++) { cJSON_AddArrayToObject(entry, RESULTS_PASSKEY_ARRAYS[i]); }
    cJSON_AddItemToObject(entry, "of", cJSON_Duplicate(of, true));
    return entry;
}

static inline cJSON* results_array(const cJSON* entry, const char* name) {
    return cJSON_GetObjectItemCaseSensitive(entry, name);
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

// Whether two entries are of the same configuration.
static inline bool results_same_perplexity(const cJSON* a, const cJSON* b) {
    static const char* const fields[] = {"window_size", "seq_len", "ntokens", "dataset_dir", "bos"};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        const cJSON* x = cJSON_GetObjectItemCaseSensitive(a, fields[i]);
        const cJSON* y = cJSON_GetObjectItemCaseSensitive(b, fields[i]);
        if ((x || y) && !cJSON_Compare(x, y, true)) { return false; }
    }
    return true;
}

// Whether an entry has every value that is printed of it.
static inline bool results_perplexity_is_whole(const cJSON* entry) {
    static const char* const arrays[] = {"perplexity", "positions", "standard_error"};
    int count = cJSON_GetArraySize(results_array(entry, "perplexity"));
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        const cJSON* array = results_array(entry, arrays[i]);
        if (!cJSON_IsArray(array) || cJSON_GetArraySize(array) != count) { return false; }
    }
    return count > 0 && cJSON_IsNumber(cJSON_GetObjectItemCaseSensitive(entry, "mean"));
}

// The place of the entry of this configuration, -1 if there is none.
static inline int results_find_perplexity(const cJSON* root, const cJSON* configuration) {
    int i = 0;
    const cJSON* entry;
    cJSON_ArrayForEach(entry, results_array(root, "perplexity")) {
        if (results_same_perplexity(entry, configuration)) { return i; }
        i++;
    }
    return -1;
}

// Adds an entry or replaces that of the same configuration; takes the entry over.
static inline void results_put_perplexity(cJSON* root, cJSON* entry) {
    int place = results_find_perplexity(root, entry);
    cJSON* section = results_array(root, "perplexity");
    if (place >= 0) {
        cJSON_ReplaceItemInArray(section, place, entry);
    } else {
        cJSON_AddItemToArray(section, entry);
    }
}

#endif
