/*
Lengths of documents in tokens, BOS and EOS counted: how many there are of each, so that the median is known without
keeping the lengths. Short ones are counted exactly, long ones by their first 16 binary digits; the table takes 5 MB.
*/
#ifndef DOCUMENT_LENGTHS_H
#define DOCUMENT_LENGTHS_H

#include "../llmc/util.h"

enum {
    LENGTH_DIGITS = 16,  // binary digits that are told apart
    LENGTH_EXACT = 1 << LENGTH_DIGITS,
    LENGTH_DOUBLINGS = 48 - LENGTH_DIGITS,
    LENGTH_BINS = LENGTH_EXACT + LENGTH_DOUBLINGS * (LENGTH_EXACT / 2)
};

typedef struct {
    size_t documents, tokens, shortest, longest;
    uint32_t* bins;
} DocumentLengths;

static inline size_t length_bin(size_t length) {
    size_t doublings = 0;
    for (; length >= LENGTH_EXACT && doublings < LENGTH_DOUBLINGS; doublings++) { length /= 2; }
    return doublings * (LENGTH_EXACT / 2) + length;
}

// The shortest length that a bin counts.
static inline size_t length_of_bin(size_t bin) {
    if (bin < LENGTH_EXACT) { return bin; }
    size_t doublings = bin / (LENGTH_EXACT / 2) - 1;
    return (LENGTH_EXACT / 2 + bin % (LENGTH_EXACT / 2)) << doublings;
}

static inline void lengths_add(DocumentLengths* l, size_t length) {
    if (!l->bins) { l->bins = (uint32_t*)xcalloc(LENGTH_BINS, sizeof *l->bins); }
    l->bins[length_bin(length)]++;
    if (l->documents == 0 || length < l->shortest) { l->shortest = length; }
    if (length > l->longest) { l->longest = length; }
    l->documents++;
    l->tokens += length;
}

// The length that at most half of the documents are shorter than; the smaller of the two in the middle.
static inline size_t lengths_median(const DocumentLengths* l) {
    size_t seen = 0, bin = 0;
    for (; bin < LENGTH_BINS; bin++) {
        seen += l->bins[bin];
        if (2 * seen >= l->documents) { break; }
    }
    return length_of_bin(bin);
}

#endif
