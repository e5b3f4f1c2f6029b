/* SPDX-License-Identifier: Apache-2.0 */
/* Allocation by CUDA's virtual memory management, for callers that only know pointers. */

#ifndef FLYT_VMM_H
#define FLYT_VMM_H

#include <stddef.h>
#include <stdint.h>

struct flyt_block {
    uint64_t start;  /* its address */
    uint64_t size;   /* bytes mapped */
    uint64_t serial; /* never used again in this process, as addresses are */
    int32_t device;
};

/* CUresult codes, which are cudaError_t's too for what can happen here. */
int flyt_vmm_alloc(size_t size, int device, void **pointer);
int flyt_vmm_free(void *pointer, int *ours);

/* 1 and the block that holds this address, or 0. */
int flyt_vmm_find(const void *pointer, struct flyt_block *block);

/* A new file descriptor of the block's memory; a CUresult. */
int flyt_vmm_export(uint64_t serial, int *fd);

/* The serial of each exported block that is freed is written to this descriptor. */
void flyt_vmm_watch(int fd);

#endif
