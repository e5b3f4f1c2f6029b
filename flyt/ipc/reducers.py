# SPDX-License-Identifier: Apache-2.0
"""How ``multiprocessing`` and ``torch.multiprocessing`` queues carry shared arrays.

A queue pickles. What it pickles here is a socket name and a one-time token, nothing else; the
receiver claims the array, and its descriptors, over a connection of its own. Each process that
sends has one `Desk`, which keeps an array until its token is used.
"""

from __future__ import annotations

import functools
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

from flyt.errors import HandshakeError, PeerTimeout, SharingError
from flyt.ipc.arrays import adapter_for, on_load
from flyt.ipc.connection import Connection
from flyt.ipc.listening import Listener, connect
from flyt.ipc.messages import TOKEN_BYTES
from flyt.ipc.outgoing import Outgoing
from flyt.ipc.sharing import find_block, outgoing, rebuild

CLAIM_LIMIT = 300.0
"""Seconds until an array that nobody claims is let go: its queue may never be read."""

MAX_WAITING = 4096
"""Arrays that may wait to be claimed; a queue that is never read must not pin all memory."""

SWEEP = 1.0
"""Seconds between two looks at what has waited too long, and at whether the desk is closed."""


class Desk:
    """Where a process's arrays wait for those who hold their tokens."""

    def __init__(self) -> None:
        self._listener = Listener()
        self._lock = threading.Lock()
        self._waiting: dict[bytes, tuple[float, Outgoing]] = {}
        self._connections: list[Connection] = []
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="flyt-ipc-desk", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """The abstract socket name to connect to."""
        return self._listener.name

    def leave(self, out: Outgoing) -> bytes:
        """Keep an array for whoever shows the token that this returns, once."""
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                raise SharingError(
                    f"{MAX_WAITING} arrays wait in queues of this process: receive them first"
                )
            self._waiting[token] = (time.monotonic() + CLAIM_LIMIT, out)
        return token

    def hand_out(self, token: bytes) -> Outgoing:
        with self._lock:
            found = self._waiting.pop(token, None)
        if found is None:
            raise SharingError(
                f"its token was used already, or not within {CLAIM_LIMIT:.0f} s: a pickled array "
                "can be received once"
            )
        return found[1]

    def _serve(self) -> None:
        while not self._closed:
            try:
                sock = self._listener.accept(SWEEP)
                self._connections.append(Connection(sock, on_claim=self.hand_out))
            except (PeerTimeout, HandshakeError):  # nobody came, or a stranger
                pass
            self._sweep()

    def _sweep(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [token for token, (limit, _) in self._waiting.items() if limit < now]
            dropped = [self._waiting.pop(token) for token in late]
        dropped.clear()
        self._connections = [c for c in self._connections if not c.is_over]

    def close(self) -> None:
        """Let go of everything; to receivers this process is dead."""
        self._closed = True
        self._thread.join(10 * SWEEP)
        self._listener.close()
        for connection in self._connections:
            connection.abort()
        with self._lock:
            self._waiting.clear()


class _Process:
    """The desk of this process, and its connections to others' desks."""

    lock = threading.RLock()
    pid = 0
    desk: Desk | None = None
    peers: dict[str, Connection] = {}  # noqa: RUF012 - one for the process, guarded by `lock`


def _own() -> type[_Process]:
    """After a fork the parent's desk is not ours."""
    if _Process.pid != os.getpid():
        _Process.pid, _Process.desk, _Process.peers = os.getpid(), None, {}
    return _Process


def _ticket(array: object) -> tuple[str, bytes]:
    # The queue's feeder thread pickles, so "the current stream" says nothing here: wait for all.
    out = outgoing(array, whole_device=True)
    with _Process.lock:
        own = _own()
        if own.desk is None:
            own.desk = Desk()
        return own.desk.name, own.desk.leave(out)


def claim(name: str, token: bytes) -> Any:
    """Receive what a process left at its desk. Unpickling calls this."""
    with _Process.lock:
        own = _own()
        peer = own.peers.get(name)
        if peer is None or peer.is_over:
            peer = own.peers[name] = connect(name)
    share, fds = peer.claim(token)
    return rebuild(peer, share, fds)


def is_shareable(array: object) -> bool:
    """Whether an array lies in memory that can be shared."""
    try:
        what = adapter_for(array)[0].describe(array)
    except SharingError:
        return False
    return what.layout.extent > 0 and find_block(what) is not None


def _reduce(fallback: Callable[[Any], Any], array: Any) -> Any:
    if not is_shareable(array):
        return fallback(array)
    return claim, _ticket(array)


def install_reducers() -> None:
    """Let multiprocessing's queues, pipes and pools carry arrays in shareable memory.

    Arrays and tensors elsewhere travel as before. Call it in the sending process; if its tensors
    come from `torch_pool` or ``flyt ipc run``, after importing PyTorch, which sets reducers of its
    own. The receiver needs Flyt installed, and the start method ``spawn`` where CUDA is used.
    """
    if _register not in on_load:
        on_load.append(_register)
    _register()


def _register() -> None:
    """For the libraries that are imported so far."""
    ForkingPickler.register(np.ndarray, functools.partial(_reduce, _numpy_as_before))
    if "torch" in sys.modules:
        import torch
        from torch.multiprocessing import reductions

        tensors = functools.partial(_reduce, reductions.reduce_tensor)
        ForkingPickler.register(torch.Tensor, tensors)
        ForkingPickler.register(torch.nn.Parameter, tensors)
    if "cupy" in sys.modules:
        import cupy

        arrays = functools.partial(_reduce, lambda array: array.__reduce__())
        ForkingPickler.register(cupy.ndarray, arrays)


def _numpy_as_before(array: np.ndarray[Any, Any]) -> Any:
    return array.__reduce_ex__(4)


def close_desk() -> None:
    """Let go of all that queues of this process still carry, and of what came through them."""
    with _Process.lock:
        own = _own()
        desk, own.desk = own.desk, None
        peers, own.peers = own.peers, {}
    if desk is not None:
        desk.close()
    for peer in peers.values():
        peer.close()
