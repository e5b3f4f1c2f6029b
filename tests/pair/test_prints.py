# SPDX-License-Identifier: Apache-2.0
"""What kernels print reaches the client's own standard output, where it has a worker of its own.

There are no kernels here: the test writes to the worker's standard output as the driver does. What
a kernel of a GPU prints is in tests/kernels/test_on_gpu.py.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flyt.frontend.kernels import Kernels
from flyt.rpc import messages as m
from tests.pair.raw import RawClient, eventually, worker_of

PROCESS = ["--isolation", "process"]

CLIENT = """
import sys
import numpy as np
import flyt, flyt as cudart
from flyt.frontend import current

def must(answer):
    assert not answer[0], (answer, flyt.last_failure())
    return answer[1] if len(answer) > 1 else None

array = np.zeros(100, np.uint8)
device = must(cudart.cudaMalloc(100))
stream, event = must(cudart.cudaStreamCreate()), must(cudart.cudaEventCreate())
must(cudart.cudaEventRecord(event, stream))
session = current.current()
session.scheduler.prints, session.express = True, None  # as loading a kernel that prints does
to_host = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
CALLS = {
    "device": lambda: cudart.cudaDeviceSynchronize(),
    "stream": lambda: cudart.cudaStreamSynchronize(stream),
    "event": lambda: cudart.cudaEventSynchronize(event),
    "copy": lambda: cudart.cudaMemcpy(array, device, 100, to_host),
}
print("ready", flush=True)
for line in sys.stdin:
    must(CALLS[line.strip()]())
    print("done", flush=True)
"""


def prints(worker: int, text: bytes) -> None:
    """The driver, in a worker, writes what kernels have printed."""
    with open(f"/proc/{worker}/fd/1", "ab") as file:
        file.write(text)


@pytest.mark.parametrize("call", ["device", "stream", "event", "copy"])
def test_calls_that_synchronise_show_it(
    backend: Callable[..., Any], start_client: Callable[..., Any], call: str
) -> None:
    served = backend(extra=PROCESS)
    client = start_client(CLIENT, served)
    assert client.stdout.readline() == "ready\n"
    prints(worker_of(served, client.pid), b"hop 1\nhop 2\n")
    lines = []
    for _ in range(2):
        client.stdin.write(f"{call}\n")
        client.stdin.flush()
        while (line := client.stdout.readline()) != "done\n":
            assert line, "the client ended"
            lines.append(line)
    assert lines == ["hop 1\n", "hop 2\n"]


def test_much_of_it(backend: Callable[..., Any], start_client: Callable[..., Any]) -> None:
    """More than a pipe holds, and than an answer; the client reads it while the call writes."""
    served = backend(extra=PROCESS)
    client = start_client(CLIENT, served)
    assert client.stdout.readline() == "ready\n"
    lines = [f"line {n} {'.' * 1000}\n" for n in range(3000)]
    prints(worker_of(served, client.pid), "".join(lines).encode())
    client.stdin.write("device\n")
    client.stdin.flush()
    assert [client.stdout.readline() for _ in lines] == lines
    assert client.stdout.readline() == "done\n"


def test_a_client_whose_output_is_closed_goes_on(
    backend: Callable[..., Any], run_client: Callable[..., Any]
) -> None:
    served = backend(extra=PROCESS)
    code = CLIENT.partition("print(")[0] + (
        "import os\n"
        "pid = os.getpid()\n"
        "from tests.pair.raw import worker_of\n"
        "from types import SimpleNamespace\n"
        "worker = worker_of(SimpleNamespace(endpoint=os.environ['FLYT_BACKEND']), pid)\n"
        "open(f'/proc/{worker}/fd/1', 'ab').write(b'hop')\n"
        "os.close(1)\n"
        "must(cudart.cudaDeviceSynchronize())\n"
        "must(cudart.cudaDeviceSynchronize())\n"
        "os._exit(7)\n"
    )
    done = run_client(code, served)
    assert done.returncode == 7, done.stderr


def test_a_session_hears_of_its_own_worker_alone(backend: Callable[..., Any]) -> None:
    served = backend(extra=PROCESS)
    with RawClient(served.endpoint) as one:
        assert one.attach().status == 0
        prints(worker_of(served, os.getpid()), b"one's\n")
        with RawClient(served.endpoint) as other:
            assert other.attach().status == 0
            assert other.call(m.Printed, 0).status == 0
            assert other.payload is None
        assert one.call(m.Printed, 0).status == 0
        assert one.payload == b"one's\n"
        assert one.call(m.Printed, 0).status == 0
        assert one.payload is None
        assert one.call(m.Printed, 9).status == 101
        assert one.lives()


def test_sessions_that_share_a_worker_hear_nothing(backend: Callable[..., Any]) -> None:
    """It would be another session's, too; it goes where the daemon's own output goes."""
    served = backend()
    with RawClient(served.endpoint) as one:
        assert one.attach().status == 0
        prints(worker_of(served, os.getpid()), b"somebody's\n")
        assert eventually(lambda: "somebody's" in served.log)
        assert one.call(m.Printed, 0).status == 0
        assert one.payload is None


@pytest.mark.parametrize("values", [(), (1,)], ids=["no print", "prints"])
def test_a_module_that_may_print_takes_the_session_off_the_short_way(
    values: tuple[int, ...],
) -> None:
    express = object()
    session: Any = SimpleNamespace(
        connection=SimpleNamespace(lock=contextlib.nullcontext()),
        scheduler=SimpleNamespace(prints=False),
        express=express,
    )
    answer: Any = SimpleNamespace(values=values)
    Kernels(session)._loaded(1 << 20, 0, answer)
    assert session.scheduler.prints is bool(values)
    assert session.express is (None if values else express)
