/* SPDX-License-Identifier: Apache-2.0 */
/* A restart: the image's memory at its addresses, over fresh lower halves; then on it goes. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "image.h"

#define RSEQ_CPU_ID 4 /* offset in struct rseq */

static long file;
static uint64_t frame; /* bytes left of a lower half's frame */

static void in(void *bytes, uint64_t size) {
    for (uint64_t done = 0; done < size;) {
        long result = sys3(SYS_read, file, (char *)bytes + done, size - done);
        if (result == -EINTR)
            continue;
        if (FAILED(result) || !result)
            fail(126, "the image ends early, or can't be read: ", image_path, NULL);
        done += (uint64_t)result;
    }
}

static void get(void *bytes, uint64_t size) {
    for (char *to = bytes; size;) {
        if (!frame)
            in(&frame, sizeof frame);
        if (!frame)
            fail(126, "a lower half wants more of the image than its predecessor put there: are both of "
                 "the same version?", NULL);
        uint64_t part = frame < size ? frame : size;
        in(to, part);
        frame -= part, to += part, size -= part;
    }
}

static void check_halves(const struct image_header *header) {
    if (header->build != image_build())
        fail(126, "the image was made by another build of Flyt's loader, whose addresses it holds: ", image_path, NULL);
    if (header->halves != info.halves)
        fail(126, "the image was made with another number of lower halves", NULL);
    for (unsigned i = 0; i < info.halves; i++)
        if (strcmp(header->half[i].name, info.half[i].name) || header->half[i].digest != info.half[i].digest)
            fail(126, "the image was made with another lower half than ", info.half[i].name,
                 ", or with another version of it", NULL);
}

static void restore_halves(void) {
    for (unsigned i = 1; i < info.halves; i++) {
        const struct split_published *published = (const void *)info.half[i].published;
        split_set_fs(info.thread[0].fs[i]);
        frame = 0;
        const char *refusal = published->restore ? published->restore(get) : NULL;
        split_set_fs(0);
        if (refusal)
            fail(126, "no restart: the lower half ", info.half[i].name, ": ", refusal, NULL);
        if (!frame)
            in(&frame, sizeof frame);
        if (frame)
            fail(126, "no restart: the lower half ", info.half[i].name, " has not read all that was saved for it", NULL);
    }
}

static void restore_memory(void) {
    struct image_region region;
    struct image_run run;
    char room[24];
    for (in(&region, sizeof region); region.end; in(&region, sizeof region)) {
        uint64_t size = region.end - region.start;
        if (!is_upper(region.start) || !is_upper(region.end - 1))
            fail(126, "the image is damaged: memory outside of the program's window", NULL);
        long got = sys6(SYS_mmap, (long)region.start, (long)size, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE | MAP_NORESERVE, -1, 0);
        if (got != (long)region.start)
            fail(126, "no restart: the program's memory at 0x", hexadecimal(region.start, room), " can't be had", NULL);
        for (in(&run, sizeof run); run.size; in(&run, sizeof run)) {
            if (run.start < region.start || run.start > region.end || run.size > region.end - run.start)
                fail(126, "the image is damaged: pages outside of their mapping", NULL);
            in((void *)run.start, run.size);
        }
        if (FAILED(sys3(SYS_mprotect, region.start, size, region.prot)))
            fail(126, "no restart: the program's memory at 0x", hexadecimal(region.start, room),
                 " can't be protected as before", NULL);
    }
}

struct place {
    uint64_t at, size;
};

static int visit_place(void *data, const struct mapping *mapping) {
    const struct place *place = data;
    return mapping->start <= place->at && place->at < mapping->end && place->size <= mapping->end - place->at &&
           mapping->readable && mapping->writable && is_upper(mapping->start);
}

/* Addresses that are used before the program goes on lie in its memory. */
static void check_state(const struct image_state *state) {
    const struct split_upper *upper = &state->upper;
    const struct place places[] = {
        {state->resume_at, 8 * sizeof(uint64_t)},
        {state->fs, sizeof(uint64_t)},
        {upper->tid_address, sizeof(int)},
        {upper->rseq, RSEQ_CPU_ID + sizeof(int)},
    };
    for (unsigned i = 0; i < sizeof places / sizeof *places; i++)
        if ((i < 2 || places[i].at) && each_mapping(visit_place, (void *)&places[i]) != 1)
            fail(126, "the image is damaged: its registers point outside of its memory", NULL);
}

/* What the kernel knew of the main thread. */
static void restore_registrations(const struct image_state *state) {
    const struct split_upper *upper = &state->upper;
    if (upper->tid_address) {
        *(int *)upper->tid_address = (int)sys0(SYS_gettid); /* the thread's id in its libc */
        sys1(SYS_set_tid_address, upper->tid_address);
    }
    if (upper->robust_list)
        sys2(SYS_set_robust_list, upper->robust_list, upper->robust_size);
    if (upper->rseq && FAILED(sys4(SYS_rseq, upper->rseq, upper->rseq_size, 0, upper->rseq_signature)))
        *(int *)(upper->rseq + RSEQ_CPU_ID) = -2; /* registration failed: its libc asks the kernel */
    sys2(SYS_sigaltstack, state->stack, 0);
    info.upper = *upper;
    info.upper.restarts++;
    signals_restore(state->action, (unsigned)state->action_count);
}

void image_resume(void) {
    static union {
        struct image_header header;
        char page[PAGE];
    } first;
    static struct image_state state;
    uint64_t all = ~(1ull << (SIGSYS - 1));
    file = sys4(SYS_openat, AT_FDCWD, image_path, O_RDONLY | O_CLOEXEC, 0);
    if (FAILED(file))
        fail(126, "the image can't be opened: ", image_path, NULL);
    in(&first, sizeof first);
    check_halves(&first.header);
    in(&state, sizeof state);
    if (state.action_count > sizeof state.action / sizeof *state.action)
        fail(126, "the image is damaged: more signals than there are", NULL);
    restore_memory();
    check_state(&state);
    restore_halves(); /* after the memory: a runtime reads a fat binary when it is registered */
    sys1(SYS_close, file);
    sys4(SYS_rt_sigprocmask, SIG_SETMASK, &all, 0, 8); /* no handler before there is its TLS */
    restore_registrations(&state);
    info.thread[0].fs[SPLIT_UPPER] = state.fs;
    split_set_gs(&info.thread[0]);
    split_set_fs(state.fs);
    sys4(SYS_rt_sigprocmask, SIG_SETMASK, &state.mask, 0, 8);
    context_resume(state.resume_at, 1);
}
