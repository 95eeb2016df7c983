/*
The sharded optimiser within one process: how arrays are cut, that the shards of a model hold every parameter once, and
that updating them one after another gives the bits of the whole update.
*/
#include "test_util.h"

#include "../llmc/model.h"

enum { MAX_SHARDS = 5 };

static void test_parts(void** state) {
    (void)state;
    for (size_t parts = 1; parts <= 9; parts++) {
        for (size_t n = 0; n <= 2000; n++) {
            const size_t usual = part_begin(n, 1, parts);
            assert_int_equal(part_begin(n, 0, parts), 0);
            assert_int_equal(part_begin(n, parts, parts), n);
            for (size_t part = 0; part < parts; part++) {
                size_t begin = part_begin(n, part, parts), end = part_begin(n, part + 1, parts);
                assert_true(begin <= end && begin % 16 == 0);
                if (part + 1 < parts) { assert_int_equal(end - begin, usual); }
            }
            // the last has at most what a cache line a part leaves over
            assert_true(n - part_begin(n, parts - 1, parts) < usual + 16 * parts);
        }
    }
}

// ----------------------------------------------------------------------------
// models

static const struct {
    const char* encoding;
    size_t V, C, NH, NKV, F;
    bool global_prior, adamw;
} rows[] = {
    {"bam_ssmax", 400, 40, 5, 1, 56, true, false},     {"bam", 258, 24, 3, 3, 40, false, true},
    {"rotary_ssmax", 385, 40, 5, 5, 72, false, false}, {"nope", 2, 8, 1, 1, 8, false, false},
    {"learned", 130, 24, 3, 3, 40, false, true},
};
enum { ROWS = sizeof rows / sizeof *rows };

static ModelConfig config_of(size_t row) {
    ModelConfig c;
    memset(&c, 0, sizeof c);
    assert_true(posenc_parse(rows[row].encoding, &c.encoding, &c.ssmax));
    c.V = rows[row].V, c.C = rows[row].C, c.L = 2, c.NH = rows[row].NH, c.NKV = rows[row].NKV, c.F = rows[row].F;
    c.bos = -1;
    c.options = model_default_options(), c.options.global_prior = rows[row].global_prior;
    c.options.learned_length = 10;
    c.posenc = posenc_default_options();
    c.posenc.trained[POSENC_theta_mu] = false;  // a frozen tensor between trained ones
    model_config_check(&c);
    return c;
}

static void plan_shard(Model* model, size_t row, size_t shard, size_t shards) {
    ModelConfig c = config_of(row);
    ModelPlan plan = {MODE_TRAIN, 1, 8, 1, 8, shard, shards};
    model_plan(model, &c, &plan);
}

// Every element is in one shard or, where nothing is sharded, in all; moments are stored without a gap.
static void test_shards_cover_parameters(void** state) {
    (void)state;
    for (size_t row = 0; row < ROWS; row++) {
        for (size_t shards = 1; shards <= MAX_SHARDS; shards++) {
            Model models[MAX_SHARDS];
            for (size_t i = 0; i < shards; i++) { plan_shard(&models[i], row, i, shards); }
            const size_t n = models[0].param_count;
            unsigned char* holders = (unsigned char*)xcalloc(n, 1);
            for (size_t i = 0; i < shards; i++) {
                size_t moments = 0, offset = 0;
                assert_int_equal(models[i].param_count, n);
                for (size_t k = 0; k < models[i].segment_count; k++) {
                    const Segment* s = &models[i].segments[k];
                    assert_int_equal(s->offset, offset);
                    assert_int_equal(s->moments, moments);
                    assert_true(s->begin <= s->end && s->end <= s->count);
                    assert_int_equal(s->moments % 16, 0);
                    for (size_t e = s->begin; e < s->end; e++) { holders[s->offset + e] += s->sharded || i == 0; }
                    if (!s->sharded) { assert_true(s->begin == 0 && s->end == s->count); }
                    if (shards == 1) { assert_false(s->sharded); }
                    moments += s->end - s->begin, offset += s->count;
                }
                assert_int_equal(offset, n);
                assert_int_equal(models[i].moment_count, moments);
            }
            for (size_t e = 0; e < n; e++) { assert_int_equal(holders[e], 1); }
            free(holders);
            for (size_t i = 0; i < shards; i++) { model_free(&models[i]); }
        }
    }
}

// ----------------------------------------------------------------------------
// the update

static UpdateSettings settings_of(size_t row, size_t step) {
    UpdateSettings s = {1e-2, 3e-2, 0.1, 0.9, 0.95, 1e-8, 0.7, step, rows[row].adamw};
    return s;
}

// The state of a model with shard `i` of `shards`: drawn weights, and moments from host arrays as a checkpoint has
// them.
static Model start_model(size_t row, size_t i, size_t shards, const float* m, const float* v, const float* grads) {
    Model model;
    plan_shard(&model, row, i, shards);
    model_allocate(&model);
    model_init(&model, 7);
    for (size_t k = 0; k < model.tensor_count; k++) {
        const Tensor* t = &model.tensors[k];
        model_write_moments(&model, model.m, t, m + t->offset);
        model_write_moments(&model, model.v, t, v + t->offset);
        copy_to_device(model.grads + t->offset, grads + t->offset, t->count * sizeof(float));
    }
    return model;
}

static void assert_same_shard(const Model* whole, const Model* part) {
    for (size_t k = 0; k < part->segment_count; k++) {
        const Segment *s = &part->segments[k], *w = &whole->segments[k];
        const size_t bytes = (s->end - s->begin) * sizeof(float);
        assert_memory_equal(part->master + s->offset + s->begin, whole->master + s->offset + s->begin, bytes);
        assert_memory_equal(part->m + s->moments, whole->m + w->moments + s->begin, bytes);
        assert_memory_equal(part->v + s->moments, whole->v + w->moments + s->begin, bytes);
    }
}

static void test_sharded_update(void** state) {
    (void)state;
    backend_init("cpu", "float32");
    for (size_t row = 0; row < ROWS; row++) {
        Model layout;
        plan_shard(&layout, row, 0, 1);
        const size_t n = layout.param_count;
        model_free(&layout);
        Random random = random_stream(3, row);
        float *m = random_array(n, 0.1, &random), *v = random_array(n, 0.1, &random);
        float *first = random_array(n, 1, &random), *second = random_array(n, 1, &random);
        for (size_t i = 0; i < n; i++) { v[i] = fabsf(v[i]); }
        for (size_t shards = 2; shards <= MAX_SHARDS; shards++) {
            Model whole = start_model(row, 0, 1, m, v, first);
            double squares = model_gradient_squares(&whole), sum = 0;
            for (size_t step = 9; step < 11; step++) {
                UpdateSettings settings = settings_of(row, step);
                model_update(&whole, &settings);
                memcpy(whole.grads, second, n * sizeof(float));
            }
            for (size_t i = 0; i < shards; i++) {
                Model part = start_model(row, i, shards, m, v, first);
                sum += model_gradient_squares(&part);
                for (size_t step = 9; step < 11; step++) {
                    UpdateSettings settings = settings_of(row, step);
                    model_update(&part, &settings);
                    memcpy(part.grads, second, n * sizeof(float));
                }
                assert_same_shard(&whole, &part);
                model_free(&part);
            }
            assert_error_below(fabs(sum / squares - 1), 1e-12);
            model_free(&whole);
        }
        free(m), free(v), free(first), free(second);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_shards_cover_parameters),
        cmocka_unit_test(test_sharded_update),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
