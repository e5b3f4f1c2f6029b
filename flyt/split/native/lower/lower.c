/* SPDX-License-Identifier: Apache-2.0 */
/* A lower half's main: publish its functions to the loader, sleep until the exit, return.
 *
 * Before, it starts a keeper: a thread that makes further threads of this half on demand. Those
 * sleep; upper-half threads run with their TLS blocks, one each.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "lower.h"

#define STACK (256u << 10) /* of a thread that only sleeps; its TLS block lies in it too */

const struct split_info *split_info;
static struct split_mail mail;

static long futex(uint32_t *word, int operation, uint32_t value) {
    return syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

static void publish_answer(int error) {
    mail.error = (uint32_t)error;
    __atomic_add_fetch(&mail.answer, 1, __ATOMIC_RELEASE);
    futex(&mail.answer, FUTEX_WAKE, 1);
}

static void *lend(void *unused) {
    (void)unused;
    uint32_t *leave = mail.leave;
    mail.fs = split_get_fs();
    publish_answer(0);
    while (!__atomic_load_n(leave, __ATOMIC_ACQUIRE))
        futex(leave, FUTEX_WAIT, 0);
    __atomic_store_n(leave, 0, __ATOMIC_RELEASE); /* seen: the upper thread stops waiting */
    futex(leave, FUTEX_WAKE, 1);
    return NULL; /* now the TLS destructors of this half run */
}

static void *keep(void *unused) {
    (void)unused;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK);
    for (uint32_t seen = 0;; seen++) {
        while (__atomic_load_n(&mail.request, __ATOMIC_ACQUIRE) == seen)
            futex(&mail.request, FUTEX_WAIT, seen);
        pthread_t thread;
        int error = pthread_create(&thread, &attributes, lend, NULL);
        if (error)
            publish_answer(error);
    }
    return NULL;
}

static void *resolve(const char *name) { return dlsym(RTLD_DEFAULT, name); }

static int give_up(const char *why) {
    fprintf(stderr, "flyt split: a lower half can't serve: %s\n", why);
    return 126;
}

int main(void) {
    const char *value = getenv(SPLIT_VARIABLE);
    struct split_info *info = value ? (struct split_info *)strtoull(value, NULL, 16) : NULL;
    if (!info || info == (void *)-1)
        return give_up("it is started by flyt's loader only (" SPLIT_VARIABLE " holds no address)");
    if (info->magic != SPLIT_MAGIC || info->version != SPLIT_VERSION)
        return give_up("the loader is of another version");
    split_info = info;
    const char *problem = lower_start();
    if (problem)
        return give_up(problem);

    sigset_t all, before;
    sigfillset(&all);
    pthread_t keeper;
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&keeper, NULL, keep, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        return give_up(strerror(error));
    pthread_detach(keeper);

    static struct split_published published;
    published = (struct split_published){lower_digest, lower_count, lower_table, resolve,
                                         lower_save, lower_restore, &mail};
    return info->publish(&published);
}
