/* SPDX-License-Identifier: Apache-2.0 */
/* Children by every way that libc has: they run, and what the parent does with signals stays its own. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "halves.h"

extern char **environ;
static volatile int handled;
static void on_signal(int number) { handled += number == SIGUSR1; }

/* The exit code, or the signal's number with a minus. */
static int outcome(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status); }

static int spawn(const char *script, const posix_spawnattr_t *how) {
    char *words[] = {"/bin/sh", "-c", (char *)script, NULL};
    pid_t child;
    int status = -1, error = posix_spawn(&child, words[0], NULL, how, words, environ);
    return error || waitpid(child, &status, 0) != child ? 1000 + error : outcome(status);
}

static int spawn_with(short flags, const char *script) {
    posix_spawnattr_t how;
    sigset_t all;
    sigfillset(&all);
    posix_spawnattr_init(&how);
    posix_spawnattr_setflags(&how, flags);
    posix_spawnattr_setsigdefault(&how, &all), posix_spawnattr_setsigmask(&how, &all);
    return spawn(script, &how);
}

static int by_vfork(void) {
    int status = -1;
    pid_t child = vfork();
    if (child == 0) {
        signal(SIGUSR1, SIG_IGN); /* before exec, as shells and interpreters do */
        execl("/bin/sh", "sh", "-c", "kill -USR1 $$; exit 7", NULL);
        _exit(99);
    }
    return waitpid(child, &status, 0) == child ? outcome(status) : 1000;
}

/* Its handlers still run and are still what sigaction says; what it ignores it ignores. */
static int still_own(void) {
    struct sigaction usr1, pipe;
    handled = 0;
    raise(SIGUSR1), raise(SIGPIPE);
    sigaction(SIGUSR1, NULL, &usr1), sigaction(SIGPIPE, NULL, &pipe);
    return handled == 1 && usr1.sa_handler == on_signal && pipe.sa_handler == SIG_IGN;
}

static void tell(const char *name, int found) { printf("%s %d own %d\n", name, found, still_own()); }

int main(void) {
    signal(SIGUSR1, on_signal), signal(SIGPIPE, SIG_IGN);
    tell("spawn", spawn("exit 3", NULL));
    tell("handled", spawn("kill -USR1 $$; exit 3", NULL));
    tell("ignored", spawn("kill -PIPE $$; exit 4", NULL));
    tell("default", spawn_with(POSIX_SPAWN_SETSIGDEF, "kill -PIPE $$; exit 4"));
    tell("blocked", spawn_with(POSIX_SPAWN_SETSIGMASK, "kill -USR1 $$; exit 5"));
    tell("system", outcome(system("exit 6")));
    tell("lower", outcome(one_system("exit 2"))); /* a lower half's own child */
    tell("vfork", by_vfork());
    char word[16] = "";
    FILE *pipe = popen("echo word", "r");
    int read = pipe && fscanf(pipe, "%15s", word) == 1 && !strcmp(word, "word");
    tell("popen", read ? outcome(pclose(pipe)) : 1000);
    int status = -1;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) /* in a forked child too */
        _exit(still_own() && spawn("exit 3", NULL) == 3 && by_vfork() == 7 && still_own() ? 8 : 9);
    tell("fork", waitpid(child, &status, 0) == child ? outcome(status) : 1000);
    /* What newer C libraries start posix_spawn's child with: its SIGSYS would be the default. */
    struct clone_args all = {.flags = CLONE_VM | CLONE_VFORK | CLONE_CLEAR_SIGHAND, .exit_signal = SIGCHLD};
    long made = syscall(SYS_clone3, &all, 0); /* of size 0: the kernel says EINVAL, and makes no child */
    tell("clone3", made < 0 ? errno : 0);
    printf("still %d\n", one_add(1, 2));
    return 0;
}
