// SPDX-License-Identifier: Apache-2.0
// The client's map of memory that is not ordinary: the same blocks as in `flyt/frontend/pointers.py`, by address.

#include <stdlib.h>
#include <string.h>

#include "express.h"

// How many blocks begin at or before the address.
static uint64_t rank(const express_t *e, uint64_t address) {
    uint64_t low = 0, high = e->block_count;
    while (low < high) {
        uint64_t middle = (low + high) / 2;
        if (e->blocks[middle].start <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// Note a block, in the place of one that begins at the same address. 0 where there is no memory for it.
int flyt_express_add(express_t *e, uint64_t start, uint64_t size, uint64_t space, uint64_t device, uint64_t index) {
    block_t block = {start, start + size, space, device, index};
    uint64_t at = rank(e, start);
    if (at && e->blocks[at - 1].start == start) {
        e->blocks[at - 1] = block;
        return 1;
    }
    if (e->block_count == e->block_room) {
        uint64_t room = e->block_room ? 2 * e->block_room : 64;
        block_t *blocks = realloc(e->blocks, room * sizeof(block_t));
        if (!blocks)
            return 0;
        e->blocks = blocks;
        e->block_room = room;
    }
    memmove(e->blocks + at + 1, e->blocks + at, (e->block_count - at) * sizeof(block_t));
    e->blocks[at] = block;
    e->block_count++;
    return 1;
}

void flyt_express_remove(express_t *e, uint64_t start) {
    uint64_t at = rank(e, start);
    if (!at || e->blocks[at - 1].start != start)
        return;
    memmove(e->blocks + at - 1, e->blocks + at, (e->block_count - at) * sizeof(block_t));
    e->block_count--;
}

void flyt_express_end(express_t *e) {
    e->shut = 1;
    free(e->blocks);
    e->blocks = NULL;
    e->block_count = e->block_room = 0;
}

// The block that all of these bytes lie in. `size` is not 0.
const block_t *flyt_within(const express_t *e, uint64_t start, uint64_t size) {
    uint64_t at = rank(e, start);
    const block_t *block = at ? &e->blocks[at - 1] : NULL;
    return block && start < block->end && size <= block->end - start ? block : NULL;
}

int flyt_is_pageable(const express_t *e, uint64_t start, uint64_t size) {
    uint64_t end = start + size, at = rank(e, end - 1);
    return end > start && (!at || e->blocks[at - 1].end - 1 < start); // an end may be 0: that of all addresses
}
