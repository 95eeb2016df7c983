/*
The program train_gpt as it is compiled for CUDA, on the emulated device: its runs against those of the CPU's program
for every encoding, going on from its checkpoints bit for bit, checkpoints that change the backend, and what it refuses.
*/
#include "emu_programs_util.h"

enum { STEPS = 10 };

// Documents of letters, the next one likely: of any length from 2 on, and some longer than a row.
static uint32_t document_token(size_t position, Random* r) {
    static uint32_t last;
    double u = random_uniform(r);
    if (position == 0 || last == BYTES_EOS) {
        last = BYTES_BOS;
    } else if (u < 1.0 / 40) {
        last = BYTES_EOS;
    } else {
        last = last >= 'a' && last < 'p' && u < 0.7 ? last + 1 : 'a' + (uint32_t)random_below(r, 16);
    }
    return last;
}

// ----------------------------------------------------------------------------
// against the CPU

// Every encoding, and between them what else changes which kernels run and on which shapes. The last 28 positions of
// 100 are a tile that is not full, heads of 40 channels end in a part of a tile.
static const struct {
    const char *encoding, *flags;
} cases[] = {
    {"nope", "--sequence_length 100"},
    {"nope_ssmax", "--recompute 1"},
    {"sinusoidal", "--n_kv_heads 1"},
    {"sinusoidal_ssmax", "--sinusoidal_freqs vaswani --no_seq_scale"},
    {"rotary", "--n_kv_heads 1 --optimizer adamw --weight_decay 0.1"},
    {"rotary_ssmax",
     "--min_tokens_per_step 400 --sequence_length 72 --rotary_fraction 0.25 --rope_scaling yarn --rope_factor 4 "
     "--rope_original_length 32 --qk_norm --window 40"},
    {"alibi", "--sequence_length 100 --grad_clip 0"},
    {"alibi_ssmax", "--dim 80 --ffn_dim 104"},
    {"bam", "--theta_alpha_init sampled --theta_beta_init linear --theta_mu_trainable --prior_lr 3e-2"},
    {"bam_ssmax", "--global_prior --theta_alpha_init sampled --ssmax_prior outside --recompute 1"},
    {"kerple_log", "--prior_lr 3e-2"},
    {"kerple_power_ssmax", "--prior_lr 3e-2 --n_kv_heads 1"},
    {"alibi_learned", "--sequence_length 100 --no-alibi_log_slope_trainable"},
    {"sandwich_ssmax", "--sandwich_dim 64 --gated_attention --final_softcap 4"},
    {"t5", "--global_prior --t5_bias_init sampled --log_scale 8,0.5 --window 33"},
    {"table_ssmax", "--table_bias_init sampled --ssmax_prior outside"},
    {"learned", "--n_kv_heads 1 --weight_decay 0.1 --learned_length 100"},
    {"rotary+bam_ssmax+alibi", "--n_layers 3 --layer_encodings rotary,bam_ssmax,alibi --recompute 1"},
    // a unit that is on at every distance adds the same to all logits of a row: rounding alone would move its bias
    {"fire", "--prior_lr 3e-2 --no-fire_hidden_bias_trainable"},
};
enum { CASES = sizeof cases / sizeof *cases };

#define MODEL \
    "--dataset documents --dim 64 --batch_size 2 --sequence_length 96 --min_tokens_per_step 1 --checkpoint_every 0 "

// Largest over the tensors of |a - b| / |b - initial|, root mean squares: how much the training itself differs. What b
// has not trained, a must not have trained either.
static double training_distance(const char* a, const char* b, const char* initial) {
    SafeTensors x = safetensors_open(a), y = safetensors_open(b), z = safetensors_open(initial);
    assert_int_equal(x.count, y.count);
    double worst = 0;
    for (size_t i = 0; i < y.count; i++) {
        const SafeTensor* tensors[] = {safetensors_find(&x, y.tensors[i].name), &y.tensors[i],
                                       safetensors_find(&z, y.tensors[i].name)};
        size_t n = y.tensors[i].count;
        float* values[3];
        for (size_t k = 0; k < 3; k++) {
            assert_true(tensors[k] && tensors[k]->count == n);
            values[k] = (float*)xcalloc(n, sizeof(float));
            safetensors_read_f32(values[k], tensors[k]);
        }
        double difference = 0, trained = 0;
        for (size_t k = 0; k < n; k++) {
            difference += pow((double)values[0][k] - values[1][k], 2);
            trained += pow((double)values[1][k] - values[2][k], 2);
        }
        double distance = difference == 0 ? 0 : sqrt(difference / trained);
        worst = isnan(distance) ? INFINITY : fmax(worst, distance);
        for (size_t k = 0; k < 3; k++) { free(values[k]); }
    }
    safetensors_close(&x), safetensors_close(&y), safetensors_close(&z);
    return worst;
}

// Largest relative difference of a column of two logs with as many rows.
static double column_distance(const char* log_a, const char* log_b, const char* encoding, unsigned column) {
    double a[64], b[64], worst = 0;
    char *path_a = run_file(log_a, encoding, "train.log"), *path_b = run_file(log_b, encoding, "train.log");
    size_t n = csv_column(path_a, column, a, 64), m = csv_column(path_b, column, b, 64);
    assert_true(n == m && n > 0);
    for (size_t i = 0; i < n; i++) {
        double d = fabs(a[i] / b[i] - 1);
        worst = isnan(d) ? INFINITY : fmax(worst, d);
    }
    free(path_a), free(path_b);
    return worst;
}

static void compare_with_cpu(const char* encoding, const char* log, const double* allowed) {
    char *a = run_file(log, encoding, "model.safetensors"), *b = run_file("cpu", encoding, "model.safetensors");
    char* initial = run_file("initial", encoding, "model.safetensors");
    double losses = column_distance(log, "cpu", encoding, 2), norms = column_distance(log, "cpu", encoding, 3);
    double training = training_distance(a, b, initial);
    assert_error_below(losses, allowed[0]);
    assert_error_below(norms, allowed[1]);
    assert_error_below(training, allowed[2]);
    free(a), free(b), free(initial);
}

// Losses, norms of the gradient, training. In fp32 only the order of sums differs: 6e-8, 1e-6 and 2e-5 were seen. bf16
// keeps 8 bits: 4e-4, 6e-3 and, depending on the random bits of rounding, 0.12 to 0.36, the last where the parts of a
// prior's gradient cancel; AdamW's first steps divide small gradients by themselves. A gradient that is missing is 1
// away, one of the wrong sign 2.
static const double allowed[EMULATED_BUILDS][3] = {{1e-6, 1e-5, 2e-4}, {1e-3, 1e-2, 0.6}};

static void test_every_encoding(void** state) {
    (void)state;
    for (size_t c = 0; c < CASES; c++) {
        const bool differ = strchr(cases[c].encoding, '+') != NULL;  // then the flags say it
        char* flags = text(MODEL "%s %s --num_iterations %d %s", differ ? "" : "--position_encoding",
                           differ ? "" : cases[c].encoding, STEPS, cases[c].flags);
        char* still = text("%s --learning_rate 1e-30 --prior_lr 1e-30 --num_iterations 1", flags);
        use_programs(NULL);
        train_tiny_quietly("cpu", flags);
        train_tiny_quietly("initial", still);
        for (size_t i = 0; i < EMULATED_BUILDS; i++) {
            const EmulatedBuild* build = &emulated_builds[i];
            use_programs(build);
            train_tiny_quietly(build->dtype, flags);
            compare_with_cpu(cases[c].encoding, build->dtype, allowed[i]);
        }
        free(flags), free(still);
    }
}

// ----------------------------------------------------------------------------
// going on from a checkpoint

// Everything that changes from step to step: data, schedule, moments, a prior that makes new tables, the seed of
// stochastic rounding, samples.
#define RESUMED                                                                                                        \
    MODEL                                                                                                              \
    "--position_encoding bam_ssmax --theta_alpha_init slope --prior_lr 3e-2 --lr_scheduler linear --val_loss_every 5 " \
    "--val_tokens 192 --val_tokens_padding 0 --sample_every 5 --sample_length 4 --sample_prompt abc "

// Weights, moments and logs are those of the run that nothing stopped, bit for bit, and that in another order of
// threads and blocks.
static void test_resume_bit_for_bit(void** state) {
    (void)state;
    static const int steps[] = {3, 8};
    for (size_t i = 0; i < EMULATED_BUILDS; i++) {
        use_programs(&emulated_builds[i]);
        emulated_order("0", "1");
        char* log = text("whole_%s", emulated_builds[i].dtype);
        char* flags = text(RESUMED "--num_iterations %d --checkpoint_every 1 --keep_checkpoints 99", STEPS);
        train_tiny_quietly(log, flags);
        char* whole = run_file(log, "bam_ssmax", "");
        emulated_order("3", "2");
        for (size_t k = 0; k < 2; k++) {
            char *cut = text("%s/cut_%zu_%zu", scratch, i, k), *from = text("%s/checkpoints/step_%09d", cut, steps[k]);
            copy_unfinished(whole, cut);
            Run r = resume(from);
            assert_identical(whole, cut);
            run_free(&r);
            free(cut), free(from);
        }
        free(log), free(flags), free(whole);
    }
}

// Stopped at any step, and going on in another order. The pipe of its output holds fewer lines than are left.
static void test_stop_and_resume(void** state) {
    (void)state;
    static const char small[] = RESUMED "--dim 32 --batch_size 1 --sequence_length 32 --num_iterations 80";
    for (size_t i = 0; i < EMULATED_BUILDS; i++) {
        use_programs(&emulated_builds[i]);
        emulated_order("0", "1");
        train_tiny_quietly(emulated_builds[i].precision, small);
        char* log = text("stopped_%s", emulated_builds[i].precision);
        char* flags = tiny_flags(log, small);
        emulated_order("2", "2");
        Run r = start_train(flags);
        assert_true(read_until(&r, " 4/80"));
        kill(r.pid, SIGTERM);
        finish_train(&r);
        assert_true(exited_with(&r, 128 + SIGTERM));
        char *stopped = run_file(log, "bam_ssmax", ""), *optimizer = text("%s/optimizer.safetensors", stopped);
        double step = metadata_number(optimizer, "step");
        assert_true(step >= 4 && step < 80);
        emulated_order("0", "1");
        Run last = resume(stopped);
        char* whole = run_file(emulated_builds[i].precision, "bam_ssmax", "");
        assert_identical(whole, stopped);
        run_free(&r), run_free(&last);
        free(log), free(flags), free(stopped), free(optimizer), free(whole);
    }
}

// A run of the CPU's program goes on on the device, and the other way, with the losses of the run that it leaves; bf16
// was seen 1e-4 away.
static void check_crossing(const char* whole, const EmulatedBuild* to, const char* dtype, double allowed) {
    static size_t number;
    char *cut = text("%s/cross_%zu", scratch, number++), *from = text("%s/checkpoints/step_%09d", cut, 5);
    copy_unfinished(whole, cut);
    use_programs(to);
    char *same = resume_flags(from), *flags = text("%s --dtype %s", same, dtype);
    Run r = run_train(flags);
    if (!exited_with(&r, 0)) { print_error("train_gpt %s: %s\n", flags, r.err); }
    assert_true(exited_with(&r, 0));
    double a[STEPS + 1], b[STEPS + 1];
    char *log_a = text("%s/train.log", whole), *log_b = text("%s/train.log", cut);
    assert_int_equal(csv_column(log_a, 2, a, STEPS + 1), STEPS);
    assert_int_equal(csv_column(log_b, 2, b, STEPS + 1), STEPS);
    double worst = 0;
    for (size_t i = 5; i < STEPS; i++) { worst = fmax(worst, fabs(b[i] / a[i] - 1)); }
    assert_error_below(worst, allowed);
    run_free(&r);
    free(cut), free(from), free(same), free(flags), free(log_a), free(log_b);
}

static void test_checkpoints_cross(void** state) {
    (void)state;
    use_programs(NULL);
    char* flags = text(RESUMED "--num_iterations %d --checkpoint_every 1 --keep_checkpoints 99", STEPS);
    train_tiny_quietly("whole_cpu", flags);
    char* cpu = run_file("whole_cpu", "bam_ssmax", "");
    for (size_t i = 0; i < EMULATED_BUILDS; i++) {
        const EmulatedBuild* build = &emulated_builds[i];
        double allowed = i == EMULATED_FP32 ? 1e-6 : 1e-3;
        char* device = text("%s/whole_%s/l2/bam_ssmax/version_00", scratch, build->dtype);
        check_crossing(cpu, build, build->dtype, allowed);
        check_crossing(device, NULL, "float32", allowed);
        free(device);
    }
    free(flags), free(cpu);
}

// ----------------------------------------------------------------------------
// memory, and what it refuses

// A model that fits is not refused: it needs 38 MB, 32 of them for cuBLASLt.
static void test_memory_that_is_enough(void** state) {
    (void)state;
    setenv("EMU_MEMORY", "42000000", 1);
    for (size_t i = 0; i < EMULATED_BUILDS; i++) {
        use_programs(&emulated_builds[i]);
        train_tiny_quietly("enough", MODEL "--num_iterations 1");
    }
    unsetenv("EMU_MEMORY");
}

static void test_refused(void** state) {
    (void)state;
    static const struct {
        const char *flags, *memory, *words;
    } cases[] = {
        {"--device cuda:7", NULL, "--device cuda:7|below 1"},
        {"--device cpu", NULL, "--device cpu|built for CUDA"},
        {"--dtype float16", NULL, "float16"},
        {"--softcap 30", NULL, "--softcap: the kernels for CUDA have no such term|train on the CPU"},
        {"--sinks", NULL, "--sinks: the kernels for CUDA have no such term|train on the CPU"},
        {"--position_encoding mix", NULL, "--position_encoding mix: the kernels for CUDA have no such term"},
        {"--position_encoding fox", NULL, "attention on CUDA has no numbers by key yet|the build for the CPU"},
        {"", "30000000", "the model needs|the device has 30 MB free|lower --batch_size or --model_size"},
    };
    for (size_t i = 0; i < EMULATED_BUILDS; i++) {
        use_programs(&emulated_builds[i]);
        const EmulatedBuild* other = &emulated_builds[EMULATED_BUILDS - 1 - i];
        char *flags = tiny_flags("refused", MODEL "--num_iterations 1"),
             *dtype = text("%s --dtype %s", flags, other->dtype);
        char* words = text("--dtype %s|make cuda PRECISION=%s", other->dtype, other->precision);
        Run r = run_train(dtype);
        assert_refused(&r, words);
        run_free(&r);
        for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
            char* all = text("%s %s", flags, cases[k].flags);
            if (cases[k].memory) { setenv("EMU_MEMORY", cases[k].memory, 1); }
            r = run_train(all);
            unsetenv("EMU_MEMORY");
            assert_refused(&r, cases[k].words);
            run_free(&r);
            free(all);
        }
        free(flags), free(dtype), free(words);
    }
}

int main(void) {
    emulator_set_up();
    make_dataset("documents", document_token, 1, 20000);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_encoding),        cmocka_unit_test(test_resume_bit_for_bit),
        cmocka_unit_test(test_stop_and_resume),       cmocka_unit_test(test_checkpoints_cross),
        cmocka_unit_test(test_memory_that_is_enough), cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
