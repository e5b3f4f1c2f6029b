/* SPDX-License-Identifier: Apache-2.0 */
/* A signal arrives while a lower half runs; masks full of signals; forks. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include "halves.h"

static volatile int until;
static volatile int handled, errno_in_handler, local_in_handler, from_two;
static _Thread_local int mine = 5;
static sigjmp_buf out;

static void on_alarm(int number, siginfo_t *about, void *context) {
    (void)about, (void)context;
    handled = number;
    local_in_handler = mine; /* the upper half's TLS, though a lower half was interrupted */
    errno_in_handler = errno;
    errno = 9;
    void *at = malloc(300000); /* a trapped call in the handler */
    from_two = two_add(40, 2);   /* and a crossing into the other half */
    free(at);
    until = 1;
}

static void write_mask(int number, siginfo_t *about, void *context) {
    (void)number, (void)about;
    memset(&((ucontext_t *)context)->uc_sigmask, 0xff, 8);
}

static void jump(int number) { siglongjmp(out, number); }

static void alarm_soon(void) {
    struct itimerval soon = {{0, 0}, {0, 30000}};
    setitimer(ITIMER_REAL, &soon, NULL);
}

static void in_child(const char *name, void (*what)(void)) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        what();
        _exit(5);
    }
    int status;
    waitpid(child, &status, 0);
    printf("%s %s %d\n", name, WIFEXITED(status) ? "exit" : "signal",
           WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
}

static void call_half(void) { one_add(1, 2); }
static void nothing(void) { free(malloc(200000)); }
static void fault(void) {
    signal(SIGSEGV, SIG_DFL);
    *(volatile int *)8 = 1;
}

int main(void) {
    struct sigaction action = {.sa_sigaction = on_alarm, .sa_flags = SA_SIGINFO}, before;
    sigfillset(&action.sa_mask);
    sigaction(SIGALRM, &action, NULL);
    errno = 1;
    alarm_soon();
    int lower_errno = one_spin(&until);
    printf("handled %d mine %d errno_in_handler %d errno_after %d lower_errno %d two %d\n", handled == SIGALRM,
           local_in_handler, errno_in_handler, errno, lower_errno, from_two);
    sigaction(SIGALRM, NULL, &before);
    printf("same_action %d full_mask %d\n", before.sa_sigaction == on_alarm, sigismember(&before.sa_mask, SIGUSR2));

    sigset_t all, old, now;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &old);
    void *at = malloc(1 << 20); /* trapped, with every signal blocked */
    sigprocmask(SIG_SETMASK, &old, &now);
    printf("blocked_works %d usr1_was_blocked %d sigsys_was_blocked %d\n", at != NULL, sigismember(&now, SIGUSR1),
           sigismember(&now, SIGSYS));
    free(at);

    until = 0, handled = 0;
    sigfillset(&all), sigdelset(&all, SIGALRM);
    alarm_soon();
    sigsuspend(&all);
    printf("suspended_works %d\n", handled == SIGALRM);

    struct sigaction writes = {.sa_sigaction = write_mask, .sa_flags = SA_SIGINFO};
    sigaction(SIGALRM, &writes, NULL);
    raise(SIGALRM);
    free(malloc(1 << 20)); /* trapped: SIGSYS must not be blocked */
    sigprocmask(SIG_SETMASK, &old, &now);
    printf("written_mask %d\n", sigismember(&now, SIGUSR1));

    signal(SIGALRM, jump);
    until = 0;
    if (sigsetjmp(out, 1) == 0) {
        alarm_soon();
        one_spin(&until);
        printf("not reached\n");
    }
    printf("after_jump mine %d two %d\n", mine, two_add(1, 1));

    /* A signal that only a thread of a lower half's own lets in comes to the main thread. */
    sigset_t usr1;
    sigemptyset(&usr1), sigaddset(&usr1, SIGUSR1);
    action.sa_sigaction = on_alarm;
    sigaction(SIGUSR1, &action, NULL);
    one_background();
    sigprocmask(SIG_BLOCK, &usr1, NULL);
    handled = local_in_handler = 0;
    kill(getpid(), SIGUSR1);
    usleep(50000);
    int early = handled;
    sigprocmask(SIG_UNBLOCK, &usr1, NULL);
    for (int i = 0; i < 1000 && !handled; i++)
        usleep(1000);
    printf("sent_on early %d handled %d mine %d\n", early, handled == SIGUSR1, local_in_handler);

    /* As the kernel answers; so some libraries ask whether an address can be read. */
    int bad_set = syscall(SYS_rt_sigprocmask, ~0, 8, NULL, 8) ? errno : 0;
    int good_set = syscall(SYS_rt_sigprocmask, ~0, &all, NULL, 8) ? errno : 0;
    int bad_old = sigprocmask(SIG_BLOCK, &usr1, (void *)8) ? errno : 0;
    int bad_action = syscall(SYS_rt_sigaction, SIGUSR2, 8, NULL, 8) ? errno : 0;
    int bad_before = syscall(SYS_rt_sigaction, SIGUSR2, NULL, 8, 8) ? errno : 0;
    printf("bad_addresses %d %d %d %d %d\n", bad_set, good_set, bad_old, bad_action, bad_before);
    sigprocmask(SIG_SETMASK, &old, NULL);

    signal(SIGSEGV, jump);
    int lower_fault = one_fault(), upper_fault = sigsetjmp(out, 1);
    if (!upper_fault)
        *(volatile int *)8 = 1;
    printf("faults %d %d mine %d\n", lower_fault, upper_fault == SIGSEGV, mine);

    in_child("child_that_calls", call_half);
    in_child("child_that_does_not", nothing);
    in_child("child_that_faults", fault);
    printf("still %d\n", one_add(1, 2));
    return 0;
}
