/* SPDX-License-Identifier: Apache-2.0 */
/* Each rank: who am I, what do all sum to, a message around the ring, a copy through cuda. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "flyt_cuda.h"

#define COUNT 100000
static long sent[COUNT], received[COUNT];

int main(int argc, char **argv) {
    int rank, size, provided, length, good = 1;
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Get_library_version(version, &length);
    version[strcspn(version, ",\n")] = 0;

    long mine = (rank + 1) * 10, sum = 0;
    double least = rank + 0.5, all_least = -1;
    MPI_Allreduce(&mine, &sum, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    MPI_Allreduce(&least, &all_least, 1, MPI_DOUBLE, MPI_MIN, MPI_COMM_WORLD);
    MPI_Allreduce(MPI_IN_PLACE, &mine, 1, MPI_LONG, MPI_MAX, MPI_COMM_WORLD);

    /* device memory in between: host -> device -> device -> host -> next rank */
    void *from, *to;
    for (int i = 0; i < COUNT; i++)
        sent[i] = rank * 1000000l + i;
    good &= cudaMalloc(&from, sizeof sent) == 0 && cudaMalloc(&to, sizeof sent) == 0;
    good &= cudaMemcpy(from, sent, sizeof sent, cudaMemcpyHostToDevice) == 0;
    good &= cudaMemcpy(to, from, sizeof sent, cudaMemcpyDeviceToDevice) == 0;
    good &= cudaMemset(from, 0, sizeof sent) == 0 && cudaDeviceSynchronize() == 0;
    memset(sent, 0xff, sizeof sent);
    good &= cudaMemcpy(sent, to, sizeof sent, cudaMemcpyDeviceToHost) == 0;

    MPI_Status status = {0};
    int next = (rank + 1) % size, before = (rank + size - 1) % size;
    if (rank % 2 == 0) {
        MPI_Send(sent, COUNT, MPI_LONG, next, 7, MPI_COMM_WORLD);
        MPI_Recv(received, COUNT, MPI_LONG, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &status);
    } else {
        MPI_Recv(received, COUNT, MPI_LONG, before, 7, MPI_COMM_WORLD, &status);
        MPI_Send(sent, COUNT, MPI_LONG, next, 7, MPI_COMM_WORLD);
    }
    for (int i = 0; i < COUNT; i++)
        good &= received[i] == before * 1000000l + i;
    good &= status.MPI_SOURCE == before && status.MPI_TAG == 7;

    char word[16] = "";
    if (rank == 1)
        strcpy(word, "from one");
    MPI_Bcast(word, sizeof word, MPI_CHAR, 1, MPI_COMM_WORLD);
    good &= cudaFree(from) == 0 && cudaFree(to) == 0;
    MPI_Barrier(MPI_COMM_WORLD);
    printf("rank %d size %d sum %ld max %ld least %.1f word '%s' good %d library %s\n", rank, size, sum, mine,
           all_least, word, good, version);
    MPI_Finalize();
    return 0;
}
