/*
The normalisation table in a SentencePiece model ("precompiled charsmap"), which the library follows without checks, so
that a damaged one makes it read anywhere. C++, private to tokenizer.cpp.

  4 bytes   size of the trie, little endian
  trie      a double array (darts-clone) of 32-bit units
  the rest  replacements, each ended by a zero byte; a leaf of the trie holds where its one begins

A unit has a label in its low byte (bit 31: it is a leaf and the other 31 bits are its value), whether a leaf hangs at
it (bit 8), and an offset: bits 10 to 30, times 256 if bit 9 is set. The child for byte c of the unit at i is at
(i ^ offset) ^ c if the label there is c; a leaf is at i ^ offset.
*/
#ifndef CHARSMAP_H
#define CHARSMAP_H

#include <stdint.h>
#include <string.h>

#include <string_view>
#include <vector>

static inline uint32_t charsmap_unit(std::string_view units, size_t i) {
    const unsigned char* b = (const unsigned char*)units.data() + 4 * i;
    return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

// Whether whatever text is looked up stays inside the table: follows every way through the trie once.
static inline bool charsmap_is_valid(std::string_view map) {
    if (map.size() < 8) { return false; }
    size_t bytes = charsmap_unit(map, 0);
    if (bytes % 4 != 0 || bytes == 0 || bytes >= map.size() - 4) { return false; }
    std::string_view units = map.substr(4, bytes), replacements = map.substr(4 + bytes);
    if (replacements.back() != '\0') { return false; }
    const size_t count = bytes / 4;
    std::vector<bool> seen(count, false);
    std::vector<uint32_t> open(1, 0);
    seen[0] = true;
    while (!open.empty()) {
        size_t i = open.back();
        open.pop_back();
        uint32_t unit = charsmap_unit(units, i);
        size_t base = i ^ ((size_t)(unit >> 10) << (unit >> 6 & 8));
        if ((base | 255) >= count) { return false; }
        bool has_leaf = unit >> 8 & 1;
        if (has_leaf && (charsmap_unit(units, base) & 0x7FFFFFFF) >= replacements.size()) { return false; }
        for (size_t c = 0; c < 256; c++) {
            size_t child = base ^ c;
            if (seen[child] || (charsmap_unit(units, child) & 0x800000FF) != c) { continue; }
            seen[child] = true;
            open.push_back((uint32_t)child);
        }
    }
    return true;
}

#endif
