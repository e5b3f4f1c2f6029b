/* SPDX-License-Identifier: Apache-2.0 */
/* What forbids a checkpoint; the program goes on, and can be checkpointed once it is over. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "flyt_split.h"
#include "halves.h"

static int pipes[2];
static void *wait_for_it(void *unused) {
    char one;
    (void)unused;
    return (void *)(long)read(pipes[0], &one, 1);
}

int main(int argc, char **argv) {
    pthread_t thread;
    one_background(); /* a thread of a lower half's own forbids nothing */
    pipe(pipes);
    pthread_create(&thread, NULL, wait_for_it, NULL);
    printf("thread %d\n", flyt_split_checkpoint(argv[1]));
    write(pipes[1], "x", 1);
    pthread_join(thread, NULL);
    char *at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    printf("shared %d\n", flyt_split_checkpoint(argv[1]));
    munmap(at, 4096);
    at = mmap((void *)0x600000000000, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    printf("stray %d\n", flyt_split_checkpoint(argv[1]));
    munmap(at, 4096);
    char *low = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
    strcpy(low, "kept");
    printf("folder %d\n", flyt_split_checkpoint("/nowhere/at/all"));
    struct rlimit small = {100000, RLIM_INFINITY}, usual = {RLIM_INFINITY, RLIM_INFINITY};
    setrlimit(RLIMIT_FSIZE, &small);
    printf("full %d\n", flyt_split_checkpoint(argv[1]));
    setrlimit(RLIMIT_FSIZE, &usual);
    printf("exists %d\n", access(argv[1], F_OK) == 0);
    printf("good %d\n", flyt_split_checkpoint(argv[1]));
    printf("calls %d %d\n", one_add(2, 3), two_add(4, 5));
    printf("low %d %s\n", (unsigned long)low < 1ul << 31, low);
    return 0;
}
