/*
Tests of the program evaluate: corpora of letters with the hash of the tokenizer "bytes", a trained run of each, and
running the program, which is ./evaluate or that of the environment variable EVALUATE.
*/
#ifndef EVALUATE_UTIL_H
#define EVALUATE_UTIL_H

#include "train_util.h"

#include "../llmc/tokenizer.h"

static const ShardInfo bytes_info = {2, 0, BYTES_VOCAB, BYTES_BOS, BYTES_EOS, 0x65b1d004};

// SCRATCH/data/NAME with one shard of these tokens; info's count is not read.
static inline void make_shard(const char* name, const ShardInfo* info, const uint32_t* tokens, size_t count) {
    Folder folder;
    ShardInfo whole = *info;
    memset(&folder, 0, sizeof folder);
    snprintf(folder.path, sizeof folder.path, "%.80s/data/%.40s", scratch, name);
    make_directories(folder.path);
    whole.token_count = count;
    write_shard(&folder, "part_0000.bin", &whole, tokens);
}

// Documents BOS, letters, EOS of these many tokens in all.
static inline void make_documents(const char* name, const size_t* lengths, size_t count) {
    size_t total = 0, n = 0;
    for (size_t i = 0; i < count; i++) { total += lengths[i]; }
    uint32_t* tokens = (uint32_t*)xcalloc(total, sizeof(uint32_t));
    Random r = random_stream(9, 0);
    for (size_t i = 0; i < count; i++) {
        tokens[n] = BYTES_BOS;
        for (size_t k = 1; k + 1 < lengths[i]; k++) { tokens[n + k] = 'a' + (uint32_t)random_below(&r, 26); }
        tokens[n + lengths[i] - 1] = BYTES_EOS;
        n += lengths[i];
    }
    make_shard(name, &bytes_info, tokens, total);
    free(tokens);
}

// The documents of the dataset "articles": four of them hold a row of 65 tokens beside their EOS.
static const size_t article_lengths[] = {64, 65, 66, 3, 67, 200, 66};
enum { ARTICLES = 7 };

static inline Run start_evaluate(const char* flags) {
    const char *program = getenv("EVALUATE"), *trainer = getenv("TRAIN_GPT");
    char* kept = trainer ? xstrdup(trainer) : NULL;
    setenv("TRAIN_GPT", program ? program : "./evaluate", 1);
    Run r = start_train(flags);
    if (kept) {
        setenv("TRAIN_GPT", kept, 1);
    } else {
        unsetenv("TRAIN_GPT");
    }
    free(kept);
    return r;
}

static inline Run run_evaluate(const char* flags) {
    Run r = start_evaluate(flags);
    finish_train(&r);
    return r;
}

// `--log_dir RUN --tokenizer bytes --data_dir SCRATCH/data` and flags; release with free().
static inline char* evaluate_flags(const char* run, const char* flags) {
    return text("--log_dir %s --tokenizer bytes --data_dir %s/data %s", run, scratch, flags);
}

// Runs to its end with status 0; returns what it printed, the caller's to free.
static inline char* evaluate_run(const char* run, const char* flags) {
    char* all = evaluate_flags(run, flags);
    Run r = run_evaluate(all);
    if (!exited_with(&r, 0)) { print_error("evaluate %s\nwait status %d\n%s\n%s\n", all, r.status, r.out, r.err); }
    assert_true(exited_with(&r, 0));
    char* out = xstrdup(r.out);
    run_free(&r);
    free(all);
    return out;
}

static inline void evaluate_quietly(const char* run, const char* flags) { free(evaluate_run(run, flags)); }

static inline cJSON* results_of(const char* run) {
    char* path = text("%s/results.json", run);
    cJSON* json = read_json(path);
    free(path);
    return json;
}

// ----------------------------------------------------------------------------
// one run for all tests of a program

#define ARTICLES_FLAGS " --perplexity --perplexity_dataset articles --perplexity_seq_len 64 --perplexity_window_size 16"

static char run_folder[160];

static inline int make_tiny_run(void** state) {
    (void)state;
    scratch_create();
    make_documents("articles", article_lengths, ARTICLES);
    size_t lengths[200];
    for (size_t i = 0; i < 200; i++) { lengths[i] = 20 + i % 50; }
    make_documents("letters", lengths, 200);
    train_tiny_quietly("logs",
                       "--dataset letters --position_encoding bam_ssmax --tokens_per_step 64 --num_iterations 30");
    char* folder = run_file("logs", "bam_ssmax", "");
    snprintf(run_folder, sizeof run_folder, "%s", folder);
    free(folder);
    return 0;
}

static inline void remove_results(void) {
    char* path = text("%s/results.json", run_folder);
    unlink(path);
    free(path);
}

// SCRATCH/NAME, a copy of the run without results; release with free().
static inline char* copy_run(const char* name) {
    char *copy = text("%s/%s", scratch, name), *results = text("%s/results.json", copy);
    copy_tree(run_folder, copy);
    unlink(results);
    free(results);
    return copy;
}

// Changes the first `from` in a section of args.json to `to`.
static inline void edit_section(const char* path, const char* section, const char* from, const char* to) {
    char *content = read_text(path, NULL), *at = strstr(content, section);
    at = at ? strstr(at, from) : NULL;
    assert_non_null(at);
    *at = '\0';
    char* edited = text("%s%s%s", content, to, at + strlen(from));
    write_text_atomically(path, edited);
    free(content);
    free(edited);
}

static inline void expect_refusal(const char* run, const char* flags, const char* words) {
    char* all = evaluate_flags(run, flags);
    Run r = run_evaluate(all);
    assert_refused(&r, words);
    assert_null(strstr(r.out, "memory "));  // before any work
    run_free(&r);
    free(all);
}

#endif
