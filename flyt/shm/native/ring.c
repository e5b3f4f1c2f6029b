// SPDX-License-Identifier: Apache-2.0
// A ring of short messages in memory that two processes share: one writes, the other reads.
//
// Neither side trusts the other: positions are kept in private memory and passed in, a message is
// copied out before anybody looks at it, and what does not add up is reported, not followed.
//
// A reader that wants to sleep says so in `asleep` (a number that differs each time, 0 while it is
// awake), fences, and looks once more; a writer publishes, fences, and reads `asleep`. One of the two
// sees the other, so no wake-up is lost. Only plain loads and stores: the words may lie in a device's
// uncached memory, where read-modify-write is slow or impossible.

#include <string.h>

#include "ring.h"

typedef struct {
    uint32_t length;
    char bytes[];
} entry_t;

// What flyt/shm/native/__init__.py expects: it counts up whenever a function of these C files changes.
int flyt_abi(void) { return 16; }

static entry_t *entry_at(ring_t *ring, uint64_t position, uint32_t count, uint32_t size) {
    return (entry_t *)(ring->entries + (position % count) * (uint64_t)size);
}

// Messages that fit right now, seen from the writer; DAMAGED when the reader's word is impossible.
int64_t flyt_ring_room(ring_t *ring, const uint64_t *position, uint32_t count) {
    uint64_t taken = atomic_load_explicit(&ring->taken, memory_order_acquire);
    uint64_t held = *position - taken;
    return held > count ? DAMAGED : (int64_t)(count - held);
}

// Publish a message, which the caller knows to fit into an entry, and move the writer's private
// position: both in one call, which no interrupt tears. Returns the reader's `asleep` (not 0: it may
// have to be woken), or FULL or DAMAGED, and then nothing is published.
int64_t flyt_ring_write(ring_t *ring, uint64_t *position, uint32_t count, uint32_t size, const char *data,
                        uint32_t length) {
    int64_t room = flyt_ring_room(ring, position, count);
    if (room <= 0)
        return room ? DAMAGED : FULL;
    entry_t *entry = entry_at(ring, *position, count, size);
    memcpy(entry->bytes, data, length);
    entry->length = length;
#if defined(__x86_64__)
    // In a guest the payload lies in write-combining memory, which a release store does not order.
    __builtin_ia32_sfence();
#endif
    atomic_store_explicit(&ring->written, ++*position, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    return (int64_t)(atomic_load_explicit(&ring->asleep, memory_order_relaxed) & INT64_MAX);
}

// Copy the next message to `out`, which holds `size` bytes. Returns its length, EMPTY or DAMAGED.
int64_t flyt_ring_peek(ring_t *ring, const uint64_t *position, uint32_t count, uint32_t size, char *out) {
    uint64_t written = atomic_load_explicit(&ring->written, memory_order_acquire);
    if (written == *position)
        return EMPTY;
    if (written - *position > count)
        return DAMAGED;
    entry_t *entry = entry_at(ring, *position, count, size);
    uint32_t length = *(volatile uint32_t *)&entry->length; // read once: the writer may change it
    if (length > size - sizeof(entry_t))
        return DAMAGED;
    memcpy(out, entry->bytes, length);
    return length;
}

// Give the place of a message that was copied out back to the writer, and move the reader's private position.
void flyt_ring_take(ring_t *ring, uint64_t *position) {
    atomic_store_explicit(&ring->taken, ++*position, memory_order_release);
}

// Take the message that was peeked at position `at` and seen to, unless whoever came in between has taken it. Whether
// another one follows.
int flyt_ring_drop(ring_t *ring, uint64_t *position, uint64_t at, int is_empty) {
    if (*position == at) {
        flyt_ring_take(ring, position);
        position[1] += is_empty != 0;
    }
    return atomic_load_explicit(&ring->written, memory_order_acquire) != *position;
}

// Both: `peek` and `take`. Returns the length, with MORE added where another message follows; EMPTY or DAMAGED. Behind
// the position stands how many messages of no length were read: whoever comes in the middle of the caller knows it, too.
int64_t flyt_ring_read(ring_t *ring, uint64_t *position, uint32_t count, uint32_t size, char *out) {
    int64_t length = flyt_ring_peek(ring, position, count, size, out);
    if (length < 0)
        return length;
    flyt_ring_take(ring, position);
    position[1] += !length;
    return atomic_load_explicit(&ring->written, memory_order_acquire) != *position ? length + MORE : length;
}

// Spin until there is a message behind the reader's position, for at most `ns`; whether there is. With `yield` the
// processor is offered to others all the while, for machines where the other side needs it.
int flyt_ring_wait(ring_t *ring, const uint64_t *position, uint64_t ns, int yield) {
    uint64_t end = 0, taken = *(volatile const uint64_t *)position;
    for (uint32_t turn = 0;; turn++) {
        if (atomic_load_explicit(&ring->written, memory_order_acquire) != taken)
            return 1;
        relax(yield);
        if (turn % 16 == 0) {
            uint64_t now = now_ns();
            if (!end)
                end = now + ns;
            else if (now >= end)
                return 0;
        }
    }
}

// Announce a sleep; whether a message came meanwhile, so that the reader must not sleep.
int flyt_ring_sleep(ring_t *ring, const uint64_t *position, uint64_t number) {
    atomic_store_explicit(&ring->asleep, number, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    return atomic_load_explicit(&ring->written, memory_order_acquire) != *(volatile const uint64_t *)position;
}

void flyt_ring_wake(ring_t *ring) { atomic_store_explicit(&ring->asleep, 0, memory_order_relaxed); }
