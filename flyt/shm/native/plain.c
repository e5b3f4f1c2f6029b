// SPDX-License-Identifier: Apache-2.0
// A session's thread without Python: the plain commands of a client, checked, carried out and answered.
//
// Plain are CopyIn, CopyOut and Memset, of a few KiB or, where the device has an engine of its own, of any size, on a
// stream, in a block and in a segment of the window that Python has checked before and noted here; and Launch of a
// function that it has noted, without attributes. Nothing of the session is in flight but what was begun here. At
// whatever is not plain, or can't be done, `flyt_plain_serve` returns and leaves the command in the ring: Python does
// it, or says what is wrong with it. So no command is refused here, and no error told.
//
// A command is copied out of the ring before it is looked at. Python changes the notes only while nobody is in here.

#include <string.h>

#include "plain.h"
#include "words.h"

enum { IDLE, LOOK, OTHER, KICK, LATE, BUSY, REFUSED }; // why it returns; the last two never leave this file

#define BATCH 32      // answered together at most: the client has as many credits back by then
#define BRIEF 65536   // bytes: what is larger is waited for longer, with a mark of its own behind it
#define NOT_READY 600 // CUDA_ERROR_NOT_READY

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
    const stream_t *s = flyt_stream_of(p, p->stream);
    uint32_t done = p->count, marks = p->slow ? marks_of(p, s) : 0;
    int code = 0;
    if (marks)
        for (done = 0; done < p->count && !(code = p->reached(p->mark[(p->oldest + done) % marks])); done++)
            continue;
    else if (s->query && (code = s->query(s->handle)))
        done = 0;
    if (!done)
        return code == NOT_READY ? BUSY : OTHER;
    // To a client that has not read for long a row is answered as a whole: it may post as many copies as it has
    // credits and read nothing, and all of them have to begin.
    if (done < p->count && 2 * flyt_ring_room(p->replies, p->replies_written, p->reply_places) < p->reply_places)
        return code == NOT_READY ? BUSY : OTHER;
    return answer(p, done);
}

// Whether it comes next on the stream of those that were taken before.
static int follows(const plain_t *p, const command_t *c) {
    return c->stream->number == p->stream && c->id == p->first + p->count && c->id; // 0: they have gone round
}

// Whether there is room for it among them, and for its answer: those of a row with marks may all be apart. A copy
// behind kernels may be answered with them, but none waits for a kernel behind it.
static int joins(const plain_t *p, const command_t *c) {
    if (!p->slow)
        return p->count < BATCH && c->size <= BRIEF && (c->code != LAUNCH || p->launches == p->count);
    return c->code != LAUNCH && p->count < marks_of(p, c->stream) &&
           flyt_ring_room(p->replies, p->replies_written, p->reply_places) > (int64_t)p->count;
}

// Small copies to the device that continue each other there and in the window become one copy: the device takes
// longer over each than over their bytes. Only what has come already is gathered; nothing waits for more.
static int extends(const plain_t *p, const command_t *c) {
    uint64_t size = p->run_size + c->size;
    return p->run && c->code == COPY_IN && follows(p, c) && joins(p, c) && size <= BRIEF &&
           c->to == p->run_to + p->run_size && c->from == p->run_from + p->run_size &&
           flyt_within_range(p->block, p->blocks, p->run_to, size) &&
           flyt_within_range(p->segment, p->segments, p->run_from - p->base, size);
}

static void extend(plain_t *p, const command_t *c) {
    if (!p->run++) {
        p->run_to = c->to, p->run_from = c->from;
        p->run_size = 0;
    }
    p->run_size += c->size;
}

// Begin what was gathered. 0, or what the device says: then it is the caller's.
static int begin(plain_t *p) {
    if (!p->run)
        return 0;
    const stream_t *s = flyt_stream_of(p, p->stream);
    int code = s->move(p->run_to, p->run_from, p->run_size, s->handle);
    if (!code)
        p->run = 0;
    return code;
}

// Whether Python has to put it beside what is under way, which may take long; else it waits for that.
static int overtakes(const plain_t *p, const command_t *c) {
    if (p->slow) // a row with marks goes on when some of it is done
        return !(follows(p, c) && c->code != LAUNCH && marks_of(p, c->stream));
    return p->launches && c->stream->number != p->stream;
}

static int serve(plain_t *p, uint64_t linger, uint64_t most, uint64_t longest, int yield) {
    unsigned char bytes[ENTRY];
    command_t c = {0};
    uint64_t begun = now_ns(), last = begun;
    for (uint32_t turn = 1;; turn++) {
        if (turn % 16 == 0) {
            uint64_t now = now_ns();
            last = last ? last : now;
            if (p->count && p->slow && now - p->since >= longest)
                return LATE;
            if (now - begun >= most && !(p->count && p->slow && !marks_of(p, flyt_stream_of(p, p->stream))))
                return LOOK;
            if (!p->count && now - last >= linger)
                return IDLE;
        }
        int64_t length =
            flyt_ring_peek(p->commands, p->commands_read, p->command_places, ENTRY, (char *)bytes);
        int plain = length >= 0 && flyt_is_plain(p, bytes, length, &c);
        if (plain && extends(p, &c)) {
            take(p, &c); // without marks, that is: nothing is recorded
            extend(p, &c);
            continue;
        }
        if (begin(p))
            return REFUSED;
        int next = plain && p->count && follows(p, &c);
        if (plain && (!p->count || (next && joins(p, &c)))) {
            if (!p->count && flyt_ring_room(p->replies, p->replies_written, p->reply_places) <= 0)
                return OTHER;
            if (c.code == COPY_IN && c.size < BRIEF && !(p->count && p->slow)) {
                take(p, &c);
                extend(p, &c);
                continue;
            }
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

// Serve plain commands until none has come for `linger` ns (IDLE), or for `most` ns (LOOK). Also returns for any other
// command, for any that can't be in a row with a large one under way, and for one of another stream behind a launch
// (OTHER); where a large one takes `longest` ns (LATE); and where the client sleeps and has an answer (KICK). What
// `count` then says was taken here, and neither finished nor answered. It is the caller's (the last `run`
// of it has yet to be begun, as one copy); or, if marks are behind it all and nothing else is done meanwhile, the next
// call's.
int flyt_plain_serve(plain_t *p, uint64_t linger, uint64_t most, uint64_t longest, int yield) {
    int why = serve(p, linger, most, longest, yield);
    return why == REFUSED || begin(p) ? OTHER : why;
}
