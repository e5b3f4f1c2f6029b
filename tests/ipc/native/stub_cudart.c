/* SPDX-License-Identifier: Apache-2.0 */
/* A stand-in for libcudart.so: its cudaMalloc says that it was reached. */

#include <stddef.h>

static char memory[64];

int cudaMalloc(void **pointer, size_t size) { return *pointer = memory, size ? 0 : 0; }
int cudaFree(void *pointer) { return pointer == NULL || pointer == memory ? 0 : 1; }
int cudaGetDevice(int *device) { return *device = 1, 0; }
