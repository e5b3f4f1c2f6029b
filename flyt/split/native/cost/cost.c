/* SPDX-License-Identifier: Apache-2.0 */
/* What crossing costs: NAME NANOSECONDS lines, the least of all rounds, which others disturb least. With ALONE, what the same
 * costs without the loader. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef ALONE
#include "../include/flyt_cuda.h"
#endif

#define ROUNDS 51

static __thread int error;
__attribute__((noinline)) static int peek(void) { return error; }
static int (*volatile plain)(void) = peek;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static int ascending(const void *a, const void *b) {
    double difference = *(const double *)a - *(const double *)b;
    return (difference > 0) - (difference < 0);
}

#define MEASURE(name, calls, statement)                                                            \
    do {                                                                                           \
        double each[ROUNDS];                                                                       \
        for (int round = 0; round < ROUNDS; round++) {                                             \
            double start = now();                                                                  \
            for (int call = 0; call < (calls); call++)                                             \
                statement;                                                                         \
            each[round] = (now() - start) / (calls);                                               \
        }                                                                                          \
        qsort(each, ROUNDS, sizeof *each, ascending);                                              \
        printf("%s %.1f\n", name, each[0]);                                               \
    } while (0)

static void map_once(void) {
    void *at = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED || munmap(at, 4096))
        exit(1);
}

int main(void) {
    MEASURE("call", 50000, plain());
#ifndef ALONE
    MEASURE("crossing", 50000, cudaPeekAtLastError());
#endif
    MEASURE("getppid", 5000, syscall(SYS_getppid));
    MEASURE("mmap_munmap", 500, map_once());
    return 0;
}
