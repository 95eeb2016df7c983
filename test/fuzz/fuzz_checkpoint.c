/*
A checkpoint that is loaded into a model: to resume, to evaluate, or as weights to start from. Input: how, then the
header of model.safetensors, a zero byte, and the header of optimizer.safetensors; the data have the size of whole
files.
*/
#include "fuzz.h"

#include "../../llmc/checkpoint.h"
#include "../../llmc/logger.h"

static Model model;

static void create_model(void) {
    ModelConfig c;
    memset(&c, 0, sizeof c);
    c.V = 10, c.C = 8, c.L = 1, c.NH = c.NKV = 1, c.F = 8, c.bos = -1;
    if (!posenc_parse("bam_ssmax", &c.encoding, &c.ssmax)) { abort(); }
    c.options = model_default_options();
    c.posenc = posenc_default_options();
    model_config_check(&c);
    const ModelPlan plan = {MODE_TRAIN, 1, 4, 1, 4, 0, 1};
    model_plan(&model, &c, &plan);
    model_allocate(&model);
    model_init(&model, 1);
}

static size_t data_bytes(int arrays) { return (size_t)arrays * model.learned_count * sizeof(float); }

static void write_file(const char* name, const uint8_t* header, size_t length, size_t bytes) {
    unsigned char* file = (unsigned char*)xcalloc(8 + length + bytes, 1);
    uint64_t n = length;
    memcpy(file, &n, 8);
    memcpy(file + 8, header, length);
    fuzz_named_file(name, file, 8 + length + bytes);
    free(file);
}

static void fuzz_one(const uint8_t* data, size_t size) {
    if (!model.tensors) {
        fuzz_runs = false;  // it outlives the run
        create_model();
        fuzz_runs = true;
    }
    uint8_t choice = fuzz_take(&data, &size);
    const uint8_t* zero = (const uint8_t*)memchr(data, 0, size);
    size_t first = zero ? (size_t)(zero - data) : size, second = zero ? size - first - 1 : 0;
    write_file("model.safetensors", data, first, data_bytes(1));
    write_file("optimizer.safetensors", data + size - second, second, data_bytes(2));
    char path[256];
    snprintf(path, sizeof path, "%s/model.safetensors", fuzz_folder);
    RunState state, now;
    memset(&now, 0, sizeof now);
    if ((choice & 3) == 0) {
        char* folder = checkpoint_choose(fuzz_folder);
        checkpoint_load(&model, &state, folder);
        free(folder);
    } else if ((choice & 3) == 1) {
        SafeTensors file = safetensors_open(path);
        checkpoint_load_weights(&model, &file);
        safetensors_close(&file);
    } else {
        checkpoint_init_from(&model, &now, path, 1);
    }
}

static void fuzz_seeds(void) {
    create_model();
    RunState state;
    memset(&state, 0, sizeof state);
    state.step = 7, state.tokens_per_step = 4, state.dataset_tokens = 1000;
    cJSON* args = model_args_json(&model.config, 1, 4);
    checkpoint_save(fuzz_folder, &model, model_state, &state, "bam_ssmax", args);
    cJSON_Delete(args);
    static const char* const names[] = {"model", "optimizer"};
    char both[1 << 14];
    size_t used = 0;
    for (size_t i = 0; i < 2; i++) {
        char path[256];
        snprintf(path, sizeof path, "%s/checkpoints/step_000000007/%s.safetensors", fuzz_folder, names[i]);
        char* file = read_text(path, NULL);
        uint64_t length;
        memcpy(&length, file, 8);
        if (used + length + 1 > sizeof both) { abort(); }
        memcpy(both + used, file + 8, length);
        used += length;
        both[used++] = '\0';
        free(file);
    }
    for (uint8_t choice = 0; choice < 3; choice++) { fuzz_seed(choice, both, used - 1); }
}
