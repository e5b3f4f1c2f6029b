/* SPDX-License-Identifier: Apache-2.0 */
/* The image of an upper half: a header of one page, then records in a fixed order.
 *
 *   header | state | per mapping: region, runs of pages, ended by an empty run | region of 0 to 0 |
 *   per lower half: frames of bytes, ended by an empty one
 *
 * `flyt split restart` has checked sizes, versions and both checksums (image.py) before the
 * loader reads it.
 */
#ifndef FLYT_SPLIT_IMAGE_H
#define FLYT_SPLIT_IMAGE_H

#include "loader.h"

#define IMAGE_MAGIC "FLYTSPLT"
#define IMAGE_VERSION 2u
#define IMAGE_BUFFER (256u << 10)

struct image_header {
    char magic[8];
    uint32_t version;
    uint32_t header_crc; /* of the page, with this word 0 */
    uint64_t size;       /* of all that follows the page */
    uint32_t crc;        /* of that */
    uint32_t halves;
    uint32_t build, pad; /* of the loader: pointers into it lie in the image */
    uint64_t arena, arena_size;
    struct {
        char name[SPLIT_NAME];
        uint64_t digest, base, size;
    } half[SPLIT_HALVES];
};

/* The same for the same program: where its text ends and what is in it. */
static inline uint32_t image_build(void) {
    extern const char __executable_start[], etext[];
    return crc32((uint32_t)(uint64_t)&info, __executable_start, (uint64_t)(etext - __executable_start));
}

/* Whose memory an image holds: the window's, and what a program has that is not position-independent. */
static inline int is_upper(uint64_t at) { return at < (1ull << 32) || at - info.half[0].base < info.half[0].size; }

struct image_state {
    uint64_t resume_at, fs, mask;
    uint64_t stack[3]; /* stack_t of sigaltstack */
    struct split_upper upper;
    uint64_t action_count;
    struct saved_action action[64];
};

struct image_region {
    uint64_t start, end, prot;
};

struct image_run {
    uint64_t start, size;
};

#endif
