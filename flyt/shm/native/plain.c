// SPDX-License-Identifier: Apache-2.0
// A session's thread without Python: the plain commands of a client, checked, carried out and answered.
//
// Plain are CopyIn, CopyOut and Memset, of a few KiB or, where the device has an engine of its own, of any size, on a
// stream, in a block and in a segment of the window that Python has checked before and noted here; and Launch of a
// function that it has noted, without attributes. Nothing of the session is in flight but what was begun here. At whatever is not plain, or can't be done, `flyt_plain_serve` returns
// and leaves the command in the ring: Python does it, or says what is wrong with it. So no command is refused here, and
// no error told.
//
// A command is copied out of the ring before it is looked at. Python changes the notes only while nobody is in here.

#include <stddef.h>
#include <string.h>

#include "ring.h"
#include "words.h"

enum { IDLE, LOOK, OTHER, KICK, LATE, BUSY }; // why it returns; BUSY never leaves this file
enum { BLOCKS = 64, SEGMENTS = 16, STREAMS = 16, MARKS = 16, FUNCTIONS = 64, ENTRY = 128 };

#define BATCH 32      // answered together at most: the client has as many credits back by then
#define BRIEF 65536   // bytes: what is larger is waited for longer, with a mark of its own behind it
#define NOT_READY 600 // CUDA_ERROR_NOT_READY

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

size_t flyt_plain_size(void) { return sizeof(plain_t); }

// --- the emulated device's functions ---

int flyt_plain_move(uint64_t to, uint64_t from, size_t size, void *stream) {
    (void)stream;
    memmove((void *)to, (const void *)from, size);
    return 0;
}

int flyt_plain_fill(uint64_t at, unsigned char value, size_t size, void *stream) {
    (void)stream;
    memset((void *)at, value, size);
    return 0;
}

// --- checking ---

// The range in which all of these bytes lie. `size` is not 0.
static const range_t *within(const range_t *ranges, uint32_t count, uint64_t start, uint64_t size) {
    for (uint32_t i = 0; i < count; i++)
        if (start >= ranges[i].start && start < ranges[i].end && size <= ranges[i].end - start)
            return &ranges[i];
    return NULL;
}

static const stream_t *stream_of(const plain_t *p, uint64_t number) {
    for (uint32_t i = 0; i < p->streams; i++)
        if (p->queue[i].number == number)
            return &p->queue[i];
    return NULL;
}

static const function_t *function_of(const plain_t *p, uint64_t number) {
    for (uint32_t i = 0; i < p->functions; i++)
        if (p->function[i].number == number)
            return &p->function[i];
    return NULL;
}

// Whether the message is a plain launch. What the driver has to say of its numbers it says to Python.
static int is_launch(const plain_t *p, const unsigned char *bytes, int64_t length, command_t *c) {
    uint64_t f[LAUNCH_WORDS], size;
    c->params = unpack_launch(bytes, length, f, &size);
    if (!c->params)
        return 0;
    c->code = LAUNCH;
    c->id = f[1];
    c->size = 0;
    c->function = function_of(p, f[2]);
    c->stream = stream_of(p, f[10]);
    if (!c->function || c->function->size != size || !c->stream || !c->stream->launch ||
        c->function->device != c->stream->device)
        return 0;
    for (int i = 0; i < 7; i++) {
        if (f[3 + i] > UINT32_MAX)
            return 0;
        c->shape[i] = (uint32_t)f[3 + i];
    }
    return 1;
}

// Whether the message is a plain command.
static int is_plain(const plain_t *p, const unsigned char *bytes, int64_t length, command_t *c) {
    uint64_t f[WORDS];
    int count = unpack(bytes, length, f);
    if (count < 1)
        return is_launch(p, bytes, length, c);
    int fills = f[0] == FILL;
    if (fills ? count != 6 : (f[0] != COPY_IN && f[0] != COPY_OUT) || count != 7)
        return 0;
    c->code = (int)f[0];
    c->id = f[1];
    c->size = f[4];
    if (c->size < 1 || c->size > p->largest)
        return 0;
    const range_t *block = within(p->block, p->blocks, f[2], c->size);
    c->stream = stream_of(p, fills ? f[5] : f[6]);
    if (!block || !c->stream || block->device != c->stream->device)
        return 0;
    c->to = c->from = f[2];
    c->value = (unsigned char)f[3]; // of a fill
    if (fills)
        return f[3] < 256;
    if (f[5] != p->pid || !within(p->segment, p->segments, f[3], c->size))
        return 0;
    if (c->code == COPY_IN)
        c->from = p->base + f[3];
    else
        c->to = p->base + f[3];
    return 1;
}

// --- doing ---

static int issue(const command_t *c) {
    const stream_t *s = c->stream;
    if (c->code == LAUNCH) {
        const uint32_t *n = c->shape;
        memcpy(c->function->bytes, c->params, c->function->size);
        return s->launch(c->function->handle, n[0], n[1], n[2], n[3], n[4], n[5], n[6], s->handle, c->function->params,
                         NULL);
    }
    if (c->code == FILL)
        return s->fill(c->to, c->value, c->size, s->handle);
    return s->move(c->to, c->from, c->size, s->handle);
}

// The marks that commands on a stream may have.
static uint32_t marks_of(const plain_t *p, const stream_t *s) {
    return s->device == p->marked ? p->marks : 0;
}

// Note that a command was begun. 0, or what the device says of its mark.
static int take(plain_t *p, const command_t *c) {
    flyt_ring_take(p->commands, p->commands_read);
    p->taken++;
    if (c->code != FILL)
        p->moved += c->size;
    if (!p->count++) {
        p->first = c->id;
        p->stream = c->stream->number;
        p->slow = c->size > BRIEF;
        p->oldest = 0;
        p->since = now_ns();
        p->launches = 0;
    }
    p->launches += c->code == LAUNCH;
    uint32_t marks = p->slow ? marks_of(p, c->stream) : 0;
    return marks ? p->record(p->mark[(p->oldest + p->count - 1) % marks], c->stream->handle) : 0;
}

// Answer the first so many of what was taken. LOOK on success, KICK where the client has to be woken, OTHER where its
// ring is damaged.
static int answer(plain_t *p, uint32_t count) {
    char message[WORDS_BYTES];
    uint64_t words[] = {DONE, p->taken, p->first, count};
    int64_t asleep = flyt_ring_write(p->replies, p->replies_written, p->reply_places, ENTRY, message,
                                     pack(message, words, 4));
    if (asleep < 0)
        return OTHER;
    p->count -= count;
    p->first += count;
    p->oldest += count;
    p->since = now_ns();
    if (asleep == 0 || (uint64_t)asleep == p->woken)
        return LOOK;
    p->woken = (uint64_t)asleep;
    return KICK;
}

// Answer what was taken, as far as the device is done with it. LOOK on success; else BUSY, or what to return.
static int finish(plain_t *p) {
    const stream_t *s = stream_of(p, p->stream);
    uint32_t done = p->count, marks = p->slow ? marks_of(p, s) : 0;
    int code = 0;
    if (marks)
        for (done = 0; done < p->count && !(code = p->reached(p->mark[(p->oldest + done) % marks])); done++)
            continue;
    else if (s->query && (code = s->query(s->handle)))
        done = 0;
    if (!done)
        return code == NOT_READY ? BUSY : OTHER;
    return answer(p, done);
}

// Whether it comes next on the stream of those that were taken before.
static int follows(const plain_t *p, const command_t *c) {
    return c->stream->number == p->stream && c->id == p->first + p->count;
}

// Whether there is room for it among them, and for its answer: those of a row with marks may all be apart. A copy behind
// kernels may be answered with them, but none waits for a kernel behind it.
static int joins(const plain_t *p, const command_t *c) {
    if (!p->slow)
        return p->count < BATCH && c->size <= BRIEF && (c->code != LAUNCH || p->launches == p->count);
    return c->code != LAUNCH && p->count < marks_of(p, c->stream) &&
           flyt_ring_room(p->replies, p->replies_written, p->reply_places) > (int64_t)p->count;
}

// Whether Python has to put it beside what is under way, which may take long; else it waits for that.
static int overtakes(const plain_t *p, const command_t *c) {
    if (p->slow) // a row with marks goes on when some of it is done
        return !(follows(p, c) && c->code != LAUNCH && marks_of(p, c->stream));
    return p->launches && c->stream->number != p->stream;
}

// Serve plain commands until none has come for `linger` ns (IDLE), or for `most` ns (LOOK). Also returns for any other
// command, for any that can't be in a row with a large one under way, and for one of another stream behind a launch
// (OTHER); where a large one takes `longest` ns (LATE); and where the client sleeps and has an answer (KICK). What
// `count` then says was taken here, and neither finished nor answered. It is the caller's; or, if marks are behind it
// all and nothing else is done meanwhile, the next call's.
int flyt_plain_serve(plain_t *p, uint64_t linger, uint64_t most, uint64_t longest, int yield) {
    unsigned char bytes[ENTRY];
    command_t c = {0};
    uint64_t begun = now_ns(), last = begun;
    for (uint32_t turn = 1;; turn++) {
        if (turn % 16 == 0) {
            uint64_t now = now_ns();
            last = last ? last : now;
            if (p->count && p->slow && now - p->since >= longest)
                return LATE;
            if (now - begun >= most && !(p->count && p->slow && !marks_of(p, stream_of(p, p->stream))))
                return LOOK;
            if (!p->count && now - last >= linger)
                return IDLE;
        }
        int64_t length =
            flyt_ring_peek(p->commands, p->commands_read, p->command_places, ENTRY, (char *)bytes);
        int plain = length >= 0 && is_plain(p, bytes, length, &c);
        int next = plain && p->count && follows(p, &c);
        if (plain && (!p->count || (next && joins(p, &c)))) {
            if (!p->count && flyt_ring_room(p->replies, p->replies_written, p->reply_places) <= 0)
                return OTHER;
            if (issue(&c) || take(p, &c))
                return OTHER;
            continue;
        }
        int is_other = length != EMPTY && !plain;
        if (p->count) {
            int said = finish(p);
            if (said == LOOK) {
                last = 0;
                continue;
            }
            if (said != BUSY)
                return said;
        }
        if (is_other || (plain && overtakes(p, &c)))
            return OTHER;
        relax(yield);
    }
}
