/* SPDX-License-Identifier: Apache-2.0 */
/* The loader: loads the lower halves, then the upper half, and passes control to it.
 *
 *   loader --upper BASE SIZE LD.SO LIBRARY_PATH PROGRAM
 *          [--half NAME BASE SIZE HINTS LD.SO PROGRAM]... --arena BASE SIZE
 *          --image PATH [--restart PATH] -- ARGV0 ARGUMENTS...
 *
 * Numbers are hexadecimal. `flyt split` writes this line and has checked all of it.
 */
#include <elf.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include "loader.h"

#define HWCAP2_FSGSBASE 2u

struct split_info info __attribute__((aligned(4096)));
const char *image_path;
long own_pid;
static uint32_t gate[1024] __attribute__((aligned(4096))); /* a page: wiped in a forked child */
#define OWNER gate[1]   /* the process whose memory this is; 0: a forked child, not yet noted */
static uint64_t own_context;
static unsigned loading;

struct source {
    char *linker, *program, *library_path;
};

static uint64_t hex(const char *text) {
    uint64_t value = 0;
    for (; *text; text++)
        value = value * 16 + (uint64_t)(*text <= '9' ? *text - '0' : *text - 'a' + 10);
    return value;
}

static void copy_text(char *to, const char *from, size_t room) {
    size_t length = strlen(from);
    if (length >= room)
        fail(2, "too long: ", from, NULL);
    memcpy(to, from, length + 1);
}

static int note_region(void *data, const struct mapping *mapping) {
    struct split_half *half = data;
    if (mapping->start - half->base >= half->size)
        return 0;
    if (half->region_count == SPLIT_REGIONS) {
        say("the record lists only the first mappings of the lower half ", half->name, NULL);
        return 1;
    }
    half->region[half->region_count++] =
        (struct split_region){mapping->start, mapping->end,
                              (uint32_t)(mapping->readable | mapping->writable << 1 | mapping->executable << 2), 0};
    return 0;
}

/* Whether this is a child by vfork, whose memory is its parent's. A forked child has noted itself
 * before it has such children: its libc registers the robust list first, and blocks signals before. */
int is_borrower(void) {
    uint32_t own = (uint32_t)sys0(SYS_getpid), owner = 0;
    return !__atomic_compare_exchange_n(&OWNER, &owner, own, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED) && owner != own;
}

/* Called by a lower half's main; returns to it when the process ends. */
static int publish(const struct split_published *published) {
    struct split_half *half = &info.half[loading];
    half->digest = published->digest;
    half->count = published->count;
    half->table = published->table;
    half->resolve = published->resolve;
    half->fs = split_get_fs();
    each_mapping(note_region, half);
    half->published = (uint64_t)published;
    return (int)context_switch(&half->parked, own_context, 0);
}

static void refuse(const char *what, const char *name, const char *mend) { fail(126, what, name, mend, NULL); }

static unsigned find(const char *name, uint64_t digest) {
    for (unsigned i = 1; i < info.halves; i++)
        if (!strcmp(info.half[i].name, name)) {
            if (info.half[i].digest != digest)
                fail(126, "the lower half ", name, " and its stub library are of different tables of "
                     "prototypes: build both from one", NULL);
            return i;
        }
    fail(126, "the program calls the lower half ", name, ", which is not loaded: name it with --half", NULL);
}

static void attend(void) {
    if (sys0(SYS_getpid) != own_pid)
        fail(126, "a forked child called a lower half, which is its parent's: call from the parent, or exec",
             NULL);
    if (threads_called_by_lower((uint64_t)__builtin_frame_address(0)))
        return; /* the request stands until the lower half has returned */
    if (__atomic_exchange_n(info.open, 1, __ATOMIC_ACQ_REL) == 0)
        context_checkpoint(info.image);
}

/* The value of LHINFO_PTR, where the kernel put it. */
static char *variable_of(char **envp) {
    for (; *envp; envp++)
        if (same_start(*envp, SPLIT_VARIABLE "="))
            return strcmp(*envp + sizeof SPLIT_VARIABLE, SPLIT_PRESET) ? NULL : *envp + sizeof SPLIT_VARIABLE;
    return NULL;
}

static void check_machine(const uint64_t *auxv) {
    uint64_t capabilities = 0;
    for (; *auxv; auxv += 2)
        if (*auxv == AT_HWCAP2)
            capabilities = auxv[1];
    if (!(capabilities & HWCAP2_FSGSBASE))
        fail(126, "this needs the FSGSBASE instructions: a CPU that has them and Linux 5.9 or later", NULL);
}

static unsigned read_options(char **argv, struct source *source) {
    unsigned at = 1;
    info.halves = 1;
    for (; argv[at] && strcmp(argv[at], "--"); at++) {
        char **value = &argv[at + 1];
        if (!strcmp(argv[at], "--upper")) {
            copy_text(info.half[0].name, "upper", SPLIT_NAME);
            info.half[0].base = hex(value[0]), info.half[0].size = hex(value[1]);
            source[0] = (struct source){value[2], value[4], value[3]};
            at += 5;
        } else if (!strcmp(argv[at], "--half")) {
            struct split_half *half = &info.half[info.halves];
            copy_text(half->name, value[0], SPLIT_NAME);
            half->base = hex(value[1]), half->size = hex(value[2]), half->own_hints = hex(value[3]);
            source[info.halves++] = (struct source){value[4], value[5], NULL};
            at += 6;
        } else if (!strcmp(argv[at], "--arena")) {
            info.arena = hex(value[0]), info.arena_size = hex(value[1]);
            at += 2;
        } else if (!strcmp(argv[at], "--image")) {
            copy_text(info.image, value[0], sizeof info.image);
            at += 1;
        } else if (!strcmp(argv[at], "--restart")) {
            image_path = value[0];
            at += 1;
        } else {
            fail(2, "unknown word on the loader's command line: ", argv[at], NULL);
        }
    }
    if (!argv[at] || !source[0].program)
        fail(2, "this is flyt's loader: use `flyt split run`", NULL);
    return at + 1;
}

void loader_main(uint64_t *stack) {
    int argc = (int)stack[0];
    char **argv = (char **)(stack + 1), **envp = argv + argc + 1, **end = envp;
    struct source source[SPLIT_HALVES] = {0};
    while (*end)
        end++;
    uint64_t *auxv = (uint64_t *)(end + 1);
    check_machine(auxv);
    unsigned first = argc > 1 ? read_options(argv, source) : 0;
    if (!first || !argv[first])
        fail(2, "this is flyt's loader: use `flyt split run`", NULL);
    char *variable = variable_of(envp);
    if (!variable)
        fail(2, SPLIT_VARIABLE " must be preset to " SPLIT_PRESET, NULL);

    own_pid = sys0(SYS_getpid);
    info.magic = SPLIT_MAGIC, info.version = SPLIT_VERSION;
    info.publish = publish, info.adopt = threads_adopt, info.release = threads_release;
    info.attend = attend, info.checkpoint = context_checkpoint, info.refuse = refuse, info.find = find;
    info.restarting = image_path != NULL;
    info.open = gate;
    gate[0] = 1, OWNER = (uint32_t)own_pid;
    sys3(SYS_madvise, gate, sizeof gate, MADV_WIPEONFORK);
    for (uint64_t value = (uint64_t)&info, digit = 0; digit < 16; digit++)
        variable[17 - digit] = "0123456789abcdef"[value >> 4 * digit & 15];

    signals_start();
    filter_install();
    for (loading = 1; loading < info.halves; loading++) {
        char *words[] = {source[loading].linker, source[loading].program, NULL};
        struct start start = elf_prepare(loading, words, source[loading].program, envp, auxv);
        split_set_fs(0);
        context_start(&own_context, start.stack, start.entry);
        info.thread[0].fs[loading] = info.half[loading].fs;
    }
    info.thread[0].used = 1;
    split_set_fs(0);
    split_set_gs(&info.thread[0]);
    if (image_path)
        image_resume();

    int count = 0;
    while (argv[first + count])
        count++;
    char *words[count + 6];
    words[0] = source[0].linker;
    words[1] = "--library-path", words[2] = source[0].library_path;
    words[3] = "--argv0", words[4] = argv[first];
    words[5] = source[0].program;
    memcpy(words + 6, argv + first + 1, sizeof(char *) * (size_t)count);
    char *name = source[0].program;
    for (char *c = name; *c; c++)
        if (*c == '/' && c[1])
            name = c + 1;
    sys2(SYS_prctl, PR_SET_NAME, name);
    struct start start = elf_prepare(SPLIT_UPPER, words, source[0].program, envp, auxv);
    context_start(&own_context, start.stack, start.entry);
    __builtin_unreachable();
}
