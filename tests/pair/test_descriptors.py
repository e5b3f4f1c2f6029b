# SPDX-License-Identifier: Apache-2.0
"""A process without descriptors gets an answer: it neither hangs, nor hears of ZeroMQ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FEWEST = 6
"""With fewer libzmq ends the process."""

MOST = 20
"""With so many a session is made."""

FIRST_CALL = """
import os, signal, sys
import flyt

def child(left):
    signal.alarm(60)
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        for descriptor in taken[:left]:
            os.close(descriptor)
    error, address = flyt.cudaMalloc(100)
    print(left, int(error), flyt.last_failure(), flush=True)
    if error == 0:
        assert flyt.cudaMemset(address, 1, 100) == (0,)
        assert flyt.cudaFree(address) == (0,)

for left in range(int(sys.argv[1]), int(sys.argv[2]) + 1):
    pid = os.fork()
    if not pid:
        try:
            child(left)
            os._exit(0)
        except BaseException as exc:
            print(left, "raised", repr(exc), flush=True)
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert status == 0, f"with {left} descriptors: {status:#x}"
"""

CONNECT = """
import os, signal, sys
import flyt

signal.alarm(60)
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
for _ in range(int(sys.argv[1])):
    os.close(taken.pop())
failed = 0
while True:
    before = len(os.listdir("/proc/self/fd"))
    try:
        session = flyt.connect()
    except flyt.FlytError as exc:
        assert "descriptors" in str(exc) or "Too many open files" in str(exc), exc
        failed += 1
        assert len(os.listdir("/proc/self/fd")) == before, exc
        os.close(taken.pop())
    else:
        break
session.close()
print(failed)
"""


def few(code: str) -> str:
    """The same with few descriptors to run out of."""
    return f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n{code}"


def test_the_first_call_without_descriptors(
    one_backend: Any, run_client: Callable[..., Any]
) -> None:
    result = run_client(few(FIRST_CALL), one_backend, str(FEWEST), str(MOST))
    assert result.returncode == 0, result.stdout + result.stderr
    codes = {}
    for line in result.stdout.splitlines():
        left, code, reason = line.split(" ", 2)
        codes[int(left)] = int(code)
        assert code == "0" or "descriptors" in reason or "Too many open files" in reason, line
    assert sorted(codes) == list(range(FEWEST, MOST + 1))
    assert set(codes.values()) == {0, 100}
    assert codes[FEWEST] == 100
    assert codes[MOST] == 0


def test_connecting_without_descriptors(one_backend: Any, run_client: Callable[..., Any]) -> None:
    result = run_client(few(CONNECT), one_backend, str(FEWEST))
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(result.stdout) >= 4
