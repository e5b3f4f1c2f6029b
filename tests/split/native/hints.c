/* SPDX-License-Identifier: Apache-2.0 */
/* What a driver asks for: a place of its own choice, and more than a window holds. */
#include <stdio.h>

#include "halves.h"

#define MIB (1ul << 20)
int main(void) {
    char *free = (char *)0x500000000000;
    printf("one.hint %p\none.large %p\n", one_mmap_at(free, MIB), one_mmap(2 * MIB * MIB));
    printf("two.hint %p\ntwo.large %p\n", two_mmap_at(free + MIB, MIB), two_mmap(2 * MIB * MIB));
    return 0;
}
