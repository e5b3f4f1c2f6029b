/* SPDX-License-Identifier: Apache-2.0 */
/* The program maps at addresses of its own choice: argv holds them, in hexadecimal; two pages each. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "halves.h"

int main(int argc, char **argv) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    for (int i = 1; i < argc; i++) {
        void *at = (void *)strtoul(argv[i], NULL, 16);
        errno = 0;
        int free = mmap(at, 8192, PROT_NONE, flags | MAP_FIXED_NOREPLACE, -1, 0) == at ? 0 : errno;
        errno = 0;
        int any = mmap(at, 8192, PROT_NONE, flags | MAP_FIXED, -1, 0) == at ? 0 : errno;
        printf("%s %d %d\n", argv[i], free, any);
    }
    printf("calls %d %d\n", one_add(2, 3), two_add(4, 5));
    return 0;
}
