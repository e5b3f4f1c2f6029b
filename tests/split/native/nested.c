/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints that are wanted where a lower half waits for the program: under a callback, under a handler. */
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#include "flyt_split.h"
#include "halves.h"

static const char *path;
static volatile int until, saved = 5, inner = 5;
static sigjmp_buf out;
static char other_stack[1 << 16];

static int save(int value, void *data) {
    *(int *)data = flyt_split_checkpoint(path);
    return value + 1;
}

static int request(int value, void *data) {
    kill(getpid(), SIGRTMAX);
    value = two_add(value, 1); /* not here: one's frames are on the stack */
    *(int *)data = access(path, F_OK);
    return value;
}

static void on_alarm(int number) {
    (void)number;
    saved = flyt_split_checkpoint(path);
    until = 1;
}

static void jump(int number) { siglongjmp(out, number); }
static int jump_out(int value, void *data) { siglongjmp(out, value + (data != NULL)); }

static void interrupt(void (*handler)(int), int flags) {
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
    struct itimerval soon = {{0, 0}, {0, 30000}};
    sigaction(SIGALRM, &action, NULL);
    until = 0;
    setitimer(ITIMER_REAL, &soon, NULL);
    one_spin(&until);
}

/* Leaves a callback, or one that a handler has left before, so that two notes stay behind. */
static int jump_deeper(int value, void *data) {
    sigjmp_buf outer;
    memcpy(outer, out, sizeof outer);
    if (!sigsetjmp(out, 1))
        interrupt(jump, 0);
    inner = flyt_split_checkpoint(path); /* the callback itself still runs */
    memcpy(out, outer, sizeof outer);
    return jump_out(value, data);
}

static __attribute__((noinline)) void deeper(int i) {
    volatile char room[8192];
    room[0] = 0;
    one_visit(i == 1 ? jump_deeper : jump_out, 1, NULL);
}

int main(int argc, char **argv) {
    int result = 5;
    path = argv[1];
    stack_t other = {.ss_sp = other_stack, .ss_size = sizeof other_stack};
    sigaltstack(&other, NULL);
    printf("callback %d", one_visit(save, 5, &result));
    printf(" %d\n", result);
    interrupt(on_alarm, 0);
    printf("handler %d\n", saved);
    interrupt(on_alarm, SA_ONSTACK);
    printf("other_stack %d\n", saved);
    printf("requested %d", one_visit(request, 5, &result));
    printf(" %d", result);
    printf(" %d", two_add(1, 1)); /* here */
    printf(" %d\n", access(path, F_OK));
    unlink(path);
    for (volatile int i = 0; i < 40; i++) {
        if (!sigsetjmp(out, 1))
            deeper(i);
    }
    int restarted = flyt_split_checkpoint(path); /* both were left: nothing forbids it */
    printf("left %d inner %d calls %d %d\n", restarted, inner, one_add(2, 3), two_add(4, 5));
    return argc > 2;
}
