# SPDX-License-Identifier: Apache-2.0
"""A /dev/shm that is too small, or full, and processes that may not map more: told at the start, or
no matter at all; never a SIGBUS in the midst of a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.faults.namespaces import run_apart

OPEN = """
import os, subprocess, sys
from tests.conftest import Backend
device, *extra = sys.argv[1:]

def free():
    status = os.statvfs("/dev/shm")
    return status.f_bavail * status.f_frsize

def fill():
    "Every last byte, whatever happens to be allocated meanwhile."
    with open("/dev/shm/full", "ab", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while True:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)
            except OSError:
                continue

def client(backend, code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        env={**os.environ, **backend.env, "FLYT_BACKEND": backend.endpoint},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()

COPIES = '''
import numpy as np
import flyt
data = np.random.default_rng(1).integers(0, 256, 20 << 20, dtype=np.uint8)
with flyt.to_device(data) as device:
    assert (device.copy_to_host() == data).all()
    pinned = flyt.pinned_empty(1 << 20, np.uint8)
    pinned[:] = 7
    with flyt.to_device(pinned) as other:
        assert (other.copy_to_host() == 7).all()
facts = flyt.statistics()
print(facts["inline_h2d_bytes"], facts["region_size"] > 0)
'''
"""

FULL = (
    OPEN
    + """
backend = Backend(device, size="16M", extra=extra)
try:
    assert client(backend, COPIES) == "0 True"
    fill()
    assert free() < 4096
    assert client(backend, COPIES) == "0 True", "a region has its memory from the start"
    assert client(backend, COPIES) == "0 True"
    backend.stop()
    assert sorted(os.listdir("/dev/shm")) == ["full"]
finally:
    backend.dispose()
print("sound")
"""
)


def test_a_full_shm_is_no_matter_to_a_region(device_kind: str) -> None:
    assert run_apart(FULL, device_kind, shm="40m") == "sound\n"


def test_a_full_shm_is_no_matter_to_clients_with_their_own(device_kind: str) -> None:
    program = FULL.replace("assert client(backend", "fill(); assert client(backend", 1)
    assert run_apart(program, device_kind, "--region", "per-client", shm="1m") == "sound\n"


SMALL = (
    OPEN
    + """
import tempfile
command = [sys.executable, "-m", "flyt.cli.backend", "--device", device, *extra]
with tempfile.TemporaryDirectory() as folder:
    done = subprocess.run(
        [*command, "--listen", f"ipc://{folder}/b.sock"],
        capture_output=True, text=True, timeout=60, env={**os.environ, "FLYT_RUNTIME_DIR": folder},
    )
    assert done.returncode == 1, done.stderr
    assert not os.listdir("/dev/shm")
    assert not os.listdir(folder), os.listdir(folder)
    print(done.stderr.splitlines()[-1])
"""
)


def test_a_region_that_does_not_fit_is_refused_at_the_start(device_kind: str) -> None:
    said = run_apart(SMALL, device_kind, "--size", "64M", shm="8m")
    assert "/dev/shm has" in said
    assert "choose a smaller --size, or enlarge it" in said


def test_without_a_size_it_takes_what_there_is(device_kind: str) -> None:
    assert "too few for the region" in run_apart(SMALL, device_kind, shm="128k")


LIMITED = """
import resource, sys, warnings
import numpy as np
import flyt
warnings.simplefilter("always")
with open("/proc/self/status") as status:
    used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), resource.RLIM_INFINITY))
data = np.random.default_rng(1).integers(0, 256, 3 << 20, dtype=np.uint8)
with flyt.to_device(data) as device:
    assert (device.copy_to_host() == data).all()
print(flyt.statistics()["inline_h2d_bytes"])
"""


def test_a_client_that_may_not_map_a_window_goes_inline(
    backend: Callable[..., Any], run_client: Callable[..., Any]
) -> None:
    done = run_client(LIMITED, backend())
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{3 << 20}\n", done.stderr
    assert "inline, which is slow" in done.stderr
