// SPDX-License-Identifier: Apache-2.0
// MessagePack as far as the hot commands and their answers need it: an array of at most 15 unsigned integers.

#pragma once

#include <stdint.h>

enum { WORDS = 15, WORDS_BYTES = 1 + WORDS * 9 };

enum { COPY_IN = 6, COPY_OUT = 7, FILL = 11 }; // codes of commands: flyt/rpc/messages.py
enum { DONE = 4 };                             // and of the reply that they have in common

// How many words the message has; -1 where it is anything else, or something follows.
static inline int unpack(const unsigned char *at, int64_t length, uint64_t *out) {
    const unsigned char *end = at + length;
    if (length < 1 || (*at & 0xf0) != 0x90)
        return -1;
    int count = *at++ & 0x0f;
    for (int i = 0; i < count; i++) {
        if (at == end)
            return -1;
        unsigned char kind = *at++;
        if (kind < 0x80) {
            out[i] = kind;
            continue;
        }
        if (kind < 0xcc || kind > 0xcf || end - at < 1 << (kind - 0xcc))
            return -1;
        out[i] = 0;
        for (int n = 1 << (kind - 0xcc); n > 0; n--)
            out[i] = out[i] << 8 | *at++;
    }
    return at == end ? count : -1;
}

// The message's length; `out` holds WORDS_BYTES.
static inline uint32_t pack(char *out, const uint64_t *words, int count) {
    char *at = out;
    *at++ = (char)(0x90 + count);
    for (int i = 0; i < count; i++) {
        uint64_t value = words[i];
        if (value < 0x80) {
            *at++ = (char)value;
            continue;
        }
        int step = value >> 32 ? 3 : value >> 16 ? 2 : value >> 8 ? 1 : 0;
        *at++ = (char)(0xcc + step);
        for (int n = (1 << step) - 1; n >= 0; n--)
            *at++ = (char)(value >> 8 * n);
    }
    return (uint32_t)(at - out);
}
