/*
Files of tensors, every value read as floats. Input: a choice, then the file itself, or (choice BUILT) the header's
text, whose length goes in front and behind which as many bytes of data as are left of the input.
*/
#include "fuzz.h"

#include "../../llmc/safetensors.h"

enum { BUILT = 1 };

static void read_file(const char* path) {
    SafeTensors st = safetensors_open(path);
    safetensors_metadata(&st, "step");
    for (size_t i = 0; i < st.count; i++) {
        const SafeTensor* t = safetensors_find(&st, st.tensors[i].name);
        if (t != &st.tensors[i]) { abort(); }
        if (safetensors_type_bytes(t->type) == 0) { continue; }
        float* values = (float*)xcalloc(t->count, sizeof(float));
        safetensors_read_f32(values, t);
        free(values);
    }
    safetensors_close(&st);
}

static void fuzz_one(const uint8_t* data, size_t size) {
    uint8_t choice = fuzz_take(&data, &size);
    if (!(choice & BUILT)) {
        read_file(fuzz_file(data, size));
        return;
    }
    const uint8_t* end = (const uint8_t*)memchr(data, 0, size);
    uint64_t length = end ? (uint64_t)(end - data) : size;
    size_t rest = end ? size - length - 1 : 0;
    unsigned char* file = (unsigned char*)xcalloc(8 + length + rest + 1, 1);
    memcpy(file, &length, 8);
    memcpy(file + 8, data, length);
    if (rest) { memcpy(file + 8 + length, end + 1, rest); }
    read_file(fuzz_file(file, 8 + length + rest));
    free(file);
}

static void fuzz_seeds(void) {
    static const char* const headers[] = {
        "{}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}}",
        "{\"__metadata__\":{\"step\":\"12\",\"format\":\"pt\"},\"b\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_"
        "offsets\":"
        "[0,8]},\"c\":{\"dtype\":\"F16\",\"shape\":[2,4],\"data_offsets\":[8,24]}}   ",
        "{\"d\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[0,8]},\"e\":{\"dtype\":\"I64\",\"shape\":[2],"
        "\"data_offsets\":[8,24]}}",
        "{\"f\":{\"dtype\":\"F8_E4M3\",\"shape\":[24],\"data_offsets\":[0,24]},\"g\":{\"dtype\":\"U8\",\"shape\":[0,7],"
        "\"data_offsets\":[24,24]}}",
        "{\"h\\u00e9\\n\":{\"dtype\":\"BOOL\",\"shape\":[1,1,1,1,1,1,1,24],\"data_offsets\":[0,24]}}",
    };
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
        char input[512] = {0}, file[512] = {0};
        uint64_t length = strlen(headers[i]), bytes = i ? 24 : 0;
        memcpy(input, headers[i], length);
        for (uint64_t b = 0; b < bytes; b++) { input[length + 1 + b] = (char)(b * 37); }
        memcpy(file, &length, 8);
        memcpy(file + 8, headers[i], length);
        memcpy(file + 8 + length, input + length + 1, bytes);
        fuzz_seed(BUILT, input, length + 1 + bytes);
        fuzz_seed(0, file, 8 + length + bytes);
    }
}
