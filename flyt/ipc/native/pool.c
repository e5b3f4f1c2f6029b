/* SPDX-License-Identifier: Apache-2.0 */
/* The two functions that PyTorch's CUDAPluggableAllocator looks for. */

#include "vmm.h"

#include <stdio.h>
#include <sys/types.h>

void *flyt_pool_alloc(ssize_t size, int device, void *stream)
{
    void *pointer = NULL;
    (void)stream; /* virtual memory management knows no streams */
    int result = size < 0 ? 1 : flyt_vmm_alloc((size_t)size, device, &pointer);
    if (result && result != 2) /* PyTorch reports a lack of memory itself */
        fprintf(stderr, "flyt: allocating %zd bytes: CUDA error %d\n", size, result);
    return pointer; /* NULL is "out of memory" to PyTorch */
}

void flyt_pool_free(void *pointer, ssize_t size, int device, void *stream)
{
    int ours;
    (void)size, (void)device, (void)stream;
    int result = flyt_vmm_free(pointer, &ours);
    if (result == 4) /* CUDA_ERROR_DEINITIALIZED: the process ends, and the driver with it */
        result = 0;
    if (pointer && (!ours || result))
        fprintf(stderr, "flyt: freeing %p: CUDA error %d\n", pointer, ours ? result : 1);
}
