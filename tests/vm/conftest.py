# SPDX-License-Identifier: Apache-2.0
"""One guest for all tests here (a boot costs more than most of them), and its backends.

The guest has five ivshmem devices: the region of the main backend (slot 05), that of the *lone*
backend without ``share=on`` (06), that of the *newer* backend, of the same size (07), that of the
*mortal* backend, which a test ends (08), and that of the *keyed* backend, which lets only keys in
that it knows (09). The mortal one's has a doorbell, the others are plain.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Backend
from tests.vm.verdicts import Verdicts
from vm.image import build
from vm.machine import Done, Image, Machine, Running, Shared

HOST = "10.0.2.2"
"""The host's loopback interface, as the guest sees it."""
MIB = 1 << 20
SIZE = 32 * MIB
OTHER_SIZE = 16 * MIB
MORTAL_SIZE = 8 * MIB
KEYED_SIZE = 4 * MIB
HEARTBEAT = "10"
"""Seconds; a guest that was reset can't say goodbye."""
EXTRA = ("--keep-region", "--heartbeat", HEARTBEAT)
JAILED = "10.0.3.100:5555"
"""Where the guest finds the mortal backend on a network that leads nowhere else."""
PIPE = Path(__file__).parent / "pipe.py"
FACTS_SECONDS = 240.0
PAYLOADS = Path(__file__).parent / "payloads"
SLOT_SIZE = str(MIB)
"""A command costs milliseconds under TCG; the default for so small a region is 256 KiB."""

NEWER = """
from flyt.rpc import handshake
handshake.PROTOCOL_VERSION += 1
"""
"""What makes a backend speak the next version of the protocol."""


LATE = (
    "test_a_guest_that_fails_hangs_or_crashes_fails_the_script",
    "test_the_facts_about_copies_hold_over_ivshmem",
    "test_the_guest_is_reset",
)
"""What comes last, in this order: these guests and the facts run beside all other tests; then the
guest is reset."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def late(item: pytest.Item) -> int:
        return next((i for i, name in enumerate(LATE, 1) if name in item.nodeid), 0)

    items.sort(key=late)


def flyt_keygen(*arguments: str) -> None:
    """Run ``flyt keygen`` on this machine."""
    command = [sys.executable, "-m", "flyt.cli.main", "keygen", *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def port_of(backend: Backend) -> str:
    return backend.endpoint.rpartition(":")[2]


def _folder(stack: contextlib.ExitStack) -> Path:
    """Not below pytest's own: the path of a socket has 107 bytes at most."""
    folder = Path(tempfile.mkdtemp(prefix="flyt-vm-"))
    stack.callback(shutil.rmtree, folder)
    return folder


class Lab:
    """The guest, the backends, and how programs there are run."""

    def __init__(self, image: Image, folder: Path, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        (folder / "sitecustomize.py").write_text(NEWER)
        path = {"PYTHONPATH": f"{folder}:{ROOT}"}
        self.doorbell = str(_folder(stack) / "doorbell")
        self.keys = _folder(stack)
        flyt_keygen("server", "--folder", str(self.keys))
        keys = ["--server-key", str(self.keys / "server.key_secret")]
        keys += ["--authorized-keys", str(self.keys / "authorized")]
        with ThreadPoolExecutor() as side_by_side:
            started = [
                side_by_side.submit(self._backend, size, *more, **details)
                for size, more, details in (
                    (SIZE, (), {}),
                    (OTHER_SIZE, (), {}),
                    (OTHER_SIZE, (), {"env": path}),
                    (MORTAL_SIZE, ("--single-port", "--doorbell", self.doorbell), {}),
                    (KEYED_SIZE, keys, {}),
                )
            ]
        self.backend, self.lone, self.newer, self.mortal, self.keyed = (
            one.result() for one in started
        )
        regions = [
            Shared(self.backend.region, SIZE),
            Shared(self.lone.region, OTHER_SIZE, share=False),
            Shared(self.newer.region, OTHER_SIZE),
            Shared(self.mortal.region, MORTAL_SIZE, doorbell=self.doorbell),
            Shared(self.keyed.region, KEYED_SIZE),
        ]
        # Where their guests' sockets lie, whose paths have 107 bytes at most.
        scripts = _folder(stack) / "s"
        scripts.mkdir()
        lone = f"tcp://{HOST}:{port_of(self.lone)}"
        self.verdicts = Verdicts(scripts, PAYLOADS / "small.py", self.lone.region, lone)
        stack.callback(self.verdicts.close)
        # A network on which there is nothing but one port of the mortal backend.
        pipe = f"{sys.executable} {PIPE} {port_of(self.mortal)}"
        options = [
            "-netdev",
            f"user,id=jail,net=10.0.3.0/24,restrict=on,guestfwd=tcp:{JAILED}-cmd:{pipe}",
        ]
        options += ["-device", "virtio-net-pci,netdev=jail,romfile=,addr=10"]
        self.machine = stack.enter_context(Machine(image, regions, options=options, reboots=True))
        # These take longest, so they run beside the first tests.
        self.facts = self.start("facts", seconds=FACTS_SECONDS)

    def _backend(self, size: int, *more: str, **arguments: Any) -> Backend:
        # The region outlives its backend: QEMU maps it.
        extra = [*EXTRA, *more]
        listen = ["tcp://127.0.0.1:*"]
        backend = Backend("emulated", size=str(size), listen=listen, extra=extra, **arguments)
        self._stack.callback(backend.dispose)
        self._stack.callback(backend.stop)
        return backend

    def start(self, payload: str, *arguments: str, **details: Any) -> Running:
        """Start a payload in the guest; `backend`: other than the main one; `env` comes on top."""
        port = port_of(details.pop("backend", self.backend))
        env = {"FLYT_BACKEND": f"tcp://{HOST}:{port}", "FLYT_SLOT_SIZE": SLOT_SIZE}
        env |= details.pop("env", {})
        code = (PAYLOADS / f"{payload}.py").read_text()
        return self.machine.start(*arguments, code=code, env=env, **details)

    def run(self, payload: str, *arguments: str, **details: Any) -> Done:
        """`start`, and wait for its end."""
        return self.start(payload, *arguments, **details).wait()

    def copies(self, region: str = "", **details: Any) -> dict[str, Any]:
        """The report of the payload ``small``; `region`: FLYT_REGION."""
        env = {**({"FLYT_REGION": region} if region else {}), **details.pop("env", {})}
        done = self.run("small", env=env, **details)
        assert done.code == 0, done.out
        report = json.loads(done.out.splitlines()[-1])
        assert isinstance(report, dict)
        return report

    def await_files(self, *names: str) -> list[str]:
        """Wait for files in the guest; their contents."""
        done = self.run("await_files", *names, seconds=90)
        assert done.code == 0, done.out
        return done.out.splitlines()

    def do(self, *command: str) -> str:
        """Run a command in the guest that must succeed."""
        done = self.machine.run(*command)
        assert done.code == 0, done.out
        return done.out


@pytest.fixture(scope="session")
def image() -> Image:
    """What the guests boot from."""
    return build()


# Autouse: what comes up in the middle of a module looks like a leak of its.
@pytest.fixture(scope="session", autouse=True)
def lab(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with contextlib.ExitStack() as stack:
        yield Lab(image, tmp_path_factory.mktemp("newer"), stack)
