// SPDX-License-Identifier: Apache-2.0
// Whether a client's command is plain: in memory, on a stream and of a function that Python has checked before.

#include "plain.h"
#include "words.h"

// The range in which all of these bytes lie. `size` is not 0.
const range_t *flyt_within_range(const range_t *ranges, uint32_t count, uint64_t start, uint64_t size) {
    for (uint32_t i = 0; i < count; i++)
        if (start >= ranges[i].start && start < ranges[i].end && size <= ranges[i].end - start)
            return &ranges[i];
    return NULL;
}

const stream_t *flyt_stream_of(const plain_t *p, uint64_t number) {
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
    c->stream = flyt_stream_of(p, f[10]);
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
int flyt_is_plain(const plain_t *p, const unsigned char *bytes, int64_t length, command_t *c) {
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
    const range_t *block = flyt_within_range(p->block, p->blocks, f[2], c->size);
    c->stream = flyt_stream_of(p, fills ? f[5] : f[6]);
    if (!block || !c->stream || block->device != c->stream->device)
        return 0;
    c->to = c->from = f[2];
    c->value = (unsigned char)f[3]; // of a fill
    if (fills)
        return f[3] < 256;
    if (f[5] != p->pid || !flyt_within_range(p->segment, p->segments, f[3], c->size))
        return 0;
    if (c->code == COPY_IN)
        c->from = p->base + f[3];
    else
        c->to = p->base + f[3];
    return 1;
}
