/*
Text from a trained model: `evaluate --log_dir RUN --prompt TEXT`. Nothing in the run folder is written. Every prompt
begins with the same random numbers, so that its text does not depend on the prompts before it.
*/
#ifndef EVALUATE_SAMPLE_H
#define EVALUATE_SAMPLE_H

#include "evaluation.h"
#include "generate.h"
#include "positions.h"

// Tokens of a prompt that is typed, as far as the model's positions reach.
enum { TYPED_PROMPT = 4096 };

// ----------------------------------------------------------------------------
// prompts

static void add_prompt(Evaluation* e, const char* prompt, size_t length) {
    TokenList ids = {NULL, 0, 0};
    int bos = tokenizer_bos(e->tokenizer);
    token_list_append(&ids, &bos, 1);
    tokenizer_encode(e->tokenizer, prompt, length, &ids);
    e->prompts = (TokenList*)xrealloc(e->prompts, (e->prompt_count + 1) * sizeof(TokenList));
    e->prompts[e->prompt_count++] = ids;
    if (ids.count > e->longest_prompt) { e->longest_prompt = ids.count; }
}

// The next line that is not empty, without its line end; its length, 0 at the end.
static size_t read_prompt_line(FILE* f, char** line, size_t* capacity) {
    for (ssize_t n; (n = getline(line, capacity, f)) >= 0;) {
        while (n > 0 && ((*line)[n - 1] == '\n' || (*line)[n - 1] == '\r')) { n--; }
        if (n > 0) { return (size_t)n; }
    }
    return 0;
}

static void read_prompt_file(Evaluation* e) {
    const char* path = e->args.prompt_file;
    FILE* f = strcmp(path, "-") == 0 ? stdin : fopen(path, "r");
    if (!f) { fatal("--prompt_file %s: %s; give a text with a prompt a line", path, strerror(errno)); }
    char* line = NULL;
    size_t capacity = 0;
    for (size_t n; (n = read_prompt_line(f, &line, &capacity)) > 0;) { add_prompt(e, line, n); }
    if (ferror(f)) { fatal("--prompt_file %s: %s; give a text with a prompt a line", path, strerror(errno)); }
    if (e->prompt_count == 0) { fatal("--prompt_file %s: no prompt in it; give a text with a prompt a line", path); }
    if (f != stdin) { fclose(f); }
    free(line);
}

static void plan_sample(Evaluation* e) {
    const EvaluateArgs* a = &e->args;
    if (!evaluate_samples(a)) { return; }
    const ModelConfig* c = &e->run.config;
    if (a->prompt) { add_prompt(e, a->prompt, strlen(a->prompt)); }
    if (a->prompt_file) { read_prompt_file(e); }
    if (!a->interactive) { return; }
    e->longest_prompt = TYPED_PROMPT;
    if (model_learns_positions(c) && !a->learned_beyond && c->options.learned_length < TYPED_PROMPT + a->length) {
        e->longest_prompt = c->options.learned_length > a->length ? c->options.learned_length - a->length : 1;
    }
}

// ----------------------------------------------------------------------------
// printing while tokens come

// Tokens from `begin` on give the text of those before `printed`, which is out, and then more.
typedef struct {
    const Tokenizer* tokenizer;
    size_t begin, printed;
} TextStream;

// Control characters of generated text would act on the terminal; tabs and line ends are text.
static void print_text_part(const char* s, size_t n) {
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)s[i];
        bool text = (c >= ' ' && c != 0x7f) || c == '\n' || c == '\t';
        putchar(text ? c : ' ');
    }
    fflush(stdout);
}

// Does the text end within a character? A SentencePiece model shows the bytes of one as U+FFFD each.
static bool text_ends_within_character(const char* s, size_t n) {
    for (size_t back = 1; back <= 3 && back <= n; back++) {
        unsigned char c = (unsigned char)s[n - back];
        if (c >= 0xC0) { return back < (c >= 0xF0 ? 4u : c >= 0xE0 ? 3u : 2u); }
        if (c < 0x80) { break; }
    }
    return n >= 3 && memcmp(s + n - 3, "\xEF\xBF\xBD", 3) == 0;
}

// Prints what tokens[length] have beyond what is out; waits for the rest of a character, for a few tokens.
static void text_stream_add(TextStream* t, const int* tokens, size_t length, bool last) {
    enum { WAIT = 6 };
    size_t before, after;
    char* old = tokenizer_decode(t->tokenizer, tokens + t->begin, t->printed - t->begin, &before);
    char* all = tokenizer_decode(t->tokenizer, tokens + t->begin, length - t->begin, &after);
    bool wait = !last && length - t->printed < WAIT && text_ends_within_character(all, after);
    if (!wait && after >= before) {
        print_text_part(all + before, after - before);
        t->begin = t->printed;
        t->printed = length;
    }
    free(old);
    free(all);
}

static void on_token(void* context, const int* tokens, size_t length) {
    text_stream_add((TextStream*)context, tokens, length, false);
}

// ----------------------------------------------------------------------------
// sampling

static void sample_prompt(Evaluation* e, const TokenList* prompt) {
    const EvaluateArgs* a = &e->args;
    SamplingSettings settings = {a->temperature, a->top_p, a->top_k};
    Random random = random_stream(a->seed, 1);
    TextStream stream = {e->tokenizer, 0, 0};
    TokenListener listener = {on_token, &stream};
    size_t length = prompt->count, most = length + a->length;
    int* tokens = (int*)xcalloc(most, sizeof(int));
    memcpy(tokens, prompt->ids, length * sizeof(int));
    read_length(e, most);
    if (!a->interactive) { text_stream_add(&stream, tokens, length, false); }
    if (a->interactive) { stream.begin = length - 1, stream.printed = length; }
    double started = wall_seconds();
    int eos = tokenizer_eos(e->tokenizer);
    length = generate(&e->model, &e->prefill.cache, tokens, length, a->length, eos, &settings, &random, &listener);
    double seconds = wall_seconds() - started;
    text_stream_add(&stream, tokens, length, true);
    putchar('\n');
    fflush(stdout);
    size_t made = length - prompt->count;
    fprintf(stderr, "%zu tokens%s, %.1f tokens/s\n", made, tokens[length - 1] == eos ? " to the end of the text" : "",
            (double)made / seconds);
    free(tokens);
}

// Prompts as they are typed, or come through a pipe, until the input ends.
static void sample_typed_prompts(Evaluation* e) {
    bool ask = isatty(STDIN_FILENO) && isatty(STDERR_FILENO);
    char* line = NULL;
    size_t capacity = 0;
    if (ask) { fprintf(stderr, "a prompt a line; Ctrl-D ends\n> "); }
    for (size_t n; (n = read_prompt_line(stdin, &line, &capacity)) > 0;) {
        e->prompt_count = 0;
        size_t longest = e->longest_prompt;
        add_prompt(e, line, n);
        e->longest_prompt = longest;
        if (e->prompts[0].count > longest) {
            warn("the prompt has %zu tokens, expected at most %zu; --prompt_file takes longer ones",
                 e->prompts[0].count, longest);
        } else {
            sample_prompt(e, &e->prompts[0]);
        }
        free(e->prompts[0].ids);
        e->prompt_count = 0;
        if (ask) { fprintf(stderr, "> "); }
    }
    if (ask) { fprintf(stderr, "\n"); }
    free(line);
}

static void run_sample(Evaluation* e) {
    if (e->args.interactive) { sample_typed_prompts(e); }
    for (size_t i = 0; i < e->prompt_count; i++) {
        sample_prompt(e, &e->prompts[i]);
        free(e->prompts[i].ids);
    }
    free(e->prompts);
}

#endif
