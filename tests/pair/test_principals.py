# SPDX-License-Identifier: Apache-2.0
"""Who shares a worker with whom: never two users, and never a user with whoever comes by TCP."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flyt.rpc import messages as m
from flyt.rpc.endpoints import Endpoint
from tests.pair.raw import RawClient, hear, session_of, status

NOBODY = 65534

Start = Callable[..., "subprocess.Popen[str]"]

needs_root = pytest.mark.skipif(
    os.getuid() != 0, reason="only root can run a client as another user"
)

CLIENT = """
import os, sys, warnings
import numpy as np
import flyt, flyt as cudart
uid = int(sys.argv[1])
if uid >= 0:  # only now: this user may not be able to read our Python's files
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    warnings.simplefilter("ignore", flyt.FlytWarning)
K = cudart.cudaMemcpyKind
error, device = cudart.cudaMalloc(100_000)
if error:
    print(int(error), flyt.last_failure(), flush=True)
data, back = np.arange(100_000, dtype=np.uint8), np.zeros(100_000, np.uint8)
errors = [cudart.cudaMemcpy(device, data, data.nbytes, K.cudaMemcpyHostToDevice)[0]]
errors.append(cudart.cudaMemcpy(back, device, back.nbytes, K.cudaMemcpyDeviceToHost)[0])
print(int(error), *map(int, errors), (data == back).all(), flyt.last_failure(), flush=True)
print(flyt.statistics()["inline_h2d_bytes"], flush=True)
sys.stdin.readline()
"""

STRANGER = """
import os, sys
from flyt.rpc.patience import Deadline
from flyt.frontend.greeting import ask
from flyt.rpc import messages as m
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.sockets import Dialer, open_context
from tests.pair.raw import hear, SILENCE
endpoint, where, token, uid = sys.argv[1:]
os.setgroups([])
os.setgid(int(uid))
os.setuid(int(uid))
context = open_context()
answer = ask(context, Endpoint.parse(endpoint), m.AskStatus(), Deadline.after(10))
print(answer.text, flush=True)
dialer = Dialer(context, Endpoint.parse(where))
dialer.send([m.COMMANDS.encode(m.Attach(1, bytes.fromhex(token), True, 0, 0, (), 0))])
heard = hear(dialer, SILENCE)
print(dialer.descriptor >= 0, heard, flush=True)
dialer.close()
context.term()
"""


@pytest.fixture
def for_all_users(backend: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Backends whose sockets every user of this machine may use."""
    mask = os.umask(0)

    def start(**arguments: Any) -> Any:
        served = backend(**arguments)
        served.folder.chmod(0o755)
        return served

    yield start
    os.umask(mask)


def connected(start: Start, served: Any, uid: int = -1) -> Any:
    """A client that has moved bytes, right, and stays."""
    process = start(CLIENT, served, str(uid))
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("0 0 0 True"), line
    inline = int(process.stdout.readline())
    entry = session_of(served, process.pid)
    assert entry is not None
    return {**entry, "inline": inline}


@needs_root
def test_two_users_never_share_a_worker(
    for_all_users: Callable[..., Any], start_client: Start
) -> None:
    served = for_all_users()
    ours = [connected(start_client, served) for _ in range(2)]
    theirs = [connected(start_client, served, NOBODY) for _ in range(2)]
    assert [e["principal"] for e in ours] == ["uid 0"] * 2
    assert [e["principal"] for e in theirs] == [f"uid {NOBODY}"] * 2
    assert ours[0]["worker"] == ours[1]["worker"]
    assert theirs[0]["worker"] == theirs[1]["worker"]
    assert ours[0]["worker"] != theirs[0]["worker"]
    # The region is its owner's alone, so the other user's bytes came inline.
    assert [e["inline"] for e in ours] == [0, 0]
    assert [e["inline"] for e in theirs] == [100_000] * 2


@needs_root
def test_another_user_gets_neither_status_nor_session_not_even_with_the_token(
    for_all_users: Callable[..., Any], start_client: Start
) -> None:
    served = for_all_users()
    with RawClient(served.endpoint) as owner:
        token = owner.welcome.token.hex()
        stranger = start_client(
            STRANGER, served, served.endpoint, str(owner.where), token, str(NOBODY)
        )
        assert stranger.stdout is not None
        assert "only the user who runs this backend" in stranger.stdout.readline()
        assert stranger.stdout.readline() == "True None\n", "it came in, and heard nothing"
        assert owner.attach().status == 0
        assert owner.lives()


def test_users_and_tcp_endpoints_never_share_a_worker(backend: Callable[..., Any]) -> None:
    tcp = ["tcp://127.0.0.1:*"] * 2
    served = backend(listen=[f"ipc:///tmp/flyt-principals-{os.getpid()}.sock", *tcp])
    local, first, second = served.endpoints
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(RawClient(endpoint))
            for endpoint in (local, first, second, first, local)
        ]
        for client in clients:
            assert client.attach().status == 0
        report = status(served)
        entries = {entry["session"]: entry for entry in report["sessions"]}
        ours = [entries[client.welcome.session] for client in clients]
        names = [f"uid {os.getuid()}", f"anonymous {first}", f"anonymous {second}"]
        assert [entry["principal"] for entry in ours] == [*names, names[1], names[0]]
        workers = [entry["worker"] for entry in ours]
        assert len(set(workers[:3])) == 3
        assert workers[3:] == [workers[1], workers[0]], "a principal keeps its worker"
        assert {w["pid"]: (w["principal"], w["sessions"]) for w in report["workers"]} == {
            workers[0]: (names[0], 2),
            workers[1]: (names[1], 2),
            workers[2]: (names[2], 1),
        }
        # The status is for the daemon's own user, whom TCP can't prove.
        dialer = clients[1].dial(Endpoint.parse(first))
        assert dialer.send([m.HELLOS.encode(m.AskStatus())])
        frames = hear(dialer)
        assert frames is not None
        answer = m.WELCOMES.decode(frames[0])
        assert isinstance(answer, m.Refused)
        assert "only the user who runs this backend" in answer.text
