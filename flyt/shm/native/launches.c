// SPDX-License-Identifier: Apache-2.0
// A client's plain launches, each in one call; see express.c.

#include "express.h"
#include "words.h"

enum { LENGTH = 4 }; // bytes of an entry that are not the message's

size_t flyt_express_kernel_size(void) { return sizeof(kernel_t); }

static int is_taken(const kernel_t *k, const uint32_t *shape) {
    uint64_t threads = 1;
    for (int i = 0; i < 3; i++) {
        uint64_t grid = shape[i], block = shape[3 + i];
        if (!grid || grid > k->grid[i] || !block || block > k->block[i] || block > k->threads / threads)
            return 0;
        threads *= block;
    }
    return shape[6] <= k->shared;
}

// A launch as a post. `shape` is grid, block, and bytes of shared memory. What the others return that post.
int64_t flyt_express_launch(express_t *e, const kernel_t *k, const uint32_t *shape, uint64_t stream, const char *params,
                            uint64_t size) {
    if (size != k->size || !is_taken(k, shape) || !flyt_is_ready(e))
        return ELSEWHERE;
    char message[ENTRY - LENGTH];
    uint64_t words[LAUNCH_WORDS] = {LAUNCH, e->last_id + 1, k->number};
    for (int i = 0; i < 7; i++)
        words[3 + i] = shape[i];
    words[10] = stream;
    uint32_t length = pack_launch(message, sizeof message, words, params, size);
    if (!length)
        return ELSEWHERE;
    int64_t asleep = flyt_publish(e, message, length, (note_t){.code = LAUNCH, .stream = stream}, 1);
    return asleep < 0 ? ELSEWHERE : flyt_posted(e, asleep);
}
