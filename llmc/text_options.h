/*
The flags that say how a text is to be read: the same for every program that reads texts (text_inputs.h).
*/
#ifndef TEXT_OPTIONS_H
#define TEXT_OPTIONS_H

// The options of a program that reads texts. NULL: not given.
typedef struct {
    const char *format, *separator, *text_field;
} TextOptions;

#define TEXT_FORMAT_HELP "needed for - and for names that end in neither .txt nor .jsonl"
#define TEXT_SEPARATOR_HELP                                                                \
    "where the documents of a txt file end: blank (at blank lines), file (one a file), "   \
    "nul (at zero bytes), or at this string, in which \\n, \\r, \\t, \\0, \\xHH and \\\\ " \
    "are understood"
#define TEXT_FIELD_HELP "the field of a jsonl line that holds the document"

#endif
