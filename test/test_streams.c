/*
Inputs that come as streams: a source that announces one must end it, whatever cuts it short; named pipes and standard
input lose nothing; and an empty one is no input.
*/
#include "prepare_util.h"

#define BYTES(s) s, sizeof(s) - 1

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

// ----------------------------------------------------------------------------
// marks

#define BEGIN "{\"bamc_stream\": \"begins\"}\n"
#define END(n) "{\"bamc_stream\": \"ends after " #n " documents\"}\n"
#define DOC "{\"text\":\"a\"}\n"

static const struct {
    const char* lines;
    int documents;      // 0 = refused
    const char* words;  // of the error
} streams[] = {
    {BEGIN DOC DOC END(2), 2, ""},
    {"\xEF\xBB\xBF\n" BEGIN DOC "\n" DOC END(2) "\n", 2, ""},
    {BEGIN DOC "{\"bamc_stream\":\"ends after 1 documents\"}", 1, ""},
    {" \t{ \"bamc_stream\" : \"begins\", \"n\": [1] } \r\n" DOC END(1), 1, ""},
    {BEGIN DOC "{\"text\":\"\"}\n" END(2), 1, ""},
    {BEGIN DOC END(1) BEGIN DOC DOC END(2), 3, ""},
    {DOC BEGIN DOC END(1) DOC, 3, ""},
    {DOC BEGIN END(0), 1, ""},
    {"{\"text\":\"\\\"bamc_stream\\\"\"}\n{\"text\":\"b\", \"bamc_stream\": 1}\n", 2, ""},
    {BEGIN DOC DOC, 0, "s.jsonl: the stream that begins in line 1 has no end after 2 documents"},
    {BEGIN, 0, "has no end after 0 documents"},
    {"\n" DOC BEGIN DOC "\n", 0, "the stream that begins in line 3 has no end after 1 documents"},
    {BEGIN DOC BEGIN DOC END(1), 0, "s.jsonl:3: a stream begins before that of line 1 has ended"},
    {DOC END(1), 0, "s.jsonl:2: a stream ends whose beginning is missing"},
    {BEGIN DOC END(1) END(1), 0, "s.jsonl:4: a stream ends whose beginning"},
    {BEGIN DOC END(2), 0, "s.jsonl:3: the stream that begins in line 1 has 1 documents, expected 2"},
    {BEGIN DOC DOC END(1), 0, "has 2 documents, expected 1"},
    {BEGIN DOC "{\"bamc_stream\": \"failed: disk full\"}\n", 0, "s.jsonl:3: the stream failed: disk full"},
    {BEGIN DOC "{\"bamc_stream\": \"ends after 1 doc", 0, "s.jsonl:3:34: the string does not end"},
    {BEGIN DOC "{\"bamc_stream\": \"ends after 1\"}\n", 0, "s.jsonl:3: the stream ends after 1"},
    {BEGIN DOC "{\"bamc_stream\": 1}\n", 0, "s.jsonl:3:17: the text field is no string"},
    {BEGIN "{\"te", 0, "s.jsonl:2:5: the string does not end"},
    {"{\"bamc_str", 0, "s.jsonl:1:11: the string does not end"},
};

static void test_marks(void** state) {
    (void)state;
    for (size_t i = 0; i < sizeof streams / sizeof *streams; i++) {
        print_message("stream %zu\n", i);
        char* path = write_bytes("s.jsonl", streams[i].lines, strlen(streams[i].lines));
        int status = run("prepare", "%s --tokenizer bytes --out %s/s", path, scratch);
        if (streams[i].documents) {
            assert_succeeded(status);
            char* documents = text("/s: %d documents", streams[i].documents);
            assert_contains(&output, documents);
            free(documents);
            remove_scratch("s");
        } else {
            assert_refused(status, streams[i].words);
            assert_int_equal(count_files("s", ""), -1);
        }
        free(path);
    }
}

// Marks far apart, in blocks that several threads read; and each input must be whole by itself.
static void test_marks_of_large_streams(void** state) {
    (void)state;
    enum { DOCUMENTS = 150000 };
    char *content = (char*)xcalloc(DOCUMENTS + 10, 32), *end = content;
    end += sprintf(end, BEGIN);
    for (int i = 0; i < DOCUMENTS; i++) { end += sprintf(end, "{\"text\":\"%d\"}\n", i); }
    char* whole_end = end + sprintf(end, END(150000) BEGIN DOC);
    size_t cut = (size_t)(end - content), open = (size_t)(whole_end - content);
    size_t whole = open - strlen(BEGIN DOC);
    char *first = write_bytes("first.jsonl", content, whole), *second = write_bytes("second.jsonl", content, cut);
    char* third = write_bytes("third.jsonl", content, open);
    assert_succeeded(run("prepare", "%s %s --threads 3 --tokenizer bytes --out %s/m", first, first, scratch));
    assert_contains(&output, "/m: 300000 documents");
    remove_scratch("m");
    assert_refused(run("prepare", "%s %s --threads 3 --tokenizer bytes --out %s/m", second, first, scratch),
                   "second.jsonl: the stream that begins in line 1 has no end after 150000 documents");
    assert_refused(run("prepare", "%s %s --threads 3 --tokenizer bytes --out %s/m", first, third, scratch),
                   "third.jsonl: the stream that begins in line 150003 has no end after 1 documents");
    assert_int_equal(count_files("m", ""), -1);
    char* all[] = {content, first, second, third};
    for (size_t i = 0; i < 4; i++) { free(all[i]); }
}

// ----------------------------------------------------------------------------
// the scripts that write streams

// dataset/fineweb.py is killed once so many lines of it have come through, at the end of a line.
static void test_killed_source(void** state) {
    (void)state;
    char* make =
        text("python3 -c 'print(\"{\\\"text\\\":\\\"some words of text\\\"}\\n\" * 300000)' >%s/big.jsonl", scratch);
    assert_int_equal(system(make), 0);
    char* script = text(
        "{ python3 dataset/fineweb.py --local %s/big.jsonl 2>/dev/null & echo $! >%s/pid; wait; } | "
        "{ head -n 4000; kill -KILL $(cat %s/pid); true; } >%s/part.jsonl 2>/dev/null",
        scratch, scratch, scratch, scratch);
    assert_int_equal(system(script), 0);
    assert_refused(run("prepare", "%s/part.jsonl --tokenizer bytes --out %s/k", scratch, scratch),
                   "has no end after 3999 documents");
    assert_refused(run("prepare", "- --format jsonl --tokenizer bytes --out %s/k <%s/part.jsonl", scratch, scratch),
                   "standard input: the stream that begins in line 1 has no end after 3999 documents");
    assert_int_equal(count_files("k", ""), -1);
    free(make);
    free(script);
}

// ----------------------------------------------------------------------------
// pipes

// 300 documents through a named pipe, through two, through standard input, and through a file descriptor.
static void test_named_pipes(void** state) {
    (void)state;
    char *content = (char*)xcalloc(301, 64), *end = content;
    for (int i = 0; i < 300; i++) { end += sprintf(end, "document %d\nof two lines\n\n", i); }
    free(write_bytes("p.txt", content, (size_t)(end - content)));
    static const char* const commands[] = {
        "fill one.txt & prepare one.txt",
        "fill one.txt & fill two.txt & prepare one.txt two.txt --separator blank",
        "cat p.txt | prepare - --format txt",
        "cat p.txt | prepare /dev/stdin --format txt",
        "prepare /dev/fd/7 --format txt 7<p.txt",
        "fill one.txt & cat p.txt | prepare p.txt one.txt - p.txt --format txt --separator blank",
    };
    static const int documents[] = {300, 600, 300, 300, 300, 1200};
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        print_message("pipe %zu\n", i);
        char* command = text(
            "P=$(realpath %s); cd %s; rm -f one.txt two.txt; mkfifo one.txt two.txt; "
            "fill() { timeout 60 sh -c \"cat p.txt >$1\"; }; "
            "prepare() { timeout 60 $P \"$@\" --tokenizer bytes --out pipes --overwrite; }; { %s; } >out 2>err",
            program("prepare"), scratch, commands[i]);
        int status = system(command);
        char* path = text("%s/out", scratch);
        Bytes out = read_bytes(path);
        char* words = text("pipes: %d documents", documents[i]);
        assert_int_equal(status, 0);
        assert_contains(&out, words);
        char* all[] = {command, path, out.bytes, words};
        for (size_t k = 0; k < 4; k++) { free(all[k]); }
    }
    assert_refused(run("prepare", "%s/one.txt %s/one.txt --tokenizer bytes --out %s/q", scratch, scratch, scratch),
                   "one.txt is named twice");
    assert_refused(run("prepare", "- %s/p.txt - --format txt --tokenizer bytes --out %s/q", scratch, scratch),
                   "standard input is named twice");
    free(content);
    remove_scratch("*");
}

// A pipe that nothing came through is a program that failed; an empty file is said to be one.
static void test_empty_inputs(void** state) {
    (void)state;
    free(write_bytes("a.txt", BYTES("a\n")));
    free(write_bytes("empty.txt", BYTES("")));
    assert_refused(run("prepare", "%s/a.txt - --format txt --tokenizer bytes --out %s/e </dev/null", scratch, scratch),
                   "no documents in standard input");
    assert_int_equal(count_files("e", ""), -1);
    assert_succeeded(run("prepare", "%s/empty.txt %s/a.txt --tokenizer bytes --out %s/e", scratch, scratch, scratch));
    assert_contains(&errors, "empty.txt: no documents");
    remove_scratch("*");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_marks),         cmocka_unit_test(test_marks_of_large_streams),
        cmocka_unit_test(test_killed_source), cmocka_unit_test(test_named_pipes),
        cmocka_unit_test(test_empty_inputs),
    };
    return cmocka_run_group_tests(tests, make_scratch, drop_scratch);
}
