/* SPDX-License-Identifier: Apache-2.0 */
/* The smallest upper half; it ends when its input does. */
#include <stdio.h>

#include "halves.h"

int main(int argc, char **argv) {
    printf("%d %d\n", one_add(2, 3), two_add(30, 4));
    fflush(stdout);
    while (argc > 1 && getchar() != EOF)
        continue;
    return 7;
}
