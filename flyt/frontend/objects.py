# SPDX-License-Identifier: Apache-2.0
"""Streams and events as objects, and what all objects share: a handle that is given back once."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from cuda.bindings.runtime import (
    cudaEventBlockingSync,
    cudaEventDisableTiming,
    cudaStreamNonBlocking,
)

from flyt.errors import CommandTimeout, DeviceError, SessionLost
from flyt.frontend import current
from flyt.frontend.api.convention import Answer
from flyt.frontend.api.events import (
    cudaEventCreateWithFlags,
    cudaEventElapsedTime,
    cudaEventQuery,
    cudaEventRecord,
    cudaEventSynchronize,
)
from flyt.frontend.api.streams import (
    cudaStreamCreateWithPriority,
    cudaStreamGetPriority,
    cudaStreamQuery,
    cudaStreamSynchronize,
    cudaStreamWaitEvent,
)
from flyt.frontend.current import thread
from flyt.frontend.garbage import Release
from flyt.frontend.session import Session

if TYPE_CHECKING:
    from typing_extensions import Self

NOT_READY = 600
CONTEXT_IS_DESTROYED = 709

LEGACY = 1
PER_THREAD = 2


def checked(answer: Answer) -> Any:
    """The value of a CUDA function's answer, None if it has none; its error is raised."""
    if answer[0]:
        raise DeviceError(int(answer[0]), thread.last_failure)
    return answer[1] if len(answer) > 1 else None


class Owned:
    """One handle of the current session; `close` gives it back, at the latest a finalizer does.

    Parameters
    ----------
    handle : int
    release : callable
        Gets the session and the handle. `close` calls it at once. A finalizer never sends, so it
        leaves the call to the session's next one.
    """

    def __init__(self, handle: int, release: Release) -> None:
        session = current.current()
        self._handle = handle
        self._session: weakref.ref[Session] | None = weakref.ref(session)
        self._finalizer = weakref.finalize(self, _drop, self._session, release, handle)
        # At exit the goodbye gives everything back.
        self._finalizer.atexit = False

    @property
    def closed(self) -> bool:
        """Whether it was given back."""
        return not self._finalizer.alive

    def _use(self) -> int:
        """The handle, for the current session's next command."""
        if self.closed:
            raise ValueError(f"this {type(self).__name__} is closed")
        if self._session is not None and self._session() is not current.existing():
            raise DeviceError(
                CONTEXT_IS_DESTROYED,
                f"this {type(self).__name__} went with its session; flyt.connect() made another",
            )
        return self._handle

    def close(self) -> None:
        """Give it back. Closing twice, or after the session's end, does nothing."""
        owned = self._finalizer.detach()  # of several threads that close, one gets it
        if owned is None:
            return
        _, _, (session, release, handle), _ = owned
        alive = session()
        if alive is None:
            return
        try:
            release(alive, handle)
        except (SessionLost, CommandTimeout):
            return  # what a lost session had is given back already

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _drop(session: weakref.ref[Session], release: Release, handle: int) -> None:
    alive = session()
    if alive is not None:
        alive.garbage.append((release, handle))


class Event(Owned):
    """A point in a stream's work.

    Parameters
    ----------
    timing : bool, keyword-only
        Whether it can be subtracted from another.
    blocking : bool, keyword-only
        cudaEventBlockingSync: `sync` sleeps at once.

    Raises
    ------
    DeviceError
        As every method does, with the ``code`` that CUDA answers.

    Notes
    -----
    ``end - start`` is the time between two recorded events in milliseconds, as in cuda.core.
    """

    def __init__(self, *, timing: bool = True, blocking: bool = False) -> None:
        flags = (0 if timing else cudaEventDisableTiming) | (
            cudaEventBlockingSync if blocking else 0
        )
        super().__init__(int(checked(cudaEventCreateWithFlags(flags))), Session.destroy_event)
        self.timing = timing
        self.blocking = blocking

    @property
    def handle(self) -> int:
        """What the functions of the runtime API take; so does ``int(event)``."""
        return self._use()

    @property
    def is_done(self) -> bool:
        """Whether the work before it is done; True before it was ever recorded, as in CUDA."""
        return _is_done(cudaEventQuery(self.handle))

    def sync(self) -> None:
        """Wait for the work before it."""
        checked(cudaEventSynchronize(self.handle))

    def __sub__(self, start: Event) -> float:
        if not isinstance(start, Event):
            return NotImplemented
        return float(checked(cudaEventElapsedTime(start.handle, self.handle)))

    def __int__(self) -> int:
        return self.handle

    __index__ = __int__

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self._handle:#x}"
        return f"Event({state}, timing={self.timing}, blocking={self.blocking})"


class Stream(Owned):
    """Work that the device does in order.

    Parameters
    ----------
    non_blocking : bool, keyword-only
        Neither waits for the legacy default stream nor is waited for by it.
    priority : int, keyword-only
        Lower numbers first; CUDA moves it into cudaDeviceGetStreamPriorityRange.

    Attributes
    ----------
    default, per_thread : Stream
        CUDA's two default streams, legacy and one per thread. They belong to nobody: `close` leaves
        them be.

    Raises
    ------
    DeviceError
        As every method does, with the ``code`` that CUDA answers.

    Notes
    -----
    `close` does not wait: what was given to the stream is still done, as by cudaStreamDestroy.
    """

    default: ClassVar[Stream]
    per_thread: ClassVar[Stream]

    def __init__(self, *, non_blocking: bool = False, priority: int = 0) -> None:
        flags = cudaStreamNonBlocking if non_blocking else 0
        handle = int(checked(cudaStreamCreateWithPriority(flags, priority)))
        super().__init__(handle, Session.destroy_stream)
        self.non_blocking = non_blocking

    @property
    def handle(self) -> int:
        """What the functions of the runtime API take; so does ``int(stream)``."""
        return self._use()

    @property
    def priority(self) -> int:
        """The priority that it got."""
        return int(checked(cudaStreamGetPriority(self.handle)))

    @property
    def is_done(self) -> bool:
        """Whether all work given to it so far is done."""
        return _is_done(cudaStreamQuery(self.handle))

    def sync(self) -> None:
        """Wait for all work given to it so far, and report that work's error."""
        checked(cudaStreamSynchronize(self.handle))

    def record(self, event: Event | None = None) -> Event:
        """Let an event, by default a new one, mark this point in the stream's work.

        Returns
        -------
        Event
            The one given, or the new one, which is the caller's to close.
        """
        mark = event if event is not None else Event()
        checked(cudaEventRecord(mark.handle, self.handle))
        return mark

    def wait(self, other: Event | Stream) -> None:
        """Let later work of this stream wait for an event, or for another stream's work so far."""
        if isinstance(other, Stream):
            with Event(timing=False) as mark:
                self.wait(other.record(mark))
            return
        checked(cudaStreamWaitEvent(self.handle, other.handle, 0))

    def __int__(self) -> int:
        return self.handle

    __index__ = __int__

    def __repr__(self) -> str:
        name = {LEGACY: "default", PER_THREAD: "per_thread"}.get(self._handle)
        if name is not None:
            return f"Stream.{name}"
        state = "closed" if self.closed else f"{self._handle:#x}"
        return f"Stream({state}, non_blocking={self.non_blocking})"


class _DefaultStream(Stream):
    """A stream that each session has; it needs no session to be named."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self.non_blocking = False

    @property
    def closed(self) -> bool:
        return False

    def _use(self) -> int:
        return self._handle

    def close(self) -> None:
        """Do nothing: nobody owns it."""


Stream.default = _DefaultStream(LEGACY)
Stream.per_thread = _DefaultStream(PER_THREAD)


def _is_done(answer: Answer) -> bool:
    if int(answer[0]) == NOT_READY:
        return False
    checked(answer)
    return True
