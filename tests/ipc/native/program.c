/* SPDX-License-Identifier: Apache-2.0 */
/* A program that knows nothing of Flyt: it allocates, writes, frees, and reports. */

#include <stdio.h>
#include <string.h>

int cudaMalloc(void **pointer, size_t size);
int cudaFree(void *pointer);

int main(void)
{
    void *one, *two, *none = &one;
    int other = 0;
    int a = cudaMalloc(&one, 3 << 20), b = cudaMalloc(&two, 1), c = cudaMalloc(&none, 0);
    if (a || b || c)
        return printf("malloc %d %d %d\n", a, b, c), 1;
    memset(one, 7, 3 << 20);
    printf("%d %d ", none == NULL, ((char *)one)[(3 << 20) - 1]);
    a = cudaFree(one), b = cudaFree(two), c = cudaFree(NULL);
    printf("%d %d %d ", a, b, c);
    printf("%d %d\n", cudaFree(one), cudaFree(&other)); /* twice, and never allocated */
    return 0;
}
