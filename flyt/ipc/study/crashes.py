# SPDX-License-Identifier: Apache-2.0
"""Question 4: one process of two dies, or frees, while the other uses the memory.

The one that survives reads the bytes afterwards. What leaks once both are dead is told by the
descriptors of this process and, on a GPU, by the memory in use there.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

from flyt.errors import FlytError
from flyt.ipc import sockets
from flyt.ipc.connection import Connection
from flyt.ipc.driver import get_driver
from flyt.ipc.sharing import empty, recv, send
from flyt.ipc.study.report import Answer

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
"""

ENDS = ("killed", "aborted", "faulting", "freed")


@dataclasses.dataclass(slots=True)
class _Case:
    dies: str
    how: str


def measure(like: str) -> Answer:
    """Every way to go, for the exporter and for the importer."""
    cases = [_Case(dies, how) for dies in ("exporter", "importer") for how in ENDS]
    before = len(os.listdir("/proc/self/fd"))
    rows = [_run(case, like) for case in cases]
    leaked = len(os.listdir("/proc/self/fd")) - before
    intact = sum(row["bytes_intact"] for row in rows)
    verdict = (
        f"{get_driver().kind}: the survivor reads all bytes in {intact} of {len(rows)} cases; "
        f"{leaked} descriptors are left once all are gone"
    )
    return Answer("crashes", verdict, rows)


def _run(case: _Case, like: str) -> dict[str, Any]:
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
