/*
What a run leaves behind and what people see of it: the run folder, its CSV logs and JSON files, and the
progress line. Only one rank calls these functions, except format_progress() and the timer.

  run_folder_create   logs/MODEL_SIZE/ENCODING/version_NN, first free number
  run_logs_open       train.log and eval.log: one flushed line a row; a resumed run continues them so that each
                      step is there once and time goes on from where the earlier run stopped
  write_*_atomically  whole old file or whole new file, never a part, also when the disk fills up
  format_progress     one line per step, at most 80 columns
*/
#ifndef LOGGER_H
#define LOGGER_H

#include <cjson/cJSON.h>
#include <fcntl.h>
#include <libgen.h>
#include <math.h>

#include "util.h"

// ----------------------------------------------------------------------------
// files

// Replaces path by these bytes: temporary file beside it, flushed to the disk, renamed.
static inline void write_atomically(const char* path, const void* data, size_t size) {
    char* temporary = text("%s.tmp.%ld", path, (long)getpid());
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    bool good = fd >= 0;
    for (size_t done = 0; good && done < size;) {
        ssize_t n = write(fd, (const char*)data + done, size - done);
        if (n > 0) { done += (size_t)n; }
        good = n > 0 || (n < 0 && errno == EINTR);
    }
    good = good && fsync(fd) == 0;
    int error = errno;
    if (fd >= 0 && close(fd) != 0 && good) {
        good = false;
        error = errno;
    }
    if (good && rename(temporary, path) != 0) {
        good = false;
        error = errno;
    }
    if (!good) {
        if (fd >= 0) { unlink(temporary); }
        fatal("cannot write %s: %s; free space or fix the permissions, then resume", path, strerror(error));
    }
    free(temporary);
    char* copy = xstrdup(path);
    int folder = open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder >= 0) {  // makes the new name durable; some file systems cannot, which is no fault of the user's
        fsync(folder);
        close(folder);
    }
    free(copy);
}

static inline void write_text_atomically(const char* path, const char* string) {
    write_atomically(path, string, strlen(string));
}

// The file's bytes with a '\0' after them; release with free(). size may be NULL.
static inline char* read_text(const char* path, size_t* size) {
    FILE* f = fopen(path, "rb");
    if (!f) { fatal("cannot open %s: %s", path, strerror(errno)); }
    char* s = NULL;
    size_t used = 0, room = 0;
    do {
        if (used + 1 >= room) { s = (char*)xrealloc(s, room = 2 * room + 4096); }
        used += fread(s + used, 1, room - used - 1, f);
    } while (!feof(f) && !ferror(f));
    if (ferror(f)) { fatal("cannot read %s: %s", path, strerror(errno)); }
    fclose(f);
    s[used] = '\0';
    if (size) { *size = used; }
    return s;
}

static inline void write_json_atomically(const char* path, const cJSON* json) {
    char* printed = cJSON_Print(json);
    if (!printed) { fatal("out of memory: the text of %s", path); }
    char* line = text("%s\n", printed);
    write_text_atomically(path, line);
    free(line);
    cJSON_free(printed);
}

// Release with cJSON_Delete().
static inline cJSON* read_json(const char* path) {
    char* string = read_text(path, NULL);
    const char* end;
    cJSON* json = cJSON_ParseWithOpts(string, &end, true);
    if (!json) {
        size_t line = 1;
        for (const char* c = string; c < end; c++) { line += *c == '\n'; }
        fatal("%s: line %zu is not valid JSON; repair the file or give another one", path, line);
    }
    free(string);
    return json;
}

// ----------------------------------------------------------------------------
// run folder

// Creates LOG_DIR/MODEL_SIZE/ENCODING/version_NN with the first free NN and returns its path; release with free().
// Safe against other runs that start at the same moment: mkdir() decides who gets a number.
static inline char* run_folder_create(const char* log_dir, const char* model_size, const char* encoding) {
    char* parent = text("%s/%s/%s", log_dir, model_size, encoding);
    make_directories(parent);
    for (size_t version = 0; version < 100000; version++) {
        char* path = text("%s/version_%02zu", parent, version);
        if (mkdir(path, 0777) == 0) {
            free(parent);
            return path;
        }
        if (errno != EEXIST) { fatal("cannot create %s: %s", path, strerror(errno)); }
        free(path);
    }
    fatal("%s: every number up to version_99999 is taken; move old runs away", parent);
}

// How this program was built and where it runs; callers add libraries and devices.
static inline cJSON* build_info(void) {
#ifdef BAMC_COMMIT
    const char* commit = BAMC_COMMIT;
#else
    const char* commit = "unknown";
#endif
#ifdef BAMC_FLAGS
    const char* flags = BAMC_FLAGS;
#else
    const char* flags = "unknown";
#endif
#ifdef __clang__
    const char* compiler = __VERSION__;
#else
    const char* compiler = "GCC " __VERSION__;
#endif
    char host[256] = "unknown";
    if (gethostname(host, sizeof host) == 0) { host[sizeof host - 1] = '\0'; }
    cJSON* json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "commit", commit);
    cJSON_AddStringToObject(json, "compiler", compiler);
    cJSON_AddStringToObject(json, "flags", flags);
    cJSON_AddStringToObject(json, "host", host);
    return json;
}

// FOLDER/args.json; takes over and deletes the four objects.
static inline void write_args_json(const char* folder, cJSON* args, cJSON* dataset_args, cJSON* model_args,
                                   cJSON* build) {
    cJSON* json = cJSON_CreateObject();
    cJSON_AddItemToObject(json, "args", args);
    cJSON_AddItemToObject(json, "dataset_args", dataset_args);
    cJSON_AddItemToObject(json, "model_args", model_args);
    cJSON_AddItemToObject(json, "build", build);
    char* path = text("%s/args.json", folder);
    write_json_atomically(path, json);
    free(path);
    cJSON_Delete(json);
}

// ----------------------------------------------------------------------------
// logs

#define TRAIN_LOG_HEADER "step,time,loss,norm,lr,exec_time,tok/sec"
#define EVAL_LOG_HEADER "step,time,loss,exec_time,tok/sec"

typedef struct {
    FILE* file;
    char* path;
} CsvLog;

typedef struct {
    CsvLog train, eval;
    double time_before;  // seconds of the runs that this one continues
    double started;      // wall_seconds() at opening
} RunLogs;

// Fields of a row that ends at `end`.
static inline size_t csv_fields(const char* row, const char* end) {
    size_t n = 1;
    for (; row < end; row++) { n += *row == ','; }
    return n;
}

// Cuts the log's text of *size bytes down to the header and the rows of steps before resume_step, in place, and returns
// the time in the last of them. A line cut off by a crash has no end and is dropped. So are the zero bytes that a power
// failure leaves in the place of what was not yet on the disk, and the rows that they have damaged.
static inline double csv_log_truncate(const char* path, char* s, size_t* size, const char* header, size_t resume_step) {
    size_t n = strlen(header), fields = csv_fields(header, header + n), damaged = 0;
    double time = 0;
    if (*size <= n || strncmp(s, header, n) != 0 || s[n] != '\n') {
        fatal("%s: found first line '%.*s', expected '%s'; move the file away", path, (int)strcspn(s, "\n"), s, header);
    }
    char *row = s + n + 1, *end = row, *all = s + *size, *stop;
    bool torn = false;            // by zero bytes before or after it
    unsigned long long next = 0;  // the first step that may follow; a torn number is a smaller one
    for (size_t line = 2; row < all; row = stop + 1) {
        for (stop = row; stop < all && *stop != '\n' && *stop != '\0';) { stop++; }
        if (stop == all) { break; }
        bool newline = *stop == '\n', was_torn = torn || !newline;
        torn = !newline;
        *stop = '\0';
        char *after_step = row, *after_time = row;
        unsigned long long step = strtoull(row, &after_step, 10);
        double row_time = *after_step == ',' ? strtod(after_step + 1, &after_time) : 0;
        bool good = row[0] >= '0' && row[0] <= '9' && *after_step == ',' && *after_time == ',';
        if (!good && !was_torn) {
            fatal("%s: line %zu is '%.40s', expected a step and a time first; repair or move the file", path, line,
                  row);
        }
        line += newline;
        if (was_torn && (!good || step < next || csv_fields(row, stop) != fields)) {
            damaged += stop > row;
            continue;
        }
        *stop = '\n';
        next = step + 1;
        if (step >= resume_step) { continue; }
        time = row_time;
        size_t bytes = (size_t)(stop + 1 - row);
        memmove(end, row, bytes);
        end += bytes;
    }
    if (damaged) { warn("%s: %zu damaged rows left out", path, damaged); }
    *end = '\0';
    *size = (size_t)(end - s);
    return time;
}

// Opens a log for appending, header written; rows of steps from resume_step on are gone. *time is raised to the time
// of the last row.
static inline CsvLog csv_log_open(const char* folder, const char* name, const char* header, size_t resume_step,
                                  double* time) {
    CsvLog log = {NULL, text("%s/%s", folder, name)};
    size_t size = 0;
    char* old = file_exists(log.path) ? read_text(log.path, &size) : xstrdup("");
    if (size == 0 || !memchr(old, '\n', size)) {
        char* first_line = text("%s\n", header);
        write_text_atomically(log.path, first_line);
        free(first_line);
    } else {
        size_t left = size;
        bool zeros = memchr(old, '\0', size);  // one in the place of a row's end changes no size
        double last = csv_log_truncate(log.path, old, &left, header, resume_step);
        if (last > *time) { *time = last; }
        if (left != size || zeros) { write_atomically(log.path, old, left); }
    }
    free(old);
    log.file = fopen(log.path, "a");
    if (!log.file) { fatal("cannot append to %s: %s", log.path, strerror(errno)); }
    return log;
}

// FOLDER/train.log and FOLDER/eval.log. resume_step is the next step to take: 0 for a new run.
static inline RunLogs run_logs_open(const char* folder, size_t resume_step) {
    RunLogs logs;
    logs.time_before = 0;
    logs.train = csv_log_open(folder, "train.log", TRAIN_LOG_HEADER, resume_step, &logs.time_before);
    logs.eval = csv_log_open(folder, "eval.log", EVAL_LOG_HEADER, resume_step, &logs.time_before);
    logs.started = wall_seconds();
    return logs;
}

// Has eval.log a row of this step?
static inline bool eval_log_has(const char* folder, size_t step) {
    char *path = text("%s/eval.log", folder), *row = text("\n%zu,", step);
    size_t size = 0, length = strlen(row);
    char* log = file_exists(path) ? read_text(path, &size) : xstrdup("");
    bool found = false;
    for (size_t i = 0; i + length <= size && !found; i++) { found = memcmp(log + i, row, length) == 0; }
    free(path), free(row), free(log);
    return found;
}

static inline void run_logs_close(RunLogs* logs) {
    fclose(logs->train.file);
    fclose(logs->eval.file);
    free(logs->train.path);
    free(logs->eval.path);
}

// Seconds of training so far, earlier runs that this one continues included.
static inline double run_logs_time(const RunLogs* logs) { return logs->time_before + wall_seconds() - logs->started; }

// Nine digits give every fp32 value back; "nan" whatever its sign.
static inline const char* csv_number(char buffer[32], double x) {
    if (isnan(x)) { return "nan"; }
    snprintf(buffer, 32, "%.9g", x);
    return buffer;
}

// Appends "step,values..." and has it on its way to the disk before it returns.
static inline void csv_log_row(CsvLog* log, size_t step, const double* values, size_t count) {
    char buffer[32];
    fprintf(log->file, "%zu", step);
    for (size_t i = 0; i < count; i++) { fprintf(log->file, ",%s", csv_number(buffer, values[i])); }
    fputc('\n', log->file);
    if (fflush(log->file) != 0 || ferror(log->file)) {
        fatal("cannot append to %s: %s; free space, then resume", log->path, strerror(errno));
    }
}

static inline void log_train(RunLogs* logs, size_t step, double loss, double norm, double lr, double exec_seconds,
                             double tokens_per_second) {
    double values[] = {run_logs_time(logs), loss, norm, lr, exec_seconds, tokens_per_second};
    csv_log_row(&logs->train, step, values, 6);
}

static inline void log_eval(RunLogs* logs, size_t step, double loss, double exec_seconds, double tokens_per_second) {
    double values[] = {run_logs_time(logs), loss, exec_seconds, tokens_per_second};
    csv_log_row(&logs->eval, step, values, 4);
}

// ----------------------------------------------------------------------------
// progress

static inline bool is_terminal(FILE* f) { return isatty(fileno(f)) == 1; }

// A smoothed duration of a step: exponential average with the bias correction of Adam (Kingma, Ba 2015), so that it is
// right from the first step on. The first step pays for setting up, so it is forgotten once there is a second.
typedef struct {
    double sum, weight;
    size_t steps;
} StepTimer;

static inline void step_timer_add(StepTimer* t, double seconds) {
    const double keep = 0.95;
    if (t->steps++ == 1) { t->sum = t->weight = 0; }
    t->sum = keep * t->sum + (1 - keep) * seconds;
    t->weight = keep * t->weight + (1 - keep);
}

// Seconds a step takes; NAN before the first one.
static inline double step_timer_seconds(const StepTimer* t) { return t->weight > 0 ? t->sum / t->weight : NAN; }

typedef struct {
    size_t step, num_steps;  // steps done, counted from 1 for people
    double loss, norm, lr;
    double step_seconds;
    double tokens_per_second;
    double mfu;           // 0...1; NAN when the machine's peak is not known
    double seconds_left;  // NAN when not known
} Progress;

enum { PROGRESS_COLUMNS = 80, PROGRESS_BUFFER = 256 };

// "9.8e-4": no padding of the exponent.
static inline const char* progress_scientific(char buffer[32], double x, int decimals) {
    char digits[32];
    snprintf(digits, sizeof digits, "%.*e", decimals, x);
    size_t mantissa = strcspn(digits, "e");
    if (digits[mantissa] == '\0') { return strcpy(buffer, digits); }  // nan, inf
    snprintf(buffer, 32, "%.*se%ld", (int)mantissa, digits, strtol(digits + mantissa + 1, NULL, 10));
    return buffer;
}

// x right aligned in `width` >= 3 columns with at most so many decimals; fewer, or an exponent, where it is large.
static inline const char* progress_number(char buffer[32], double x, int width, int decimals) {
    if (isnan(x) || isinf(x)) {
        snprintf(buffer, 32, "%*s", width, isnan(x) ? "nan" : x < 0 ? "-inf" : "inf");
        return buffer;
    }
    for (int d = decimals; d >= 0 && fabs(x) < 1e15; d--) {
        if (snprintf(buffer, 32, "%*.*f", width, d, x) <= width) { return buffer; }
    }
    char digits[32];
    if ((int)strlen(progress_scientific(digits, x, 1)) > width) { progress_scientific(digits, x, 0); }
    snprintf(buffer, 32, "%*s", width, digits);
    return buffer;
}

// "982", "14.8k", "1.25M": three digits, right aligned in five columns.
static inline const char* progress_rate(char buffer[32], double x) {
    static const char* const units[] = {"", "k", "M", "G", "T"};
    size_t unit = 0;
    if (!(x >= 0 && x < 1e15)) { return strcpy(buffer, "    ?"); }
    for (; x >= 999.5 && unit < 4; unit++) { x /= 1000; }
    int decimals = unit == 0 || x >= 99.95 ? 0 : x >= 9.995 ? 1 : 2;
    char digits[24];
    snprintf(digits, sizeof digits, "%.*f%s", decimals, x, units[unit]);
    snprintf(buffer, 32, "%5s", digits);
    return buffer;
}

/*
One line without '\n', at most 80 columns; returns out, of at least PROGRESS_BUFFER bytes. Columns stay in place
from step to step. What does not fit is left out, the least telling first: the words "step" and "left", the time
of a step, norm, lr, mfu, time left.

   12/20000 loss 6.1234 norm 1.23 lr 9.8e-4  14.8k tok/s  221ms mfu 81% |  1h50m
*/
static inline const char* format_progress(char out[PROGRESS_BUFFER], const Progress* p) {
    enum { PIECES = 10, NEVER = 8 };
    static const int dropped_at[PIECES] = {1, NEVER, NEVER, 4, 5, NEVER, 3, 6, 7, 2};
    char piece[PIECES][64], number[32], duration[16];
    double left = p->seconds_left, seconds = p->step_seconds, percent = 100 * p->mfu;
    bool slow = !(seconds < 1), known = left >= 0 && left < 3e8;
    int width = snprintf(piece[0], sizeof piece[0], "%zu", p->num_steps);
    snprintf(piece[0], sizeof piece[0], "step ");
    snprintf(piece[1], sizeof piece[1], "%*zu/%zu", width, p->step, p->num_steps);
    snprintf(piece[2], sizeof piece[2], " loss %s", progress_number(number, p->loss, 6, 4));
    snprintf(piece[3], sizeof piece[3], " norm %s", progress_number(number, p->norm, 4, 2));
    snprintf(piece[4], sizeof piece[4], " lr %s", progress_scientific(number, p->lr, 1));
    snprintf(piece[5], sizeof piece[5], "  %s tok/s", progress_rate(number, p->tokens_per_second));
    snprintf(piece[6], sizeof piece[6], " %s%s", progress_number(number, slow ? seconds : 1000 * seconds, 4, 2),
             slow ? "s " : "ms");
    piece[7][0] = piece[8][0] = piece[9][0] = '\0';
    if (percent >= 0) { snprintf(piece[7], sizeof piece[7], " mfu %2.0f%%", fmin(percent, 999)); }
    if (known) {
        snprintf(piece[8], sizeof piece[8], " | %6s", format_duration(duration, left));
        snprintf(piece[9], sizeof piece[9], " left");
    }
    size_t length = 0;
    for (int i = 0; i < PIECES; i++) { length += strlen(piece[i]); }
    for (int drop = 1; drop < NEVER && length > PROGRESS_COLUMNS; drop++) {
        for (int i = 0; i < PIECES; i++) {
            if (dropped_at[i] != drop) { continue; }
            length -= strlen(piece[i]);
            piece[i][0] = '\0';
        }
    }
    out[0] = '\0';
    for (int i = 0; i < PIECES; i++) { strcat(out, piece[i]); }
    return out;
}

#endif
