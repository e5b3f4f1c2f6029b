/* SPDX-License-Identifier: Apache-2.0 */
/* An upper half that prints one fact a line: NAME VALUE. */
#define _GNU_SOURCE
#include <errno.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <unistd.h>

#include "halves.h"

static int loaded(struct dl_phdr_info *about, size_t size, void *data) {
    (void)size, (void)data;
    printf("link_map %s\n", about->dlpi_name[0] ? about->dlpi_name : "-");
    return 0;
}

static void show_maps(const char *moment) {
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps))
        printf("maps.%s %s", moment, line);
    fclose(maps);
}

int main(int argc, char **argv) {
    char environment[65536];
    FILE *own = fopen("/proc/self/environ", "r");
    size_t length = fread(environment, 1, sizeof environment, own);
    fclose(own);
    for (char *at = environment; at < environment + length; at += strlen(at) + 1)
        if (!strncmp(at, "LHINFO_PTR=", 11))
            printf("preset %s\n", at + 11);
    printf("variable %s\n", getenv("LHINFO_PTR"));
    show_maps("early");
    dl_iterate_phdr(loaded, NULL);
    /* constructors in order of priority, IFUNC, thread_local, in each of three copies */
    printf("order %d %d %d\n", side_order(), one_order(), two_order());
    printf("ifunc %d %d %d\n", side_ifunc(), one_ifunc(), two_ifunc());
    side_count(), side_count(), one_count();
    printf("count %ld %ld %ld\n", side_count(), one_count(), two_count());
    side_local(), one_local(), one_local();
    printf("local %d %d %d\n", side_local(), one_local(), two_local());
    errno = 11, one_set_errno(22), two_set_errno(33);
    printf("errno %d", errno);
    printf(" %d", one_set_errno(0));
    printf(" %d\n", two_set_errno(0));
    printf("many %.1f\n", one_many(1, 2.5, 3, 4.5, 5, 6, 7, 8, 9, 10.5, 11));

#define WHERE(name, address) printf("at %s %p\n", name, (void *)(address))
    char *name = argv[1];
    WHERE("one malloc", one_malloc(100));
    WHERE("two malloc", two_malloc(100));
    WHERE("upper malloc", malloc(100));
    WHERE("one malloc_large", one_malloc(64 << 20));
    WHERE("two malloc_large", two_malloc(64 << 20));
    WHERE("upper malloc_large", malloc(64 << 20));
    WHERE("one mmap", one_mmap(1 << 20));
    WHERE("two mmap", two_mmap(1 << 20));
    WHERE("upper mmap", mmap(NULL, 1 << 20, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    WHERE("one mremap", one_mremap(one_mmap(4096), 4096, 32 << 20));
    void *at = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    WHERE("upper mremap", mremap(at, 4096, 32 << 20, MREMAP_MAYMOVE));
    WHERE("one shmat", one_shmat(4096));
    WHERE("two thread_stack", two_thread_stack());
    WHERE("one thread_stack", one_thread_stack());
    WHERE("one dlopen", argc > 1 ? one_dlopen(name) : NULL);
    WHERE("two dlopen", argc > 1 ? two_dlopen(name) : NULL);
    WHERE("upper stack", __builtin_frame_address(0));
    void *all[3] = {one_malloc(1 << 16), two_malloc(1 << 16), malloc(1 << 16)};
    one_free(all[0]), two_free(all[1]), free(all[2]);
    show_maps("late");
    return 0;
}
