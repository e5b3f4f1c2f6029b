# SPDX-License-Identifier: Apache-2.0
"""Question 4: one process of two dies, or frees, while the other uses the memory.

The one that survives reads the bytes afterwards. What leaks once the other is dead and the memory
is let go is told by the descriptors of this process and, on a GPU, by the memory in use there.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from flyt.errors import FlytError
from flyt.ipc import sockets
from flyt.ipc.connection import Connection
from flyt.ipc.driver import get_driver
from flyt.ipc.sharing import empty, recv, send
from flyt.ipc.study.blocks import memory_in_use
from flyt.ipc.study.report import Row

SIZE = 4 << 20
PATTERN = 0xA5
LIMIT = 60.0
"""Seconds for a process to start, share and die."""

CHILD = """
import os, sys, signal
from flyt.ipc.connection import Connection
from flyt.ipc.sharing import empty, recv, send
conn, role, end = Connection(int(sys.argv[1])), sys.argv[2], sys.argv[3]
if role == "exporter":
    array = empty((int(sys.argv[5]),), "uint8", like=sys.argv[4]); array[:] = int(sys.argv[6])
    send(conn, array)
else:
    array = recv(conn)
sys.stdin.readline()
if end == "freed": del array; conn.close(); sys.exit(0)
if end == "killed": os.kill(os.getpid(), signal.SIGKILL)
if end == "aborted": os.abort()
if end == "faulting": import ctypes; ctypes.memset(8, 0, 1)
from flyt.ipc.study.crashes import FAULT
from flyt.ipc.study.gpu import Gpu
gpu = Gpu(FAULT)
gpu.launch("fault", 1, 1, (8,))
gpu.synchronize()
"""

FAULT = 'extern "C" __global__ void fault(unsigned long long *at) { *at = 1; }'

ENDS = ("killed", "aborted", "faulting", "freed")
GPU_ENDS = (*ENDS, "kernel fault")
"""The last is a kernel that writes where nothing is: it costs the process its context."""

RETURN_LIMIT = 3.0
"""Seconds until the memory of a process that has ended counts as free."""


@dataclasses.dataclass(slots=True)
class _Case:
    dies: str
    how: str


def measure(like: str) -> Iterator[Row]:
    """Every way to go, for the exporter and for the importer."""
    used = memory_in_use()
    _run(_Case("exporter", "freed"), like)  # what is opened once is no leak
    memory, before = used(), len(os.listdir("/proc/self/fd"))
    for dies in ("exporter", "importer"):
        for how in ENDS if memory is None else GPU_ENDS:
            row = _run(_Case(dies, how), like)
            row["descriptors_left"] = len(os.listdir("/proc/self/fd")) - before
            row["device_bytes_left"] = None if memory is None else _left(used, memory)
            yield row


def _left(used: Callable[[], int | None], before: int) -> int:
    """Bytes more than before, once they grow no less; others' work on the GPU counts too."""
    deadline = time.monotonic() + RETURN_LIMIT
    while (left := (used() or 0) - before) > 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def verdict(rows: list[Row]) -> str:
    """What the rows say."""
    intact = sum(row["bytes_intact"] for row in rows)
    told = (
        f"{rows[0]['driver']}: the survivor reads all bytes in {intact} of {len(rows)} cases; "
        f"{rows[-1]['descriptors_left']} descriptors are left once all are gone"
    )
    left = rows[-1]["device_bytes_left"]
    return told if left is None else f"{told}, {left >> 20} MiB of device memory"


def _run(case: _Case, like: str) -> Row:
    ours, theirs = sockets.pair()
    arguments = [str(theirs.fileno()), case.dies, case.how, like, str(SIZE), str(PATTERN)]
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
    connection = Connection(ours)
    noticed, intact = True, False
    try:
        if case.dies == "exporter":
            array = recv(connection, timeout=LIMIT)
        else:
            array = empty((SIZE,), "uint8", like=like)
            array[:] = PATTERN
            send(connection, array)
        _end(process)
        try:
            connection.wait_released(LIMIT)
        except FlytError:
            noticed = False
        intact = bool((array == PATTERN).all()) and array.shape == (SIZE,)
        del array
    finally:
        connection.abort()
        if process.poll() is None:
            process.kill()
        process.wait(LIMIT)
    return {
        "driver": get_driver().kind,
        "dies": case.dies,
        "how": case.how,
        "exit_code": process.returncode,
        "bytes_intact": intact,
        "memory_released": noticed,
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.communicate(b"\n", timeout=LIMIT)  # it has shared before it reads this
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
