/* SPDX-License-Identifier: Apache-2.0 */
/* The loader's parts among themselves. It has no C library: no TLS, no rseq, no heap of its own. */
#ifndef FLYT_SPLIT_LOADER_H
#define FLYT_SPLIT_LOADER_H

#include <signal.h>

#include "../abi.h"

#define PAGE 4096ull
#define UP(value) (((uint64_t)(value) + PAGE - 1) & ~(PAGE - 1))
#define DOWN(value) ((uint64_t)(value) & ~(PAGE - 1))
#define FAILED(result) ((uint64_t)(result) > (uint64_t)-4096)

#pragma GCC visibility push(hidden) /* no GOT: the loader is linked far above 2 GiB */

/* sys.c */
static inline long sys6(long n, long a, long b, long c, long d, long e, long f) {
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}
#define sys0(n) sys6(n, 0, 0, 0, 0, 0, 0)
#define sys1(n, a) sys6(n, (long)(a), 0, 0, 0, 0, 0)
#define sys2(n, a, b) sys6(n, (long)(a), (long)(b), 0, 0, 0, 0)
#define sys3(n, a, b, c) sys6(n, (long)(a), (long)(b), (long)(c), 0, 0, 0)
#define sys4(n, a, b, c, d) sys6(n, (long)(a), (long)(b), (long)(c), (long)(d), 0, 0)
#define sys5(n, a, b, c, d, e) sys6(n, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), 0)

void *memcpy(void *to, const void *from, size_t size);
void *memset(void *to, int byte, size_t size);
size_t strlen(const char *text);
int strcmp(const char *a, const char *b);
int same_start(const char *text, const char *start);
void say(const char *first, ...);                       /* to stderr, strings up to a NULL */
void fail(int code, const char *first, ...) __attribute__((noreturn)); /* say, then leave */
int is_readable(const void *at); /* eight bytes that a caller names; programs probe addresses with such calls */
int is_writable(void *at);       /* they are overwritten */
const char *decimal(uint64_t value, char room[24]);
const char *hexadecimal(uint64_t value, char room[24]);

/* One line of /proc/self/maps; the walk stops when the visitor returns nonzero. */
struct mapping {
    uint64_t start, end, offset;
    int readable, writable, executable, shared;
    char name[256];
};
int each_mapping(int (*visit)(void *data, const struct mapping *mapping), void *data);

/* main.c */
extern struct split_info info;
extern const char *image_path; /* what to restart from, or NULL */
extern long own_pid;           /* a forked child has another */
int is_borrower(void);         /* a child by vfork: memory is its parent's, signal actions its own */

/* place.c */
uint64_t place(unsigned half, uint64_t size, uint64_t prot, uint64_t flags, long fd, long offset);
void place_on_sigsys(int number, siginfo_t *about, void *context);
uint64_t place_stray(void); /* an address of what the program has mapped outside of its window; 0: nothing */

/* filter.c */
void filter_install(void);

/* signals.c */
struct kernel_action {
    uint64_t handler, flags, restorer, mask;
};
struct saved_action {
    uint64_t signal, handler, flags, mask;
};
void restorer(void);
long signals_action(unsigned owner, int number, const struct kernel_action *new_action,
                    struct kernel_action *old, uint64_t mask_size);
void signals_start(void);
unsigned signals_save(struct saved_action *to); /* the upper half's; at most 64 */
void signals_restore(const struct saved_action *from, unsigned count);

/* elf.c */
struct start {
    uint64_t entry, stack;
};
/* `words` begins with the path of ld.so; `name` is the program's path. */
struct start elf_prepare(unsigned half, char **words, const char *name, char **envp, uint64_t *auxv);

/* threads.c */
struct split_thread *threads_adopt(unsigned half);
void threads_release(struct split_thread *thread);
struct split_thread *threads_mine(void);               /* the running thread's record, or NULL */
struct split_thread *threads_new(void);
void threads_borrow(struct split_thread *thread, unsigned half);
int threads_called_by_lower(uint64_t stack); /* whether frames of a lower half lie above `stack` */

/* leave.c: on the thread that leaves, each lower half's main returns, the last loaded first */
void leave_from(unsigned half, int code) __attribute__((noreturn));

/* image_write.c, image_read.c */
int image_write(const char *path, uint64_t resume_at);
void image_resume(void) __attribute__((noreturn));
uint32_t crc32(uint32_t before, const void *bytes, uint64_t size);

/* switch.S */
uint64_t context_switch(uint64_t *save, uint64_t to, uint64_t value);
uint64_t context_start(uint64_t *save, uint64_t stack, uint64_t entry);
void context_resume(uint64_t stack, uint64_t value) __attribute__((noreturn));
int context_checkpoint(const char *path); /* image_write with the registers on the stack */

#pragma GCC visibility pop

#endif
