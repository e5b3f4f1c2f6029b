/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
int one_add(int, int), two_add(int, int);
int main(int argc, char **argv) {
    printf("%d %d argc %d\n", one_add(2, 3), two_add(30, 4), argc);
    for (int i = 0; i < argc; i++) printf("<%s>", argv[i]);
    printf("\n");
    return 7;
}
