/* SPDX-License-Identifier: Apache-2.0 */
/* Preloaded into the lower halves: takes the page at $TAKEN before anybody else can. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>

__attribute__((constructor)) static void take(void) {
    void *at = (void *)strtoul(getenv("TAKEN"), NULL, 16);
    mmap(at, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
}
