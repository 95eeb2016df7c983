/*
Command-line options from one table, which drives parsing, --help, the printed settings, the JSON of
args.json and reading it back. The table is written at the place of use:

    typedef struct { const char* dataset; size_t batch_size; bool global_prior; ... } TrainArgs;
    Option rows[] = {
        OPT_GROUP("Data"),
        OPT_STRING(o->dataset, "10B", "token shards in data/NAME"),
        option_required(OPT_SIZE(o->num_iterations, NULL, 1, OPTION_MAX, "optimizer steps")),
        option_alias("theta_beta_init", OPT_CHOICE(o->thata_beta_init, "0", "number linear sampled", "...")),
    };
    Options options = options_create("train_gpt", "Trains a model.", rows, sizeof rows / sizeof *rows);
    options_parse(&options, argc, argv);                                  // the command line
    if (o->checkpoint_args) { options_from_json(&options, args, path); }  // fills what it left open
    options_check(&options);                                              // is everything required there?

A flag is called as its field. Accepted: --flag value, --flag=value; for switches --flag, --no-flag,
--flag=0|1|true|false, and --flag followed by exactly one of those words; for lists --flag a,b,c and
--flag a b c; whole numbers may be grouped as 589_824. A flag given twice: the last one wins.
An option without a default that nobody gave is unset: NULL, 0, NAN, false, empty; null in JSON.
Strings in targets point into argv, the table, or text that the Options own until options_free().
Numbers keep 15 significant digits, so that JSON gives back the very same value.
*/
#ifndef OPTIONS_H
#define OPTIONS_H

#include <cjson/cJSON.h>
#include <ctype.h>
#include <math.h>

#include "util.h"

typedef enum {
    OPTION_GROUP,    // a heading of --help
    OPTION_STRING,   // const char*
    OPTION_CHOICE,   // const char*, one of a few words
    OPTION_SIZE,     // size_t
    OPTION_DOUBLE,   // double, finite
    OPTION_BOOL,     // bool
    OPTION_IGNORED,  // bool that changes nothing
    OPTION_STRINGS,  // OptionList
    OPTION_SIZES     // OptionList of whole numbers
} OptionType;

// Later sources win.
typedef enum { OPTION_UNSET, OPTION_FROM_DEFAULT, OPTION_FROM_JSON, OPTION_FROM_COMMAND_LINE } OptionSource;

typedef struct {
    size_t count;
    const char** items;
    size_t* sizes;  // OPTION_SIZES: the items as numbers, else zeros
} OptionList;

typedef struct {
    OptionType type;
    const char* name;
    const char* default_text;  // as typed on the command line; NULL = none
    const char* help;
    void* target;
    double min, max;      // both allowed
    const char* choices;  // separated by spaces; "number" stands for any number
    const char* alias;    // a second spelling
    const char* one_of;   // of rows with the same label, at most one has a value
    bool required;        // in a one_of set: some row of the set
    OptionSource source;  // where the value came from
} Option;

typedef struct {
    const char *program, *summary;
    Option* rows;
    size_t count;
    void** owned;
    size_t owned_count;
} Options;

enum { OPTION_COLUMNS = 80, OPTION_HELP_COLUMN = 32 };
#define OPTION_MAX 999999999999999.0  // the largest whole number: 15 digits

// ----------------------------------------------------------------------------
// rows

// "o->batch_size" gives "batch_size".
static inline const char* option_field_name(const char* expression) {
    const char* name = expression;
    for (const char* c = expression; *c; c++) {
        if (*c == '.' || *c == '>') { name = c + 1; }
    }
    return name;
}

static inline Option option_row(OptionType type, const char* field, void* target, const char* default_text, double min,
                                double max, const char* choices, const char* help) {
    Option row = {
        type, option_field_name(field), default_text, help, target, min, max, choices, NULL, NULL, false, OPTION_UNSET};
    return row;
}

// &field, refused by the compiler when the field is not of this type.
#define OPTION_TARGET(type, field) ((void*)(true ? &(field) : (type*)NULL))

#define OPT_GROUP(heading) option_row(OPTION_GROUP, "", NULL, NULL, 0, 0, NULL, heading)
#define OPT_STRING(field, standard, help) \
    option_row(OPTION_STRING, #field, OPTION_TARGET(const char*, field), standard, 0, 0, NULL, help)
#define OPT_CHOICE(field, standard, choices, help) \
    option_row(OPTION_CHOICE, #field, OPTION_TARGET(const char*, field), standard, 0, 0, choices, help)
#define OPT_SIZE(field, standard, min, max, help) \
    option_row(OPTION_SIZE, #field, OPTION_TARGET(size_t, field), standard, min, max, NULL, help)
#define OPT_DOUBLE(field, standard, min, max, help) \
    option_row(OPTION_DOUBLE, #field, OPTION_TARGET(double, field), standard, min, max, NULL, help)
#define OPT_BOOL(field, standard, help) \
    option_row(OPTION_BOOL, #field, OPTION_TARGET(bool, field), standard, 0, 0, NULL, help)
#define OPT_IGNORED(field, help) option_row(OPTION_IGNORED, #field, OPTION_TARGET(bool, field), "0", 0, 0, NULL, help)
#define OPT_STRINGS(field, standard, help) \
    option_row(OPTION_STRINGS, #field, OPTION_TARGET(OptionList, field), standard, 0, 0, NULL, help)
#define OPT_CHOICES(field, standard, choices, help) \
    option_row(OPTION_STRINGS, #field, OPTION_TARGET(OptionList, field), standard, 0, 0, choices, help)
#define OPT_SIZES(field, standard, min, max, help) \
    option_row(OPTION_SIZES, #field, OPTION_TARGET(OptionList, field), standard, min, max, NULL, help)

static inline Option option_required(Option row) { return row.required = true, row; }
static inline Option option_alias(const char* alias, Option row) { return row.alias = alias, row; }

// At most one row of a label has a value; with option_required(), exactly one.
static inline Option option_one_of(const char* label, Option row) { return row.one_of = label, row; }

static inline bool option_is_switch(const Option* r) { return r->type == OPTION_BOOL || r->type == OPTION_IGNORED; }
static inline bool option_is_list(const Option* r) { return r->type == OPTION_STRINGS || r->type == OPTION_SIZES; }

static inline bool option_excludes(const Option* a, const Option* b) {
    return a != b && a->one_of && b->one_of && strcmp(a->one_of, b->one_of) == 0;
}

// ----------------------------------------------------------------------------
// values

// Decimal digits and single underscores between them.
static inline bool option_parse_whole(const char* s, double min, double max, double* value) {
    double x = 0;
    for (const char* c = s; *c; c++) {
        if (*c == '_' && c > s && isdigit((unsigned char)c[1])) { continue; }
        if (!isdigit((unsigned char)*c)) { return false; }
        x = 10 * x + (*c - '0');
    }
    *value = x;
    return *s != '\0' && x >= min && x <= max && x <= OPTION_MAX;
}

static inline bool option_parse_double(const char* s, double min, double max, double* value) {
    if (*s == '\0' || s[strspn(s, "0123456789+-.eE")] != '\0') { return false; }  // no hexadecimal, inf, nan, blanks
    char *end, digits[32];
    errno = 0;
    double x = strtod(s, &end);
    if (*end != '\0' || errno == ERANGE || !isfinite(x)) { return false; }
    snprintf(digits, sizeof digits, "%.15g", x);
    *value = strtod(digits, NULL);
    return *value >= min && *value <= max;
}

static inline bool option_parse_bool(const char* s, double* value) {
    *value = strcmp(s, "1") == 0 || strcmp(s, "true") == 0;
    return *value == 1 || strcmp(s, "0") == 0 || strcmp(s, "false") == 0;
}

static inline bool option_allows(const char* choices, const char* s) {
    double x;
    size_t n = strlen(s), length;
    for (const char* c = choices; *c; c += length + (c[length] == ' ')) {
        length = strcspn(c, " ");
        bool any_number = length == 6 && strncmp(c, "number", 6) == 0;
        if (any_number && option_parse_double(s, -HUGE_VAL, HUGE_VAL, &x)) { return true; }
        if (!any_number && length == n && strncmp(c, s, n) == 0) { return true; }
    }
    return false;
}

// Is the text, or one element of a list, a value of this option? Numbers and bools go to *value.
static inline bool option_accepts(const Option* r, const char* s, double* value) {
    switch (r->type) {
        case OPTION_CHOICE: return option_allows(r->choices, s);
        case OPTION_STRINGS: return r->choices ? option_allows(r->choices, s) : *s != '\0';
        case OPTION_SIZE:
        case OPTION_SIZES: return option_parse_whole(s, r->min, r->max, value);
        case OPTION_DOUBLE: return option_parse_double(s, r->min, r->max, value);
        case OPTION_BOOL:
        case OPTION_IGNORED: return option_parse_bool(s, value);
        default: return *s != '\0';
    }
}

__attribute__((noreturn)) static inline void option_refuse(const Option* r, const char* where, const char* value) {
    static const char* const expected[] = {"",
                                           "text that is not empty",
                                           "one of: ",
                                           "a whole number",
                                           "a number",
                                           "0, 1, true or false",
                                           "0, 1, true or false",
                                           "words that are not empty",
                                           "whole numbers"};
    char range[64] = "";
    if (r->min < r->max) { snprintf(range, sizeof range, " from %.15g to %.15g", r->min, r->max); }
    fatal("%s: found '%s', expected %s%s; see --help", where, value, expected[r->choices ? OPTION_CHOICE : r->type],
          r->choices ? r->choices : range);
}

// Has the pointer freed by options_free(); returns it.
static inline void* options_own(Options* o, void* pointer) {
    o->owned = (void**)xrealloc(o->owned, (o->owned_count + 1) * sizeof(void*));
    o->owned[o->owned_count++] = pointer;
    return pointer;
}

static inline void option_store_list(Options* o, Option* r, const char* where, const char* value) {
    OptionList list = {1, NULL, NULL};
    for (const char* c = value; *c; c++) { list.count += *c == ','; }
    list.items = (const char**)options_own(o, xcalloc(list.count, sizeof(char*)));
    list.sizes = (size_t*)options_own(o, xcalloc(list.count, sizeof(size_t)));
    char* item = (char*)options_own(o, xstrdup(value));
    for (size_t i = 0; i < list.count; i++) {
        size_t length = strcspn(item, ",");
        item[length] = '\0';
        double x = 0;
        if (!option_accepts(r, item, &x)) { option_refuse(r, where, item); }
        list.items[i] = item;
        list.sizes[i] = (size_t)x;
        item += length + 1;
    }
    *(OptionList*)r->target = list;
}

// Checks the text and stores its value; where names the option in an error.
static inline void option_store(Options* o, Option* r, const char* where, const char* value) {
    double x = 0;
    if (option_is_list(r)) {
        option_store_list(o, r, where, value);
        return;
    }
    if (!option_accepts(r, value, &x)) { option_refuse(r, where, value); }
    switch (r->type) {
        case OPTION_SIZE: *(size_t*)r->target = (size_t)x; break;
        case OPTION_DOUBLE: *(double*)r->target = x; break;
        case OPTION_BOOL:
        case OPTION_IGNORED: *(bool*)r->target = x != 0; break;
        default: *(const char**)r->target = value; break;
    }
}

static inline void option_unset(Option* r) {
    OptionList none = {0, NULL, NULL};
    r->source = OPTION_UNSET;
    switch (r->type) {
        case OPTION_GROUP: break;
        case OPTION_SIZE: *(size_t*)r->target = 0; break;
        case OPTION_DOUBLE: *(double*)r->target = NAN; break;
        case OPTION_BOOL:
        case OPTION_IGNORED: *(bool*)r->target = false; break;
        case OPTION_STRINGS:
        case OPTION_SIZES: *(OptionList*)r->target = none; break;
        default: *(const char**)r->target = NULL; break;
    }
}

// Gives an option its value unless it, or a row that excludes it, has one from a later source.
static inline void option_set(Options* o, Option* r, OptionSource source, const char* where, const char* value) {
    for (size_t i = 0; i < o->count; i++) {
        Option* other = &o->rows[i];
        if (!option_excludes(r, other) && r != other) { continue; }
        if (other->source > source) { return; }
        if (other != r && other->source == source && source > OPTION_FROM_DEFAULT) {
            fatal("%s: given together with --%s, which excludes it; give only one of the two", where, other->name);
        }
        if (other != r) { option_unset(other); }
    }
    option_store(o, r, where, value);
    r->source = source;
}

// ----------------------------------------------------------------------------
// parsing

static inline bool option_is_called(const char* spelling, const char* name, size_t length) {
    return spelling && strlen(spelling) == length && strncmp(spelling, name, length) == 0;
}

// The row with this name or alias, or NULL.
static inline Option* options_find(const Options* o, const char* name, size_t length) {
    for (Option* r = o->rows; r < o->rows + o->count; r++) {
        if (r->type == OPTION_GROUP) { continue; }
        if (option_is_called(r->name, name, length) || option_is_called(r->alias, name, length)) { return r; }
    }
    return NULL;
}

static inline Options options_create(const char* program, const char* summary, const Option* rows, size_t count) {
    Options o = {program, summary, (Option*)xcalloc(count, sizeof(Option)), count, NULL, 0};
    memcpy(o.rows, rows, count * sizeof(Option));
    for (size_t i = 0; i < count; i++) {
        Option* r = &o.rows[i];
        assert(r->type == OPTION_GROUP || options_find(&o, r->name, strlen(r->name)) == r);  // names are unique
        option_unset(r);
        if (r->default_text) { option_set(&o, r, OPTION_FROM_DEFAULT, r->name, r->default_text); }
    }
    return o;
}

static inline void options_free(Options* o) {
    for (size_t i = 0; i < o->owned_count; i++) { free(o->owned[i]); }
    free(o->owned);
    free(o->rows);
}

// The row of a name that is there.
static inline Option* options_row(const Options* o, const char* name) {
    Option* r = options_find(o, name, strlen(name));
    assert(r);
    return r;
}

// Where the value of an option came from; OPTION_FROM_COMMAND_LINE = it was given explicitly.
static inline OptionSource options_source(const Options* o, const char* name) { return options_row(o, name)->source; }

// Edits (insert, delete, replace) that turn the first n characters of a into b (Levenshtein 1966), with - and _
// taken as equal; 1 when they begin b.
static inline size_t option_distance(const char* a, size_t n, const char* b) {
    enum { LONGEST = 64 };
    size_t m = strlen(b), edits[LONGEST + 1];
    if (n > LONGEST || m > LONGEST) { return LONGEST; }
    if (n >= 3 && n < m && strncmp(a, b, n) == 0) { return 1; }
    for (size_t j = 0; j <= m; j++) { edits[j] = j; }
    for (size_t i = 1; i <= n; i++) {
        size_t diagonal = edits[0];
        edits[0] = i;
        for (size_t j = 1; j <= m; j++) {
            char x = a[i - 1] == '-' ? '_' : a[i - 1], y = b[j - 1] == '-' ? '_' : b[j - 1];
            size_t replace = diagonal + (x != y), insert = edits[j - 1] + 1, erase = edits[j] + 1;
            diagonal = edits[j];
            edits[j] = replace < insert ? replace : insert;
            if (erase < edits[j]) { edits[j] = erase; }
        }
    }
    return edits[m];
}

// Are the n characters of a the initials of b's words, as lr are those of learning_rate?
static inline bool option_is_abbreviation(const char* a, size_t n, const char* b) {
    size_t i = 0;
    for (const char* word = b; word; i++) {
        if (i == n || a[i] != *word) { return false; }
        word = strchr(word, '_');
        word = word ? word + 1 : NULL;
    }
    return i == n && n > 1;
}

__attribute__((noreturn)) static inline void options_refuse_flag(const Options* o, const char* flag) {
    const char* name = flag + strspn(flag, "-");
    size_t n = strcspn(name, "="), best = n / 3 + 2;
    char nearest[128] = "", negated[128];
    for (size_t i = 0; i < o->count; i++) {
        const Option* r = &o->rows[i];
        if (r->type == OPTION_GROUP) { continue; }
        snprintf(negated, sizeof negated, "no-%s", r->name);
        const char* spellings[] = {r->name, r->alias, option_is_switch(r) ? negated : NULL};
        for (size_t j = 0; j < 3; j++) {
            size_t distance = spellings[j] ? option_distance(name, n, spellings[j]) : best;
            if (spellings[j] && option_is_abbreviation(name, n, spellings[j])) { distance = 0; }
            if (distance >= best) { continue; }
            best = distance;
            snprintf(nearest, sizeof nearest, " (did you mean --%s?)", spellings[j]);
        }
    }
    fatal("unknown flag %.*s%s; see --help", (int)(name + n - flag), flag, nearest);
}

// A negative number does not.
static inline bool option_looks_like_flag(const char* argument) { return strncmp(argument, "--", 2) == 0; }

// The value or values that follow argv[*i]; *i moves to the last one.
static inline const char* option_take_value(Options* o, const Option* r, int argc, char** argv, int* i) {
    if (*i + 1 >= argc || option_looks_like_flag(argv[*i + 1])) {
        fatal("%s: the value is missing; give %s VALUE, see --help", argv[*i], argv[*i]);
    }
    const char* value = argv[++*i];
    while (option_is_list(r) && *i + 1 < argc && !option_looks_like_flag(argv[*i + 1])) {
        value = (const char*)options_own(o, text("%s,%s", value, argv[++*i]));
    }
    return value;
}

static inline void options_print_help(const Options* o, FILE* f);

// Reads the command line; --help prints and ends the program.
static inline void options_parse(Options* o, int argc, char** argv) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "-h") == 0 || strcmp(argv[i], "--help") == 0) {
            options_print_help(o, stdout);
            exit(0);
        }
    }
    for (int i = 1; i < argc; i++) {
        const char *flag = argv[i], *name = flag + 2, *value = NULL;
        double number;
        if (flag[0] != '-' || option_parse_double(flag, -HUGE_VAL, HUGE_VAL, &number)) {
            fatal("unexpected '%s'%s%s: flags begin with --, switches take 0, 1, true, false or nothing; see --help",
                  flag, i > 1 ? " after " : "", i > 1 ? argv[i - 1] : "");
        }
        if (flag[1] != '-') { options_refuse_flag(o, flag); }
        size_t length = strcspn(name, "=");
        Option* r = options_find(o, name, length);
        if (!r && strncmp(name, "no-", 3) == 0) {
            r = options_find(o, name + 3, length - 3);
            value = "0";
            if (r && !option_is_switch(r)) { fatal("%s: --%s is no switch; see --help", flag, r->name); }
            if (r && name[length] == '=') { fatal("%s: --no-%s takes no value; see --help", flag, r->name); }
        }
        if (!r) { options_refuse_flag(o, flag); }
        const char* where = (const char*)options_own(o, text("%.*s", (int)(length + 2), flag));
        if (name[length] == '=') {
            value = name + length + 1;
        } else if (!value && option_is_switch(r)) {
            value = i + 1 < argc && option_parse_bool(argv[i + 1], &number) ? argv[++i] : "1";
        } else if (!value) {
            value = option_take_value(o, r, argc, argv, &i);
        }
        option_set(o, r, OPTION_FROM_COMMAND_LINE, where, value);
    }
}

// Ends the program when something required is unset.
static inline void options_check(const Options* o) {
    for (size_t i = 0; i < o->count; i++) {
        const Option* r = &o->rows[i];
        bool missing = r->required && r->source == OPTION_UNSET;
        char others[512] = "";
        for (size_t j = 0; missing && j < o->count; j++) {
            const Option* other = &o->rows[j];
            if (!option_excludes(r, other)) { continue; }
            if (other->source != OPTION_UNSET) { missing = false; }
            size_t n = strlen(others);
            snprintf(others + n, sizeof others - n, " or --%s", other->name);
        }
        if (missing) { fatal("missing --%s%s, which is required: %s; see --help", r->name, others, r->help); }
    }
}

// ----------------------------------------------------------------------------
// JSON

// Well-formed UTF-8 (RFC 3629), which the texts of JSON are.
static inline bool option_is_utf8(const char* s) {
    for (const unsigned char* c = (const unsigned char*)s; *c; c++) {
        int more = *c < 0x80 ? 0 : *c < 0xc2 ? -1 : *c < 0xe0 ? 1 : *c < 0xf0 ? 2 : *c < 0xf5 ? 3 : -1;
        if (more < 0) { return false; }
        bool wrong = (*c == 0xe0 && c[1] < 0xa0) || (*c == 0xed && c[1] > 0x9f) || (*c == 0xf0 && c[1] < 0x90) ||
                     (*c == 0xf4 && c[1] > 0x8f);
        if (more > 0 && wrong) { return false; }
        for (; more > 0; more--) {
            if ((*++c & 0xc0) != 0x80) { return false; }
        }
    }
    return true;
}

// Refuses text that JSON cannot hold, in the option of this name, or with NULL in any: for what gets recorded.
static inline void options_check_text(const Options* o, const char* name) {
    for (size_t i = 0; i < o->count; i++) {
        const Option* r = &o->rows[i];
        bool one = r->type == OPTION_STRING || r->type == OPTION_CHOICE;
        if ((!one && r->type != OPTION_STRINGS) || r->source == OPTION_UNSET) { continue; }
        if (name && strcmp(r->name, name) != 0) { continue; }
        OptionList single = {1, (const char**)r->target, NULL};
        const OptionList* list = one ? &single : (const OptionList*)r->target;
        for (size_t j = 0; j < list->count; j++) {
            if (list->items[j] && !option_is_utf8(list->items[j])) {
                fatal(
                    "--%s: the text is not UTF-8, which it must be to be recorded as JSON; convert it, or rename what "
                    "it names",
                    r->name);
            }
        }
    }
}

static inline cJSON* option_to_json(const Option* r) {
    bool is_text = r->type == OPTION_STRING || r->type == OPTION_CHOICE;
    const char* string = is_text ? *(const char**)r->target : "";
    if (r->source == OPTION_UNSET || !string) { return cJSON_CreateNull(); }
    double x;
    bool is_number = r->type == OPTION_CHOICE && option_parse_double(string, -HUGE_VAL, HUGE_VAL, &x);
    switch (r->type) {
        case OPTION_SIZE: return cJSON_CreateNumber((double)*(size_t*)r->target);
        case OPTION_DOUBLE: return cJSON_CreateNumber(*(double*)r->target);
        case OPTION_BOOL:
        case OPTION_IGNORED: return cJSON_CreateBool(*(bool*)r->target);
        case OPTION_STRINGS:
        case OPTION_SIZES: break;
        default: return is_number ? cJSON_CreateNumber(x) : cJSON_CreateString(string);
    }
    cJSON* array = cJSON_CreateArray();
    const OptionList* list = (const OptionList*)r->target;
    for (size_t i = 0; i < list->count; i++) {
        bool is_size = r->type == OPTION_SIZES;
        cJSON* item = is_size ? cJSON_CreateNumber((double)list->sizes[i]) : cJSON_CreateString(list->items[i]);
        cJSON_AddItemToArray(array, item);
    }
    return array;
}

// A new object with every option by name; null = unset. Values come from the targets, so that what the program
// settled after parsing is what gets recorded.
static inline cJSON* options_to_json(const Options* o) {
    cJSON* object = cJSON_CreateObject();
    for (size_t i = 0; i < o->count; i++) {
        const Option* r = &o->rows[i];
        if (r->type != OPTION_GROUP) { cJSON_AddItemToObject(object, r->name, option_to_json(r)); }
    }
    return object;
}

// A JSON value as the command line would spell it; NULL for null, an empty array and what is no value of r.
static inline char* option_json_text(const Option* r, const cJSON* item) {
    if (cJSON_IsString(item)) { return xstrdup(item->valuestring); }
    if (cJSON_IsNumber(item)) { return text("%.15g", item->valuedouble); }
    if (cJSON_IsBool(item) && option_is_switch(r)) { return xstrdup(cJSON_IsTrue(item) ? "1" : "0"); }
    if (!cJSON_IsArray(item) || !option_is_list(r)) { return NULL; }
    char* joined = NULL;
    const cJSON* element;
    cJSON_ArrayForEach(element, item) {
        char* next = option_json_text(r, element);
        char* longer = text("%s%s%s", joined ? joined : "", joined ? "," : "", next ? next : "");
        free(joined);
        free(next);
        joined = longer;
    }
    return joined;
}

// Takes options from an object such as options_to_json() made, e.g. the "args" of an earlier run; the command line
// wins over it, and it wins over the defaults. path is for messages. Unknown names get a warning, null is skipped.
static inline void options_from_json(Options* o, const cJSON* object, const char* path) {
    if (!cJSON_IsObject(object)) { fatal("%s: expected an object with arguments; give an args.json of a run", path); }
    const cJSON* item;
    cJSON_ArrayForEach(item, object) {
        Option* r = options_find(o, item->string, strlen(item->string));
        if (!r) {
            warn("%s: no argument of %s is called '%s': ignored", path, o->program, item->string);
            continue;
        }
        const char* where = (const char*)options_own(o, text("%s: %s", path, item->string));
        char* value = option_json_text(r, item);
        bool is_unset = cJSON_IsNull(item) || (cJSON_IsArray(item) && option_is_list(r) && !item->child);
        if (!value && !is_unset) { option_refuse(r, where, cJSON_IsBool(item) ? "a truth value" : "a nested value"); }
        if (value) { option_set(o, r, OPTION_FROM_JSON, where, (const char*)options_own(o, value)); }
    }
}

// ----------------------------------------------------------------------------
// printing

// Prints words from the given column on, with line breaks before column 80, later lines indented.
static inline void option_print_wrapped(FILE* f, size_t column, size_t indent, const char* words) {
    for (const char* w = words; *w;) {
        size_t length = strcspn(w, " ");
        bool first = column == indent;
        if (!first && column + 1 + length > OPTION_COLUMNS) {
            fprintf(f, "\n%*s", (int)indent, "");
            column = indent;
        } else if (!first) {
            column += (size_t)fprintf(f, " ");
        }
        column += (size_t)fprintf(f, "%.*s", (int)length, w);
        w += length + strspn(w + length, " ");
    }
    fputc('\n', f);
}

// The flag's help with what else there is to know in brackets; release with free().
static inline char* option_help_text(const Options* o, const Option* r) {
    char* s = NULL;
    size_t n = 0;
    FILE* f = open_memstream(&s, &n);
    if (!f) { fatal("out of memory: the help text"); }
    fprintf(f, "%s", r->help);
    double on = 0;
    const char *open = " (", *separator = open;
#define NOTE(...) (fprintf(f, "%s", separator), fprintf(f, __VA_ARGS__), separator = "; ")
    if (r->choices) { NOTE("one of: %s", r->choices); }
    if (r->required) { NOTE("required"); }
    if (r->default_text && !option_is_switch(r)) { NOTE("default %s", r->default_text); }
    if (r->default_text && option_is_switch(r) && option_parse_bool(r->default_text, &on) && on == 1) {
        NOTE("on by default, --no-%s turns it off", r->name);
    }
    if (r->alias) { NOTE("also --%s", r->alias); }
    for (size_t i = 0; i < o->count; i++) {
        if (option_excludes(r, &o->rows[i])) { NOTE("excludes --%s", o->rows[i].name); }
    }
#undef NOTE
    if (separator != open) { fputc(')', f); }
    fclose(f);
    return s;
}

static inline void options_print_help(const Options* o, FILE* f) {
    static const char* const kinds[] = {"", " TEXT", " WORD", " N", " X", "", "", " TEXT,...", " N,..."};
    fprintf(f, "usage: %s [--flag VALUE | --flag=VALUE | --[no-]switch]...\n", o->program);
    option_print_wrapped(f, 0, 0, o->summary);
    for (size_t i = 0; i < o->count; i++) {
        const Option* r = &o->rows[i];
        if (r->type == OPTION_GROUP) {
            fprintf(f, "\n%s\n", r->help);
            continue;
        }
        const char* kind = r->type == OPTION_STRINGS && r->choices ? " WORD,..." : kinds[r->type];
        size_t column = (size_t)fprintf(f, "  --%s%s", r->name, kind);
        if (column + 2 > OPTION_HELP_COLUMN) {
            fputc('\n', f);
            column = 0;
        }
        fprintf(f, "%*s", (int)(OPTION_HELP_COLUMN - column), "");
        char* help = option_help_text(o, r);
        option_print_wrapped(f, OPTION_HELP_COLUMN, OPTION_HELP_COLUMN, help);
        free(help);
    }
    fprintf(f, "\n  -h, --help%*sprint this\n", OPTION_HELP_COLUMN - 12, "");
}

// What was given on the command line or came from a run, two to a line; defaults and ignored flags are left out, what
// is long gets its own line.
static inline void options_print_settings(const Options* o, FILE* f) {
    enum { CELL = 38 };
    bool right = false;
    for (size_t i = 0; i < o->count; i++) {
        const Option* r = &o->rows[i];
        if (r->source < OPTION_FROM_JSON || r->type == OPTION_IGNORED) { continue; }
        cJSON* json = option_to_json(r);
        char* value = r->type == OPTION_BOOL ? xstrdup(*(bool*)r->target ? "yes" : "no") : option_json_text(r, json);
        if (!value) { value = xstrdup("-"); }
        size_t used = strlen(r->name) + strlen(value) + 2;
        bool wide = used + 3 > CELL;
        size_t width = wide ? (size_t)OPTION_COLUMNS : (size_t)CELL;
        if (right) { fputs(wide ? "\n" : "    ", f); }
        fprintf(f, "%s ", r->name);
        for (size_t dots = used; dots < width; dots++) { fputc('.', f); }
        right = !right && !wide;
        fprintf(f, " %s%s", value, right ? "" : "\n");
        free(value);
        cJSON_Delete(json);
    }
    if (right) { fputc('\n', f); }
}

#endif
