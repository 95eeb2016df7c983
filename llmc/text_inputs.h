/*
Texts as they are named on the command line of every program that reads documents: which file is what, where its
documents end, and what is refused before any work. Nothing is opened here, as a named pipe gives its bytes only once.
*/
#ifndef TEXT_INPUTS_H
#define TEXT_INPUTS_H

#include "documents.h"
#include "text_options.h"

typedef struct {
    const char* path;  // "-" = standard input
    const char* name;  // for messages
    Format format;
    bool regular;  // a file, no pipe or device
    dev_t device;
    ino_t inode;
} Input;

// ----------------------------------------------------------------------------
// the separator

static inline int hex_digit(char c) {
    const char* digits = "0123456789abcdef";
    const char* at = c ? strchr(digits, c | 32) : NULL;
    return at ? (int)(at - digits) : -1;
}

// The bytes that the --separator stands for, in a new string of *length bytes.
static inline char* separator_bytes(const char* given, size_t* length) {
    static const char escapes[] = "nrt0\\", meanings[] = "\n\r\t\0\\";
    char *bytes = xstrdup(given), *out = bytes;
    for (const char* s = given; *s; s++) {
        const char* escape = *s == '\\' && s[1] ? strchr(escapes, s[1]) : NULL;
        if (escape) {
            *out++ = meanings[escape - escapes];
            s++;
        } else if (*s == '\\' && s[1] == 'x' && hex_digit(s[2]) >= 0 && hex_digit(s[3]) >= 0) {
            *out++ = (char)(16 * hex_digit(s[2]) + hex_digit(s[3]));
            s += 3;
        } else if (*s == '\\') {
            fatal(
                "--separator '%s': unknown escape at '%s', expected \\n, \\r, \\t, \\0, \\xHH, or \\\\ for a backslash",
                given, s);
        } else {
            *out++ = *s;
        }
    }
    *length = (size_t)(out - bytes);
    return bytes;
}

// Text whose lines end in \r\n is read as if they ended in \n, so the separator must be, too; unless it names \r alone.
static inline void separator_unify_lines(DocumentRules* rules, char* bytes) {
    size_t n = rules->separator_length, kept = 0;
    for (size_t i = 0; i < n; i++) { rules->raw_lines |= bytes[i] == '\r' && (i + 1 == n || bytes[i + 1] != '\n'); }
    for (size_t i = 0; i < n && !rules->raw_lines; i++) {
        if (bytes[i] != '\r') { bytes[kept++] = bytes[i]; }
    }
    if (!rules->raw_lines) { rules->separator_length = kept; }
}

// What a text is read by that is the only one: blank lines, unless --separator says otherwise. Release with
// document_rules_free().
static inline DocumentRules document_rules(const TextOptions* o) {
    DocumentRules rules = {NULL, 0, o->text_field ? o->text_field : "text", false, false};
    if (!o->separator || strcmp(o->separator, "blank") == 0) { return rules; }
    rules.whole_files = strcmp(o->separator, "file") == 0;
    if (rules.whole_files) { return rules; }
    if (strcmp(o->separator, "nul") == 0) {
        rules.separator = (const char*)xcalloc(1, 1);
        rules.separator_length = 1;
        return rules;
    }
    char* bytes = separator_bytes(o->separator, &rules.separator_length);
    separator_unify_lines(&rules, bytes);
    rules.separator = bytes;
    return rules;
}

static inline void document_rules_free(DocumentRules* rules) { free((void*)(uintptr_t)rules->separator); }

// ----------------------------------------------------------------------------
// the files

__attribute__((noreturn)) static inline void input_failed(const Input* input) {
    fatal("%s: %s; expected text that can be read", input->name, strerror(errno));
}

// The format that was given holds for all inputs, but no jsonl is read as one large text for the sake of another input.
static inline Format input_format(const Input* input, const char* given) {
    bool named_jsonl = ends_with(input->path, ".jsonl"), named = named_jsonl || ends_with(input->path, ".txt");
    if (!given && !named) {
        fatal("%s: unknown kind of text, expected a name in .txt or .jsonl; give --format txt or --format jsonl",
              input->name);
    }
    if (given && strcmp(given, "txt") == 0 && named_jsonl) {
        fatal("%s: found --format txt for a name in .jsonl; leave --format out, or give the file another name",
              input->name);
    }
    return (given ? strcmp(given, "jsonl") == 0 : named_jsonl) ? FORMAT_JSONL : FORMAT_TXT;
}

static inline Input input_find(const char* path, const char* format, size_t* bytes) {
    Input input;
    memset(&input, 0, sizeof input);
    bool is_stdin = strcmp(path, "-") == 0;
    input.path = path;
    input.name = is_stdin ? "standard input" : path;
    struct stat info;
    if ((is_stdin ? fstat(STDIN_FILENO, &info) : stat(path, &info)) != 0) { input_failed(&input); }
    if (S_ISDIR(info.st_mode)) { fatal("%s: a folder, expected a file; name the files in it", input.name); }
    if (!is_stdin && access(path, R_OK) != 0) { input_failed(&input); }
    input.regular = S_ISREG(info.st_mode);
    input.device = info.st_dev;
    input.inode = info.st_ino;
    input.format = input_format(&input, format);
    *bytes = (size_t)info.st_size;
    return input;
}

// What is no file gives its bytes once, so that it can be one input only.
static inline void input_check_single(const Input* inputs, size_t index) {
    for (size_t i = 0; i < index; i++) {
        if (inputs[i].regular || inputs[i].device != inputs[index].device || inputs[i].inode != inputs[index].inode) {
            continue;
        }
        fatal("%s is named twice%s%s; a pipe can be read once, give it once", inputs[i].name,
              strcmp(inputs[i].name, inputs[index].name) == 0 ? "" : ", also as ",
              strcmp(inputs[i].name, inputs[index].name) == 0 ? "" : inputs[index].name);
    }
}

// Checks that every input is there and what it is; adds up the sizes, 0 when one is unknown. Release with free().
static inline Input* text_inputs_find(const char* const* paths, size_t count, const TextOptions* o, size_t* total) {
    Input* inputs = (Input*)xcalloc(count, sizeof *inputs);
    bool unknown = false, any_txt = false;
    *total = 0;
    for (size_t i = 0; i < count; i++) {
        size_t bytes;
        inputs[i] = input_find(paths[i], o->format, &bytes);
        if (!inputs[i].regular) { input_check_single(inputs, i); }
        unknown = unknown || !inputs[i].regular;
        any_txt = any_txt || inputs[i].format == FORMAT_TXT;
        *total += bytes;
    }
    if (unknown) { *total = 0; }
    if (o->separator && !any_txt) { fatal("--separator is for txt input, found only jsonl; leave it out"); }
    return inputs;
}

// The rules for all inputs together: of several texts each is one document, unless --separator says otherwise.
static inline DocumentRules document_rules_of_inputs(const TextOptions* o, const Input* inputs, size_t count) {
    DocumentRules rules = document_rules(o);
    size_t texts = 0;
    for (size_t i = 0; i < count; i++) { texts += inputs[i].format == FORMAT_TXT; }
    rules.whole_files = rules.whole_files || (!o->separator && texts > 1);
    return rules;
}

// How the documents of txt inputs were told apart; NULL where there is no txt.
static inline const char* document_rules_words(const DocumentRules* rules, const Input* inputs, size_t count) {
    size_t texts = 0;
    for (size_t i = 0; i < count; i++) { texts += inputs[i].format == FORMAT_TXT; }
    if (texts == 0) { return NULL; }
    return rules->whole_files ? "with their file" : rules->separator_length ? "at --separator" : "at blank lines";
}

#endif
