// SPDX-License-Identifier: Apache-2.0
// What a client's short way knows and notes, for its four C files.

#pragma once

#include <stdint.h>

#include "ring.h"

enum { ELSEWHERE = -1, LOOK = -2, SENT = -3 }; // SENT - id: the caller waits for it
enum { NOTES = 256, ROWS = 16, ENTRY = 128 };
enum { PINNED = 1, DEVICE = 2 }; // cudaMemoryType's
#define NOWHERE UINT64_MAX       // index of host memory that is not in the window

typedef struct {
    uint64_t start, end, space, device, index;
} block_t;

typedef struct {
    uint64_t id, code, size, index, stream, issued, answered;
} note_t;

typedef struct {
    uint64_t first, count;
} row_t;

typedef struct {
    uint64_t id, end, answered;
} held_t;

typedef struct {
    ring_t *commands, *replies;
    uint64_t *commands_written, *replies_read; // private positions, which Python uses too
    uint64_t command_places, reply_places;
    uint64_t pid, shut;                     // shut: something has to be seen to first
    uint64_t last_id, sent, taken, credits; // flow: also Python's, who holds the lock
    uint64_t woken;                         // the reader's sleep for which it was woken last
    // What Python has to hear of: what was sent (by id % NOTES), successes of its own commands, counts.
    uint64_t news, base, first, count, rows, heard, posts, calls; // `base`: the first one since Python heard
    uint64_t staged_in, staged_out, pinned_in, pinned_out;
    uint64_t asleep;        // of SENT: the sleep of who has to be woken
    uint64_t since, looked; // posts since the last look at the connection, and when that was
    uint64_t patience, yields; // ns that a post waits for a place at most, and whether it gives way meanwhile
    // Staging: a ring of bytes for copies to the device, a cell for copies to the host.
    char *ring;
    uint64_t ring_index, ring_size, head, tail, holds, freed; // positions and counts go on for ever
    char *cell;
    uint64_t cell_index, cell_size, reader; // the command whose answer, or whose caller, still needs the cell
    uint64_t owner;                         // that caller's number of its call
    block_t *blocks;
    uint64_t block_count, block_room;
    row_t row[ROWS];
    held_t held[NOTES];
    note_t note[NOTES];
} express_t;

// A function, and what the driver is known to take of it: flyt/frontend/plain_kernel.py.
typedef struct {
    uint64_t number, size; // of its parameters
    uint64_t grid[3], block[3], threads, shared;
} kernel_t;

const block_t *flyt_within(const express_t *e, uint64_t start, uint64_t size);
int flyt_is_pageable(const express_t *e, uint64_t start, uint64_t size);

int flyt_is_ready(express_t *e);
int64_t flyt_publish(express_t *e, const char *message, uint32_t length, note_t note, int posted);
int64_t flyt_posted(express_t *e, int64_t asleep);

int64_t flyt_express_in(express_t *e, uint64_t address, uint64_t host, uint64_t size, int64_t stream, int waits,
                        uint64_t ns, int yield);
int64_t flyt_express_out(express_t *e, uint64_t host, uint64_t address, uint64_t size, int64_t stream, int waits,
                         uint64_t ns, int yield, uint64_t call);
int64_t flyt_express_fill(express_t *e, uint64_t address, uint64_t value, uint64_t size, int64_t stream);
int64_t flyt_express_part(express_t *e, uint64_t address, uint64_t index, uint64_t size, uint64_t stream,
                          uint64_t *sent);
int64_t flyt_express_sync(express_t *e, uint64_t stream, uint64_t last, uint64_t ns, int yield);
int64_t flyt_express_launch(express_t *e, const kernel_t *k, const uint32_t *shape, uint64_t stream, const char *params,
                            uint64_t size);
