# SPDX-License-Identifier: Apache-2.0
"""A lock inside which no signal handler runs, so that Ctrl-C can't tear what it guards.

Python runs signal handlers on the main thread between any two steps. A KeyboardInterrupt between
sending a command and noting it would leave a table that is wrong. Signals that come while the lock
is held are delivered when it is given back: `with` then raises at its end, with all tables whole.

The mask is the main thread's. A signal that the kernel gives to another thread meanwhile is raised
in the main thread all the same, so what is done inside comes in an order in which a tear costs
little: the rings' positions move in the library, within one call (`flyt.shm.ring`).
"""

from __future__ import annotations

import ctypes
import functools
import signal
import threading
from collections.abc import Callable
from threading import get_ident
from types import TracebackType
from typing import Any

from flyt.shm.native import native

_SHIELDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGALRM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,
    signal.SIGPROF,
    signal.SIGVTALRM,
)
"""Signals whose handlers programs write in Python."""

_SIGSET_BYTES = 128
"""glibc's and musl's sigset_t."""

# Straight to libc: signal.pthread_sigmask makes enums of what it returns, 15 times the cost.
_libc = ctypes.PyDLL(None)
_sigmask = _libc.pthread_sigmask
_sigmask.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)
_run_handlers = ctypes.pythonapi.PyErr_CheckSignals
_BLOCK, _SETMASK = int(signal.SIG_BLOCK), int(signal.SIG_SETMASK)


def _sigset(signals: tuple[signal.Signals, ...]) -> bytes:
    buffer = ctypes.create_string_buffer(_SIGSET_BYTES)
    _libc.sigemptyset(buffer)
    for one in signals:
        _libc.sigaddset(buffer, int(one))
    return buffer.raw


_SHIELD = _sigset(_SHIELDED)


class _Shield:
    """Blocks the signals, nested; without the compiled library. For one thread."""

    def __init__(self) -> None:
        self._depth = 0
        self._masked = False
        self._mask = ctypes.create_string_buffer(_SIGSET_BYTES)

    def enter(self) -> None:
        """Run the handlers of what has come already, and let none run until `leave`."""
        if not self._depth:
            before = self._mask
            if not self._masked:  # else an interrupt tore the last leaving: `before` still holds
                _sigmask(_BLOCK, None, before)
            self._masked = True
            try:
                _sigmask(_BLOCK, _SHIELD, None)
                _run_handlers()
            except BaseException:
                _sigmask(_SETMASK, before, None)
                self._masked = False
                raise
        self._depth += 1

    def leave(self) -> None:
        """Once too often does no harm."""
        if not self._depth:
            return
        self._depth -= 1
        if not self._depth:
            _sigmask(_SETMASK, self._mask, None)
            self._masked = False


def _shield() -> tuple[Callable[[], None], Callable[[], None]]:
    """Enter and leave, by the library where there is one: a third of the cost."""
    library = native()
    if library is None:
        shield = _Shield()
        return shield.enter, shield.leave
    state = ctypes.create_string_buffer(library.shield_size())
    signals = (ctypes.c_int * len(_SHIELDED))(*map(int, _SHIELDED))
    check = ctypes.cast(_run_handlers, ctypes.c_void_p)
    library.shield_init(state, signals, len(_SHIELDED), check)
    return (
        functools.partial(library.shield_enter, state),
        functools.partial(library.shield_leave, state),
    )


def _nothing() -> None:
    pass


def _is_owned(lock: Any) -> bool:
    """Whether this thread holds an RLock; `threading.Condition` asks the same way."""
    return bool(lock._is_owned())  # noqa: SLF001


class ShieldedLock:
    """A reentrant lock. Who holds it copies a few KiB at most, and waits no longer than
    `flyt.frontend.express_link.HOLD_SECONDS`, so it is held for microseconds; but a session's end
    copies whole arrays, and a finalizer's or a handler's call in between takes as long as it takes.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._main = threading.main_thread().ident
        self._raise, self._lower = _shield()
        self._depth = 0  # an interrupt may leave it too high, until the lock is next taken afresh
        self._begin: Callable[[], object] = _nothing
        self._end: Callable[[], object] = _nothing
        self.reading = self._lock
        """The lock alone, for those who change nothing: they may be interrupted."""

    @property
    def is_held(self) -> bool:
        """Whether this thread holds it."""
        return _is_owned(self._lock)

    def surround(self, begin: Callable[[], object], end: Callable[[], object]) -> None:
        """Have every ``with`` call ``begin`` first, and the outermost one ``end`` last, with the
        lock held. An interrupt may leave ``end`` out; it is never early."""
        self._begin, self._end = begin, end

    def _finish(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._end()

    def __enter__(self) -> None:
        inside = _is_owned(self._lock)
        if get_ident() != self._main:
            self._lock.acquire()
            try:
                self._depth = self._depth + 1 if inside else 1
                self._begin()
            except BaseException:
                self._lock.release()
                raise
            return
        try:
            self._raise()
            self._lock.acquire()
        except BaseException:  # by a signal that came before, or that another thread got
            if not inside and _is_owned(self._lock):
                self._lock.release()
            self._lower()
            raise
        try:
            self._depth = self._depth + 1 if inside else 1
            self._begin()
        except BaseException:
            self._lock.release()
            self._lower()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if get_ident() != self._main:
            try:
                self._finish()
            finally:
                self._lock.release()
            return
        try:
            self._finish()
        finally:
            try:
                self._lock.release()
            finally:
                self._lower()
