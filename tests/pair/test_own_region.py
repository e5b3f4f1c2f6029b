# SPDX-License-Identifier: Apache-2.0
"""``--region per-client``: each client's memory is its own, by the kernel's word, and nobody's to
truncate. That all else works as with a region for all is in `test_conformance.py`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from flyt.backend.private import CALLERS, SUFFIX
from flyt.errors import RegionError
from flyt.rpc import messages as m
from flyt.shm.private import PRIVATE, fetch
from tests.conftest import others_use
from tests.pair.raw import LIMIT, SOON, Evaluator, eventually, say, session_of, status

PER_CLIENT = ["--region", "per-client"]
NOBODY = 65534
MEMFD = "/memfd:flyt-region"

HOLDS = """
import os, sys
import numpy as np
import flyt, flyt as cudart
K = cudart.cudaMemcpyKind
data = np.random.default_rng(os.getpid()).integers(0, 256, 3 << 20, dtype=np.uint8)
pinned = flyt.pinned_empty(data.shape, np.uint8)
pinned[:] = data
error, device = cudart.cudaMalloc(data.nbytes)
assert not error, flyt.last_failure()

def check():
    back = np.zeros_like(data)
    for answer in (
        cudart.cudaMemcpy(device, pinned, data.nbytes, K.cudaMemcpyHostToDevice),
        cudart.cudaMemcpy(back, device, data.nbytes, K.cudaMemcpyDeviceToHost),
    ):
        assert not answer[0], flyt.last_failure()
    return bool((back == data).all() and (pinned == data).all())

assert check()
print("ready", flush=True)
for line in sys.stdin:
    if line == "loop\\n":
        while check():
            pass
    print(check() if line == "check\\n" else eval(line), flush=True)
"""


class Holder(Evaluator):
    """A client with memory of every kind, which also evaluates what it is told."""


@pytest.fixture(scope="module")
def served(module_backend: Callable[..., Any]) -> Any:
    return module_backend(size="24M", extra=PER_CLIENT)


@pytest.fixture
def holder(served: Any, start_client: Callable[..., Any]) -> Callable[[], Holder]:
    return lambda: Holder(start_client(HOLDS, served))


def mapped(pid: int) -> set[int]:
    """Inodes of all regions that a process maps."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if MEMFD in line}


def opened(pid: int) -> set[int]:
    """Inodes of all regions that a process has open."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            path = f"/proc/{pid}/fd/{name}"
            if os.readlink(path).startswith(MEMFD):
                found.add(os.stat(path).st_ino)
    return found


def region_of(pid: int) -> Any:
    """Its region, open for writing, as who may trace a process can have it."""
    folder = Path(f"/proc/{pid}/fd")
    path = next(p for p in folder.iterdir() if os.readlink(p).startswith(MEMFD))
    return open(path, "r+b", buffering=0)


def side_socket(served: Any) -> str:
    return str(served.endpoint.removeprefix("ipc://")) + SUFFIX


def test_no_client_has_anothers_memory(served: Any, holder: Callable[[], Holder]) -> None:
    before = set(os.listdir("/dev/shm"))
    clients = [holder() for _ in range(3)]
    seen = [mapped(client.pid) | opened(client.pid) for client in clients]
    assert all(len(inodes) == 1 for inodes in seen), "its own, and no other"
    assert len(set.union(*seen)) == 3
    assert mapped(served.pid) | opened(served.pid) == set(), "the daemon has none"
    new = {name for name in os.listdir("/dev/shm") if name not in before}
    # Tests that run beside this one have regions with names.
    assert not [name for name in new if not others_use(name)], "no path leads there"
    entry = session_of(served, clients[0].pid)
    assert entry is not None
    assert mapped(entry["worker"]) >= set.union(*seen), "but the worker maps them all"
    assert all(client.says("check") == "True" for client in clients)


@pytest.mark.parametrize("size", [0, 1 << 30])
def test_nobody_can_change_its_size(holder: Callable[[], Holder], size: int) -> None:
    client = holder()
    with region_of(client.pid) as region:
        with pytest.raises(PermissionError):
            os.ftruncate(region.fileno(), size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(region.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert client.says("check") == "True"


def test_a_client_that_ruins_its_region_ruins_its_own(
    served: Any, holder: Callable[[], Holder]
) -> None:
    victim, vandal = holder(), holder()
    with region_of(vandal.pid) as region:
        size = os.fstat(region.fileno()).st_size
        for offset in range(0, size, 1 << 20):
            os.pwrite(region.fileno(), b"\xff" * (1 << 20), offset)
    vandal.process.kill()
    vandal.process.wait(LIMIT)
    assert eventually(lambda: session_of(served, vandal.pid) is None, SOON)
    assert victim.says("check") == "True"
    assert holder().says("check") == "True"


def test_frames_come_back(served: Any, connect: Callable[..., flyt.Session]) -> None:
    session = connect(served)
    region = session.statistics()["region_size"]
    assert region == 24 << 20
    before = status(served)["frames"]["granted"]
    for fill in range(4):  # each takes more than a half: the second needs the first one's frames
        pinned = flyt.pinned_empty(region * 2 // 3, np.uint8)
        assert not pinned.any(), "it is zero"
        pinned[:] = fill + 1
        device = flyt.to_device(pinned)
        assert (device.copy_to_host() == fill + 1).all()
        device.close()
        del pinned, device
        assert cudart.cudaDeviceSynchronize()[0] == 0
    assert eventually(lambda: status(served)["frames"]["granted"] == before, SOON)
    assert session.statistics()["inline_h2d_bytes"] == 0


def test_a_full_region_is_an_error_and_no_more(
    served: Any, connect: Callable[..., flyt.Session], holder: Callable[[], Holder]
) -> None:
    session = connect(served)
    other = holder()
    error, _ = cudart.cudaHostAlloc(session.statistics()["region_size"], 0)
    assert error == cudart.cudaError_t.cudaErrorMemoryAllocation
    assert other.says("check") == "True", "another client's region is not full"


def test_a_killed_client_leaves_nothing(served: Any, holder: Callable[[], Holder]) -> None:
    other = holder()
    entry = session_of(served, other.pid)
    assert entry is not None
    worker = entry["worker"]
    maps, descriptors = mapped(worker), len(os.listdir(f"/proc/{served.pid}/fd"))
    for _ in range(3):
        client = holder()
        assert client.process.stdin is not None
        client.process.stdin.write("loop\n")
        client.process.stdin.flush()
        client.process.send_signal(signal.SIGKILL)
        client.process.wait(LIMIT)
        assert eventually(lambda pid=client.pid: session_of(served, pid) is None, SOON)
        assert eventually(lambda: mapped(worker) == maps, SOON)
        assert eventually(lambda: opened(worker) == maps, SOON)
    assert eventually(lambda: len(os.listdir(f"/proc/{served.pid}/fd")) <= descriptors, SOON)
    assert other.says("check") == "True"


# --- who gets one --------------------------------------------------------------------------------


def welcome_of(served: Any) -> m.Welcome:
    """HELLO and WELCOME; the session ends ten seconds later, for want of an ATTACH."""
    answer = say(served.endpoint, m.Hello(m.PROTOCOL_VERSION, (1, 2), os.getpid(), "raw"))
    assert isinstance(answer, m.Welcome), answer
    return answer


def test_a_region_is_handed_out_once(served: Any) -> None:
    welcome = welcome_of(served)
    assert welcome.region == PRIVATE + os.path.basename(side_socket(served))
    with pytest.raises(RegionError, match="no region for this client"):
        fetch(side_socket(served), bytes(16), welcome.region_size)
    with pytest.raises(RegionError, match="no region for this client"):
        fetch(side_socket(served), welcome.token + b"x", welcome.region_size)
    os.close(fetch(side_socket(served), welcome.token, welcome.region_size))
    with pytest.raises(RegionError, match="no region for this client"):
        fetch(side_socket(served), welcome.token, welcome.region_size)


THIEF = """
import os, sys
from flyt.rpc import messages as m
from flyt.shm.private import fetch
from flyt.errors import RegionError
path, token, size, uid = sys.argv[1:]
os.chmod(path, 0o777)
os.setgroups([])
os.setgid(int(uid))
os.setuid(int(uid))
try:
    fetch(path, bytes.fromhex(token), int(size))
except RegionError as exc:
    print(exc)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_gets_none_even_with_the_token(served: Any) -> None:
    served.folder.chmod(0o755)
    welcome = welcome_of(served)
    done = subprocess.run(
        [
            *(sys.executable, "-c", THIEF, side_socket(served)),
            *(welcome.token.hex(), str(welcome.region_size), str(NOBODY)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )
    assert "no region for this client" in done.stdout, done.stderr
    os.close(fetch(side_socket(served), welcome.token, welcome.region_size))


def test_strangers_that_say_nothing_shut_nobody_out(
    served: Any, holder: Callable[[], Holder]
) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(2 * CALLERS):
            one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(one).settimeout(LIMIT)
            with contextlib.suppress(BlockingIOError):  # as many as may wait do wait
                one.connect(side_socket(served))
        assert holder().says("check") == "True"
        assert holder().says("flyt.statistics()['inline_h2d_bytes']") == "0"


def test_an_epoch_of_its_own_in_each(served: Any) -> None:
    one, two = welcome_of(served), welcome_of(served)
    assert one.epoch != two.epoch
    assert one.token != two.token


def test_clients_that_can_get_none_go_inline(
    backend: Callable[..., Any], run_client: Callable[..., Any]
) -> None:
    served = backend(extra=PER_CLIENT)
    ask = "import flyt; flyt.connect(); print(flyt.statistics()['region_size'])"
    done = run_client(ask, served, env={"FLYT_REGION": "/dev/shm/some"})
    assert done.stdout == "0\n"
    assert "unset FLYT_REGION" in done.stderr


def test_tcp_clients_go_inline(backend: Callable[..., Any], run_client: Callable[..., Any]) -> None:
    local = f"ipc:///tmp/flyt-own-region-{os.getpid()}.sock"
    served = backend(listen=["tcp://127.0.0.1:0", local], extra=PER_CLIENT)
    ask = "import flyt; flyt.connect(); print(flyt.statistics()['region_size'])"
    done = run_client(ask, served)
    assert done.stdout == "0\n", done.stderr
    done = run_client(ask, served.endpoints[1], env=served.env)
    assert done.stdout == f"{48 << 20}\n", done.stderr
    served.stop()
    assert not os.path.exists(local.removeprefix("ipc://") + SUFFIX)
