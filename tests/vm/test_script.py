# SPDX-License-Identifier: Apache-2.0
"""A guest's verdict is the exit code of `scripts/vm run`, and a guest that fails has one too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.pair.raw import eventually
from tests.vm.conftest import MIB, Lab
from tests.vm.verdicts import FAILED, VERDICTS
from vm.image import build
from vm.machine import HUNG

pytestmark = pytest.mark.timeout(300)


def test_a_guest_that_fails_hangs_or_crashes_fails_the_script(lab: Lab) -> None:
    """And leaves no process, no shared memory and no file."""
    (code, said), *others = lab.verdicts.ends()
    assert code == FAILED, said
    report = json.loads(said.splitlines()[-1])
    assert (report["right"], report["region"], report["warnings"]) == (True, True, []), report
    for (code, said), (wanted, words) in zip(others, VERDICTS.values(), strict=True):
        assert (code, words in said) == (wanted, True), said
    assert lab.verdicts.left() == []


def test_the_verdict_is_the_payloads(lab: Lab) -> None:
    done = lab.machine.run("a", "b", code="import sys; print(sys.argv[1:]); sys.exit(7)")
    assert (done.code, done.out) == (7, "['a', 'b']\n")


def test_a_payload_that_hangs_is_ended(lab: Lab) -> None:
    assert lab.machine.run(code="while True: pass", seconds=2).code == HUNG


def test_a_guest_that_hangs_is_given_up(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vm.machine.GRACE", 2.0)
    os.kill(lab.machine.pid, signal.SIGSTOP)
    try:
        done = lab.machine.run("true", seconds=1)
    finally:
        os.kill(lab.machine.pid, signal.SIGCONT)
    assert done.code == HUNG
    assert "does not answer" in done.out


def test_a_payload_that_is_killed_fails(lab: Lab) -> None:
    assert lab.machine.run(code="import os; os.abort()").code == -signal.SIGABRT
    assert lab.machine.run("/no/such/program").code != 0


NOISE = """
import os, sys
port = os.open("/dev/ttyS1", os.O_WRONLY)
for line in (b"[]", b"7", b"{}", b'{"id": [], "code": 0, "out": ""}', b'{"id": 1, "code": 0}'):
    os.write(port, line + b"\\n")
sys.exit(3)
"""


def test_what_a_payload_says_on_the_agents_port_is_no_verdict(lab: Lab) -> None:
    assert lab.machine.run(code=NOISE).code == 3
    assert lab.machine.run("true").code == 0


def test_the_end_of_a_long_output_is_kept(lab: Lab) -> None:
    code = f"import sys; print('x' * {64 * MIB}); print('the end'); sys.exit(3)"
    done = lab.machine.run(code=code)
    assert (done.code, done.out[-9:]) == (3, "\nthe end\n")
    assert "bytes before" in done.out[:100]
    assert len(done.out) < 2 * MIB


def script(*words: str | Path, folder: Path) -> subprocess.Popen[str]:
    """`scripts/vm run`, with its guest's files in this folder."""
    return subprocess.Popen(
        [ROOT / "scripts" / "vm", "run", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "FLYT_VENV": sys.prefix, "TMPDIR": str(folder)},
    )


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_script_that_is_ended_takes_its_guest_along(
    lab: Lab, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    folder = tmp_path_factory.mktemp("s")
    payload = folder.parent / "payload.py"
    payload.write_text("")
    running = script(payload, folder=folder)
    try:
        assert eventually(lambda: list(folder.glob("*/agent")), 60)  # QEMU is there
        running.send_signal(getattr(signal, name))
        said, _ = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode > 0, said
    assert list(folder.iterdir()) == []
    named = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(folder) in _read(p)]
    assert named == []


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended
        return ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--region", "/dev/shm/there-is-none"], "'/dev/shm/there-is-none' does not exist"),
        (["--env", "NAME"], "NAME=VALUE"),
    ],
)
def test_arguments_that_are_wrong(lab: Lab, tmp_path: Path, words: list[str], said: str) -> None:
    payload = tmp_path / "payload.py"
    payload.write_text("")
    running = script(*words, payload, folder=tmp_path)
    answer, _ = running.communicate(timeout=60)
    assert running.returncode == 2
    assert said in answer
    assert "Traceback" not in answer


def test_one_at_a_time_fills_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kernel" / "boot").mkdir(parents=True)
    (tmp_path / "kernel" / "boot" / "vmlinuz-1").touch()
    (tmp_path / "kernel" / "lib" / "modules" / "1").mkdir(parents=True)
    (tmp_path / "busybox").mkdir()
    working, met = threading.Lock(), []

    def disk(cache: Path, *_: object) -> Path:
        met.append(working.acquire(blocking=False))
        time.sleep(0.2)  # long enough for the other one to get here, if it may
        if met[-1]:
            working.release()
        return cache

    monkeypatch.setenv("FLYT_VM_CACHE", str(tmp_path))
    monkeypatch.setattr("vm.image.disk", disk)
    monkeypatch.setattr("vm.image.initramfs", lambda cache, *_: cache)
    monkeypatch.setattr("vm.probe.accelerator", lambda *_: "tcg")
    with ThreadPoolExecutor() as two:
        list(two.map(lambda _: build(), range(2)))
    assert met == [True, True]
