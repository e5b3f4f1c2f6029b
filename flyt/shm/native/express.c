// SPDX-License-Identifier: Apache-2.0
// A client's small copies and fills, each in one call: checked, staged, encoded, published, noted; and plain answers.
//
// Whoever calls holds the lock of the connection, and the GIL, so that a call is one step to other threads and to
// handlers of signals. It leaves its notes here, where the next holder of the lock who wants more than this finds them
// (`flyt/frontend/express_link.py`). What is not plain returns ELSEWHERE, and nothing has happened.
//
// The commands are CopyIn, CopyOut and Memset, and in launches.c Launch, the answers Done. Any other answer is left in
// the ring, for Python.

#include <stddef.h>
#include <string.h>

#include "express.h"
#include "words.h"

enum { LINE = 64 };
enum { OF_MEMORY = -1 }; // no stream's number: the legacy stream of the memory's device

#define LOOK_EVERY 32    // posts between two looks at the connection, which tells of its end; and FRESH at least
#define SHORT (64 << 10) // bytes: what is longer on its way is not waited for with the lock held
#define FRESH 1000000    // ns: LOOK_SECONDS of flyt/frontend/wire.py, how often the connection is looked at

size_t flyt_express_size(void) { return sizeof(express_t); }

// --- answers ---

// A command was answered in success, or was told to Python: whoever held bytes for it does so no longer.
static void let_go(express_t *e, uint64_t id) {
    for (uint64_t i = e->freed; i != e->holds && e->held[i % NOTES].id <= id; i++)
        if (e->held[i % NOTES].id == id)
            e->held[i % NOTES].answered = 1;
    for (; e->freed != e->holds && e->held[e->freed % NOTES].answered; e->freed++)
        e->tail = e->held[e->freed % NOTES].end;
}

void flyt_express_answered(express_t *e, uint64_t first, uint64_t count) {
    uint64_t last = e->holds != e->freed ? e->held[(e->holds - 1) % NOTES].id : 0;
    for (uint64_t id = first; count-- && id <= last; id++)
        let_go(e, id);
}

static int is_noted(const express_t *e, uint64_t id) { return id - e->first < e->count; }

// Whether the answer to a command was read, and Python has not been told yet.
static int is_answered(const express_t *e, uint64_t id) {
    if (e->base && id >= e->base)
        return !is_noted(e, id) || e->note[id % NOTES].answered;
    for (uint64_t i = 0; i < e->rows; i++)
        if (id - e->row[i].first < e->row[i].count)
            return 1;
    return 0;
}

// The same for who does not know whether Python has been told: then it is Python's to say, -1.
int flyt_express_state(const express_t *e, uint64_t id) {
    return is_answered(e, id) ? 1 : e->base && id >= e->base ? 0 : -1;
}

static void tell(express_t *e, uint64_t id) {
    row_t *last = e->rows ? &e->row[e->rows - 1] : NULL;
    if (is_noted(e, id))
        e->note[id % NOTES].answered = 1;
    else if (last && last->first + last->count == id)
        last->count++;
    else
        e->row[e->rows++] = (row_t){id, 1};
}

// Read one Done. 1, or 0 where there is something else, which is Python's, or EMPTY.
static int read_on(express_t *e) {
    unsigned char bytes[ENTRY];
    uint64_t words[WORDS];
    int64_t length = flyt_ring_peek(e->replies, e->replies_read, (uint32_t)e->reply_places, ENTRY, (char *)bytes);
    if (length == EMPTY)
        return EMPTY;
    if (unpack(bytes, length, words) != 4 || words[0] != DONE || e->rows == ROWS)
        return 0; // one row is enough: those of our notes are in none, and come last
    uint64_t first = words[2], count = words[3];
    if (count > e->sent || first > e->last_id || count > e->last_id - first + 1)
        return 0;
    flyt_ring_take(e->replies, e->replies_read);
    for (uint64_t id = first; id - first < count; id++)
        tell(e, id);
    flyt_express_answered(e, first, count);
    for (; e->count && e->note[e->first % NOTES].answered; e->first++)
        e->count--;
    if (words[1] > e->taken)
        e->taken = words[1];
    e->heard = now_ns();
    e->news = 1;
    return 1;
}

// Read all there is; whether there was any answer.
int flyt_express_read(express_t *e) {
    int any = 0;
    while (read_on(e) == 1)
        any = 1;
    return any;
}

// Read on until the answer to a command was read, something else has come, or for `ns`.
void flyt_express_wait(express_t *e, uint64_t id, uint64_t ns, int yield) {
    uint64_t end = 0;
    for (uint32_t turn = 1; !is_answered(e, id); turn++) {
        int read = read_on(e);
        if (read == 0)
            return;
        if (turn % 16 == 0) {
            uint64_t now = now_ns();
            end = end ? end : now + ns;
            if (now >= end)
                return;
        }
        if (read == EMPTY)
            relax(yield);
    }
}

// Whether all that was put on a stream is done; `last` is the number of the last command of it that Python knows to be
// unanswered, 0 for none. Waits for `ns` at most. ELSEWHERE: it is not, or something has to be seen to first.
int64_t flyt_express_sync(express_t *e, uint64_t stream, uint64_t last, uint64_t ns, int yield) {
    if (e->shut)
        return ELSEWHERE;
    for (uint64_t id = e->first + e->count; id > e->first; id--)
        if (e->note[(id - 1) % NOTES].stream == stream) {
            last = id - 1;
            break;
        }
    if (last) {
        flyt_express_wait(e, last, ns, yield);
        if (!is_answered(e, last))
            return ELSEWHERE;
    }
    int read;
    while ((read = read_on(e)) == 1) // an error of other work may be there, which is told by any synchronise
        continue;
    return read == EMPTY && now_ns() - e->heard < FRESH ? 0 : ELSEWHERE;
}

// Python has noted all the news, and numbers commands itself from here on.
void flyt_express_heard(express_t *e) {
    e->news = e->base = e->count = e->rows = e->posts = e->calls = 0;
    e->staged_in = e->staged_out = e->pinned_in = e->pinned_out = 0;
}

// --- sending ---

static const block_t *on_device(const express_t *e, uint64_t address, uint64_t size) {
    const block_t *block = flyt_within(e, address, size);
    return block && block->space == DEVICE ? block : NULL;
}

// Read on while a post has no place. 0 after a while, and where something has come that is Python's; `end` begins as 0.
static int waits(express_t *e, uint64_t *end) {
    uint64_t now = now_ns();
    *end = *end ? *end : now + e->patience;
    if (now >= *end)
        return 0;
    relax((int)e->yields);
    int read;
    while ((read = read_on(e)) == 1)
        continue;
    return read == EMPTY;
}

// Whether there is nothing to see to first, and a credit, and room for a note. Who posts faster than the worker takes
// waits for that here: the general way takes longer over it than a whole row of posts.
int flyt_is_ready(express_t *e) {
    if (e->shut)
        return 0;
    uint64_t end = 0;
    int read;
    while ((read = read_on(e)) == 1)
        continue;
    if (read != EMPTY)
        return 0;
    while (e->sent - e->taken >= e->credits || e->count >= NOTES || e->holds - e->freed >= NOTES)
        if (!waits(e, &end))
            return 0;
    return 1;
}

typedef struct {
    uint64_t code, address, second, size, stream, index, posted;
} command_t;

// Publish the next command and note it. What flyt_ring_write returns, 0 for a reader that has been woken already.
int64_t flyt_publish(express_t *e, const char *message, uint32_t length, note_t note, int posted) {
    int64_t asleep = flyt_ring_write(e->commands, e->commands_written, (uint32_t)e->command_places, ENTRY, message,
                                     length);
    if (asleep < 0)
        return asleep;
    note.id = ++e->last_id;
    note.issued = now_ns();
    if (!e->base)
        e->base = note.id;
    if (!e->count)
        e->first = note.id;
    e->note[note.id % NOTES] = note;
    e->count++;
    e->sent++;
    e->news = 1;
    if (posted)
        e->posts++;
    else
        e->calls++;
    return (uint64_t)asleep == e->woken ? 0 : asleep;
}

static int64_t publish(express_t *e, const command_t *c) {
    char message[WORDS_BYTES];
    uint64_t words[] = {c->code, e->last_id + 1, c->address, c->second, c->size, e->pid, c->stream};
    int count = 7;
    if (c->code == FILL) {
        words[5] = c->stream;
        count = 6;
    }
    note_t note = {.code = c->code, .size = c->size, .index = c->index, .stream = c->stream};
    return flyt_publish(e, message, pack(message, words, count), note, (int)c->posted);
}

// Of a post: 0, LOOK now and then, or the sleep of the reader, who has to be woken.
int64_t flyt_posted(express_t *e, int64_t asleep) {
    if (asleep)
        return asleep;
    uint64_t now = e->note[e->last_id % NOTES].issued;
    if (++e->since < LOOK_EVERY || now < e->looked + FRESH)
        return 0;
    e->since = 0;
    e->looked = now;
    return LOOK;
}

static int64_t sent(express_t *e, int64_t asleep) {
    e->asleep = (uint64_t)asleep;
    return SENT - (int64_t)e->last_id;
}

// Where the next bytes go: an offset in the ring, or NOWHERE while others hold that place.
static uint64_t place(express_t *e, uint64_t size) {
    if (e->freed == e->holds)
        e->tail = e->head;
    uint64_t at = e->head % e->ring_size;
    if (at + size > e->ring_size) { // not across the end
        e->head += e->ring_size - at;
        at = 0;
    }
    return e->head + size - e->tail > e->ring_size ? NOWHERE : at;
}

static int64_t stage(express_t *e, command_t *c, uint64_t host) {
    uint64_t at = NOWHERE, end = 0;
    while (c->size <= e->ring_size / 16 && (at = place(e, c->size)) == NOWHERE && waits(e, &end))
        continue;
    if (at == NOWHERE)
        return ELSEWHERE;
    memcpy(e->ring + at, (const void *)host, c->size);
    c->second = c->index = e->ring_index + at;
    c->posted = 1;
    int64_t asleep = publish(e, c);
    if (asleep < 0)
        return ELSEWHERE;
    e->head += (c->size + LINE - 1) / LINE * LINE;
    e->held[e->holds++ % NOTES] = (held_t){e->last_id, e->head, 0};
    e->staged_in += c->size;
    return flyt_posted(e, asleep);
}

// A copy between the device and pinned memory; with `waits` its caller waits for it, `ns` of that time here.
static int64_t move(express_t *e, command_t *c, uint64_t host, int waits, uint64_t ns, int yield) {
    const block_t *block = flyt_within(e, host, c->size);
    if (!block || block->index == NOWHERE)
        return ELSEWHERE;
    c->second = c->index = block->index + host - block->start;
    c->posted = !waits;
    int64_t asleep = publish(e, c);
    if (asleep < 0)
        return ELSEWHERE;
    *(c->code == COPY_IN ? &e->pinned_in : &e->pinned_out) += c->size;
    if (!waits)
        return flyt_posted(e, asleep);
    if (!asleep && c->size <= SHORT)
        flyt_express_wait(e, e->last_id, ns, yield);
    return is_answered(e, e->last_id) ? 0 : sent(e, asleep);
}

// cudaMemcpyAsync to the device; `waits` for cudaMemcpy. Returns 0: all is done that was to be done; SENT - id; LOOK;
// ELSEWHERE; or the reader's sleep, see `posted`.
int64_t flyt_express_in(express_t *e, uint64_t address, uint64_t host, uint64_t size, int64_t stream, int waits,
                        uint64_t ns, int yield) {
    const block_t *block = on_device(e, address, size);
    if (!block || !flyt_is_ready(e))
        return ELSEWHERE;
    command_t c = {COPY_IN, address, 0, size, stream == OF_MEMORY ? block->device : (uint64_t)stream, 0, 0};
    return flyt_is_pageable(e, host, size) ? stage(e, &c, host) : move(e, &c, host, waits, ns, yield);
}

// The same to host memory. Pageable memory is complete at 0; at SENT - id the cell is the `call`'s.
int64_t flyt_express_out(express_t *e, uint64_t host, uint64_t address, uint64_t size, int64_t stream, int waits,
                         uint64_t ns, int yield, uint64_t call) {
    const block_t *block = on_device(e, address, size);
    if (!block || !flyt_is_ready(e))
        return ELSEWHERE;
    command_t c = {COPY_OUT, address, 0, size, stream == OF_MEMORY ? block->device : (uint64_t)stream, 0, 0};
    if (!flyt_is_pageable(e, host, size))
        return move(e, &c, host, waits, ns, yield);
    if (size > e->cell_size || e->reader)
        return ELSEWHERE;
    c.second = c.index = e->cell_index;
    int64_t asleep = publish(e, &c);
    if (asleep < 0)
        return ELSEWHERE;
    e->staged_out += size;
    if (!asleep)
        flyt_express_wait(e, e->last_id, ns, yield);
    if (!is_answered(e, e->last_id)) {
        e->reader = e->last_id;
        e->owner = call;
        return sent(e, asleep);
    }
    memcpy((void *)host, e->cell, size);
    return 0;
}

// A part of a longer copy, from its slot in the window to checked device memory: posted. `sent` gets the command's
// number: whose slot it is until it is answered.
int64_t flyt_express_part(express_t *e, uint64_t address, uint64_t index, uint64_t size, uint64_t stream,
                          uint64_t *sent) {
    if (!flyt_is_ready(e))
        return ELSEWHERE;
    command_t c = {COPY_IN, address, index, size, stream, index, 1};
    int64_t asleep = publish(e, &c);
    if (asleep < 0)
        return ELSEWHERE;
    *sent = e->last_id;
    return flyt_posted(e, asleep);
}

// cudaMemsetAsync of device memory.
int64_t flyt_express_fill(express_t *e, uint64_t address, uint64_t value, uint64_t size, int64_t stream) {
    if (!on_device(e, address, size) || !flyt_is_ready(e))
        return ELSEWHERE;
    command_t c = {FILL, address, value, size, (uint64_t)stream, 0, 1};
    int64_t asleep = publish(e, &c);
    return asleep < 0 ? ELSEWHERE : flyt_posted(e, asleep);
}
