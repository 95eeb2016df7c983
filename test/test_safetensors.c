/*
safetensors: round trips, a file of the format's own Python package, every kind of damaged file, random damage,
and saves that fail half way.
*/
#include "test_util.h"

#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>

#include "../llmc/safetensors.h"

typedef struct {
    char folder[64], path[96], temporary[96];
} Scratch;

static void scratch_open(Scratch* s) {
    scratch_folder(s->folder);
    snprintf(s->path, sizeof s->path, "%s/x.safetensors", s->folder);
    snprintf(s->temporary, sizeof s->temporary, "%s/x.safetensors.tmp", s->folder);
}

static void scratch_close(Scratch* s) {
    remove(s->path);
    assert_int_equal(rmdir(s->folder), 0);  // nothing else was left behind
}

static void write_bytes(const char* path, const void* data, size_t bytes) {
    FILE* file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

static unsigned char* read_bytes(const char* path, size_t* bytes) {
    FILE* file = fopen(path, "rb");
    assert_non_null(file);
    unsigned char* data = xcalloc(1 << 22, 1);
    *bytes = fread(data, 1, 1 << 22, file);
    fclose(file);
    return data;
}

// ----------------------------------------------------------------------------
// round trips

// Byte k of tensor i is a hash of both, so that a piece at the wrong place shows.
static unsigned char pattern(size_t i, size_t k) { return (unsigned char)((k + 1) * 2654435761u >> 13 ^ i * 37); }

static void pattern_source(void* context, size_t index, size_t offset, void* chunk, size_t bytes) {
    size_t* pieces = context;
    assert_in_range(bytes, 1, SAFETENSORS_CHUNK);
    if (pieces) { pieces[index]++; }
    for (size_t k = 0; k < bytes; k++) { ((unsigned char*)chunk)[k] = pattern(index, offset + k); }
}

static void assert_pattern(const SafeTensor* t, size_t index) {
    for (size_t k = 0; k < t->bytes; k++) {
        if (t->data[k] != pattern(index, k)) { fail_msg("tensor %zu differs at byte %zu", index, k); }
    }
}

static const SafeTensorsEntry entries[] = {
    {"layers.10.attention.wq.weight", SAFETENSORS_F32, 2, {3, 5}},
    {"odd", SAFETENSORS_U8, 1, {3}},  // puts everything after it at odd addresses
    {"layers.2.attention.wq.weight", SAFETENSORS_F32, 3, {2, 1, 7}},
    {"scalar", SAFETENSORS_I64, 0, {0}},
    {"empty", SAFETENSORS_F32, 2, {0, 4}},
    {"eight", SAFETENSORS_I32, 8, {1, 2, 1, 2, 1, 2, 1, 2}},
    {"na\xc3\xafve \"quoted\" \\ \n\t", SAFETENSORS_BF16, 1, {9}},
    {"", SAFETENSORS_F16, 1, {1}},
    {"b", SAFETENSORS_BOOL, 1, {5}},
    {"i8", SAFETENSORS_I8, 1, {2}},
    {"u16", SAFETENSORS_U16, 1, {2}},
    {"i16", SAFETENSORS_I16, 1, {2}},
    {"u32", SAFETENSORS_U32, 1, {2}},
    {"u64", SAFETENSORS_U64, 1, {2}},
    {"f64", SAFETENSORS_F64, 1, {2}},
};
static const size_t entry_bytes[] = {60, 3, 56, 8, 0, 64, 18, 2, 5, 2, 4, 4, 8, 16, 16};
enum { ENTRIES = sizeof entries / sizeof *entries };

static const char* const metadata[][2] = {{"format", "pt"}, {"step", "1234"}, {"text", "\"\\\n\x01\xe2\x82\xac"}};

static void write_entries(const char* path) {
    safetensors_write(path, entries, ENTRIES, metadata, 3, pattern_source, NULL);
}

static void test_round_trip(void** state) {
    (void)state;
    Scratch s;
    scratch_open(&s);
    write_entries(s.path);
    SafeTensors st = safetensors_open(s.path);
    assert_int_equal(st.count, ENTRIES);
    for (size_t i = 0; i < ENTRIES; i++) {
        const SafeTensor* t = safetensors_find(&st, entries[i].name);
        assert_non_null(t);
        assert_string_equal(t->name, entries[i].name);
        assert_int_equal(t->type, entries[i].type);
        assert_int_equal(t->ndim, entries[i].ndim);
        for (size_t d = 0; d < t->ndim; d++) { assert_int_equal(t->shape[d], entries[i].shape[d]); }
        assert_int_equal(t->bytes, entry_bytes[i]);
        assert_int_equal(t->count * safetensors_type_bytes(t->type), entry_bytes[i]);
        assert_pattern(t, i);
    }
    assert_null(safetensors_find(&st, "layers.3.attention.wq.weight"));
    assert_null(safetensors_find(&st, "zzz"));
    for (size_t i = 0; i < 3; i++) { assert_string_equal(safetensors_metadata(&st, metadata[i][0]), metadata[i][1]); }
    assert_null(safetensors_metadata(&st, "Step"));
    safetensors_close(&st);

    size_t bytes;
    unsigned char* file = read_bytes(s.path, &bytes);
    size_t header = file[0] + 256u * file[1], total = 8 + header;
    assert_int_equal((8 + header) % 64, 0);
    for (size_t i = 0; i < ENTRIES; i++) { total += entry_bytes[i]; }
    assert_int_equal(bytes, total);
    assert_int_equal(file[8], '{');
    free(file);
    scratch_close(&s);
}

static void test_nothing_but_a_header(void** state) {
    (void)state;
    Scratch s;
    scratch_open(&s);
    safetensors_write(s.path, NULL, 0, NULL, 0, pattern_source, NULL);
    SafeTensors st = safetensors_open(s.path);
    assert_int_equal(st.count, 0);
    assert_null(safetensors_find(&st, "a"));
    assert_null(safetensors_metadata(&st, "a"));
    safetensors_close(&st);
    scratch_close(&s);
}

static void test_large_tensors_are_written_in_pieces(void** state) {
    (void)state;
    const size_t chunk = SAFETENSORS_CHUNK;
    const SafeTensorsEntry large[] = {{"a", SAFETENSORS_F32, 2, {2, chunk / 4}},
                                      {"b", SAFETENSORS_I64, 1, {chunk / 8 + 1}},
                                      {"c", SAFETENSORS_F32, 1, {chunk / 4}}};
    const size_t bytes[] = {2 * chunk, chunk + 8, chunk};
    size_t pieces[3] = {0};
    Scratch s;
    scratch_open(&s);
    safetensors_write(s.path, large, 3, NULL, 0, pattern_source, pieces);
    SafeTensors st = safetensors_open(s.path);
    for (size_t i = 0; i < 3; i++) {
        const SafeTensor* t = safetensors_find(&st, large[i].name);
        assert_int_equal(t->bytes, bytes[i]);
        assert_int_equal(pieces[i], (bytes[i] + chunk - 1) / chunk);
        assert_pattern(t, i);
    }
    safetensors_close(&st);
    scratch_close(&s);
}

// ----------------------------------------------------------------------------
// values

static void bits_source(void* context, size_t index, size_t offset, void* chunk, size_t bytes) {
    (void)context;
    for (size_t k = 0; k < bytes; k += 2) {
        uint16_t value = (uint16_t)((offset + k) / 2);
        memcpy((char*)chunk + k, &value, index == 0 ? 1 : 2);
    }
}

// The value of a 16-bit float from its definition; expected exactly, as every one is a float.
static double decode(unsigned bits, int exponent_bits, int fraction_bits) {
    int exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1), bias = (1 << (exponent_bits - 1)) - 1;
    double fraction = ldexp(bits & ((1 << fraction_bits) - 1), -fraction_bits), sign = bits & 0x8000 ? -1 : 1;
    if (exponent == (1 << exponent_bits) - 1) { return fraction != 0 ? NAN : sign * INFINITY; }
    return sign * (exponent == 0 ? ldexp(fraction, 1 - bias) : ldexp(1 + fraction, exponent - bias));
}

static void test_every_16_bit_float(void** state) {
    (void)state;
    const SafeTensorsEntry all[] = {{"one byte", SAFETENSORS_U8, 1, {1}},  // data at odd addresses
                                    {"half", SAFETENSORS_F16, 1, {65536}},
                                    {"bf16", SAFETENSORS_BF16, 2, {256, 256}}};
    Scratch s;
    scratch_open(&s);
    safetensors_write(s.path, all, 3, NULL, 0, bits_source, NULL);
    SafeTensors st = safetensors_open(s.path);
    float* got = xcalloc(65536, sizeof(float));
    for (int half = 0; half < 2; half++) {
        const SafeTensor* t = safetensors_find(&st, half ? "half" : "bf16");
        assert_int_equal((uintptr_t)t->data % 2, 1);
        safetensors_read_f32(got, t);
        for (unsigned bits = 0; bits < 65536; bits++) {
            double want = decode(bits, half ? 5 : 8, half ? 10 : 7);
            bool same = isnan(want) ? isnan(got[bits]) : got[bits] == want && !signbit(got[bits]) == !signbit(want);
            if (!same) { fail_msg("%s 0x%04x: got %g, expected %g", half ? "F16" : "BF16", bits, got[bits], want); }
        }
    }
    free(got);
    safetensors_close(&st);
    scratch_close(&s);
}

// Written by the safetensors package of Python, version 0.8.0, from numpy arrays.
static void test_file_of_the_python_package(void** state) {
    (void)state;
    SafeTensors st = safetensors_open("test/fixtures/interop_mixed.safetensors");
    assert_int_equal(st.count, 6);
    assert_string_equal(safetensors_metadata(&st, "format"), "np");
    assert_string_equal(safetensors_metadata(&st, "step"), "1234");
    assert_string_equal(safetensors_metadata(&st, "note"), "na\xc3\xafve \"quoted\" \\ line\nend");

    const float alpha[12] = {0,        -0.0f,     1.5f, -2.25f, 3.4028235e38f, 0x1p-149f,
                             INFINITY, -INFINITY, NAN,  0.1f,   3.14159265f,   -1e-3f};
    const float beta[6] = {1, -2.5f, 3.140625f, 0x1p-133f, INFINITY, 0};
    const float gamma[8] = {1, -0.333251953125f, 65504, 0x1p-14f, 0x1.ff8p-15f, 0x1p-24f, -INFINITY, NAN};
    const float scalar[1] = {3.14159265f};
    const struct {
        const char* name;
        SafeTensorsType type;
        size_t ndim, rows, columns, count;
        const float* values;
    } floats[] = {{"alpha.f32", SAFETENSORS_F32, 2, 3, 4, 12, alpha},
                  {"beta.bf16", SAFETENSORS_BF16, 2, 2, 3, 6, beta},
                  {"gamma.f16", SAFETENSORS_F16, 1, 8, 0, 8, gamma},
                  {"scalar.f64", SAFETENSORS_F64, 0, 0, 0, 1, scalar},
                  {"empty", SAFETENSORS_F32, 2, 0, 5, 0, NULL}};
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++) {
        const SafeTensor* t = safetensors_find(&st, floats[i].name);
        assert_non_null(t);
        assert_int_equal(t->type, floats[i].type);
        assert_int_equal(t->ndim, floats[i].ndim);
        assert_int_equal(t->shape[0], floats[i].rows);
        assert_int_equal(t->shape[1], floats[i].columns);
        assert_int_equal(t->count, floats[i].count);
        float got[12];
        safetensors_read_f32(got, t);
        for (size_t k = 0; k < t->count; k++) {
            if (isnan(floats[i].values[k])) {
                assert_true(isnan(got[k]));
            } else {
                assert_memory_equal(&got[k], &floats[i].values[k], 4);
            }
        }
    }
    const SafeTensor* t = safetensors_find(&st, "delta.i32");
    const int32_t delta[4] = {INT32_MIN, -1, 0, INT32_MAX};
    assert_int_equal(t->type, SAFETENSORS_I32);
    assert_int_equal(t->bytes, sizeof delta);
    assert_memory_equal(t->data, delta, sizeof delta);
    safetensors_close(&st);
}

// ----------------------------------------------------------------------------
// damaged files

static void open_and_read(void* path) {
    SafeTensors st = safetensors_open(path);
    for (size_t i = 0; i < st.count; i++) {
        const SafeTensor* t = &st.tensors[i];
        float* values = xcalloc(t->count, sizeof(float));
        safetensors_read_f32(values, t);
        free(values);
    }
    safetensors_close(&st);
}

static void expect_refused(const Scratch* s, const char* a, const char* b) {
    const char* const words[] = {s->path, a, b, "expected", NULL};
    expect_fatal(open_and_read, (void*)(uintptr_t)s->path, words);
}

// A file of this header and as many bytes of data.
static void write_json(const char* path, const char* json, size_t data_bytes) {
    size_t length = strlen(json);
    unsigned char* file = xcalloc(8 + length + data_bytes, 1);
    for (int i = 0; i < 8; i++) { file[i] = (unsigned char)(length >> 8 * i); }
    memcpy(file + 8, json, length);
    write_bytes(path, file, 8 + length + data_bytes);
    free(file);
}

#define TENSOR(type, shape, offsets) "{\"dtype\":\"" type "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
#define ONE(type, shape, offsets) "{\"a\":" TENSOR(type, shape, offsets) "}"
#define TWO(first, second) "{\"a\":" TENSOR("U8", "[4]", first) ",\"b\":" TENSOR("U8", "[4]", second) "}"

static void test_refuses_bad_headers(void** state) {
    (void)state;
    const struct {
        const char* json;
        size_t data_bytes;
        const char *found, *more;
    } cases[] = {
        // not JSON, not an object
        {"", 0, "no JSON", "byte 0"},
        {"x", 0, "no JSON", "byte 0"},
        {"[]", 0, "no JSON", "byte 0"},
        {" {}", 0, "no JSON", "byte 0"},
        {"{", 0, "no JSON", "one object"},
        {"{\"a\":1,", 0, "no JSON", "one object"},
        {"{} {}", 0, "no JSON", "byte 3"},
        {"{}x", 0, "no JSON", "byte 2"},
        // entries
        {"{\"a\":1}", 0, "\"a\": no object", ""},
        {"{\"a\":[]}", 0, "\"a\": no object", ""},
        {"{\"a\":{}}", 0, "\"a\": no dtype", ""},
        {"{\"a\":{\"dtype\":7,\"shape\":[],\"data_offsets\":[0,4]}}", 4, "no dtype", ""},
        {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "no shape", ""},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[]}}", 4, "two data_offsets", ""},
        {ONE("F32", "4", "[0,4]"), 4, "no shape", ""},
        {ONE("F32", "[1]", "[]"), 4, "two data_offsets", ""},
        {ONE("F32", "[1]", "[0]"), 4, "two data_offsets", ""},
        {ONE("F32", "[1]", "[0,4,4]"), 4, "two data_offsets", ""},
        {ONE("F32", "[1]", "{\"begin\":0,\"end\":4}"), 4, "two data_offsets", ""},
        {ONE("F32", "[1]", "[0,\"4\"]"), 4, "offset is no number", ""},
        {"{\"__metadata__\":[]}", 0, "__metadata__", "object of strings"},
        {"{\"__metadata__\":{\"k\":1}}", 0, "\"k\"", "a string"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "__metadata__", "one object"},
        // numbers
        {ONE("F32", "[-1]", "[0,4]"), 4, "dimension -1", "2^53"},
        {ONE("F32", "[0.5]", "[0,4]"), 4, "dimension 0.5", "2^53"},
        {ONE("F32", "[1e999]", "[0,4]"), 4, "dimension inf", "2^53"},
        {ONE("F32", "[9007199254740992]", "[0,4]"), 4, "dimension 9.0072e+15", "2^53"},
        {ONE("F32", "[18446744073709551617]", "[0,4]"), 4, "dimension 1.84467e+19", "2^53"},
        {ONE("F32", "[null]", "[0,4]"), 4, "dimension is no number", ""},
        {ONE("F32", "[1]", "[-4,0]"), 4, "offset -4", "2^53"},
        {ONE("F32", "[1]", "[0,4.5]"), 5, "offset 4.5", "2^53"},
        {ONE("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, "more than 8 dimensions", ""},
        // sizes
        {ONE("F32", "[4294967296,4294967296]", "[0,0]"), 0, "more than 2^64 elements", ""},
        {ONE("F32", "[4294967296,1073741824]", "[0,0]"), 0, "expected 4611686018427387904 elements of 4", ""},
        {ONE("F32", "[2]", "[0,4]"), 4, "4 bytes of data", "expected 2 elements of 4 bytes"},
        {ONE("BF16", "[1]", "[0,4]"), 4, "4 bytes of data", "expected 1 elements of 2 bytes"},
        {ONE("F32", "[0]", "[0,4]"), 4, "4 bytes of data", "expected 0 elements"},
        {ONE("F32", "[]", "[0,0]"), 0, "0 bytes of data", "expected 1 elements"},
        // places
        {ONE("F32", "[1]", "[4,0]"), 4, "[4, 0]", "4 bytes of data"},
        {ONE("F32", "[2]", "[0,8]"), 4, "[0, 8]", "4 bytes of data"},
        {ONE("F32", "[1]", "[9007199254740984,9007199254740988]"), 4, "[9007199254740984", "4 bytes of data"},
        {ONE("F32", "[1]", "[4,8]"), 8, "begins at offset 4", "expected 0"},
        {ONE("F32", "[1]", "[0,4]"), 5, "5 bytes of data", "expected 4 as in the header"},
        {"{}", 1, "1 bytes of data", "expected 0 as in the header"},
        {TWO("[0,4]", "[5,9]"), 9, "\"b\": data begins at offset 5", "expected 4"},
        {TWO("[0,4]", "[3,7]"), 7, "\"b\": data begins at offset 3", "expected 4"},
        {TWO("[0,4]", "[0,4]"), 4, "data begins at offset 0", "expected 4"},
        {TWO("[4,8]", "[0,4]"), 9, "9 bytes of data", "expected 8"},
        {"{\"a\":" TENSOR("U8", "[4]", "[0,4]") ",\"a\":" TENSOR("U8", "[4]", "[4,8]") "}", 8, "\"a\": found twice",
         ""},
        // types; text from the file stays on one line
        {ONE("I32", "[1]", "[0,4]"), 4, "dtype I32", "F32, BF16, F16 or F64"},
        {ONE("F4\\nerror", "[1]", "[0,4]"), 4, "dtype F4?error,", "F32, BF16, F16 or F64"},
        {"{\"a\\n\\u0001b\":1}", 0, "\"a??b\": no object", ""},
        {"{\"a\nb\":1}", 0, "\"a?b\": no object", ""},
    };
    Scratch s;
    scratch_open(&s);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        write_json(s.path, cases[c].json, cases[c].data_bytes);
        expect_refused(&s, cases[c].found, cases[c].more);
    }
    scratch_close(&s);
}

static void test_accepts_what_the_format_allows(void** state) {
    (void)state;
    const struct {
        const char* json;
        size_t data_bytes, count;
    } cases[] = {
        {"{}", 0, 0},
        {"{} \n\t ", 0, 0},
        {"{\"__metadata__\":{}}", 0, 0},
        {TWO("[4,8]", "[0,4]"), 8, 2},
        {"{\"a\":" TENSOR("U8", "[4]", "[0,4]") ",\"b\":" TENSOR("U8", "[0]", "[0,0]") "}", 4, 2},
        {ONE("F32", "[2,0,9007199254740991]", "[0,0]"), 0, 1},
        {ONE("F8_E4M3", "[7]", "[0,7]"), 7, 1},
        {"{\"a\":{\"data_offsets\":[0,4],\"extra\":{},\"shape\":[1],\"dtype\":\"F32\"}}", 4, 1},
    };
    Scratch s;
    scratch_open(&s);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        write_json(s.path, cases[c].json, cases[c].data_bytes);
        SafeTensors st = safetensors_open(s.path);
        assert_int_equal(st.count, cases[c].count);
        safetensors_close(&st);
    }
    scratch_close(&s);
}

static void test_refuses_bad_lengths(void** state) {
    (void)state;
    const struct {
        uint64_t length;
        off_t file_bytes;
        const char *found, *more;
    } cases[] = {
        {2, 0, "0 bytes", "at least 8"},
        {2, 7, "7 bytes", "at least 8"},
        {2, 8, "header of 2 bytes", "file of 8"},
        {2, 9, "header of 2 bytes", "file of 9"},
        {0, 8, "no JSON", "byte 0"},
        {10000000000, 10, "header of 10000000000 bytes", "file of 10"},
        {UINT64_MAX, 10, "header of 18446744073709551615 bytes", "file of 10"},
        {UINT64_MAX - 7, 10, "header of 18446744073709551608 bytes", "file of 10"},
        {100000001, 200000000, "header of 100000001 bytes", "at most 100000000"},
        {4088, 4096, "no JSON", "one object"},  // ends with the page
    };
    Scratch s;
    scratch_open(&s);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        unsigned char file[12] = "........{\"a,";
        for (int i = 0; i < 8; i++) { file[i] = (unsigned char)(cases[c].length >> 8 * i); }
        write_bytes(s.path, file, sizeof file);
        assert_int_equal(truncate(s.path, cases[c].file_bytes), 0);
        expect_refused(&s, cases[c].found, cases[c].more);
    }
    remove(s.path);
    const char* const missing[] = {s.path, "No such file", NULL};
    expect_fatal(open_and_read, s.path, missing);
    const char* const folder[] = {s.folder, "not a file", NULL};
    expect_fatal(open_and_read, s.folder, folder);
    scratch_close(&s);
}

static void test_refuses_nesting_bombs(void** state) {
    (void)state;
    enum { DEPTH = 1000000 };
    Scratch s;
    scratch_open(&s);
    for (int inside = 0; inside < 3; inside++) {
        const char* start = inside == 0 ? "{\"a\":" : inside == 1 ? "{\"a\":{\"dtype\":\"F32\",\"shape\":" : "";
        const char* repeated = inside == 2 ? "{\"a\":" : "[";
        size_t n = strlen(start), step = strlen(repeated);
        char* json = xcalloc(n + step * DEPTH + 1, 1);
        memcpy(json, start, n);
        for (size_t i = 0; i < DEPTH; i++) { memcpy(json + n + step * i, repeated, step); }
        write_json(s.path, json, 4);
        expect_refused(&s, "no JSON", "");
        free(json);
    }
    scratch_close(&s);
}

// ----------------------------------------------------------------------------
// random damage

// One to four changes: a bit, a byte, a cut, a copied piece, or a character that JSON cares about.
static size_t damage(unsigned char* file, size_t bytes, Random* r) {
    const char* const special = "{}[]\",:0123456789-.e\\u \n\x00\xff";
    for (uint64_t change = 1 + random_below(r, 4); change > 0; change--) {
        uint64_t limit = random_below(r, 4) == 0 ? bytes : bytes < 520 ? bytes : 520;
        size_t at = (size_t)random_below(r, limit), other = (size_t)random_below(r, limit);
        switch (random_below(r, 5)) {
            case 0: file[at] ^= (unsigned char)(1 << random_below(r, 8)); break;
            case 1: file[at] = (unsigned char)random_below(r, 256); break;
            case 2: bytes = random_below(r, 4) == 0 ? at + 1 : bytes - random_below(r, 2); break;
            case 3: memmove(file + at, file + other, (bytes - (at > other ? at : other)) % 17); break;
            default: file[at] = (unsigned char)special[random_below(r, 26)]; break;
        }
    }
    return bytes;
}

enum { TRIALS = 2000 };

typedef struct {
    const Scratch* s;
    const unsigned char* good;
    unsigned char* bad;
    size_t bytes;
    Random random;
    size_t *trial, *accepted;  // shared with the parent
} Fuzz;

static jmp_buf next_trial;

static void abandon_trial(void) { longjmp(next_trial, 1); }

// One process for all trials: the fatal error of a refusal leads to the next trial instead of the exit.
static void fuzz(Fuzz* f) {
    fatal_hook = abandon_trial;
    setjmp(next_trial);
    while (*f->trial < TRIALS) {
        memcpy(f->bad, f->good, f->bytes);
        *f->trial += 1;
        remove(f->s->path);  // a refused file stays mapped
        write_bytes(f->s->path, f->bad, damage(f->bad, f->bytes, &f->random));
        open_and_read((void*)(uintptr_t)f->s->path);
        *f->accepted += 1;
    }
    _exit(0);
}

static void test_random_damage_never_crashes(void** state) {
    (void)state;
    const SafeTensorsEntry small[] = {{"w1", SAFETENSORS_F32, 2, {2, 2}}, {"w2", SAFETENSORS_BF16, 1, {3}},
                                      {"s", SAFETENSORS_F64, 0, {0}},     {"h", SAFETENSORS_F16, 2, {1, 5}},
                                      {"e", SAFETENSORS_F32, 1, {0}},     {"w3", SAFETENSORS_F32, 1, {4}}};
    Scratch s;
    scratch_open(&s);
    safetensors_write(s.path, small, 6, metadata, 2, pattern_source, NULL);
    Fuzz f = {.s = &s, .random = random_stream(1, 0)};
    unsigned char* good = read_bytes(s.path, &f.bytes);
    f.good = good;
    f.bad = xcalloc(f.bytes, 1);
    f.trial = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    f.accepted = f.trial + 1;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        if (!freopen(s.temporary, "w", stderr)) { _exit(2); }
        fuzz(&f);
    }
    int status;
    waitpid(child, &status, 0);
    size_t bytes, lines = 0;
    char* output = (char*)read_bytes(s.temporary, &bytes);
    if (status != 0) { fail_msg("trial %zu: wait status %d\n%s", *f.trial, status, output); }
    for (char *line = output, *end; (end = strchr(line, '\n')); line = end + 1, lines++) {
        assert_memory_equal(line, "error: ", 7);
    }
    assert_int_equal(*f.trial, TRIALS);
    assert_int_equal(lines + *f.accepted, TRIALS);
    assert_in_range(*f.accepted, TRIALS / 50, TRIALS / 2);  // both outcomes were exercised
    munmap(f.trial, 4096);
    free(output);
    free(f.bad);
    free(good);
    remove(s.temporary);
    scratch_close(&s);
}

// ----------------------------------------------------------------------------
// saves that fail

static void assert_old_file(const Scratch* s) {
    SafeTensors st = safetensors_open(s->path);
    assert_int_equal(st.count, ENTRIES);
    for (size_t i = 0; i < ENTRIES; i++) { assert_pattern(safetensors_find(&st, entries[i].name), i); }
    safetensors_close(&st);
}

static const SafeTensorsEntry new_entry[] = {{"new", SAFETENSORS_F32, 1, {3 * SAFETENSORS_CHUNK / 4}}};

static void write_new(void* path) { safetensors_write(path, new_entry, 1, NULL, 0, pattern_source, NULL); }

static void write_new_limited(void* path) {
    signal(SIGXFSZ, SIG_IGN);
    const struct rlimit limit = {SAFETENSORS_CHUNK + 100, RLIM_INFINITY};
    setrlimit(RLIMIT_FSIZE, &limit);
    write_new(path);
}

static void test_full_disk_keeps_the_old_file(void** state) {
    (void)state;
    Scratch s;
    scratch_open(&s);
    write_entries(s.path);
    const char* const limited[] = {s.path, "File too large", "unchanged", NULL};
    expect_fatal(write_new_limited, s.path, limited);
    assert_false(file_exists(s.temporary));
    assert_old_file(&s);

    assert_int_equal(symlink("/dev/full", s.temporary), 0);
    const char* const full[] = {s.path, "No space left on device", "unchanged", NULL};
    expect_fatal(write_new, s.path, full);
    assert_false(file_exists(s.temporary));
    assert_old_file(&s);

    write_new(s.path);
    SafeTensors st = safetensors_open(s.path);
    assert_non_null(safetensors_find(&st, "new"));
    safetensors_close(&st);
    scratch_close(&s);
}

static void killed_source(void* context, size_t index, size_t offset, void* chunk, size_t bytes) {
    pattern_source(context, index, offset, chunk, bytes);
    if (offset > 0) { raise(SIGKILL); }
}

static void test_kill_during_a_save_keeps_the_old_file(void** state) {
    (void)state;
    Scratch s;
    scratch_open(&s);
    write_entries(s.path);
    pid_t child = fork();
    if (child == 0) {
        safetensors_write(s.path, new_entry, 1, NULL, 0, killed_source, NULL);
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    assert_true(WIFSIGNALED(status));
    assert_true(file_exists(s.temporary));
    assert_old_file(&s);
    write_entries(s.path);  // over the longer temporary file that was left
    assert_false(file_exists(s.temporary));
    assert_old_file(&s);
    scratch_close(&s);
}

static void test_refuses_to_write_nowhere(void** state) {
    (void)state;
    char* path = "/tmp/bamc_no_such_folder/x.safetensors";
    const char* const words[] = {path, "No such file", "folder exists", NULL};
    expect_fatal(write_new, path, words);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_nothing_but_a_header),
        cmocka_unit_test(test_large_tensors_are_written_in_pieces),
        cmocka_unit_test(test_every_16_bit_float),
        cmocka_unit_test(test_file_of_the_python_package),
        cmocka_unit_test(test_refuses_bad_headers),
        cmocka_unit_test(test_accepts_what_the_format_allows),
        cmocka_unit_test(test_refuses_bad_lengths),
        cmocka_unit_test(test_refuses_nesting_bombs),
        cmocka_unit_test(test_random_damage_never_crashes),
        cmocka_unit_test(test_full_disk_keeps_the_old_file),
        cmocka_unit_test(test_kill_during_a_save_keeps_the_old_file),
        cmocka_unit_test(test_refuses_to_write_nowhere),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
