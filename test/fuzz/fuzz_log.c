/*
train.log and eval.log when a run is resumed. Input: the step, then the file. What is left must be the header and whole
rows of earlier steps, and stay as it is when the log is opened once more.
*/
#include "fuzz.h"

#include "../../llmc/logger.h"

static char* reopened(const char* name, const char* header, size_t step) {
    double time = 0;
    CsvLog log = csv_log_open(fuzz_folder, name, header, step, &time);
    if (isnan(time) || time < 0) { abort(); }
    fclose(log.file);
    char* s = read_text(log.path, NULL);
    free(log.path);
    return s;
}

static void fuzz_one(const uint8_t* data, size_t size) {
    uint8_t choice = fuzz_take(&data, &size);
    const char *name = choice & 128 ? "eval.log" : "train.log",
               *header = choice & 128 ? EVAL_LOG_HEADER : TRAIN_LOG_HEADER;
    size_t step = (choice & 127) == 127 ? SIZE_MAX : choice & 127;
    fuzz_named_file(name, data, size);
    char *once = reopened(name, header, step), *again = reopened(name, header, step);
    if (strcmp(once, again) != 0) { abort(); }
    size_t n = strlen(once);
    if (strncmp(once, header, strlen(header)) != 0 || once[n - 1] != '\n') { abort(); }
    for (const char* row = strchr(once, '\n') + 1; *row; row = strchr(row, '\n') + 1) {
        if (*row < '0' || *row > '9' || strtoull(row, NULL, 10) >= step) { abort(); }
    }
    free(once);
    free(again);
}

static void fuzz_seeds(void) {
    static const char* const rows[] = {
        "",
        "0,0.5,6.1,1.2,0.001,0.5,1000\n1,1.0,6.0,1.1,0.001,0.5,1000\n",
        "0,0.5,6.1,1.2,0.001,0.5,1000\n1,1.0,nan,inf,0.001,0.5,1000\n2,1.5,6,1,0.001,0.5,1000\n3,2,6,1,0.00",
        "0,0.5,6.1,1.2,0.001,0.5,1000,0123456789abcdef\n18446744073709551615,1e300,0,0,0,0,0\n",
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char* train = text(TRAIN_LOG_HEADER "\n%s", rows[i]);
        char* eval = text(EVAL_LOG_HEADER "\n%s", rows[i]);
        fuzz_seed_text(2, train);
        fuzz_seed_text(127, train);
        fuzz_seed_text(128 + 2, eval);
        free(train);
        free(eval);
    }
    fuzz_seed_text(1, "");
}
