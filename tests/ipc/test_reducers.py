# SPDX-License-Identifier: Apache-2.0
"""Queues of ``multiprocessing``: spawned children get the same memory, the pickle holds a token."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest

from flyt import ipc
from flyt.errors import PeerLost, SharingError
from flyt.ipc import reducers

PROGRAM = Path(__file__).with_name("queue_program.py")
LIMIT = 90.0
"""Seconds; the program starts two interpreters."""


@pytest.fixture
def desk() -> Iterator[None]:
    ipc.install_reducers()
    yield
    ipc.close_desk()


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_queue_carries_the_memory_both_ways(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), library],
        env={**os.environ, "FLYT_IPC_DRIVER": "emulated"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told == {
        "child saw": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
        "parent sees what the child wrote": 50.0,
        "came back over the same address": True,
        "private": [1.0, 1.0],
        "private is a copy": True,
        "two from one block share it": True,
    }


def test_the_pickle_holds_a_name_and_a_token(desk: None) -> None:
    array = ipc.empty((1000,), "uint8")
    array[:] = ord("x")
    data = bytes(ForkingPickler.dumps(array))
    assert len(data) < 200
    assert b"xxxx" not in data
    got = pickle.loads(data)
    assert got.ctypes.data == array.ctypes.data
    with pytest.raises(SharingError, match="received once"):
        pickle.loads(data)


def test_a_desk_that_is_gone_is_told(desk: None) -> None:
    data = bytes(ForkingPickler.dumps(ipc.empty((3,))))
    ipc.close_desk()
    with pytest.raises(PeerLost, match="nobody listens"):
        pickle.loads(data)


def test_what_nobody_claims_is_let_go(desk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducers, "CLAIM_LIMIT", -1.0)
    monkeypatch.setattr(reducers, "SWEEP", 0.01)
    array = ipc.empty((3,))
    held = sys.getrefcount(array)
    data = bytes(ForkingPickler.dumps(array))
    assert sys.getrefcount(array) > held
    for _ in range(2000):
        if sys.getrefcount(array) == held:
            break
        __import__("time").sleep(0.01)
    assert sys.getrefcount(array) == held
    with pytest.raises(SharingError, match="not within"):
        pickle.loads(data)


def test_arrays_elsewhere_travel_as_before(desk: None) -> None:
    array = np.arange(5)
    got = pickle.loads(bytes(ForkingPickler.dumps(array)))
    assert got.tolist() == [0, 1, 2, 3, 4]
    got[0] = 9
    assert array[0] == 0
    time = np.array(["2020-01-01"], "M8[D]")
    assert pickle.loads(bytes(ForkingPickler.dumps(time))) == time
