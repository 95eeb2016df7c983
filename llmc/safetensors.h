/*
Files of named tensors in the safetensors format:

  8 bytes   header length N, little endian
  N bytes   JSON: {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [BEGIN, END]}, ...,
            "__metadata__": {"KEY": "TEXT", ...}}, padded with spaces
  the rest  data; offsets count from here, and the tensors cover it without holes or overlaps

The reader maps a file into memory and checks all of the above: anything else ends the program with one line, or is
told to a caller that knows a way out (safetensors_try).
Data may be at any address, so it is read through safetensors_read_f32 or memcpy. Cutting a file short while
it is mapped kills the program (SIGBUS).
The writer asks for the data piece by piece, so that a device's memory needs no second copy in the host's, and
replaces the file at once: at every moment PATH is the whole old file or the whole new one.
*/
#ifndef SAFETENSORS_H
#define SAFETENSORS_H

#include <cjson/cJSON.h>
#include <fcntl.h>
#include <sys/mman.h>

#include "util.h"

enum { SAFETENSORS_MAX_DIMS = 8, SAFETENSORS_MAX_HEADER = 100000000, SAFETENSORS_CHUNK = 4 << 20 };

typedef enum {
    SAFETENSORS_OTHER,  // a type that is not in this list; cannot be written
    SAFETENSORS_BOOL,
    SAFETENSORS_U8,
    SAFETENSORS_I8,
    SAFETENSORS_U16,
    SAFETENSORS_I16,
    SAFETENSORS_F16,
    SAFETENSORS_BF16,
    SAFETENSORS_U32,
    SAFETENSORS_I32,
    SAFETENSORS_F32,
    SAFETENSORS_U64,
    SAFETENSORS_I64,
    SAFETENSORS_F64,
    SAFETENSORS_TYPES
} SafeTensorsType;

static inline const char* safetensors_type_name(SafeTensorsType type) {
    static const char* const names[SAFETENSORS_TYPES] = {"other", "BOOL", "U8",  "I8",  "U16", "I16", "F16",
                                                         "BF16",  "U32",  "I32", "F32", "U64", "I64", "F64"};
    return names[type];
}

// Bytes of an element; 0 = unknown.
static inline size_t safetensors_type_bytes(SafeTensorsType type) {
    static const unsigned char bytes[SAFETENSORS_TYPES] = {0, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 8, 8, 8};
    return bytes[type];
}

// A tensor in an open file; valid until safetensors_close.
typedef struct {
    const char *file, *name, *type_name;
    SafeTensorsType type;
    size_t ndim, shape[SAFETENSORS_MAX_DIMS];
    size_t count;  // elements
    const unsigned char* data;
    size_t bytes;
    size_t begin;  // of data, in the file's data part
} SafeTensor;

typedef struct {
    char* path;
    SafeTensor* tensors;  // in the order of their data
    size_t count;
    const SafeTensor** by_name;
    cJSON *header, *metadata;  // metadata: NULL = none
    void* map;
    size_t map_bytes;
    char* fault;  // why the file cannot be used; NULL: it can
} SafeTensors;

// ----------------------------------------------------------------------------
// reading: checks

static inline void safetensors_printable(char* message) {
    for (char* c = message; *c; c++) {
        if (*c < ' ' || *c > '~') { *c = '?'; }
    }
}

// Notes why the file cannot be used and returns false. where: a name in the file, or NULL. Text from the file is
// noted without its control characters.
__attribute__((format(printf, 3, 4))) static inline bool safetensors_fault(SafeTensors* st, const char* where,
                                                                           const char* format, ...) {
    char message[512];
    int n = where ? snprintf(message, sizeof message, "\"%.64s\": ", where) : 0;
    va_list args;
    va_start(args, format);
    vsnprintf(message + n, sizeof message - (size_t)n, format, args);
    va_end(args);
    safetensors_printable(message);
    assert(!st->fault);
    st->fault = text("%s: %s; the file is damaged or no safetensors file: use another copy", st->path, message);
    return false;
}

// The same for what the system says about the file.
static inline bool safetensors_system_fault(SafeTensors* st, const char* what) {
    st->fault = text("%s: %s; check the path and its permissions", st->path, what);
    return false;
}

// A number of the header as an exact size: doubles are exact below 2^53.
static inline bool safetensors_size(SafeTensors* st, const char* name, const char* what, const cJSON* item,
                                    size_t* size) {
    if (!cJSON_IsNumber(item)) { return safetensors_fault(st, name, "%s is no number, expected a size", what); }
    double value = item->valuedouble;
    if (!(value >= 0 && value < 0x1p53) || value != (double)(size_t)value) {
        return safetensors_fault(st, name, "%s %g, expected a whole number from 0 to 2^53", what, value);
    }
    *size = (size_t)value;
    return true;
}

static inline bool safetensors_parse_type(SafeTensors* st, SafeTensor* t, const cJSON* item) {
    const char* found = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, "dtype"));
    if (!found) { return safetensors_fault(st, t->name, "no dtype, expected a name like \"F32\""); }
    t->type_name = found;
    t->type = SAFETENSORS_OTHER;
    for (int i = SAFETENSORS_BOOL; i < SAFETENSORS_TYPES; i++) {
        if (strcmp(found, safetensors_type_name((SafeTensorsType)i)) == 0) { t->type = (SafeTensorsType)i; }
    }
    return true;
}

static inline bool safetensors_parse_shape(SafeTensors* st, SafeTensor* t, const cJSON* item) {
    const cJSON* shape = cJSON_GetObjectItemCaseSensitive(item, "shape");
    if (!cJSON_IsArray(shape)) { return safetensors_fault(st, t->name, "no shape, expected an array of sizes"); }
    t->count = 1;
    for (const cJSON* size = shape->child; size; size = size->next) {
        if (t->ndim == SAFETENSORS_MAX_DIMS) {
            return safetensors_fault(st, t->name, "more than %d dimensions, expected fewer", SAFETENSORS_MAX_DIMS);
        }
        size_t n = 0;
        if (!safetensors_size(st, t->name, "dimension", size, &n)) { return false; }
        t->shape[t->ndim++] = n;
        if (__builtin_mul_overflow(t->count, n, &t->count)) {
            return safetensors_fault(st, t->name, "a shape of more than 2^64 elements, expected fewer");
        }
    }
    return true;
}

static inline bool safetensors_parse_offsets(SafeTensors* st, SafeTensor* t, const cJSON* item,
                                             const unsigned char* data, size_t data_bytes) {
    const cJSON* offsets = cJSON_GetObjectItemCaseSensitive(item, "data_offsets");
    const cJSON *first = cJSON_IsArray(offsets) ? offsets->child : NULL, *second = first ? first->next : NULL;
    if (!second || second->next) { return safetensors_fault(st, t->name, "expected two data_offsets"); }
    size_t end = 0;
    if (!safetensors_size(st, t->name, "offset", first, &t->begin)) { return false; }
    if (!safetensors_size(st, t->name, "offset", second, &end)) { return false; }
    if (end < t->begin || end > data_bytes) {
        return safetensors_fault(st, t->name, "data_offsets [%zu, %zu], expected a range within %zu bytes of data",
                                 t->begin, end, data_bytes);
    }
    t->data = data + t->begin;
    t->bytes = end - t->begin;
    size_t expected, size = safetensors_type_bytes(t->type);
    if (size && (__builtin_mul_overflow(t->count, size, &expected) || t->bytes != expected)) {
        return safetensors_fault(st, t->name, "%zu bytes of data, expected %zu elements of %zu bytes", t->bytes,
                                 t->count, size);
    }
    return true;
}

static inline bool safetensors_parse_metadata(SafeTensors* st, cJSON* item) {
    if (st->metadata || !cJSON_IsObject(item)) {
        return safetensors_fault(st, item->string, "expected one object of strings");
    }
    st->metadata = item;
    for (const cJSON* pair = item->child; pair; pair = pair->next) {
        if (!cJSON_IsString(pair)) { return safetensors_fault(st, pair->string, "metadata, expected a string"); }
    }
    return true;
}

static inline int safetensors_compare_place(const void* a, const void* b) {
    const SafeTensor *x = (const SafeTensor*)a, *y = (const SafeTensor*)b;
    if (x->begin != y->begin) { return x->begin < y->begin ? -1 : 1; }
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static inline int safetensors_compare_names(const void* a, const void* b) {
    return strcmp((*(const SafeTensor* const*)a)->name, (*(const SafeTensor* const*)b)->name);
}

// The tensors cover the data without holes or overlaps, and no two share a name.
static inline bool safetensors_check_cover(SafeTensors* st, size_t data_bytes) {
    qsort(st->tensors, st->count, sizeof(SafeTensor), safetensors_compare_place);
    st->by_name = (const SafeTensor**)xcalloc(st->count, sizeof(SafeTensor*));
    size_t covered = 0;
    for (size_t i = 0; i < st->count; i++) {
        const SafeTensor* t = st->by_name[i] = &st->tensors[i];
        if (t->begin != covered) {
            return safetensors_fault(st, t->name, "data begins at offset %zu, expected %zu, where the one before ends",
                                     t->begin, covered);
        }
        covered += t->bytes;
    }
    if (covered != data_bytes) {
        return safetensors_fault(st, NULL, "%zu bytes of data, expected %zu as in the header", data_bytes, covered);
    }
    qsort(st->by_name, st->count, sizeof(SafeTensor*), safetensors_compare_names);
    for (size_t i = 1; i < st->count; i++) {
        if (strcmp(st->by_name[i - 1]->name, st->by_name[i]->name) == 0) {
            return safetensors_fault(st, st->by_name[i]->name, "found twice, expected once");
        }
    }
    return true;
}

// ----------------------------------------------------------------------------
// reading: interface

static inline bool safetensors_map(SafeTensors* st) {
    int fd = open(st->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe must not make the program wait
    if (fd < 0) { return safetensors_system_fault(st, strerror(errno)); }
    struct stat status;
    bool good = fstat(fd, &status) == 0;
    if (!good) { safetensors_system_fault(st, strerror(errno)); }
    if (good && !S_ISREG(status.st_mode)) {
        good = safetensors_system_fault(st, "not a file, expected a safetensors file");
    }
    size_t bytes = good ? (size_t)status.st_size : 0;
    if (good && bytes < 8) {
        good = safetensors_fault(st, NULL, "%zu bytes, expected at least 8 for the header's length", bytes);
    }
    void* map = good ? mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, fd, 0) : NULL;
    if (good && map == MAP_FAILED) { good = safetensors_system_fault(st, "cannot map into memory"); }
    if (good) { st->map = map, st->map_bytes = bytes; }
    close(fd);
    return good;
}

// Parses the JSON header and sets its length.
static inline bool safetensors_parse_header(SafeTensors* st, size_t* header_bytes) {
    const unsigned char* file = (const unsigned char*)st->map;
    uint64_t length = 0;
    for (int i = 0; i < 8; i++) { length |= (uint64_t)file[i] << 8 * i; }
    if (length > st->map_bytes - 8 || length > SAFETENSORS_MAX_HEADER) {
        return safetensors_fault(st, NULL, "header of %llu bytes in a file of %zu, expected it inside and at most %d",
                                 (unsigned long long)length, st->map_bytes, SAFETENSORS_MAX_HEADER);
    }
    // a copy that ends in 0: cJSON before 1.7.18 may look one byte past the end (CVE-2023-53154)
    char* json = (char*)xcalloc((size_t)length + 1, 1);
    memcpy(json, file + 8, (size_t)length);
    const char *end = json, *last = json + length;
    if (*json == '{') { st->header = cJSON_ParseWithLengthOpts(json, (size_t)length, &end, 0); }
    while (st->header && end < last && (*end == ' ' || *end == '\n' || *end == '\r' || *end == '\t')) { end++; }
    size_t stopped = (size_t)(end - json);
    bool good = st->header && end == last;
    free(json);
    *header_bytes = (size_t)length;
    return good || safetensors_fault(st, NULL, "no JSON at byte %zu of the header, expected one object", stopped);
}

static inline bool safetensors_parse_tensor(SafeTensors* st, cJSON* item, size_t data_begin) {
    SafeTensor* t = &st->tensors[st->count++];
    t->file = st->path;
    t->name = item->string;
    if (!cJSON_IsObject(item)) { return safetensors_fault(st, t->name, "no object, expected dtype and shape"); }
    return safetensors_parse_type(st, t, item) && safetensors_parse_shape(st, t, item) &&
           safetensors_parse_offsets(st, t, item, (const unsigned char*)st->map + data_begin,
                                     st->map_bytes - data_begin);
}

// Opens and checks a file. False where it is not entirely valid: then fault says why, in the words of an error, and
// only safetensors_close may follow.
static inline bool safetensors_try(SafeTensors* st, const char* path) {
    memset(st, 0, sizeof *st);
    st->path = xstrdup(path);
    size_t header_bytes = 0;
    if (!safetensors_map(st) || !safetensors_parse_header(st, &header_bytes)) { return false; }
    st->tensors = (SafeTensor*)xcalloc((size_t)cJSON_GetArraySize(st->header), sizeof(SafeTensor));
    for (cJSON* item = st->header->child; item; item = item->next) {
        bool metadata = strcmp(item->string, "__metadata__") == 0;
        bool good =
            metadata ? safetensors_parse_metadata(st, item) : safetensors_parse_tensor(st, item, 8 + header_bytes);
        if (!good) { return false; }
    }
    return safetensors_check_cover(st, st->map_bytes - 8 - header_bytes);
}

// Opens and checks a file; ends the program if it is not entirely valid.
static inline SafeTensors safetensors_open(const char* path) {
    SafeTensors st;
    if (!safetensors_try(&st, path)) { fatal("%s", st.fault); }
    return st;
}

static inline void safetensors_close(SafeTensors* st) {
    if (st->map) { munmap(st->map, st->map_bytes); }
    cJSON_Delete(st->header);
    free(st->by_name);
    free(st->tensors);
    free(st->path);
    free(st->fault);
    memset(st, 0, sizeof *st);
}

// NULL = the file has no tensor of this name.
static inline const SafeTensor* safetensors_find(const SafeTensors* st, const char* name) {
    size_t low = 0, high = st->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(name, st->by_name[middle]->name);
        if (order == 0) { return st->by_name[middle]; }
        if (order < 0) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return NULL;
}

// NULL = the file has no such key.
static inline const char* safetensors_metadata(const SafeTensors* st, const char* key) {
    return st->metadata ? cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(st->metadata, key)) : NULL;
}

// ----------------------------------------------------------------------------
// reading: values

static inline float safetensors_float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// IEEE 754 binary16, exactly.
static inline float safetensors_float_of_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = half >> 10 & 31u, fraction = half & 1023u;
    if (exponent == 31) { return safetensors_float_of_bits(sign | 0x7F800000u | fraction << 13); }
    if (exponent > 0) { return safetensors_float_of_bits(sign | (exponent + 112) << 23 | fraction << 13); }
    float subnormal = (float)fraction * 0x1p-24f;
    return sign ? -subnormal : subnormal;
}

// Writes the tensor's count elements to dst as floats; F32, BF16, F16 exactly, F64 rounded.
static inline void safetensors_read_f32(float* dst, const SafeTensor* t) {
    const unsigned char* from = t->data;
    if (t->type == SAFETENSORS_F32) {
        memcpy(dst, from, t->bytes);
    } else if (t->type == SAFETENSORS_BF16 || t->type == SAFETENSORS_F16) {
        for (size_t i = 0; i < t->count; i++) {
            uint16_t bits;
            memcpy(&bits, from + 2 * i, 2);
            dst[i] = t->type == SAFETENSORS_F16 ? safetensors_float_of_half(bits)
                                                : safetensors_float_of_bits((uint32_t)bits << 16);
        }
    } else if (t->type == SAFETENSORS_F64) {
        for (size_t i = 0; i < t->count; i++) {
            double value;
            memcpy(&value, from + 8 * i, 8);
            dst[i] = (float)value;
        }
    } else {
        char message[128];
        snprintf(message, sizeof message, "\"%.64s\": dtype %.20s", t->name, t->type_name);
        safetensors_printable(message);
        fatal("%s: %s, expected F32, BF16, F16 or F64; use another copy", t->file, message);
    }
}

// ----------------------------------------------------------------------------
// writing

typedef struct {
    const char* name;
    SafeTensorsType type;
    size_t ndim, shape[SAFETENSORS_MAX_DIMS];
} SafeTensorsEntry;

// Fills chunk with `bytes` bytes of entry `index`, from byte `offset` of its data on; whole elements each time,
// in order, at most SAFETENSORS_CHUNK bytes.
typedef void (*SafeTensorsSource)(void* context, size_t index, size_t offset, void* chunk, size_t bytes);

static inline size_t safetensors_entry_bytes(const SafeTensorsEntry* e) {
    size_t bytes = safetensors_type_bytes(e->type);
    for (size_t d = 0; d < e->ndim; d++) { bytes *= e->shape[d]; }
    return bytes;
}

// The header's length and text, padded so that the data begin at a multiple of 64 bytes; free() it.
static inline char* safetensors_header(const SafeTensorsEntry* entries, size_t count, const char* const (*metadata)[2],
                                       size_t pairs, size_t* bytes) {
    cJSON* root = cJSON_CreateObject();
    if (pairs) {
        cJSON* strings = cJSON_AddObjectToObject(root, "__metadata__");
        for (size_t i = 0; i < pairs; i++) { cJSON_AddStringToObject(strings, metadata[i][0], metadata[i][1]); }
    }
    size_t offset = 0;
    for (size_t i = 0; i < count; i++) {
        const SafeTensorsEntry* e = &entries[i];
        assert(e->type > SAFETENSORS_OTHER && e->type < SAFETENSORS_TYPES && e->ndim <= SAFETENSORS_MAX_DIMS);
        assert(!cJSON_GetObjectItemCaseSensitive(root, e->name));
        cJSON* item = cJSON_AddObjectToObject(root, e->name);
        cJSON_AddStringToObject(item, "dtype", safetensors_type_name(e->type));
        cJSON* shape = cJSON_AddArrayToObject(item, "shape");
        for (size_t d = 0; d < e->ndim; d++) { cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)e->shape[d])); }
        cJSON* offsets = cJSON_AddArrayToObject(item, "data_offsets");
        cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)offset));
        offset += safetensors_entry_bytes(e);
        cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)offset));
    }
    char* json = cJSON_PrintUnformatted(root);
    cJSON_Delete(root);
    if (!json) { fatal("out of memory: the header of %zu tensors", count); }
    size_t text_bytes = strlen(json);
    *bytes = round_up(8 + text_bytes, 64);
    char* header = (char*)xcalloc(*bytes, 1);
    for (int i = 0; i < 8; i++) { header[i] = (char)((*bytes - 8) >> 8 * i & 0xFF); }
    memset(header + 8, ' ', *bytes - 8);
    memcpy(header + 8, json, text_bytes);
    cJSON_free(json);
    return header;
}

// Ends the program after removing what was written.
__attribute__((noreturn)) static inline void safetensors_write_failed(const char* path, const char* temporary) {
    int error = errno;
    unlink(temporary);
    fatal("%s: cannot write: %s; free some space or choose another folder (a file that was there is unchanged)", path,
          strerror(error));
}

static inline bool safetensors_write_all(int fd, const void* data, size_t bytes) {
    const char* from = (const char*)data;
    while (bytes > 0) {
        ssize_t n = write(fd, from, bytes);
        if (n < 0 && errno == EINTR) { continue; }
        if (n <= 0) { return false; }
        from += n;
        bytes -= (size_t)n;
    }
    return true;
}

static inline bool safetensors_write_data(int fd, const SafeTensorsEntry* entries, size_t count,
                                          SafeTensorsSource source, void* context) {
    char* chunk = (char*)xcalloc(SAFETENSORS_CHUNK, 1);
    bool good = true;
    for (size_t i = 0; good && i < count; i++) {
        size_t bytes = safetensors_entry_bytes(&entries[i]);
        for (size_t at = 0; good && at < bytes; at += SAFETENSORS_CHUNK) {
            size_t left = bytes - at, n = left < SAFETENSORS_CHUNK ? left : (size_t)SAFETENSORS_CHUNK;
            source(context, i, at, chunk, n);
            good = safetensors_write_all(fd, chunk, n);
        }
    }
    free(chunk);
    return good;
}

// Makes a rename last through a power failure, where the file system can.
static inline void safetensors_sync_folder(const char* path) {
    char* folder = xstrdup(path);
    char* slash = strrchr(folder, '/');
    if (slash) { slash[slash == folder] = '\0'; }
    int fd = open(slash ? folder : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
    free(folder);
}

// Writes entries, in this order, with `pairs` pairs of metadata (key, text), through PATH.tmp. Ends the program
// when the disk refuses, leaving the file that was at path.
static inline void safetensors_write(const char* path, const SafeTensorsEntry* entries, size_t count,
                                     const char* const (*metadata)[2], size_t pairs, SafeTensorsSource source,
                                     void* context) {
    size_t header_bytes;
    char* header = safetensors_header(entries, count, metadata, pairs, &header_bytes);
    char* temporary = text("%s.tmp", path);
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) { fatal("%s: %s; check that the folder exists and is writable", temporary, strerror(errno)); }
    bool good = safetensors_write_all(fd, header, header_bytes) &&
                safetensors_write_data(fd, entries, count, source, context) && fsync(fd) == 0;
    if (!good) { safetensors_write_failed(path, temporary); }
    if (close(fd) != 0 || rename(temporary, path) != 0) { safetensors_write_failed(path, temporary); }
    safetensors_sync_folder(path);
    free(temporary);
    free(header);
}

#endif
