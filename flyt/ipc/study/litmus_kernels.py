# SPDX-License-Identifier: Apache-2.0
"""The kernels of the litmus test: one writer and one reader for each variant, and what they count.

Each block of threads is one of a pair (its first thread runs), so pairs of many processors run at
once. A round, where k is its number: the reader loads the data, so that its first-level cache may
hold the old value, and says that it is ready; the writer, which has waited for that, stores k as
data, then as flag; the reader loads the flag until it is k, then the data. "Ready" is relaxed on
purpose: a fence there would clear the reader's cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

MOST_PAIRS = 32
COUNTERS = 8
"""Words of 64 bits that a pair's reader or writer counts in."""

PAIR_BYTES = 65_536
DATA_SLOTS = 32
"""The data of a round lies in one of so many lines, in turns: they belong to different parts of the
second-level cache than the flag, so that the two stores take different ways."""

BLOCK_BYTES = 4 << 20
"""Two MiB of data and flags; a word by which the sides find that both run."""

START_OFFSET = 3 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """How the two sides store and load.

    Attributes
    ----------
    data_store, between_stores, flag_store, flag_load, between_loads, data_load : str
        PTX; "" for nothing.
    fence_in_loop : bool
        Whether ``between_loads`` follows each load of the flag, as in a polling loop with
        ``__threadfence``.
    ordered : bool
        Whether PTX's memory model orders this between threads of one program on one GPU.
    """

    data_store: str
    between_stores: str
    flag_store: str
    flag_load: str
    between_loads: str
    data_load: str
    ordered: bool = False
    fence_in_loop: bool = False

    @property
    def writer(self) -> str:
        return "; ".join(x for x in (self.data_store, self.between_stores, self.flag_store) if x)

    @property
    def reader(self) -> str:
        return "; ".join(x for x in (self.flag_load, self.between_loads, self.data_load) if x)


def _weak_data(store: str, load: str, *, ordered: bool = False) -> Variant:
    return Variant("st.weak", "", store, load, "", "ld.weak", ordered)


def _fenced(scope: str) -> Variant:
    fence = f"fence.acq_rel.{scope}"
    return Variant("st.weak", fence, "st.weak", "ld.weak", fence, "ld.weak", False, True)


def _all(store: str, load: str) -> Variant:
    return Variant(store, "", store, load, "", load)


VARIANTS = {
    "plain": _all("st.weak", "ld.weak"),
    "plain_fence_gpu": _fenced("gpu"),
    "plain_fence_sys": _fenced("sys"),
    "volatile": _all("st.volatile", "ld.volatile"),
    "relaxed_gpu": _all("st.relaxed.gpu", "ld.relaxed.gpu"),
    "relaxed_sys": _all("st.relaxed.sys", "ld.relaxed.sys"),
    "relaxed_flag_gpu": _weak_data("st.relaxed.gpu", "ld.relaxed.gpu"),
    "relaxed_flag_sys": _weak_data("st.relaxed.sys", "ld.relaxed.sys"),
    "release_acquire_cta": _weak_data("st.release.cta", "ld.acquire.cta"),
    "release_acquire_gpu": _weak_data("st.release.gpu", "ld.acquire.gpu", ordered=True),
    "release_acquire_sys": _weak_data("st.release.sys", "ld.acquire.sys", ordered=True),
}
"""By name. ``plain_fence`` is what CUDA C's ``__threadfence`` and ``__threadfence_system`` are;
nothing orders its flag by the model, which is a data race."""

_COMMON = r"""
typedef unsigned long long u64;
enum { ROUNDS, STALE, UNSEEN, BROKEN_OFF, NANOSECONDS, PLACE };

static __device__ u64 now()
{
    u64 ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}
static __device__ u64 place()
{
    unsigned number;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
    return number;
}
static __device__ unsigned strong(const unsigned *at)
{
    unsigned value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
static __device__ void say(unsigned *at, unsigned value)
{
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
}
/* Whether both sides run before the time is over: neither's time counts until then. */
static __device__ bool meet(unsigned *mine, const unsigned *other, u64 end)
{
    say(mine, 1);
    while (!strong(other))
        if (now() > end)
            return false;
    return true;
}
#define DATA(k) (unsigned *)(block + blockIdx.x * PAIR + ((k) % SLOTS) * 1024ull)
#define FLAG (unsigned *)(block + blockIdx.x * PAIR + 40960)
#define READY (unsigned *)(block + blockIdx.x * PAIR + 49152)
#define STARTS (unsigned *)(block + START + blockIdx.x * 256)
"""

_PAIR = r"""
extern "C" __global__ void write_NAME(char *block, u64 rounds, u64 limit, u64 patience, u64 *count)
{
    (void)patience;
    if (threadIdx.x || !rounds)
        return;
    count += blockIdx.x * COUNTERS;
    count[PLACE] = place() + 1;
    if (!meet(STARTS, STARTS + 1, now() + limit))
        return;
    u64 start = now(), done = 0;
    for (unsigned k = 1; k <= rounds; k++) {
        unsigned ready;
        while ((ready = strong(READY)) < k)
            if (now() - start > limit)
                goto end;
        if (ready == ~0u) /* the reader has given up */
            break;
        unsigned *data = DATA(k), *flag = FLAG;
        asm volatile("DATA_STORE.global.u32 [%0], %1;" : : "l"(data), "r"(k) : "memory");
        BETWEEN_STORES
        asm volatile("FLAG_STORE.global.u32 [%0], %1;" : : "l"(flag), "r"(k) : "memory");
        done = k;
    }
end:
    count[ROUNDS] = done;
    count[NANOSECONDS] = now() - start;
}

extern "C" __global__ void read_NAME(char *block, u64 rounds, u64 limit, u64 patience, u64 *count)
{
    if (threadIdx.x || !rounds)
        return;
    count += blockIdx.x * COUNTERS;
    count[PLACE] = place() + 1;
    if (!meet(STARTS + 1, STARTS, now() + limit)) {
        count[BROKEN_OFF] = 1;
        return;
    }
    u64 start = now(), done = 0, stale = 0;
    for (unsigned k = 1; k <= rounds; k++) {
        unsigned *data = DATA(k), *flag = FLAG, value, got;
        asm volatile("DATA_LOAD.global.u32 %0, [%1];" : "=r"(value) : "l"(data) : "memory");
        if (value == ~0u) /* waits for the load; it never holds */
            count[STALE + 6] = 1;
        say(READY, k);
        u64 begin = now();
        for (unsigned polls = 0;; polls++) {
            asm volatile("FLAG_LOAD.global.u32 %0, [%1];" : "=r"(got) : "l"(flag) : "memory");
            IN_LOOP
            if (got == k)
                break;
            if (polls % 64)
                continue;
            u64 passed = now() - begin;
            if (passed > patience && strong(flag) == k) {
                count[UNSEEN] = 1;
                goto end;
            }
            if (now() - start > limit) {
                count[BROKEN_OFF] = 1;
                goto end;
            }
        }
        AFTER_LOOP
        asm volatile("DATA_LOAD.global.u32 %0, [%1];" : "=r"(value) : "l"(data) : "memory");
        stale += value != k;
        done = k;
    }
end:
    say(READY, ~0u);
    count[ROUNDS] = done;
    count[STALE] = stale;
    count[NANOSECONDS] = now() - start;
}
"""


def _kernels(name: str, variant: Variant) -> str:
    def fence(instruction: str) -> str:
        return f'asm volatile("{instruction};" : : : "memory");' if instruction else ""

    loop = fence(variant.between_loads)
    parts = {
        "NAME": name,
        "DATA_STORE": variant.data_store,
        "BETWEEN_STORES": fence(variant.between_stores),
        "FLAG_STORE": variant.flag_store,
        "DATA_LOAD": variant.data_load,
        "FLAG_LOAD": variant.flag_load,
        "IN_LOOP": loop if variant.fence_in_loop else "",
        "AFTER_LOOP": "" if variant.fence_in_loop else loop,
    }
    text = _PAIR
    for word, part in parts.items():
        text = text.replace(word, part)
    return text


SOURCE = (
    f"#define PAIR {PAIR_BYTES}ull\n#define SLOTS {DATA_SLOTS}\n#define START {START_OFFSET}\n"
    f"#define COUNTERS {COUNTERS}\n{_COMMON}"
    + "".join(_kernels(name, variant) for name, variant in VARIANTS.items())
)


@dataclasses.dataclass(slots=True)
class Outcome:
    """What all pairs' writers or readers counted.

    Attributes
    ----------
    rounds, stale, unseen, broken_off, nanoseconds : int
        Sums over the pairs; a pair ends at its first unseen flag or when its time is over.
    places : list of int
        The multiprocessor that each ran on, from 1 on; 0: it did not run.
    """

    rounds: int
    stale: int
    unseen: int
    broken_off: int
    nanoseconds: int
    places: list[int]

    @classmethod
    def of(cls, words: Sequence[int]) -> Outcome:
        pairs = [words[i : i + COUNTERS] for i in range(0, len(words), COUNTERS)]
        rounds, stale, unseen, broken_off, nanoseconds = (
            sum(p[i] for p in pairs) for i in range(5)
        )
        places = [pair[5] for pair in pairs]
        return cls(rounds, stale, unseen, broken_off, nanoseconds, places)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
