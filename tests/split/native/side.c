/* SPDX-License-Identifier: Apache-2.0 */
/* A library that every half has a copy of: constructors with priorities, an IFUNC, a
 * thread_local, a global, a destructor that prints. */
#include <stdio.h>
#include <stdlib.h>

static int order;
__attribute__((constructor(301))) static void first(void) { order = order * 10 + 1; }
__attribute__((constructor(302))) static void second(void) { order = order * 10 + 2; }
__attribute__((constructor)) static void last(void) { order = order * 10 + 3; }
__attribute__((destructor)) static void end(void) {
    if (getenv("SIDE_PRINTS"))
        printf("end of %s\n", getenv("SIDE_PRINTS"));
}

static int chosen(void) { return 42; }
static int (*choose(void))(void) { return chosen; }
int side_ifunc(void) __attribute__((ifunc("choose")));

static long count;
static _Thread_local int local = 100;
int side_order(void) { return order; }
long side_count(void) { return __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED); }
int side_local(void) { return ++local; }
