/* SPDX-License-Identifier: Apache-2.0 */
/* One half calls back into the upper half, which calls the other half, which calls back... */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "halves.h"

static _Thread_local int mine = 1;

static int deeper(int value, void *data) {
    mine++;
    int *depth = data;
    errno = 50 + *depth;
    void *at = malloc(1000);
    int below = --*depth ? (*depth & 1 ? one_visit : two_visit)(deeper, value + 1, data) : value;
    free(at);
    return below;
}

static int plain(int value, void *data) { return value + *(int *)data; }

int main(int argc, char **argv) {
    int depth = 6, ten = 10;
    int deep = one_visit(deeper, 100, &depth);
    printf("deep %d mine %d\n", deep, mine);
    printf("plain %d %d\n", one_visit(plain, 5, &ten), two_visit(plain, 6, &ten));
    if (argc > 1 && !strcmp(argv[1], "stray"))
        one_stray(plain);
    return 0;
}
