// SPDX-License-Identifier: Apache-2.0
// MessagePack as far as the hot commands and their answers need it: an array of at most 15 unsigned integers; and
// Launch.

#pragma once

#include <stdint.h>
#include <string.h>

enum { WORDS = 15, WORDS_BYTES = 1 + WORDS * 9 };

enum { COPY_IN = 6, COPY_OUT = 7, FILL = 11, LAUNCH = 103 }; // codes of commands: flyt/rpc/messages.py
enum { DONE = 4 };                                           // and of the reply that they have in common

// Read so many unsigned integers; where they end, or NULL.
static inline const unsigned char *unpack_words(const unsigned char *at, const unsigned char *end, uint64_t *out,
                                                int count) {
    for (int i = 0; i < count; i++) {
        if (at == end)
            return NULL;
        unsigned char kind = *at++;
        if (kind < 0x80) {
            out[i] = kind;
            continue;
        }
        if (kind < 0xcc || kind > 0xcf || end - at < 1 << (kind - 0xcc))
            return NULL;
        out[i] = 0;
        for (int n = 1 << (kind - 0xcc); n > 0; n--)
            out[i] = out[i] << 8 | *at++;
    }
    return at;
}

// How many words the message has; -1 where it is anything else, or something follows.
static inline int unpack(const unsigned char *at, int64_t length, uint64_t *out) {
    if (length < 1 || (*at & 0xf0) != 0x90)
        return -1;
    int count = *at & 0x0f;
    return unpack_words(at + 1, at + length, out, count) == at + length ? count : -1;
}

static inline char *pack_words(char *at, const uint64_t *words, int count) {
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
    return at;
}

// The message's length; `out` holds WORDS_BYTES.
static inline uint32_t pack(char *out, const uint64_t *words, int count) {
    *out = (char)(0x90 + count);
    return (uint32_t)(pack_words(out + 1, words, count) - out);
}

// --- Launch: 11 words, no attributes, the bytes of its parameters, and that nobody waits for the driver's answer ---

enum { LAUNCH_WORDS = 11, LAUNCH_FIELDS = LAUNCH_WORDS + 3 }; // code, id, function, grid, block, shared, stream
enum { NONE = 0x90, BYTES_8 = 0xc4, NO = 0xc2 };

// The parameters, which lie in the message, and their size; NULL where it is anything else, or something follows.
static inline const unsigned char *unpack_launch(const unsigned char *at, int64_t length, uint64_t *words,
                                                 uint64_t *size) {
    const unsigned char *end = at + length;
    if (length < 1 || *at != 0x90 + LAUNCH_FIELDS)
        return NULL;
    at = unpack_words(at + 1, end, words, LAUNCH_WORDS);
    if (!at || words[0] != LAUNCH || end - at < 4 || *at++ != NONE)
        return NULL;
    if (*at++ != BYTES_8)
        return NULL;
    *size = *at++;
    return (uint64_t)(end - at) == *size + 1 && end[-1] == NO ? at : NULL;
}

// The message's length; 0 where it is longer than the `room` in `out`, which holds the words at least.
static inline uint32_t pack_launch(char *out, uint64_t room, const uint64_t *words, const char *params, uint64_t size) {
    *out = (char)(0x90 + LAUNCH_FIELDS);
    char *at = pack_words(out + 1, words, LAUNCH_WORDS);
    if (size > 0xff || (uint64_t)(at - out) + 4 + size > room)
        return 0;
    *at++ = (char)NONE;
    *at++ = (char)BYTES_8;
    *at++ = (char)size;
    memcpy(at, params, size);
    at += size;
    *at++ = (char)NO;
    return (uint32_t)(at - out);
}
