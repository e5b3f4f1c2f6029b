// SPDX-License-Identifier: Apache-2.0
// A client's hot commands: encoded, published and waited for in one call; and plain answers, read in a row.
//
// The commands are CopyIn, CopyOut and Memset, the answers Done. Any other answer is left in the ring, for Python.

#include <stddef.h>

#include "ring.h"
#include "words.h"

enum { ENTRY = 128 };

typedef struct {
    ring_t *commands, *replies;
    uint64_t *commands_written, *replies_read; // private positions, which Python uses too
    uint32_t command_places, reply_places;
    uint64_t pid;
    uint64_t taken, first, count; // what the last call has read: success of `count` commands from `first` on
} express_t;

size_t flyt_express_size(void) { return sizeof(express_t); }

// Publish a command. `second` is the index of a copy or the value of a fill. Returns as flyt_ring_write.
int64_t flyt_express_post(express_t *e, uint64_t code, uint64_t id, uint64_t address, uint64_t second, uint64_t size,
                          uint64_t stream) {
    char message[WORDS_BYTES];
    uint64_t words[] = {code, id, address, second, size, e->pid, stream};
    int count = 7;
    if (code == FILL) {
        words[5] = stream;
        count = 6;
    }
    return flyt_ring_write(e->commands, e->commands_written, e->command_places, ENTRY, message,
                           pack(message, words, count));
}

// Read one Done that continues the row that was read so far. 1, or 0 where there is something else, or EMPTY.
static int read_on(express_t *e) {
    unsigned char bytes[ENTRY];
    uint64_t words[WORDS];
    int64_t length = flyt_ring_peek(e->replies, e->replies_read, e->reply_places, ENTRY, (char *)bytes);
    if (length == EMPTY)
        return EMPTY;
    if (unpack(bytes, length, words) != 4 || words[0] != DONE || words[3] >> 32)
        return 0;
    if (e->count && words[2] != e->first + e->count)
        return 0;
    flyt_ring_take(e->replies, e->replies_read);
    if (!e->count)
        e->first = words[2];
    e->taken = words[1];
    e->count += words[3];
    return 1;
}

// Read all there is of one row; whether there was any answer.
int flyt_express_read(express_t *e) {
    e->count = 0;
    int any = 0;
    while (read_on(e) == 1)
        any = 1;
    return any;
}

static void wait_for(express_t *e, uint64_t id, uint64_t ns, int yield) {
    uint64_t end = 0;
    for (uint32_t turn = 1;; turn++) {
        int read = read_on(e);
        if (read == 0 || (read == 1 && id - e->first < e->count))
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

// Read on until the answer to command `id` was read, something else has come, or for `ns`; `count` tells what came.
void flyt_express_wait(express_t *e, uint64_t id, uint64_t ns, int yield) {
    e->count = 0;
    wait_for(e, id, ns, yield);
}

// `post`, and `wait` for the answer. Does not wait where the other side sleeps: the caller has to wake it.
int64_t flyt_express_call(express_t *e, uint64_t code, uint64_t id, uint64_t address, uint64_t second, uint64_t size,
                          uint64_t stream, uint64_t ns, int yield) {
    e->count = 0;
    int64_t asleep = flyt_express_post(e, code, id, address, second, size, stream);
    if (asleep == 0)
        wait_for(e, id, ns, yield);
    return asleep;
}
