/* SPDX-License-Identifier: Apache-2.0 */
/* The tests' lower half, compiled with -DHALF=one or two. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <unistd.h>

#include "lower/lower.h"

int side_ifunc(void), side_order(void), side_local(void);
long side_count(void);

#define JOIN2(a, b, c) a##b##_##c
#define JOIN(a, b, c) JOIN2(a, b, c)
#define LOWER(name) JOIN(lower_, HALF, name)
#define TEXT2(x) #x
#define TEXT(x) TEXT2(x)

void *LOWER(mmap_at)(void *hint, size_t size);
const char *lower_start(void) {
    setenv("SIDE_PRINTS", TEXT(HALF), 1);
    if (getenv("HALF_HINT")) /* as a driver does at its start: the upper half is not loaded yet */
        printf("%s.early %p\n", TEXT(HALF), LOWER(mmap_at)((void *)strtoul(getenv("HALF_HINT"), NULL, 16), 2 << 20));
    return getenv("HALF_FAILS");
}

static long kept = 5; /* state that a checkpoint takes along */
const char *lower_save(split_put put) {
    put(&kept, sizeof kept);
    return NULL;
}
const char *lower_restore(split_get get) {
    get(&kept, sizeof kept);
    return NULL;
}

int LOWER(add)(int a, int b) { return a + b; }
double LOWER(many)(int a, double b, long c, double d, int e, int f, int g, int h, int i, double j, char k) {
    return a + 2 * b + 3 * (double)c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h + 9 * i + 10 * j + 11 * k;
}
int LOWER(set_errno)(int value) {
    int before = errno;
    errno = value;
    return before;
}
long LOWER(count)(void) { return side_count(); }
int LOWER(local)(void) { return side_local(); }
int LOWER(order)(void) { return side_order(); }
int LOWER(ifunc)(void) { return side_ifunc(); }
void *LOWER(malloc)(size_t size) { return malloc(size); }
void LOWER(free)(void *at) { free(at); }
void *LOWER(mmap_at)(void *hint, size_t size) {
    return mmap(hint, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}
void *LOWER(mmap)(size_t size) { return LOWER(mmap_at)(NULL, size); }
int LOWER(munmap)(void *at, size_t size) { return munmap(at, size); }
void *LOWER(mremap)(void *at, size_t size, size_t grown) { return mremap(at, size, grown, MREMAP_MAYMOVE); }
void *LOWER(shmat)(size_t size) {
    int id = shmget(IPC_PRIVATE, size, 0600);
    void *at = shmat(id, NULL, 0);
    shmctl(id, IPC_RMID, NULL);
    return at;
}
void *LOWER(dlopen)(const char *name) {
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    return library ? dlsym(library, "side_order") : NULL;
}
static void *own_stack(void *unused) {
    (void)unused;
    return __builtin_frame_address(0);
}
void *LOWER(thread_stack)(void) {
    pthread_t thread;
    void *at = NULL;
    if (pthread_create(&thread, NULL, own_stack, NULL) == 0)
        pthread_join(thread, &at);
    return at;
}
void LOWER(print)(const char *text) { printf("%s", text); /* not flushed: the exit has to */ }
int LOWER(visit)(int (*function)(int, void *), int value, void *data) {
    int before = side_local();
    int result = function(value, data);
    return side_local() > before ? result : -1; /* still its own TLS */
}
int LOWER(spin)(volatile int *until) {
    errno = 77;
    while (!*until)
        continue; /* no system call that would set errno */
    return errno;
}
struct call {
    int (*function)(int, void *);
};
static void *stray(void *call) {
    ((struct call *)call)->function(1, NULL);
    return NULL;
}
int LOWER(stray)(int (*function)(int, void *)) {
    pthread_t thread;
    struct call call = {function};
    return pthread_create(&thread, NULL, stray, &call) || pthread_join(thread, NULL);
}
static void *idle(void *unused) {
    for (;;)
        pause(); /* with every signal open */
    return unused;
}
int LOWER(background)(void) {
    pthread_t thread;
    return pthread_create(&thread, NULL, idle, NULL) || pthread_detach(thread);
}
static volatile int *volatile nowhere;
static void raise_fault(void) { *nowhere = 1; }
static sigjmp_buf out;
static void on_fault(int number) { siglongjmp(out, number); }
int LOWER(fault)(void) { /* this half's own handler, whatever the program has installed */
    struct sigaction action = {.sa_handler = on_fault}, before;
    sigaction(SIGSEGV, &action, &before);
    int number = sigsetjmp(out, 1);
    if (!number)
        raise_fault();
    sigaction(SIGSEGV, &before, NULL);
    return number == SIGSEGV && before.sa_handler == SIG_DFL; /* nor does it see the program's */
}
int LOWER(system)(const char *command) { return system(command); }
void LOWER(leave)(int code) { exit(code); }
