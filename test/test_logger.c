/*
Run folders (numbering, two processes at once), logs (format, resuming), atomic files (disk full, no permission),
args.json, and the progress line.
*/
#include "test_util.h"

#include <dirent.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "../llmc/logger.h"

static char folder[64];  // fresh for every test

static int set_up(void** state) {
    (void)state;
    scratch_folder(folder);
    return 0;
}

static int tear_down(void** state) {
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command);
}

// folder/NAME in one of a few static buffers.
static const char* in_folder(const char* name) {
    static char buffers[4][256];
    static size_t next;
    char* path = buffers[next++ % 4];
    snprintf(path, 256, "%s/%s", folder, name);
    return path;
}

static void assert_file_is(const char* name, const char* content) {
    char* s = read_text(in_folder(name), NULL);
    assert_string_equal(s, content);
    free(s);
}

static size_t count_files(const char* path) {
    size_t n = 0;
    DIR* d = opendir(path);
    assert_non_null(d);
    for (struct dirent* e; (e = readdir(d)) != NULL;) { n += e->d_name[0] != '.'; }
    closedir(d);
    return n;
}

// ----------------------------------------------------------------------------
// run folders

static void assert_creates(const char* version) {
    char* path = run_folder_create(in_folder("logs"), "l6", "bam_ssmax");
    char want[256];
    snprintf(want, sizeof want, "%s/logs/l6/bam_ssmax/%s", folder, version);
    assert_string_equal(path, want);
    struct stat info;
    assert_true(stat(path, &info) == 0 && S_ISDIR(info.st_mode));
    free(path);
}

static void test_versions(void** state) {
    (void)state;
    assert_creates("version_00");
    assert_creates("version_01");
    make_directories(in_folder("logs/l6/bam_ssmax/version_02"));
    write_text_atomically(in_folder("logs/l6/bam_ssmax/version_03"), "a file takes a number, too");
    assert_creates("version_04");
    assert_int_equal(rmdir(in_folder("logs/l6/bam_ssmax/version_01")), 0);
    assert_creates("version_01");  // the first free one
    for (size_t i = 5; i < 100; i++) {
        char name[64];
        snprintf(name, sizeof name, "logs/l6/bam_ssmax/version_%02zu", i);
        make_directories(in_folder(name));
    }
    assert_creates("version_100");
}

// Two processes that ask for a folder at the same moment, 60 times: they never get the same one.
static void test_version_race(void** state) {
    (void)state;
    enum { ROUNDS = 60 };
    atomic_size_t* arrived =
        (atomic_size_t*)mmap(NULL, sizeof *arrived, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(arrived != MAP_FAILED);
    pid_t children[2];
    fflush(NULL);
    for (size_t p = 0; p < 2; p++) {
        children[p] = fork();
        if (children[p] != 0) { continue; }
        bool shared = false;
        for (size_t round = 0; round < ROUNDS; round++) {
            char encoding[16];
            snprintf(encoding, sizeof encoding, "%zu", round);
            atomic_fetch_add(arrived, 1);
            while (atomic_load(arrived) < 2 * (round + 1)) { sched_yield(); }
            char *path = run_folder_create(folder, "l2", encoding), *mine = text("%s/owner", path);
            int fd = open(mine, O_CREAT | O_EXCL | O_WRONLY, 0666);  // fails if the other one has this folder
            shared = shared || fd < 0;
            close(fd);
            free(mine);
            free(path);
        }
        _exit(shared);
    }
    for (size_t p = 0; p < 2; p++) {
        int status;
        waitpid(children[p], &status, 0);
        assert_int_equal(status, 0);
    }
    munmap(arrived, sizeof *arrived);
    for (size_t round = 0; round < ROUNDS; round++) {
        char name[64];
        snprintf(name, sizeof name, "l2/%zu", round);
        assert_int_equal(count_files(in_folder(name)), 2);
    }
}

static void create_in(void* log_dir) { run_folder_create((const char*)log_dir, "l6", "nope"); }

static void test_run_folder_refusals(void** state) {
    (void)state;
    write_text_atomically(in_folder("file"), "");
    const char* words[] = {in_folder("file"), "cannot create", NULL};
    expect_fatal(create_in, (void*)in_folder("file"), words);
}

// ----------------------------------------------------------------------------
// files

static void test_write_atomically(void** state) {
    (void)state;
    const char* path = in_folder("a.txt");
    write_text_atomically(path, "old");
    write_text_atomically(path, "");
    assert_file_is("a.txt", "");
    size_t size = 3u << 20, got;
    char* large = (char*)xcalloc(size + 1, 1);
    for (size_t i = 0; i < size; i++) { large[i] = (char)('a' + i % 23); }
    write_text_atomically(path, large);
    char* back = read_text(path, &got);
    assert_int_equal(got, size);
    assert_string_equal(back, large);
    assert_int_equal(count_files(folder), 1);  // no temporary file left
    free(large);
    free(back);
}

static void write_hello(void* path) { write_text_atomically((const char*)path, "hello"); }

// A file size limit below what is written acts as a full disk.
static void write_to_full_disk(void* path) {
    struct rlimit limit = {1000, 1000};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    char* s = (char*)xcalloc(5001, 1);
    memset(s, 'x', 5000);
    write_text_atomically((const char*)path, s);
}

static void test_write_failures(void** state) {
    (void)state;
    const char* path = in_folder("kept.txt");
    write_text_atomically(path, "earlier");
    const char* full[] = {path, "cannot write", "too large", "free space", NULL};
    expect_fatal(write_to_full_disk, (void*)path, full);
    assert_file_is("kept.txt", "earlier");
    make_directories(in_folder("directory/inside"));
    const char* directory[] = {in_folder("directory"), "cannot write", NULL};
    expect_fatal(write_hello, (void*)in_folder("directory"), directory);
    const char* missing[] = {in_folder("none/a.txt"), "No such file", NULL};
    expect_fatal(write_hello, (void*)in_folder("none/a.txt"), missing);
    assert_int_equal(count_files(folder), 2);
}

static void read_as_json(void* path) { read_json((const char*)path); }

static void test_json_files(void** state) {
    (void)state;
    cJSON* build = build_info();
    cJSON_AddStringToObject(build, "oneDNN", "2.6.3");
    static const char* const keys[] = {"commit", "compiler", "flags", "host", "oneDNN"};
    for (size_t i = 0; i < 5; i++) {
        const char* value = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(build, keys[i]));
        assert_true(value && *value);
    }
    cJSON* args = cJSON_CreateObject();
    cJSON_AddNumberToObject(args, "learning_rate", 1e-3);
    write_args_json(folder, args, cJSON_CreateObject(), cJSON_CreateObject(), build);
    cJSON* json = read_json(in_folder("args.json"));
    static const char* const parts[] = {"args", "dataset_args", "model_args", "build"};
    for (size_t i = 0; i < 4; i++) { assert_true(cJSON_IsObject(cJSON_GetObjectItemCaseSensitive(json, parts[i]))); }
    const cJSON* lr = cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(json, "args"), "learning_rate");
    assert_true(lr && lr->valuedouble == 1e-3);
    cJSON_Delete(json);
    write_text_atomically(in_folder("bad.json"), "{\"a\": 1,\n\"b\": }\n");
    const char* bad[] = {in_folder("bad.json"), "line 2", "not valid JSON", NULL};
    expect_fatal(read_as_json, (void*)in_folder("bad.json"), bad);
    const char* none[] = {in_folder("none.json"), "cannot open", NULL};
    expect_fatal(read_as_json, (void*)in_folder("none.json"), none);
}

// ----------------------------------------------------------------------------
// logs

static void test_log_rows(void** state) {
    (void)state;
    RunLogs logs = run_logs_open(folder, 0);
    assert_file_is("train.log", TRAIN_LOG_HEADER "\n");
    log_train(&logs, 0, 10.3972082, 1.5, 2.5e-6, 0.25, 2000);
    log_train(&logs, 1, -(double)NAN, INFINITY, 1e-3, 0.5, 1234567);
    log_eval(&logs, 0, 1.0 / 3, 2, 1e6);
    // Flushed row by row: read while the logs are still open. The second column is the time.
    char* s = read_text(in_folder("train.log"), NULL);
    double times[2];
    char tails[2][128];
    assert_int_equal(sscanf(s, "%*[^\n]\n0,%lf,%127s\n1,%lf,%127s", &times[0], tails[0], &times[1], tails[1]), 4);
    assert_string_equal(tails[0], "10.3972082,1.5,2.5e-06,0.25,2000");
    assert_string_equal(tails[1], "nan,inf,0.001,0.5,1234567");
    assert_true(times[0] >= 0 && times[1] >= times[0] && times[1] < 10);
    free(s);
    s = read_text(in_folder("eval.log"), NULL);
    assert_int_equal(strncmp(s, EVAL_LOG_HEADER "\n0,", strlen(EVAL_LOG_HEADER) + 3), 0);
    assert_non_null(strstr(s, ",0.333333333,2,1000000\n"));
    free(s);
    run_logs_close(&logs);
}

#define ROW(step, time) #step "," #time ",5,1,0.001,1,10\n"
#define EVAL_ROW(step, time) #step "," #time ",5,1,10\n"

static void test_resume(void** state) {
    (void)state;
    static const struct {
        const char *name, *before, *after;
        size_t resume_step;
        double time;
    } cases[] = {
        {"middle", ROW(0, 1) ROW(1, 2) ROW(2, 3), ROW(0, 1) ROW(1, 2), 2, 2},
        {"beginning", ROW(0, 1) ROW(1, 2), "", 0, 0},
        {"end", ROW(0, 1) ROW(1, 2), ROW(0, 1) ROW(1, 2), 2, 2},
        {"past the end", ROW(0, 1) ROW(1, 2), ROW(0, 1) ROW(1, 2), 10, 2},
        {"line cut off", ROW(0, 1) ROW(1, 2) "2,3,5", ROW(0, 1) ROW(1, 2), 10, 2},
        {"header only", "", "", 10, 0},
        {"two digits", ROW(9, 1) ROW(10, 2.5) ROW(11, 3), ROW(9, 1) ROW(10, 2.5), 11, 2.5},
        {"written twice", ROW(0, 1) ROW(3, 4) ROW(1, 5) ROW(2, 6), ROW(0, 1) ROW(1, 5) ROW(2, 6), 3, 6},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *before = text("%s\n%s", TRAIN_LOG_HEADER, cases[i].before),
             *after = text("%s\n%s", TRAIN_LOG_HEADER, cases[i].after);
        write_text_atomically(in_folder("train.log"), before);
        RunLogs logs = run_logs_open(folder, cases[i].resume_step);
        assert_file_is("train.log", after);
        assert_true(logs.time_before == cases[i].time);
        assert_true(run_logs_time(&logs) >= cases[i].time && run_logs_time(&logs) < cases[i].time + 10);
        log_train(&logs, cases[i].resume_step, 1, 1, 1, 1, 1);
        run_logs_close(&logs);
        char* s = read_text(in_folder("train.log"), NULL);
        assert_int_equal(strncmp(s, after, strlen(after)), 0);
        size_t step;
        assert_int_equal(sscanf(s + strlen(after), "%zu,", &step), 1);
        assert_int_equal(step, cases[i].resume_step);
        free(s);
        free(before);
        free(after);
    }
    assert_int_equal(count_files(folder), 2);
}

// Zero bytes, as a power failure leaves them, cost no row but those that they have damaged.
static void test_zero_bytes(void** state) {
    (void)state;
    static const struct {
        const char *before, *after;  // '@' stands for three zero bytes, '#' for one
    } cases[] = {
        {ROW(0, 1) "@" ROW(1, 2) ROW(2, 3), ROW(0, 1) ROW(1, 2) ROW(2, 3)},
        {ROW(0, 1) "@\n" ROW(1, 2), ROW(0, 1) ROW(1, 2)},
        {"@" ROW(0, 1) "@@" ROW(1, 2) "@", ROW(0, 1) ROW(1, 2)},
        {ROW(0, 1) "1,2,5,1,0.001,1,10@" ROW(2, 3), ROW(0, 1) ROW(1, 2) ROW(2, 3)},
        {ROW(0, 1) "1,2,5,1,0.001,1,10#" ROW(2, 3), ROW(0, 1) ROW(1, 2) ROW(2, 3)},
        {ROW(0, 1) "1,2,5,@,0.001,1,10\n" ROW(2, 3), ROW(0, 1) ROW(2, 3)},
        {ROW(10, 1) "@1,2,5,1,0.001,1,10\n" ROW(12, 3), ROW(10, 1) ROW(12, 3)},
        {ROW(0, 1) "@,5,1,0.001,1,10\n@x\n" ROW(2, 3), ROW(0, 1) ROW(2, 3)},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *log = text("%s\n%s", TRAIN_LOG_HEADER, cases[i].before), *zeros = (char*)xcalloc(3 * strlen(log) + 1, 1),
             *want = text("%s\n%s", TRAIN_LOG_HEADER, cases[i].after);
        size_t n = 0;
        for (const char* c = log; *c; c++) {
            if (*c == '@') { n += 2; }
            zeros[n++] = *c == '@' || *c == '#' ? '\0' : *c;
        }
        write_atomically(in_folder("train.log"), zeros, n);
        RunLogs logs = run_logs_open(folder, 20);
        run_logs_close(&logs);
        assert_file_is("train.log", want);
        free(log), free(zeros), free(want);
    }
}

// The clock goes on from the later of both logs; a file cut off within its header begins anew.
static void test_resume_both_logs(void** state) {
    (void)state;
    write_text_atomically(in_folder("train.log"), TRAIN_LOG_HEADER "\n" ROW(0, 1) ROW(1, 2));
    write_text_atomically(in_folder("eval.log"), EVAL_LOG_HEADER "\n" EVAL_ROW(0, 0.5) EVAL_ROW(1, 7) EVAL_ROW(2, 9));
    RunLogs logs = run_logs_open(folder, 2);
    assert_true(logs.time_before == 7);
    assert_file_is("eval.log", EVAL_LOG_HEADER "\n" EVAL_ROW(0, 0.5) EVAL_ROW(1, 7));
    run_logs_close(&logs);
    write_text_atomically(in_folder("train.log"), "step,ti");
    logs = run_logs_open(folder, 2);
    assert_file_is("train.log", TRAIN_LOG_HEADER "\n");
    run_logs_close(&logs);
}

static void open_logs(void* content) {
    write_text_atomically(in_folder("train.log"), (const char*)content);
    run_logs_open(folder, 5);
}

static void append_to_full_disk(void* unused) {
    (void)unused;
    struct rlimit limit = {1000, 1000};
    signal(SIGXFSZ, SIG_IGN);
    RunLogs logs = run_logs_open(folder, 5);
    setrlimit(RLIMIT_FSIZE, &limit);
    for (size_t step = 0; step < 100; step++) { log_train(&logs, step, 1, 1, 1, 1, 1); }
}

static void test_log_refusals(void** state) {
    (void)state;
    const char* path = in_folder("train.log");
    static const char* const contents[] = {"step,loss\n1,2\n",
                                           TRAIN_LOG_HEADER "x\n",
                                           TRAIN_LOG_HEADER "\n" ROW(0, 1) "x,1,2\n",
                                           TRAIN_LOG_HEADER "\n0,\n1,2,3\n",
                                           TRAIN_LOG_HEADER "\n-1,2,3\n",
                                           "step,\r\t\33[2J\n"};
    static const char* const words[] = {"'step,loss'", "sec'", "line 3", "line 2", "line 2", "'step,  ?[2J'"};
    for (size_t i = 0; i < 6; i++) {
        const char* all[] = {path, words[i], "move the file", NULL};
        expect_fatal(open_logs, (void*)contents[i], all);
        assert_file_is("train.log", contents[i]);  // untouched
    }
    write_text_atomically(path, TRAIN_LOG_HEADER "\n");
    const char* full[] = {path, "cannot append", NULL};
    expect_fatal(append_to_full_disk, NULL, full);
}

// ----------------------------------------------------------------------------
// progress

static void test_progress_lines(void** state) {
    (void)state;
    static const struct {
        Progress p;
        const char* line;
    } cases[] = {
        {{12, 200, 6.1234, 1.23, 9.8e-4, 2.21, 14800, 0.81, 410},
         " 12/200 loss 6.1234 norm 1.23 lr 9.8e-4  14.8k tok/s 2.21s  mfu 81% |  6m50s"},
        {{12, 200, 6.12341, 1.234, 9.8e-4, 2.213, 14800, NAN, 410},
         "step  12/200 loss 6.1234 norm 1.23 lr 9.8e-4  14.8k tok/s 2.21s  |  6m50s left"},
        {{7, 20000, 10.3972, 12.34, 1e-3, 0.0219, 909000, 0.452, 43500},
         "    7/20000 loss 10.397 norm 12.3 lr 1.0e-3   909k tok/s 21.9ms mfu 45% | 12h05m"},
        {{1, 9, NAN, INFINITY, 0, 0.5, 999.6, NAN, NAN}, "step 1/9 loss    nan norm  inf lr 0.0e0  1.00k tok/s  500ms"},
        {{1, 9, 0.00004, 0, NAN, 0.00123, 9997, 0, 59.7},
         "step 1/9 loss 0.0000 norm 0.00 lr nan  10.0k tok/s 1.23ms mfu  0% |  1m00s left"},
        {{1, 9, 1e9, 99.96, 1e-10, 250, 12, 1, NAN},
         "step 1/9 loss  1.0e9 norm  100 lr 1.0e-10     12 tok/s  250s  mfu 100%"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char line[PROGRESS_BUFFER];
        if (strcmp(format_progress(line, &cases[i].p), cases[i].line) != 0) { print_error("got  '%s'\n", line); }
        assert_string_equal(line, cases[i].line);
    }
}

// Never over 80 columns, step and loss always there.
static void test_progress_extremes(void** state) {
    (void)state;
    static const double values[] = {0,   -1,     NAN, INFINITY, -INFINITY, 1e-300, 1e-5,  0.999999, 9.99996, 99.9996,
                                    1e5, 999.96, 1e9, 1e15,     -1e9,      3e8,    2.9e8, 1e300,    -1e300};
    static const size_t steps[] = {1, 200, 99999, 1000000, 1000000000, SIZE_MAX};
    enum { VALUES = sizeof values / sizeof *values };
    Random r = random_stream(3, 0);
    for (size_t i = 0; i < 60000; i++) {
        double x[7];
        for (size_t j = 0; j < 7; j++) { x[j] = values[random_below(&r, VALUES)]; }
        size_t n = steps[random_below(&r, 6)];
        Progress p = {n, n, x[0], x[1], x[2], x[3], x[4], x[5], x[6]};
        char line[PROGRESS_BUFFER], want[64];
        format_progress(line, &p);
        snprintf(want, sizeof want, "%zu/%zu loss ", n, n);
        if (strlen(line) > 80) { print_error("%zu columns: %s\n", strlen(line), line); }
        assert_true(strlen(line) <= 80);
        assert_non_null(strstr(line, want));
        assert_null(strchr(line, '\n'));
    }
}

// Within a run, the columns do not move.
static void test_progress_is_steady(void** state) {
    (void)state;
    size_t width = 0;
    for (size_t step = 1; step <= 2000; step++) {
        double t = (double)step / 2000;
        Progress p = {
            step,    2000,          11 - 8 * t, 40 * exp(-9 * t) + 0.2, 1e-3 - 9e-4 * t, 0.05 + t, 9e4 / (1 + 99 * t),
            0.9 * t, 8000 * (1 - t)};
        char line[PROGRESS_BUFFER];
        size_t n = strlen(format_progress(line, &p));
        if (step == 1) { width = n; }
        assert_int_equal(n, width);
    }
}

static void test_step_timer(void** state) {
    (void)state;
    StepTimer t = {0, 0, 0};
    assert_true(isnan(step_timer_seconds(&t)));
    step_timer_add(&t, 60);
    assert_error_below(fabs(step_timer_seconds(&t) - 60), 1e-12);
    step_timer_add(&t, 2);  // the first step counts no more
    assert_error_below(fabs(step_timer_seconds(&t) - 2), 1e-12);
    step_timer_add(&t, 4);  // weights 0.95 and 1
    assert_error_below(fabs(step_timer_seconds(&t) - (0.95 * 2 + 4) / 1.95), 1e-12);
    for (size_t i = 0; i < 400; i++) { step_timer_add(&t, 3); }
    assert_error_below(fabs(step_timer_seconds(&t) - 3), 1e-8);
}

static void test_terminal(void** state) {
    (void)state;
    FILE* f = fopen("/dev/null", "w");
    assert_false(is_terminal(f));
    fclose(f);
}

#define IN_FOLDER(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        IN_FOLDER(test_versions),
        IN_FOLDER(test_version_race),
        IN_FOLDER(test_run_folder_refusals),
        IN_FOLDER(test_write_atomically),
        IN_FOLDER(test_write_failures),
        IN_FOLDER(test_json_files),
        IN_FOLDER(test_log_rows),
        IN_FOLDER(test_resume),
        IN_FOLDER(test_zero_bytes),
        IN_FOLDER(test_resume_both_logs),
        IN_FOLDER(test_log_refusals),
        cmocka_unit_test(test_progress_lines),
        cmocka_unit_test(test_progress_extremes),
        cmocka_unit_test(test_progress_is_steady),
        cmocka_unit_test(test_step_timer),
        cmocka_unit_test(test_terminal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
