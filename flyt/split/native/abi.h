/* SPDX-License-Identifier: Apache-2.0 */
/* The record that LHINFO_PTR points to: what the loader, the lower halves and the stubs share.
 *
 * It lies in the loader's own memory, at an address that is linked in, so that pointers to it
 * that the upper half's memory holds are right again after a restart.
 */
#ifndef FLYT_SPLIT_ABI_H
#define FLYT_SPLIT_ABI_H

#include <stddef.h>
#include <stdint.h>

#define SPLIT_MAGIC 0x54494c5054594c46ull /* "FLYTPLIT" */
#define SPLIT_VERSION 2u

#define SPLIT_UPPER 0u    /* the upper half's index; lower halves follow in order of loading */
#define SPLIT_HALVES 8u   /* one upper, up to seven lower: one byte of indices is plenty */
#define SPLIT_THREADS 1024u /* upper-half threads that call a lower half at the same time */
#define SPLIT_REGIONS 1024u /* mappings noted per half when it has published; Open MPI's has 72, a driver's may have more */
#define SPLIT_NESTED 16u /* a deeper call from a lower half takes the last one's place: the outer ones tell too */
#define SPLIT_NAME 16u
#define SPLIT_VARIABLE "LHINFO_PTR"
#define SPLIT_PRESET "0xffffffffffffffff" /* 18 characters, overwritten in place */
#define SPLIT_SIGNAL 64 /* SIGRTMAX: asks for a checkpoint at the next stub call */

/* One per upper-half thread that has crossed: which TLS block it has in each half. Zeroed when
 * it is free. A lower half's block is borrowed from a thread of that half which sleeps on
 * `leave` until the upper thread ends. */
struct split_thread {
    uint64_t fs[SPLIT_HALVES];
    uint32_t leave[SPLIT_HALVES];
    uint32_t used;
    uint32_t depth; /* of calls from a lower half into the upper one that have not returned */
    uint64_t mark[SPLIT_NESTED]; /* of these: an address in the frame that made the call */
};

/* How a lower half is asked for one more thread to borrow from. */
struct split_mail {
    uint32_t lock;
    uint32_t request; /* counts requests */
    uint32_t answer;  /* follows it */
    uint32_t error;   /* errno of pthread_create */
    uint64_t fs;
    uint32_t *leave;
};

typedef void (*split_put)(const void *bytes, uint64_t size);
typedef void (*split_get)(void *bytes, uint64_t size);

/* What a lower half publishes once its libraries' constructors have run. */
struct split_published {
    uint64_t digest; /* of its table of prototypes: the stubs must be of the same */
    uint64_t count;
    void *const *table;
    void *(*resolve)(const char *name); /* dlsym among its libraries */
    const char *(*save)(split_put put); /* at a checkpoint; NULL, or what forbids it */
    const char *(*restore)(split_get get);
    struct split_mail *mail;
};

struct split_region {
    uint64_t start, end;
    uint32_t prot, pad;
};

struct split_half {
    char name[SPLIT_NAME];
    uint64_t base, size;
    uint64_t fs; /* TLS base of its main thread */
    uint64_t own_hints; /* it may map outside of all windows: where it asks for an address, and what its own can't hold */
    uint64_t parked;    /* stack pointer of its main, which waits for the exit */
    uint64_t published; /* struct split_published *, in its own memory; copied here: */
    uint64_t digest, count;
    void *const *table;
    void *(*resolve)(const char *name);
    uint64_t region_count;
    struct split_region region[SPLIT_REGIONS];
};

/* What the upper half puts there and a restart needs. */
struct split_upper {
    uint64_t tid_address; /* its libc's set_tid_address, set_robust_list and rseq */
    uint64_t robust_list, robust_size;
    uint64_t rseq, rseq_size, rseq_signature;
    uint64_t restarts; /* how often its state has been restarted */
    void (*exit)(int code); /* its libc's: a lower half that calls exit ends the whole program */
};

struct split_info {
    uint64_t magic;
    uint32_t version, halves;
    /* 1 while stubs may cross at once; 0 when a checkpoint is wanted, and in a forked child
     * (the page is MADV_WIPEONFORK): then they ask split_info.attend first. */
    volatile uint32_t *open;
    uint64_t arena, arena_size; /* where cuda_lh puts device memory */
    uint64_t restarting;        /* 1 when the lower halves are loaded to take up saved state */
    char image[4096];           /* where a checkpoint goes */

    /* Entries of the loader; they need no TLS and keep to the caller's stack. */
    int (*publish)(const struct split_published *published); /* returns at the exit: its code */
    struct split_thread *(*adopt)(unsigned half);
    void (*release)(struct split_thread *thread);
    void (*attend)(void);
    int (*checkpoint)(const char *path); /* 0: written; 1: this is the restarted process; <0 */
    void (*refuse)(const char *what, const char *name, const char *mend);
    unsigned (*find)(const char *name, uint64_t digest);

    struct split_upper upper;
    struct split_half half[SPLIT_HALVES];
    struct split_thread thread[SPLIT_THREADS];
};

static inline uint64_t split_get_fs(void) {
    uint64_t value;
    __asm__ volatile("rdfsbase %0" : "=r"(value));
    return value;
}

static inline void split_set_fs(uint64_t value) {
    __asm__ volatile("wrfsbase %0" : : "r"(value) : "memory");
}

static inline struct split_thread *split_get_gs(void) {
    struct split_thread *value;
    __asm__ volatile("rdgsbase %0" : "=r"(value));
    return value;
}

static inline void split_set_gs(struct split_thread *value) {
    __asm__ volatile("wrgsbase %0" : : "r"(value) : "memory");
}

/* A lower half's call of the upper half is noted while it lasts: no checkpoint may be made under its
 * frames. `mark` lies in the caller's frame, and holds `split_marked` as long as that frame is there. */
static inline uint64_t split_marked(const uint64_t *mark) { return (uint64_t)mark ^ SPLIT_MAGIC; }

static inline uint32_t split_note(struct split_thread *thread, volatile uint64_t *mark) {
    uint32_t depth = thread->depth == SPLIT_NESTED ? SPLIT_NESTED - 1 : thread->depth;
    *mark = split_marked((const uint64_t *)mark);
    __atomic_store_n(&thread->depth, depth + 1, __ATOMIC_RELAXED);
    __atomic_signal_fence(__ATOMIC_SEQ_CST); /* a handler notes its own beyond this one */
    thread->mark[depth] = (uint64_t)mark;
    return depth;
}

static inline void split_forget(struct split_thread *thread, volatile uint64_t *mark, uint32_t depth) {
    thread->depth = depth;
    *mark = 0;
}

static inline int split_half_at(const struct split_info *info, uint64_t address) {
    for (unsigned i = 0; i < info->halves; i++)
        if (address - info->half[i].base < info->half[i].size)
            return (int)i;
    return -1;
}

#endif
