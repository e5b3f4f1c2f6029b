// SPDX-License-Identifier: Apache-2.0
// What a worker's loop knows of its session, and a command, for its two C files.

#pragma once

#include <stddef.h>
#include <stdint.h>

#include "ring.h"

enum { BLOCKS = 64, SEGMENTS = 16, STREAMS = 16, MARKS = 16, FUNCTIONS = 64, ENTRY = 128 };

// A device's own functions, in the form of cuMemcpyAsync, cuMemsetD8Async, cuStreamQuery, cuEventRecord, cuEventQuery
// and cuLaunchKernel: 0 is success.
typedef int (*move_t)(uint64_t to, uint64_t from, size_t size, void *stream);
typedef int (*fill_t)(uint64_t at, unsigned char value, size_t size, void *stream);
typedef int (*query_t)(void *stream);
typedef int (*record_t)(void *event, void *stream);
typedef int (*reached_t)(void *event);
typedef int (*launch_t)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **params, void **extra);

typedef struct {
    uint64_t start, end, device;
} range_t;

typedef struct {
    uint64_t number, device;
    void *handle;
    move_t move;
    fill_t fill;
    query_t query;   // NULL: what was put on the stream is done when the call is back
    launch_t launch; // NULL: the device runs no kernels
} stream_t;

typedef struct {
    uint64_t number, device;
    void *handle;
    uint64_t size;        // of its parameters,
    unsigned char *bytes; // which have their place here,
    void **params;        // and a pointer to each here; the driver takes them before its call is back
} function_t;

typedef struct {
    ring_t *commands, *replies;
    uint64_t *commands_read, *replies_written; // private positions, which Python uses too
    uint32_t command_places, reply_places;
    uint64_t base, pid, largest;
    uint32_t blocks, segments, streams, functions; // how many are noted
    uint32_t count;                                // commands that were taken here and not answered,
    uint32_t launches;                             // of which so many, the first ones, are launches,
    uint64_t first;                                // from this number on,
    uint64_t stream;                               // on this stream
    uint64_t taken, moved, woken;
    uint64_t slow; // whether what was taken began with a large copy or fill: each has a mark then
    uint32_t marks, oldest; // events of a device, in turns; without any, large ones are done one at a time
    uint64_t marked;        // the device that they are of
    uint64_t since;         // when something was answered last, or the first of what is under way was begun
    uint64_t run, run_to, run_from, run_size; // the last so many of what was taken are one copy that is not begun yet
    record_t record;
    reached_t reached;
    void *mark[MARKS];
    range_t block[BLOCKS], segment[SEGMENTS]; // segments by index into the window
    stream_t queue[STREAMS];
    function_t function[FUNCTIONS];
} plain_t;

typedef struct {
    uint64_t id, number, size;
    const stream_t *stream;
    uint64_t to, from;
    unsigned char value;
    int code;
    const function_t *function;  // of a launch,
    const unsigned char *params; // with its parameters,
    uint32_t shape[7];           // grid, block, and bytes of shared memory
} command_t;

const range_t *flyt_within_range(const range_t *ranges, uint32_t count, uint64_t start, uint64_t size);
const stream_t *flyt_stream_of(const plain_t *p, uint64_t number);
int flyt_is_plain(const plain_t *p, const unsigned char *bytes, int64_t length, command_t *c);
