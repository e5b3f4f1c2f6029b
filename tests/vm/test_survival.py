# SPDX-License-Identifier: Apache-2.0
"""What a guest's processes live through, and what becomes of a guest that doesn't."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import Backend
from tests.pair.raw import RegionView, eventually
from tests.vm.conftest import EXTRA, HEARTBEAT, MORTAL_SIZE, Lab
from vm.machine import CRASHED

pytestmark = pytest.mark.timeout(300)

BACK_SECONDS = 30.0 + 3 * float(HEARTBEAT)
"""For frames of processes that a reset took: their host only hears that they are silent."""


SMALL_SLOTS = {"FLYT_SLOT_SIZE": "131072"}
"""Two sessions share 8 MiB."""


def test_the_backend_is_restarted_under_a_running_guest(
    lab: Lab, backend: Callable[..., Backend]
) -> None:
    old = lab.mortal
    running = lab.start("restart", backend=old, env=SMALL_SLOTS, seconds=100)
    (pid,) = lab.await_files("/tmp/restart")
    with RegionView(old.region) as view:
        held = view.frames_of(int(pid))
        assert held
        epoch = view.table.superblock().epoch
        old.stop()
        new = backend(
            size=str(MORTAL_SIZE),
            region=old.region_name,
            listen=[old.endpoint],
            extra=[*EXTRA, "--doorbell", lab.doorbell],
        )
        assert view.table.superblock().epoch != epoch
        # A new process gets on, and not with frames that the old one still maps.
        report = lab.copies(backend=new, env=SMALL_SLOTS)
        assert report["right"]
        assert report["region"]
        # QEMU has a doorbell at the old one only.
        (warning,) = report["warnings"]
        assert "it does not hear the doorbell" in warning
        lab.do("touch", "/tmp/restarted")
        done = running.wait()
        assert done.code == 0, done.out
        assert eventually(lambda: len(view.free()) == view.table.geometry.page_count, BACK_SECONDS)


def test_the_guest_is_reset(lab: Lab) -> None:
    running = lab.start("share", "7", "1", seconds=100)
    lab.await_files("/tmp/share.7")
    with RegionView(lab.backend.region) as view:
        held = len(view.table.snapshot())
        assert held
        boots = lab.machine.boots
        lab.machine.start("reboot", "-f")
        lab.machine.await_boot(boots + 1)
        assert running.wait().code == CRASHED
        report = lab.copies()
        assert report["region"]
        assert report["right"]
        assert report["warnings"] == []
        assert eventually(lambda: len(view.free()) == view.table.geometry.page_count, BACK_SECONDS)
        assert view.dirty(view.free()) == []
