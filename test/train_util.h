/*
Tests of the program train_gpt itself: corpora, running it as a child process, and reading what it leaves behind.
The program is ./train_gpt, or that of the environment variable TRAIN_GPT (a sanitizer build, say).
*/
#ifndef TRAIN_UTIL_H
#define TRAIN_UTIL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // pipes of a given size
#endif

#include <ftw.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include "shard_util.h"

#include "../llmc/logger.h"
#include "../llmc/safetensors.h"

// The vocabulary of the built-in tokenizer "bytes".
enum { BYTES_VOCAB = 258, BYTES_BOS = 256, BYTES_EOS = 257 };

// A model and a step that train in a millisecond; flags given later win.
#define TINY_MODEL "--model_size l2 --dim 32 --n_heads 2 --n_layers 2 --batch_size 2 --sequence_length 32"
#define TINY TINY_MODEL " --tokenizer bytes --val_tokens 0 --learning_rate 1e-2"

static char scratch[64];  // holds everything of this program: data/NAME, log folders, output

// ----------------------------------------------------------------------------
// scratch folder and corpora

static inline int remove_entry(const char* path, const struct stat* status, int kind, struct FTW* walk) {
    (void)status, (void)kind, (void)walk;
    return remove(path);
}

static inline void remove_tree(const char* path) { nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS); }

static inline void scratch_remove(void) { remove_tree(scratch); }

// Copies a folder of files and folders.
static inline void copy_tree(const char* from, const char* to) {
    pid_t child = fork();
    if (child == 0) {
        execlp("cp", "cp", "-a", from, to, (char*)NULL);
        _exit(127);
    }
    int status = -1;
    waitpid(child, &status, 0);
    assert_int_equal(status, 0);
}

typedef uint32_t (*TokenRule)(size_t position, Random* r);

// Documents of 50 tokens, BOS a..z a..z EOS without the last letters: learned within a few dozen steps.
static inline uint32_t easy_token(size_t position, Random* r) {
    (void)r;
    size_t at = position % 50;
    return at == 0 ? BYTES_BOS : at == 49 ? BYTES_EOS : 'a' + (uint32_t)(at % 26);
}

// No two batches are alike.
static inline uint32_t noise_token(size_t position, Random* r) {
    return position % 37 == 0 ? BYTES_BOS : (uint32_t)(random_uniform(r) * 256);
}

// SCRATCH/data/NAME, empty.
static inline Folder dataset_folder(const char* name) {
    Folder folder;
    memset(&folder, 0, sizeof folder);
    int n = snprintf(folder.path, sizeof folder.path, "%s/data/%s", scratch, name);
    assert_true(n > 0 && (size_t)n < sizeof folder.path);
    make_directories(folder.path);
    return folder;
}

// SCRATCH/data/NAME with `shards` shards of `tokens` tokens each.
static inline void make_dataset(const char* name, TokenRule rule, size_t shards, size_t tokens) {
    Folder folder = dataset_folder(name);
    Random random = random_stream(1, 1);
    uint32_t* ids = (uint32_t*)xcalloc(tokens, sizeof(uint32_t));
    for (size_t s = 0; s < shards; s++) {
        for (size_t i = 0; i < tokens; i++) { ids[i] = rule(s * tokens + i, &random); }
        ShardInfo info = {2, tokens, BYTES_VOCAB, BYTES_BOS, BYTES_EOS, 1};
        char* file = text("part_%04zu.bin", s);
        write_shard(&folder, file, &info, ids);
        free(file);
    }
    free(ids);
}

static inline void scratch_create(void) {
    scratch_folder(scratch);
    atexit(scratch_remove);
    make_dataset("easy", easy_token, 1, 20000);
    make_dataset("noise", noise_token, 1, 20000);
}

// ----------------------------------------------------------------------------
// running the program

typedef struct {
    pid_t pid;
    int out_pipe;
    int status;       // of waitpid
    char *out, *err;  // what it printed
    char* err_path;
} Run;

static rlim_t file_size_limit = RLIM_INFINITY;  // of the next runs: a full disk

static inline void exec_command(char* command, const Run* r, int out) {
    static char* argv[256];
    int argc = 0;
    for (char* word = strtok(command, " "); word && argc < 255; word = strtok(NULL, " ")) { argv[argc++] = word; }
    struct rlimit limit = {file_size_limit, file_size_limit};
    signal(SIGXFSZ, SIG_IGN);
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // nothing is left running by a test that fails
    setenv("OMP_NUM_THREADS", "1", 0);
    setenv("ASAN_OPTIONS", "detect_leaks=0", 0);  // fatal() frees nothing
    int err = open(r->err_path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    bool good = dup2(out, 1) == 1 && dup2(err, 2) == 2 && setrlimit(RLIMIT_FSIZE, &limit) == 0;
    if (good) { execvp(argv[0], argv); }
    fprintf(stderr, "cannot run %s: build it with make\n", argv[0]);
    _exit(127);
}

// Starts a command, whose words hold no spaces. Its output waits in a pipe of one page, so it is never more than some
// fifty lines ahead of whoever reads.
static inline Run start_command(const char* command) {
    static size_t number;
    Run r;
    memset(&r, 0, sizeof r);
    int ends[2];
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    fcntl(ends[0], F_SETPIPE_SZ, 4096);
    r.err_path = text("%s/stderr_%zu", scratch, number++);
    char* words = xstrdup(command);
    fflush(NULL);
    r.pid = fork();
    if (r.pid == 0) { exec_command(words, &r, ends[1]); }
    free(words);
    close(ends[1]);
    r.out_pipe = ends[0];
    r.out = xstrdup("");
    return r;
}

// Starts the program in another folder; prefix: a command before it, such as "nohup", or "".
static inline Run start_train_in(const char* folder, const char* prefix, const char* flags) {
    const char* given = getenv("TRAIN_GPT");
    char* program = realpath(given ? given : "./train_gpt", NULL);
    assert_non_null(program);
    char* command = text("env -C %s %s %s %s", folder, prefix, program, flags);
    Run r = start_command(command);
    free(command), free(program);
    return r;
}

static inline Run start_train(const char* flags) {
    const char* program = getenv("TRAIN_GPT");
    char* command = text("%s %s", program ? program : "./train_gpt", flags);
    Run r = start_command(command);
    free(command);
    return r;
}

// Reads its output until the words come, or the end; false at the end.
static inline bool read_until(Run* r, const char* words) {
    size_t length = strlen(r->out);
    while (!words || !strstr(r->out, words)) {
        char buffer[512];
        ssize_t n = read(r->out_pipe, buffer, sizeof buffer);
        if (n <= 0) { return false; }
        for (ssize_t i = 0; i < n; i++) { buffer[i] = buffer[i] ? buffer[i] : ' '; }
        r->out = (char*)xrealloc(r->out, length + (size_t)n + 1);
        memcpy(r->out + length, buffer, (size_t)n);
        length += (size_t)n;
        r->out[length] = '\0';
    }
    return true;
}

// Waits until the process has computed for so many seconds more, however long that takes on a busy machine, or until it
// has ended.
static inline void wait_for_work(pid_t process, double seconds) {
    struct timespec t;
    clockid_t clock;
    double started = -1;
    while (clock_getcpuclockid(process, &clock) == 0 && clock_gettime(clock, &t) == 0) {
        double now = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
        if (started < 0) { started = now; }
        if (now - started >= seconds || kill(process, 0) != 0) { return; }
        usleep(1000);
    }
}

static inline void finish_train(Run* r) {
    read_until(r, NULL);
    close(r->out_pipe);
    waitpid(r->pid, &r->status, 0);
    r->err = read_text(r->err_path, NULL);
    unlink(r->err_path);
}

static inline void run_free(Run* r) {
    free(r->out);
    free(r->err);
    free(r->err_path);
}

static inline Run run_train(const char* flags) {
    Run r = start_train(flags);
    finish_train(&r);
    return r;
}

static inline bool exited_with(const Run* r, int code) {
    return WIFEXITED(r->status) && WEXITSTATUS(r->status) == code;
}

// `--data_dir --log_dir TINY` and the flags; release with free().
static inline char* tiny_flags(const char* log, const char* flags) {
    return text("--data_dir %s/data --dataset easy --log_dir %s/%s %s %s", scratch, scratch, log, TINY, flags);
}

// Runs a tiny model to its end, with logs in SCRATCH/LOG; the output is the caller's to free.
static inline Run train_tiny(const char* log, const char* flags) {
    char* all = tiny_flags(log, flags);
    Run r = run_train(all);
    if (!exited_with(&r, 0)) { print_error("train_gpt %s\nwait status %d\n%s\n", all, r.status, r.err); }
    assert_true(exited_with(&r, 0));
    free(all);
    return r;
}

// The same, where only the run folder matters.
static inline void train_tiny_quietly(const char* log, const char* flags) {
    Run r = train_tiny(log, flags);
    run_free(&r);
}

// Has this processor bfloat16 products?
static inline bool has_bfloat16(void) {
    char* flags = tiny_flags("probe", "--dtype bfloat16 --tokens_per_step 64 --num_iterations 1");
    Run r = run_train(flags);
    bool yes = exited_with(&r, 0);
    assert_true(yes || strstr(r.err, "oneDNN has no such matrix product"));
    run_free(&r);
    free(flags);
    return yes;
}

static inline size_t count_words(const char* s, const char* words) {
    size_t n = 0;
    for (; (s = strstr(s, words)); s += strlen(words)) { n++; }
    return n;
}

// Status 1, the last line of stderr an error with all the words that | separates; any line before it a warning.
static inline void assert_refused(const Run* r, const char* words) {
    const char* line = r->err;
    for (const char* end; (end = strchr(line, '\n')) && end[1]; line = end + 1) {
        if (strncmp(line, "warning: ", 9) != 0) { break; }
    }
    const char* newline = strchr(line, '\n');
    bool good = exited_with(r, 1) && strncmp(line, "error: ", 7) == 0 && newline && newline[1] == '\0';
    char *list = xstrdup(words), *at = NULL;
    for (char* word = strtok_r(list, "|", &at); word; word = strtok_r(NULL, "|", &at)) {
        good = good && strstr(line, word);
    }
    free(list);
    if (!good) { print_error("expected exit 1 and one error with '%s', got %d: %s\n", words, r->status, r->err); }
    assert_true(good);
}

// ----------------------------------------------------------------------------
// what is left behind

// Path of a file in SCRATCH/LOG/l2/ENCODING/version_00; release with free().
static inline char* run_file(const char* log, const char* encoding, const char* name) {
    return text("%s/%s/l2/%s/version_00%s%s", scratch, log, encoding, *name ? "/" : "", name);
}

// Row by row of a CSV: the columns asked for (a bit each), newline after a row. Release with free().
static inline char* csv_columns(const char* path, unsigned columns) {
    char *s = read_text(path, NULL), *out = (char*)xcalloc(strlen(s) + 2, 1);
    size_t column = 0, n = 0;
    for (const char* c = s; *c; c++) {
        bool end = *c == ',' || *c == '\n';
        if (columns >> column & 1) { out[n++] = *c; }
        if (*c == '\n' && !(columns >> column & 1)) { out[n++] = '\n'; }
        column = *c == '\n' ? 0 : column + end;
    }
    free(s);
    return out;
}

// A column of a log without its header; returns how many rows.
static inline size_t csv_column(const char* path, unsigned column, double* values, size_t most) {
    char *s = csv_columns(path, 1u << column), *line = strchr(s, '\n') + 1;
    size_t n = 0;
    for (char* end; (end = strchr(line, '\n')) && n < most; line = end + 1) { values[n++] = strtod(line, NULL); }
    free(s);
    return n;
}

static inline size_t losses_of(const char* log, const char* encoding, double* values, size_t most) {
    char* path = run_file(log, encoding, "train.log");
    size_t n = csv_column(path, 2, values, most);
    free(path);
    return n;
}

// Names in a folder, sorted, each followed by a space; "" without such a folder. Release with free().
static inline char* list_folder(const char* path) {
    struct dirent** entries;
    int n = scandir(path, &entries, NULL, alphasort);
    char* list = xstrdup("");
    for (int i = 0; i < n; i++) {
        if (entries[i]->d_name[0] != '.') {
            char* longer = text("%s%s ", list, entries[i]->d_name);
            free(list);
            list = longer;
        }
        free(entries[i]);
    }
    if (n >= 0) { free(entries); }
    return list;
}

static inline void assert_folder(const char* path, const char* names) {
    char* list = list_folder(path);
    assert_string_equal(list, names);
    free(list);
}

static inline void assert_same_file(const char* a, const char* b) {
    size_t n, m;
    char *x = read_text(a, &n), *y = read_text(b, &m);
    if (n != m || memcmp(x, y, n) != 0) { print_error("%s and %s differ\n", a, b); }
    assert_int_equal(n, m);
    assert_memory_equal(x, y, n);
    free(x);
    free(y);
}

// Largest difference between two tensors, relative to the largest element or, where all are smaller, to `least`; NaN
// equals NaN.
static inline double tensor_distance(const SafeTensor* t, const SafeTensor* u, double least) {
    assert_true(u && u->count == t->count);
    float *p = (float*)xcalloc(t->count, sizeof(float)), *q = (float*)xcalloc(t->count, sizeof(float));
    safetensors_read_f32(p, t);
    safetensors_read_f32(q, u);
    double difference = 0, largest = least;
    for (size_t k = 0; k < t->count; k++) {
        if (isnan(p[k]) && isnan(q[k])) { continue; }
        double d = fabs((double)p[k] - q[k]);
        difference = isnan(d) ? INFINITY : fmax(difference, d);
        largest = isnan(p[k]) ? largest : fmax(largest, fabs(p[k]));
    }
    free(p);
    free(q);
    return difference / largest;
}

// The largest of these between tensors of the same name.
static inline double weights_distance(const char* a, const char* b) {
    SafeTensors x = safetensors_open(a), y = safetensors_open(b);
    assert_int_equal(x.count, y.count);
    double worst = 0;
    for (size_t i = 0; i < x.count; i++) {
        worst = fmax(worst, tensor_distance(&x.tensors[i], safetensors_find(&y, x.tensors[i].name), 1e-3));
    }
    safetensors_close(&x);
    safetensors_close(&y);
    return worst;
}

static inline double metadata_number(const char* path, const char* key) {
    assert_true(file_exists(path));
    SafeTensors file = safetensors_open(path);
    const char* value = safetensors_metadata(&file, key);
    assert_non_null(value);
    double number = atof(value);
    safetensors_close(&file);
    return number;
}

// ----------------------------------------------------------------------------
// going on from a checkpoint

// Columns of train.log and eval.log that do not depend on the clock.
enum { TRAIN_COLUMNS = 1 << 0 | 1 << 2 | 1 << 3 | 1 << 4, EVAL_COLUMNS = 1 << 0 | 1 << 2 };

static inline void assert_same_columns(const char* a, const char* b, const char* name, unsigned columns) {
    char *path_a = text("%s/%s", a, name), *path_b = text("%s/%s", b, name);
    char *x = csv_columns(path_a, columns), *y = csv_columns(path_b, columns);
    assert_string_equal(x, y);
    free(path_a), free(path_b), free(x), free(y);
}

// Two runs with the same bits: weights, moments, logs but for the clock.
static inline void assert_identical(const char* a, const char* b) {
    static const char* const files[] = {"model.safetensors", "optimizer.safetensors"};
    assert_same_columns(a, b, "train.log", TRAIN_COLUMNS);
    assert_same_columns(a, b, "eval.log", EVAL_COLUMNS);
    for (size_t i = 0; i < 2; i++) {
        char *x = text("%s/%s", a, files[i]), *y = text("%s/%s", b, files[i]);
        assert_same_file(x, y);
        free(x), free(y);
    }
}

// A copy of a run folder without its final weights and moments, which a resumed run has to write.
static inline void copy_unfinished(const char* whole, const char* cut) {
    static const char* const files[] = {"model.safetensors", "optimizer.safetensors"};
    copy_tree(whole, cut);
    for (size_t i = 0; i < 2; i++) {
        char* path = text("%s/%s", cut, files[i]);
        assert_int_equal(unlink(path), 0);
        free(path);
    }
}

static inline char* resume_flags(const char* folder) { return text("--checkpoint %s --checkpoint_args", folder); }

static inline Run resume(const char* folder) {
    char* flags = resume_flags(folder);
    Run r = run_train(flags);
    if (!exited_with(&r, 0)) { print_error("resuming %s: %s\n", folder, r.err); }
    assert_true(exited_with(&r, 0));
    free(flags);
    return r;
}

// A copy of a run that was cut off after its checkpoint of this step goes on to the very same files.
static inline void check_resumed(const char* whole, int step) {
    static size_t number;
    char *cut = text("%s/cut_%zu", scratch, number++), *from = text("%s/checkpoints/step_%09d", cut, step);
    copy_unfinished(whole, cut);
    Run r = resume(from);
    assert_identical(whole, cut);
    run_free(&r);
    free(cut), free(from);
}

#endif
