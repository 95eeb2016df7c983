/*
dataset/synthetic, and dataset/fineweb.py and wikipedia.py on local files, as programs: wording, lengths, depths, keys
that are held out, whole documents in a sequence, the same documents as text and as shards, refusals. The texts are
parsed by code and wording written here.
*/
#include "prepare_util.h"

#define TASK                                                                                                \
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will " \
    "quiz you about the important information there."
#define FILLER "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
#define QUESTION "What is the pass key? The pass key is "

static int make_scratch(void** state) {
    (void)state;
    scratch_folder(scratch);
    return 0;
}

static int drop_scratch(void** state) {
    (void)state;
    remove_scratch("");
    return 0;
}

// Runs a shell command; output and errors as after run().
__attribute__((format(printf, 1, 2))) static int shell(const char* format, ...) {
    char line[4096];
    va_list list;
    va_start(list, format);
    vsnprintf(line, sizeof line, format, list);
    va_end(list);
    char *out = text("%s/out", scratch), *err = text("%s/err", scratch);
    char* command = text("{ %s ; } >%s 2>%s", line, out, err);
    int status = system(command);
    free(output.bytes);
    free(errors.bytes);
    output = read_bytes(out);
    errors = read_bytes(err);
    free(command);
    free(out);
    free(err);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

#define PROGRAM "dataset/synthetic"

// The next document of a text at *p, NUL-terminated in place; NULL at the end. Checks the blank line behind it.
static char* next_line(char** p) {
    if (!**p) { return NULL; }
    char *line = *p, *end = strchr(line, '\n');
    assert_true(end && end > line && end[1] == '\n');
    *end = '\0';
    *p = end + 2;
    return line;
}

// Steps over the words, which must come next.
static void take(char** p, const char* words) {
    if (strncmp(*p, words, strlen(words)) != 0) { fail_msg("expected '%s' at: %s", words, *p); }
    *p += strlen(words);
}

static bool taken(char** p, const char* words) {
    bool found = strncmp(*p, words, strlen(words)) == 0;
    *p += found ? strlen(words) : 0;
    return found;
}

static bool digits_sum_to_tens(const char* s, size_t n) {
    int sum = 0;
    for (size_t i = 0; i < n; i++) { sum += s[i] - '0'; }
    return sum % 10 == 0;
}

// A count of n trials of this probability lies within five standard deviations: one run in a million would not.
static void assert_share(size_t count, size_t n, double probability) {
    double expected = (double)n * probability, deviation = sqrt(expected * (1 - probability));
    assert_error_below(fabs((double)count - expected), 5 * deviation + 1e-9);
}

// ----------------------------------------------------------------------------
// the same bytes

static void test_reproducible(void** state) {
    (void)state;
    static const char* const flags[] = {
        "--documents 300",
        "--bytes 50_000 --copy_share 0.3",
        "--tokens 20000 --tokenizer bytes",
        "--tokens 20000 --tokenizer bytes --sequence_length 512 --max_fillers 1",
    };
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        static const char* const seeds[] = {"", "--seed 0", "--seed 1"};
        Bytes made[3];
        for (size_t k = 0; k < 3; k++) {
            assert_succeeded(shell(PROGRAM " %s %s --out %s/s.txt --overwrite", flags[i], seeds[k], scratch));
            char* path = text("%s/s.txt", scratch);
            made[k] = read_bytes(path);
            free(path);
        }
        assert_true(made[0].size > 10000);
        assert_int_equal(made[0].size, made[1].size);
        assert_memory_equal(made[0].bytes, made[1].bytes, made[0].size);
        assert_true(made[2].size != made[0].size || memcmp(made[2].bytes, made[0].bytes, made[0].size) != 0);
        for (size_t k = 0; k < 3; k++) { free(made[k].bytes); }
    }
}

// ----------------------------------------------------------------------------
// passkey documents

enum { MOST = 6, DOCUMENTS = 20000 };

typedef struct {
    size_t fillers, depth;
    char key[16];
} Passkey;

static Passkey parse_passkey(char* line) {
    Passkey p = {0, SIZE_MAX, ""};
    take(&line, TASK " ");
    for (;;) {
        if (taken(&line, FILLER " ")) {
            p.fillers++;
        } else if (p.depth == SIZE_MAX) {
            take(&line, "The pass key is ");
            size_t n = strspn(line, "0123456789");
            assert_in_range(n, 1, sizeof p.key - 1);
            memcpy(p.key, line, n);
            take(&line, p.key);
            take(&line, ". Remember it. ");
            take(&line, p.key);
            take(&line, " is the pass key. ");
            p.depth = p.fillers;
        } else {
            break;
        }
    }
    take(&line, QUESTION);
    assert_string_equal(line, p.key);
    return p;
}

static void test_passkey(void** state) {
    (void)state;
    for (int hold_out = 0; hold_out < 2; hold_out++) {
        assert_succeeded(shell(PROGRAM " --task passkey --documents %d --min_fillers 1 --max_fillers %d "
                                       "--exclude_fillers 3 --digits 4 --out - %s",
                               DOCUMENTS, MOST, hold_out ? "" : "--no-hold_out"));
        size_t counts[MOST + 1][MOST + 1] = {{0}}, digits[4][10] = {{0}}, held_out = 0, n = 0;
        char* p = output.bytes;
        for (char* line; (line = next_line(&p)); n++) {
            Passkey k = parse_passkey(line);
            assert_int_equal(strlen(k.key), 4);
            assert_in_range(k.fillers, 1, MOST);
            counts[k.fillers][k.depth]++;
            held_out += digits_sum_to_tens(k.key, 4);
            for (size_t i = 0; i < 4; i++) { digits[i][k.key[i] - '0']++; }
        }
        assert_int_equal(n, DOCUMENTS);
        assert_share(held_out, n, hold_out ? 0 : 0.1);
        for (size_t fillers = 0; fillers <= MOST; fillers++) {
            bool allowed = fillers != 0 && fillers != 3;
            for (size_t depth = 0; depth <= fillers; depth++) {
                assert_share(counts[fillers][depth], n, allowed ? 1.0 / (MOST - 1) / (double)(fillers + 1) : 0);
            }
        }
        for (size_t i = 0; i < 4; i++) {
            for (size_t d = 0; d < 10; d++) { assert_share(digits[i][d], n, i > 0 ? 0.1 : d > 0 ? 1.0 / 9 : 0); }
        }
    }
}

static void test_own_texts(void** state) {
    (void)state;
    assert_succeeded(shell(PROGRAM " --task passkey --documents 50 --min_fillers 1 --max_fillers 1 --digits 2 --out - "
                                   "--task_text 'Find it.' --filler_text Noise. --key_text 'Key {key}{key}, {key}.' "
                                   "--question_text Key?"));
    char* p = output.bytes;
    size_t first = 0;
    for (char* line; (line = next_line(&p));) {
        take(&line, "Find it. ");
        bool after = taken(&line, "Noise. ");
        take(&line, "Key ");
        char *key = text("%.2s", line), *rest = text("%s%s, %s.%s Key? %s", key, key, key, after ? "" : " Noise.", key);
        assert_string_equal(line, rest);
        free(key);
        free(rest);
        first += !after;
    }
    assert_in_range(first, 5, 45);
}

// ----------------------------------------------------------------------------
// digit strings and shares

// s is followed by other words or the end; checks that no three of its digits are a held-out key.
static size_t check_string(const char* s) {
    size_t n = strspn(s, "0123456789");
    for (size_t i = 0; i + 3 <= n; i++) { assert_false(digits_sum_to_tens(s + i, 3)); }
    return n;
}

static void test_strings(void** state) {
    (void)state;
    assert_succeeded(shell(PROGRAM " --documents %d --repeat_share 0.5 --copy_share 0.2 --digits 3 --min_string 2 "
                                   "--max_string 5 --max_repeats 4 --out -",
                           DOCUMENTS));
    char* p = output.bytes;
    size_t copies = 0, repeats = 0, passkeys = 0, lengths[6] = {0}, times[5] = {0};
    for (char* line; (line = next_line(&p));) {
        bool copy = taken(&line, "Copy: ");
        if (!copy && *line == 'T') {
            assert_false(digits_sum_to_tens(parse_passkey(line).key, 3));
            passkeys++;
            continue;
        }
        size_t n = check_string(line), count = 1;
        assert_in_range(n, 2, 5);
        char* s = text("%.*s", (int)n, line);
        for (line += n; *line; count++) {
            take(&line, copy ? " Answer: " : " ");
            take(&line, s);
        }
        free(s);
        assert_in_range(count, 2, copy ? 2 : 4);
        copies += copy;
        repeats += !copy;
        lengths[n]++;
        times[count] += !copy;
    }
    assert_int_equal(copies + repeats + passkeys, DOCUMENTS);
    assert_share(repeats, DOCUMENTS, 0.5);
    assert_share(copies, DOCUMENTS, 0.2);
    for (size_t n = 2; n <= 5; n++) { assert_share(lengths[n], copies + repeats, 0.25); }
    for (size_t n = 2; n <= 4; n++) { assert_share(times[n], repeats, 1.0 / 3); }
}

// ----------------------------------------------------------------------------
// tokens

// As text and then through prepare, or straight to shards: the same.
static void test_shards(void** state) {
    (void)state;
    static const char* const sizes[] = {"--documents 500", "--bytes 100000", "--tokens 100000 --sequence_length 600"};
    for (size_t i = 0; i < 3; i++) {
        const char* common = "--copy_share 0.2 --tokenizer bytes --seed 5 --overwrite";
        assert_succeeded(shell(PROGRAM " %s %s --out %s/a.txt", sizes[i], common, scratch));
        assert_succeeded(shell(PROGRAM " %s %s --out %s/made/x --shard_size 30000", sizes[i], common, scratch));
        assert_succeeded(run("prepare", "%s/a.txt --out %s/prepared/x --tokenizer bytes --shard_size 30000 --overwrite",
                             scratch, scratch));
        assert_succeeded(shell("diff -r %s/made/x %s/prepared/x", scratch, scratch));
        assert_succeeded(shell("test -e %s/made/x/x_000002.bin", scratch));
    }
    remove_scratch("made");
    remove_scratch("prepared");
}

static void check_sequences(const char* tokenizer, size_t T) {
    Tokenizer* t = tokenizer_open(tokenizer);
    assert_succeeded(shell(PROGRAM " --tokens 200_000 --sequence_length %zu --tokenizer %s --max_string 9 --out %s/q",
                           T, tokenizer, scratch));
    ShardInfo info;
    TokenList ids = read_shards("q", 100000000, &info);
    assert_int_equal(ids.count, round_up(200000, T));
    size_t starts = 0, passkeys = 0, later = 0, lengths[3] = {0};
    for (size_t i = 0; i < ids.count; i++) {
        if (i % T == 0) { assert_int_equal(ids.ids[i], tokenizer_bos(t)); }
        starts += ids.ids[i] == tokenizer_bos(t);
    }
    Bytes b = decode_documents(&ids, t);
    size_t position = 0, n = 0;
    for (char *p = b.bytes, *end; (end = strchr(p, '|')); p = end + 1, n++) {
        *end = '\0';
        size_t start = position;
        do { position++; } while (position < ids.count && ids.ids[position] != tokenizer_bos(t));
        if (*p != 'T') { continue; }
        lengths[parse_passkey(p).fillers]++;
        passkeys++;
        later += start % T != 0;
    }
    assert_int_equal(n, starts);
    assert_true(later > passkeys / 20);
    for (size_t i = 0; i < 3; i++) { assert_share(lengths[i], passkeys, 1.0 / 3); }
    free(b.bytes);
    free(ids.ids);
    tokenizer_close(t);
    remove_scratch("q");
}

static void test_sequences(void** state) {
    (void)state;
    check_sequences("bytes", 512);
    const char* mistral = mistral_path();
    assert_non_null(mistral);
    check_sequences(mistral, 128);
}

static void test_vocabulary_text(void** state) {
    (void)state;
    assert_succeeded(shell(PROGRAM " --vocabulary_text --task_text 'Go on, go.' --filler_text A! --key_text '{key}: B' "
                                   "--question_text 'Key ?' --copy_share 0.1 --out -"));
    char *p = output.bytes, digits[] = "0 0.\n";
    take(&p, "Go Go. Go\non on. on,\ngo go. go.\nA A. A!\n:\nB B. B\nKey Key. Key\n?\nCopy Copy. Copy:\n");
    take(&p, "Answer Answer. Answer:\n");
    for (; digits[0] <= '9'; digits[0]++, digits[2]++) { take(&p, digits); }
    assert_string_equal(p, "");
}

// ----------------------------------------------------------------------------
// refusals

static void test_refusals(void** state) {
    (void)state;
    static const struct {
        const char *flags, *words;
    } bad[] = {
        {"--out r.txt", "missing --documents, --bytes or --tokens"},
        {"--documents 5", "missing --out"},
        {"--documents 5 --bytes 5 --out r.txt", "excludes"},
        {"--documents 5 --out r", "shards need --tokenizer"},
        {"--tokens 5 --out r.txt", "--tokens needs --tokenizer"},
        {"--documents 5 --sequence_length 64 --out r.txt", "--sequence_length needs --tokenizer"},
        {"--documents 5 --out r.txt --min_fillers 3", "--min_fillers 3 is above --max_fillers 2"},
        {"--documents 5 --out r.txt --min_string 30", "--min_string 30 is above"},
        {"--documents 5 --out r.txt --exclude_fillers 0,1,2", "--exclude_fillers leaves none"},
        {"--documents 5 --out r.txt --key_text 'no key'", "{key}"},
        {"--documents 5 --out r.txt --task_text 'a\nb'", "--task_text: found a line end"},
        {"--documents 5 --out r.txt --digits 1", "--no-hold_out"},
        {"--documents 5 --out r.txt --repeat_share 0.6 --copy_share 0.6", "at most 1 together"},
        {"--vocabulary_text --out r --tokenizer bytes", "for --vocabulary_text"},
        {"--documents 500 --tokenizer bytes --sequence_length 300 --out r.txt", "--sequence_length 300"},
        {"--documents 500 --tokenizer bytes --sequence_length 300 --out r", "--sequence_length 300"},
        {"--documents 5 --tokenizer bytes --task repeat --min_string 20 --sequence_length 30 --out r", "--min_string"},
        {"--documents 5 --out nowhere/r.txt", "nowhere/r.txt: cannot write"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        print_message("flags %zu\n", i);
        assert_refused(shell("p=$PWD; cd %s && $p/" PROGRAM " %s", scratch, bad[i].flags), bad[i].words);
        char* left = text("ls -d %s/r* >/dev/null 2>&1", scratch);
        assert_int_not_equal(system(left), 0);
        free(left);
    }
    char* path = write_bytes("there.txt", "kept", 4);
    assert_refused(shell(PROGRAM " --documents 5 --out %s", path), "--overwrite");
    assert_succeeded(shell("grep -q kept %s", path));
    free(path);
}

// Interrupted once it has begun to write, it leaves nothing.
static void test_interrupted(void** state) {
    (void)state;
    static const char* const outputs[][2] = {{"i.txt", "i.txt.tmp*"}, {"i --tokenizer bytes", "i/*.tmp"}};
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(shell(PROGRAM " --documents 900_000_000_000 --out %s/%s & "
                                       "for try in $(seq 2400); do ls %s/%s && break; sleep 0.05; done; "
                                       "kill -TERM $! && wait $!",
                               scratch, outputs[i][0], scratch, outputs[i][1]),
                         128 + SIGTERM);
        assert_contains(&output, ".tmp");
    }
    assert_int_not_equal(shell("ls -d %s/i*", scratch), 0);
}

// ----------------------------------------------------------------------------
// fineweb.py and wikipedia.py on local files

static const char lines[] =
    "{\"id\":1,\"text\":\"one\\n\\ntwo\"}\n\n"
    "{\"text\":\"\xC3\xA9\xE6\x97\xA5 \\ud83d\\ude00 \\\"q\\\" \\\\ \\u0000.\",\"n\":[{}]}\n"
    "{\"text\":\"a long one of more than thirty bytes\"}\n";

static void check_stream(const char* flags, const char* documents, size_t size) {
    for (int wikipedia = 0; wikipedia < 2; wikipedia++) {
        const char* script = wikipedia ? "wikipedia" : "fineweb";
        assert_succeeded(
            shell("python3 dataset/%s.py --local %s/l.jsonl %s | dataset/prepare - --format jsonl "
                  "--tokenizer bytes --overwrite --out %s/l",
                  script, scratch, flags, scratch));
        assert_contains(&errors, " documents");
        Tokenizer* t = tokenizer_open("bytes");
        ShardInfo info;
        TokenList ids = read_shards("l", 100000000, &info);
        Bytes got = decode_documents(&ids, t);
        assert_int_equal(got.size, size);
        assert_memory_equal(got.bytes, documents, size);
        free(got.bytes);
        free(ids.ids);
        tokenizer_close(t);
    }
}

#define BEGIN "{\"bamc_stream\": \"begins\"}\n"
#define END(n) "{\"bamc_stream\": \"ends after " #n " documents\"}\n"
#define A_LINE "{\"text\":\"a\"}\n"
#define CHECK_STREAM(flags, documents) check_stream(flags, documents, sizeof(documents) - 1)
#define ONE "one\n\ntwo|"
#define TWO "\xC3\xA9\xE6\x97\xA5 \xF0\x9F\x98\x80 \"q\" \\ \0.|"
#define THREE "a long one of more than thirty bytes|"

static void test_stream(void** state) {
    (void)state;
    free(write_bytes("l.jsonl", lines, sizeof lines - 1));
    CHECK_STREAM("", ONE TWO THREE);
    CHECK_STREAM("--max_documents 2", ONE TWO);
    CHECK_STREAM("--max_bytes 9", ONE TWO);
    CHECK_STREAM("--min_bytes 8", ONE TWO THREE);
    CHECK_STREAM("--min_bytes 9", TWO THREE);
    assert_succeeded(shell("gzip -k %s/l.jsonl; cp %s/l.jsonl.gz %s/cut.jsonl.gz; truncate -s -9 %s/cut.jsonl.gz",
                           scratch, scratch, scratch, scratch));
    char* twice = text("%s/l.jsonl.gz", scratch);
    CHECK_STREAM(twice, ONE TWO THREE ONE TWO THREE);
    free(twice);
    assert_succeeded(shell("python3 dataset/wikipedia.py --local %s/l.jsonl --seq_len 10", scratch));
    assert_string_equal(output.bytes, BEGIN "{\"text\": \"a long one of more than thirty bytes\"}\n" END(1));
    assert_succeeded(shell("python3 -c 'print(\"{\\\"text\\\":\\\"x\\\"}\\n\" * 100000)' >%s/many.jsonl", scratch));
    assert_succeeded(shell("python3 dataset/fineweb.py --no_marks --local %s/many.jsonl | head -n 1", scratch));
    assert_string_equal(output.bytes, "{\"text\": \"x\"}\n");
    assert_string_equal(errors.bytes, "");
}

// A stream that was saved is a source, too, and is whole or refused; so is a named pipe, which is opened once.
static void test_stream_of_saved_stream(void** state) {
    (void)state;
    static const struct {
        const char *lines, *words;
    } saved[] = {
        {BEGIN A_LINE END(1), NULL},
        {A_LINE BEGIN A_LINE END(1) BEGIN END(0), NULL},
        {BEGIN A_LINE, "s.jsonl:2: the stream has no end"},
        {BEGIN A_LINE END(2), "the stream has 1 documents, and says that it has 2"},
        {A_LINE END(1), "s.jsonl:2: a stream ends that never began"},
        {BEGIN A_LINE BEGIN, "s.jsonl:3: a stream begins in a stream"},
        {BEGIN A_LINE "{\"bamc_stream\": \"failed: reason\"}\n", "s.jsonl:3: the stream failed: reason"},
    };
    for (size_t i = 0; i < sizeof saved / sizeof *saved; i++) {
        free(write_bytes("s.jsonl", saved[i].lines, strlen(saved[i].lines)));
        int status = shell("python3 dataset/fineweb.py --local %s/s.jsonl", scratch);
        if (saved[i].words) {
            assert_refused(status, saved[i].words);
            assert_contains(&output, "\"failed: ");
        } else {
            assert_succeeded(status);
        }
    }
    assert_succeeded(
        shell("D=%s; rm $D/s.jsonl; mkfifo $D/s.jsonl; timeout 60 sh -c \"cat $D/l.jsonl >$D/s.jsonl\" & "
              "timeout 60 python3 dataset/fineweb.py --local %s/s.jsonl",
              scratch, scratch));
    assert_contains(&output, END(3));
}

// Nowhere to write to is an error of one line.
static void test_stream_to_nowhere(void** state) {
    (void)state;
    static const struct {
        const char* to;
        int status;
        const char* words;
    } cases[] = {
        {">/dev/full", 1, "error: standard output: No space left on device"},
        {">&-", 1, "error: standard output is closed"},
        {"<&- >&-", 1, "error: standard output is closed"},
        {"<&-", 0, "3 documents"},
        {"<&- 2>&-", 0, ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(shell("python3 dataset/fineweb.py --local %s/l.jsonl %s", scratch, cases[i].to),
                         cases[i].status);
        assert_contains(&errors, cases[i].words);
        assert_null(strstr(errors.bytes, "Traceback"));
        if (cases[i].status == 0) { assert_contains(&output, END(3)); }
    }
}

static void test_stream_errors(void** state) {
    (void)state;
    static const struct {
        const char *name, *content, *words;
    } bad[] = {
        {"l.jsonl", NULL, "l.jsonl: No such file"},
        {"l.csv", "", "l.csv: unknown kind of file"},
        {"l.jsonl", "{\"text\":\"a\"}\n{\"text\":\n", "l.jsonl:2: "},
        {"l.jsonl", "{\"body\":\"a\"}", "no field 'text'"},
        {"l.jsonl", "[1]", "l.jsonl:1: "},
        {"l.jsonl", "{\"text\":5}", "document 1: found int"},
        {"l.jsonl.gz", "no gzip", "expected a whole gzip"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        remove_scratch("l.*");
        if (bad[i].content) { free(write_bytes(bad[i].name, bad[i].content, strlen(bad[i].content))); }
        char* command = text("python3 dataset/fineweb.py --local %s/%s", scratch, bad[i].name);
        assert_refused(shell("%s", command), bad[i].words);
        // prepare does not take what came before the error for a whole dataset
        assert_int_equal(shell("%s | dataset/prepare - --format jsonl --tokenizer bytes --out %s/r", command, scratch),
                         1);
        assert_int_equal(count_files("r", ""), -1);
        free(command);
    }
    assert_refused(shell("python3 dataset/fineweb.py --lokal x"), "unrecognized arguments");
    remove_scratch("l.*");
    assert_refused(shell("python3 dataset/fineweb.py --local %s/cut.jsonl.gz", scratch), "expected a whole gzip");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reproducible),
        cmocka_unit_test(test_passkey),
        cmocka_unit_test(test_own_texts),
        cmocka_unit_test(test_strings),
        cmocka_unit_test(test_shards),
        cmocka_unit_test(test_sequences),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_vocabulary_text),
        cmocka_unit_test(test_interrupted),
        cmocka_unit_test(test_stream),
        cmocka_unit_test(test_stream_of_saved_stream),
        cmocka_unit_test(test_stream_to_nowhere),
        cmocka_unit_test(test_stream_errors),
    };
    return cmocka_run_group_tests(tests, make_scratch, drop_scratch);
}
