# SPDX-License-Identifier: Apache-2.0
"""What a run consists of, and how large its region is."""

from __future__ import annotations

import pytest

from flyt.bench.plan import CONTENDERS, GIB, KIB, MIB, SIZES, Plan, bytes_text
from flyt.bench.run import Setup, region_size
from flyt.errors import ConfigurationError
from flyt.rpc.messages import CREDITS

ALL = ["memcpy", "native", "flyt", "inline"]


def test_sizes_from_4_bytes_to_1_gib() -> None:
    assert (SIZES[0], SIZES[-1]) == (4, GIB)
    copies = [job for job in Plan().jobs(ALL) if job.case == "copy"]
    assert sorted(job.size for job in copies) == list(SIZES)
    assert all(len(job.entrants) == len(CONTENDERS) for job in copies)


def test_what_was_promised_comes_first() -> None:
    jobs = Plan().jobs(ALL)
    last_promise = max(
        i for i, job in enumerate(jobs) if job.case != "copy" or job.size >= 64 * MIB
    )
    loops = [job for job in jobs if job.case == "loop"]
    assert [job.size for job in loops] == [256 * MIB, 64 * MIB, GIB]
    assert {e.contender.split()[0] for job in loops for e in job.entrants} == {"native", "flyt"}
    curve = [i for i, job in enumerate(jobs) if job.case == "copy" and job.size < 64 * MIB]
    assert last_promise < min(curve)


def test_without_native_nobody_waits_for_it() -> None:
    jobs = Plan().jobs(["memcpy", "flyt", "inline"])
    assert jobs
    assert not [e for job in jobs for e in job.entrants if e.contender.startswith("native")]
    assert not [job for job in jobs if job.case == "loop"], "a promise beside native CUDA"


def test_clients_and_threads() -> None:
    mix = next(job for job in Plan(clients=(1, 4)).jobs(ALL) if job.case == "mix")
    assert [(e.contender, e.clients, e.threads) for e in mix.entrants] == [
        ("native pageable", 1, 1),
        ("flyt pageable", 1, 0),
        ("native pageable", 1, 4),
        ("flyt pageable", 4, 0),
    ]


def test_a_burst_stays_below_the_credit_limit() -> None:
    burst = next(job for job in Plan().jobs(ALL) if job.case == "burst")
    assert burst.calls < CREDITS


def test_cases_and_rounds_as_asked_for() -> None:
    jobs = Plan(sizes=(4, KIB), cases=("copy",), rounds=2).jobs(ALL)
    assert [(job.case, job.size, job.rounds) for job in jobs] == [("copy", 4, 2), ("copy", KIB, 2)]


def test_the_region_holds_the_largest_copy_beside_all_streams() -> None:
    assert region_size(Plan(), 1 << 40) >= GIB + 8 * 3 * 64 * MIB
    assert region_size(Plan(), 64 * MIB) == 48 * MIB
    with pytest.raises(ConfigurationError, match="--shm-size"):
        region_size(Plan(), 4 * MIB)


def test_which_promises_apply() -> None:
    assert Setup("cupy", native="cupy.cuda.runtime").against == ["native"]
    assert Setup("emulated").against == ["memcpy"]
    assert Setup("emulated", native="flyt").against == ["native", "memcpy"]
    assert Setup("auto", backend="ipc:///x").against == []


@pytest.mark.parametrize(
    ("size", "text"), [(4, "4 B"), (KIB, "1 KiB"), (1025, "1025 B"), (64 * MIB, "64 MiB")]
)
def test_sizes_as_text(size: int, text: str) -> None:
    assert bytes_text(size) == text
