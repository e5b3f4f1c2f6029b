# SPDX-License-Identifier: Apache-2.0
"""A guest without a GPU: its processes share one region, a real ivshmem device, with the host."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flyt.shm.layout import FrameState
from tests.pair.raw import RegionView, eventually
from tests.vm.conftest import LIMIT, MIB, copies, run, start
from vm.machine import Image, Machine, Shared

pytestmark = pytest.mark.timeout(300)

SIZE = 32 * MIB
BACK_SECONDS = 30.0
"""For frames of the dead; some two seconds, and a guest that has to notice first."""

WAIT_FOR_FILES = """
import sys, time
from pathlib import Path
deadline = time.monotonic() + 80
for name in sys.argv[1:]:
    while not Path(name).exists():
        if time.monotonic() > deadline:
            sys.exit(f"no {name}")
        time.sleep(0.02)
    print(Path(name).read_text())
"""


@pytest.fixture(scope="module")
def backend(backend_on_tcp: Callable[..., Any]) -> Any:
    return backend_on_tcp(size="32M")


@pytest.fixture(scope="module")
def guest(image: Image, backend: Any) -> Iterator[Machine]:
    with Machine(image, [Shared(backend.region, SIZE)]) as machine:
        yield machine


def files(guest: Machine, *names: str) -> list[str]:
    done = guest.run(*names, code=WAIT_FOR_FILES, seconds=90)
    assert done.code == 0, done.out
    return done.out.splitlines()


def test_the_facts_about_copies_hold_over_ivshmem(guest: Machine, backend: Any) -> None:
    done = run(guest, backend, "facts", seconds=200)
    assert done.code == 0, done.out


def test_three_processes_share_the_region_and_one_dies(guest: Machine, backend: Any) -> None:
    running = [start(guest, backend, "share", str(n), seconds=150) for n in range(3)]
    reports = [json.loads(line) for line in files(guest, *(f"/tmp/share.{n}" for n in range(3)))]
    assert len({report["session"] for report in reports}) == 3

    with RegionView(backend.region) as view:
        geometry = view.table.geometry
        memory = np.memmap(backend.region, np.uint8, "r")
        entries = view.table.snapshot()
        for number, report in enumerate(reports):
            # The host reads the region's bytes through the page table: what the device had.
            mine = [e for e in entries if e.session == report["session"]]
            assert {e.pid for e in mine} == {report["pid"]}
            assert {e.state for e in mine} == {FrameState.OWNED}
            frames = {e.vpn: e.frame for e in mine}
            pages = range(report["vpn"], report["vpn"] + MIB // geometry.page_size)
            shown = [
                memory[geometry.offset(frames[vpn]) :][: geometry.page_size] for vpn in pages
            ]
            words = np.arange(63 * MIB // 8, 64 * MIB // 8, dtype=np.uint64) * np.uint64(
                2 * number + 3
            )
            assert np.concatenate(shown).tobytes() == words.tobytes()
            assert report["counts"]["staged_h2d_bytes"] == 64 * MIB
            assert report["counts"]["staged_d2h_bytes"] == 64 * MIB
            assert report["counts"]["pinned_d2h_bytes"] == MIB
        held = [e.frame for e in entries]
        assert len(set(held)) == len(held)
        del memory

        victim = reports[1]
        frames_of_victim = view.frames_of(victim["pid"])
        files(guest, *_copies_without_end(guest, 1))
        assert guest.run("kill", "-9", str(victim["pid"])).code == 0
        assert running[1].wait().code == -9
        state = guest.run("head", "-c1", "/tmp/state.1").out
        assert state == "\x01", f"it was not in mid-copy: {state!r}"
        assert eventually(lambda: view.are_free(frames_of_victim), BACK_SECONDS)
        assert view.dirty(frames_of_victim) == []

        assert guest.run("touch", "/tmp/go").code == 0
        for number in (0, 2):
            done = running[number].wait()
            assert done.code == 0, done.out
        assert eventually(lambda: len(view.free()) == geometry.page_count, BACK_SECONDS)


def _copies_without_end(guest: Machine, number: int) -> list[str]:
    assert guest.run("touch", f"/tmp/forever.{number}").code == 0
    return [f"/tmp/state.{number}"]


def test_a_copy_of_ten_times_the_region(guest: Machine, backend: Any) -> None:
    done = run(guest, backend, "large", str(10 * SIZE), seconds=120)
    assert done.code == 0, done.out


def test_an_ordinary_user_needs_what_the_udev_rule_does(guest: Machine, backend: Any) -> None:
    folder = "/sys/bus/pci/devices/0000:00:05.0"
    refused = copies(guest, backend, user="user", seconds=LIMIT)
    assert refused["right"]
    assert not refused["region"]
    assert f"can't open {folder}/resource2_wc: Permission denied" in refused["warnings"][0]
    assert "udev" in refused["warnings"][0]

    rule = f"chgrp user {folder}/resource2* && chmod 660 {folder}/resource2*"
    assert guest.run("sh", "-c", rule).code == 0
    served = copies(guest, backend, user="user", seconds=LIMIT)
    assert served["right"]
    assert served["region"]
    assert served["warnings"] == []
