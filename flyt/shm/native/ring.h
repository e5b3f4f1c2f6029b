// SPDX-License-Identifier: Apache-2.0
// What the C files of Flyt share about rings; flyt/shm/native/ring.c tells how they work.

#pragma once

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#define EMPTY (-1)
#define DAMAGED (-2)
#define FULL (-3)
#define MORE (INT64_C(1) << 32)

typedef struct {
    _Atomic uint64_t written; // messages that the writer has published
    char pad0[56];
    _Atomic uint64_t taken; // messages that the reader has copied out
    char pad1[56];
    _Atomic uint64_t asleep; // 0, or the number of the reader's sleep
    char pad2[56];
    char entries[];
} ring_t;

int64_t flyt_ring_room(ring_t *ring, const uint64_t *position, uint32_t count);
int64_t flyt_ring_write(ring_t *ring, uint64_t *position, uint32_t count, uint32_t size, const char *data,
                        uint32_t length);
int64_t flyt_ring_peek(ring_t *ring, const uint64_t *position, uint32_t count, uint32_t size, char *out);
void flyt_ring_take(ring_t *ring, uint64_t *position);

static inline uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

// Between two looks: with `yield` the processor is offered to others, for machines where the other side needs it.
static inline void relax(int yield) {
    if (yield) {
        sched_yield();
        return;
    }
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}
