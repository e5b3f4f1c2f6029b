/* SPDX-License-Identifier: Apache-2.0 */
/* A crossing, inlined into each generated stub: into a lower half and back, or, in a callback's
 * thunk, into the upper half and back. Compiled without stack protector: FS changes half-way.
 */
#ifndef FLYT_SPLIT_STUB_H
#define FLYT_SPLIT_STUB_H

#include "../abi.h"

#define SPLIT_EXPORT __attribute__((visibility("default")))
#define SPLIT_CALLBACKS 8u /* different functions of one callback type that are known at a time */

extern struct split_info *flyt_split_info SPLIT_EXPORT;
extern __thread struct split_thread *flyt_split_thread SPLIT_EXPORT
    __attribute__((tls_model("initial-exec")));

/* First crossing of a thread into a half, a checkpoint wanted, or a forked child. */
SPLIT_EXPORT struct split_thread *flyt_split_slow(unsigned half);
SPLIT_EXPORT unsigned flyt_split_find(const char *name, uint64_t digest);
SPLIT_EXPORT unsigned flyt_split_callback(void **known, void *function, const char *type);

static inline void *split_enter(uint64_t *back, unsigned half, unsigned index) {
    struct split_info *info = flyt_split_info;
    struct split_thread *thread = flyt_split_thread;
    if (__builtin_expect(!thread || !thread->fs[half] || !*info->open, 0))
        thread = flyt_split_slow(half);
    void *function = info->half[half].table[index];
    *back = split_get_fs();
    split_set_fs(thread->fs[half]);
    return function;
}

static inline void split_leave(uint64_t back) { split_set_fs(back); }

struct split_called {
    uint64_t back, mark;
    uint32_t depth;
};

/* In a callback: a lower half runs, on a thread that crossed; or this is refused. */
static inline void split_enter_upper(struct split_called *called, struct split_info *info, unsigned half) {
    struct split_thread *thread = split_get_gs();
    called->back = split_get_fs();
    if (!thread || thread->fs[half] != called->back)
        info->refuse("a callback came on a thread of a lower half's own, which has no thread of the "
                     "upper half beside it", "", "");
    called->depth = split_note(thread, &called->mark);
    split_set_fs(thread->fs[SPLIT_UPPER]);
}

static inline void split_leave_upper(struct split_called *called) {
    split_forget(split_get_gs(), &called->mark, called->depth);
    split_set_fs(called->back);
}

#endif
