/* SPDX-License-Identifier: Apache-2.0 */
/* Works on memory of all kinds and on device memory; is checkpointed, killed, restarted.
 *
 *   keeps IMAGE PAUSES [signal|stop]    each pause: a checkpoint, "ready N", a line of input
 */
#define _GNU_SOURCE
#include <errno.h>
#include <locale.h>
#include <math.h>
#include <sched.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <unistd.h>

#include "flyt_cuda.h"
#include "flyt_split.h"
#ifdef WITH_MPI
#include "mpi.h"
#endif

#define SLOTS 12
#define MIB (1u << 20)

static unsigned long seed = 88172645463325252ul;
static unsigned next(void) { return (unsigned)((seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17) >> 16); }

static struct {
    unsigned char *device, *host; /* the same content */
    size_t size;
} slot[SLOTS];
static _Thread_local int local = 17;
static int handled;
static void on_signal(int number) { handled += number == SIGUSR1 && local > 0; }

static void change(int rounds) {
    while (rounds--) {
        int i = (int)(next() % SLOTS);
        if (slot[i].device) { /* freed and, later, its address used again */
            cudaFree(slot[i].device), free(slot[i].host);
            slot[i].device = NULL;
            continue;
        }
        slot[i].size = 1 + next() % (3 * MIB);
        slot[i].host = calloc(1, slot[i].size);
        for (size_t at = 0; at < slot[i].size; at += 4)
            slot[i].host[at] = (unsigned char)next();
        int made = cudaMalloc((void **)&slot[i].device, slot[i].size), sent = 0;
        if (!made)
            sent = cudaMemcpy(slot[i].device, slot[i].host, slot[i].size, cudaMemcpyHostToDevice);
        if (made || sent)
            printf("allocation failed: %d %d %zu at %p\n", made, sent, slot[i].size, (void *)slot[i].device);
    }
}

static int wrong(void) {
    int found = 0;
    for (int i = 0; i < SLOTS; i++) {
        if (!slot[i].device)
            continue;
        unsigned char *back = malloc(slot[i].size);
        found += cudaMemcpy(back, slot[i].device, slot[i].size, cudaMemcpyDeviceToHost) != 0;
        found += memcmp(back, slot[i].host, slot[i].size) != 0;
        free(back);
    }
    return found;
}

static unsigned long digest(void) { /* of pointers and device contents */
    unsigned long sum = 5381;
    for (int i = 0; i < SLOTS; i++) {
        sum = sum * 33 + (unsigned long)slot[i].device;
        unsigned char *back = malloc(slot[i].size + 1);
        if (slot[i].device && cudaMemcpy(back, slot[i].device, slot[i].size, cudaMemcpyDeviceToHost) == 0)
            for (size_t at = 0; at < slot[i].size; at++)
                sum = sum * 33 + back[at];
        free(back);
    }
    return sum;
}

static void tls_works(void) {
    pthread_mutexattr_t kind;
    pthread_mutex_t lock;
    pthread_mutexattr_init(&kind), pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&lock, &kind);
    int taken = pthread_mutex_lock(&lock) == 0 && pthread_mutex_lock(&lock) == 0;
    int on_its_cpu = 1, before = errno; /* rseq, which sched_getcpu reads, is registered again */
    cpu_set_t all, one;
    sched_getaffinity(0, sizeof all, &all);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &all))
            continue;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        sched_setaffinity(0, sizeof one, &one);
        on_its_cpu &= sched_getcpu() == cpu;
    }
    sched_setaffinity(0, sizeof all, &all);
    printf("tls %d errno %d recursive %d cpu %d\n", local, before, taken, on_its_cpu);
}

int main(int argc, char **argv) {
    int pauses = atoi(argv[2]), by_signal = argc > 3 && !strcmp(argv[3], "signal"),
        stops = argc > 3 && !strcmp(argv[3], "stop"), rank = 0, size = 1;
    double volatile angle = 0.5;
    char line[64];
    setlocale(LC_ALL, "");
    signal(SIGUSR1, on_signal);
#ifdef WITH_MPI
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank), MPI_Comm_size(MPI_COMM_WORLD, &size);
#endif
    char *guard = mmap(NULL, 64 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    strcpy(guard + 5 * MIB, "kept though unreadable");
    mprotect(guard, 64 * MIB, PROT_NONE);
    seed += (unsigned long)rank;
    change(200);
    for (int pause = 0; pause < pauses; pause++) {
        unsigned long before = digest();
        local++, errno = 40 + pause;
        int restarted = 0;
#ifdef WITH_MPI
        MPI_Barrier(MPI_COMM_WORLD);
#endif
        if (!by_signal) {
            restarted = flyt_split_checkpoint(NULL);
            if (restarted < 0) {
                printf("refused %d\n", restarted);
                return 3;
            }
            tls_works();
        }
        printf("ready %d rank %d of %d restarted %d digest %lx same %d\n", pause, rank, size, restarted, before,
               digest() == before);
        fflush(stdout);
        if (by_signal) /* calls stubs until it is told to go on */
            for (int go = 0; !go;) {
                fd_set set;
                struct timeval moment = {0, 2000};
                FD_ZERO(&set);
                FD_SET(0, &set);
                cudaDeviceSynchronize();
                go = select(1, &set, NULL, NULL, &moment) > 0;
            }
        if (!restarted && (stops || !fgets(line, sizeof line, stdin))) {
#ifdef WITH_MPI
            MPI_Finalize(); /* a launcher ends all ranks when one ends without */
            return 0;
#endif
            return 4;
        }
        printf("wrong %d\n", wrong());
        change(50);
    }
    mprotect(guard, 64 * MIB, PROT_READ);
    raise(SIGUSR1);
    printf("guard '%s' handled %d sin %.6f\n", guard + 5 * MIB, handled, sin(angle));
#ifdef WITH_MPI
    long one = rank + 1, sum = 0;
    MPI_Allreduce(&one, &sum, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    printf("sum %ld\n", sum);
    MPI_Finalize();
    return 0;
#endif
    for (int i = 0; i < SLOTS; i++)
        cudaFree(slot[i].device);
    printf("end\n");
    return 9;
}
