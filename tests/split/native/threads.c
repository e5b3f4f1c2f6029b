/* SPDX-License-Identifier: Apache-2.0 */
/* Four threads call both halves for `argv[1]` calls in all; then threads come and go. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "halves.h"

#define THREADS 4
static long calls;

static void *work(void *number) {
    long wrong = 0, mine = (long)number;
    int local_one = one_local(), local_two = two_local();
    wrong += local_one != 101 || local_two != 101; /* a fresh thread's own in each half */
    for (int i = 0; i < calls / THREADS / 8; i++) {
        errno = 1000 + (int)mine;
        one_set_errno(2000 + (int)mine), two_set_errno(3000 + (int)mine);
        wrong += one_add(i, (int)mine) != i + mine;
        wrong += two_add(i, -(int)mine) != i - mine;
        void *at = i & 1 ? one_malloc(1 + i % 5000) : two_malloc(1 + i % 5000);
        wrong += at == NULL;
        i & 1 ? one_free(at) : two_free(at);
        wrong += errno != 1000 + mine;
        wrong += one_set_errno(0) != 2000 + mine || two_set_errno(0) != 3000 + mine;
    }
    return (void *)wrong;
}

static void *brief(void *unused) {
    (void)unused;
    return (void *)(long)(one_local() != 101 || two_local() != 101);
}

int main(int argc, char **argv) {
    pthread_t thread[THREADS];
    long wrong = 0;
    void *result;
    calls = argc > 1 ? atol(argv[1]) : 1000;
    for (long i = 0; i < THREADS; i++)
        pthread_create(&thread[i], NULL, work, (void *)i);
    for (int i = 0; i < THREADS; i++)
        pthread_join(thread[i], &result), wrong += (long)result;
    printf("wrong %ld\n", wrong);
    /* more than there is room for at a time: what an ended thread had is free again */
    for (int i = wrong = 0; i < 1500; i++)
        pthread_create(&thread[0], NULL, brief, NULL), pthread_join(thread[0], &result), wrong += (long)result;
    printf("wrong_brief %ld\n", wrong);
    return 0;
}
