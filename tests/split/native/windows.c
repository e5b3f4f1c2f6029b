/* SPDX-License-Identifier: Apache-2.0 */
/* Maps and unmaps 1 GiB at a time, in all more than a window holds, then what doesn't fit. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "halves.h"

#define GIB (1ul << 30)
int main(void) {
    int failed = 0;
    for (int i = 0; i < 40; i++) {
        void *at = one_mmap(GIB);
        failed += at == MAP_FAILED || one_munmap(at, GIB);
        at = mmap(NULL, GIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        failed += at == MAP_FAILED || munmap(at, GIB);
    }
    printf("failed %d\n", failed);
    printf("too_large %d\n", one_mmap(8 * GIB) == MAP_FAILED);
    int fit = 0;
    while (one_mmap(GIB / 2) != MAP_FAILED)
        fit++;
    printf("fit %d\n", fit);
    printf("other %d\n", two_mmap(GIB / 2) != MAP_FAILED);
    return 0;
}
