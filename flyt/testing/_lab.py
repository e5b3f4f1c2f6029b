# SPDX-License-Identifier: Apache-2.0
"""What a fact works with: memory, streams and events that go away after it, and work that lasts.

Order is never observed through time. Work that is surely unfinished is made by queueing copies on
a stream, with an event behind them: as long as that event is not ready, whatever was seen meanwhile
was seen while the stream was busy. Where the work ended too soon, it is made longer and the
observation repeated.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from cuda.bindings.runtime import cudaError_t, cudaMemcpyKind

from flyt.errors import FlytError

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]

H2H = cudaMemcpyKind.cudaMemcpyHostToHost
H2D = cudaMemcpyKind.cudaMemcpyHostToDevice
D2H = cudaMemcpyKind.cudaMemcpyDeviceToHost
D2D = cudaMemcpyKind.cudaMemcpyDeviceToDevice
DEFAULT = cudaMemcpyKind.cudaMemcpyDefault

INVALID_VALUE = int(cudaError_t.cudaErrorInvalidValue)
OUT_OF_MEMORY = int(cudaError_t.cudaErrorMemoryAllocation)
INVALID_HANDLE = int(cudaError_t.cudaErrorInvalidResourceHandle)
NOT_READY = int(cudaError_t.cudaErrorNotReady)

LEGACY, LEGACY_BY_NAME, PER_THREAD = 0, 1, 2
"""The stream handles that always exist: 0, cudaStreamLegacy and cudaStreamPerThread."""

NON_BLOCKING = 1
"""cudaStreamNonBlocking."""

WORKLOADS = (
    (64 << 20, 2),
    (64 << 20, 8),
    (256 << 20, 8),
    (512 << 20, 16),
    (512 << 20, 64),
    (512 << 20, 256),
    (512 << 20, 1024),
)
"""Bytes of one copy on the device, and how many keep a stream busy: from 0.1 to 300 ms on a fast
GPU, some 200 times longer where memory is emulated. The next is tried when one was too short. Large
copies rather than many: each has to take longer than it takes to issue one through a remote API."""

LONG_ENOUGH = 4.0
"""Seconds: work that took so long, on however busy a machine, and was always done was waited for;
no longer work is tried."""

HOST_PAGE = 65_536
"""Bytes; no base page of Linux is larger, so registrations of such pages share none."""

WORD = 8
MIX = 0x9E37_79B9_7F4A_7C15
"""An odd number of which half the bits are set (2**64 over the golden ratio)."""

THREAD_LIMIT = 60.0
"""Seconds that a call in another thread may take; none of the facts waits in one for long."""


class FactBroken(FlytError):
    """An implementation does not do what a fact says; the message says what it did."""


class Work:
    """Two blocks of device memory that are copied to and fro, shared by all facts of a run."""

    def __init__(self) -> None:
        self._level = 0
        self._blocks: list[int] = []

    def queue(self, lab: Lab, stream: Any) -> None:
        size, rounds = WORKLOADS[self._level]
        while len(self._blocks) < 2:
            self._blocks.append(lab.ok(lab.rt.cudaMalloc(size)))
            lab.ok(lab.rt.cudaDeviceSynchronize())
        destination, source = self._blocks
        for _ in range(rounds):
            lab.ok(lab.rt.cudaMemcpyAsync(destination, source, size, D2D, stream))

    def grow(self, rt: Any, taken: float) -> bool:
        """Make it longer for what follows than the ``taken`` seconds; False, and short again, when
        it was long enough."""
        longest = self._level + 1 == len(WORKLOADS) or taken >= LONG_ENOUGH
        self._level = 0 if longest else self._level + 1
        self.free(rt)
        return not longest

    def free(self, rt: Any) -> None:
        while self._blocks:
            rt.cudaFree(self._blocks.pop())


class Lab:
    """One fact's view of an implementation.

    Parameters
    ----------
    rt : module-like
        The functions of ``cuda.bindings.runtime``.
    work : Work
    """

    def __init__(self, rt: Any, work: Work) -> None:
        self.rt = rt
        self._work = work
        self._undo: list[Callable[[], Any]] = []
        self._alive: list[Any] = []

    # --- what an answer must be ---

    def ok(self, answer: tuple[Any, ...]) -> Any:
        """The value (or tuple of values) of an answer that has to be a success."""
        if int(answer[0]):
            raise FactBroken(f"{answer[0]!r} instead of success")
        return answer[1] if len(answer) == 2 else answer[1:]

    def refused(self, answer: tuple[Any, ...], code: int, what: str = "") -> None:
        """Demand an error code; clears the last error."""
        self.rt.cudaGetLastError()
        self.same(int(answer[0]), code, what or "the code")

    def same(self, seen: Any, wanted: Any, what: str) -> None:
        if seen != wanted:
            raise FactBroken(f"{what}: {seen!r}, expected {wanted!r}")

    def same_bytes(self, seen: Bytes, wanted: Bytes | int, what: str) -> None:
        """Compare with an array, or with one value everywhere."""
        wrong = np.flatnonzero(seen != wanted)
        if wrong.size:
            at = int(wrong[0])
            right = wanted if isinstance(wanted, int) else int(wanted[at])
            raise FactBroken(
                f"{what}: {wrong.size} of {seen.size} bytes are wrong, the first at {at}: "
                f"{int(seen[at])}, expected {right}"
            )

    # --- what goes away after the fact ---

    def device(self, size: int, value: int | None = None) -> int:
        """Device memory, perhaps filled."""
        address = int(self.ok(self.rt.cudaMalloc(size)))
        self._undo.append(lambda: self.rt.cudaFree(address))
        if value is not None:
            self.ok(self.rt.cudaMemset(address, value, size))
            self.ok(self.rt.cudaDeviceSynchronize())
        return address

    def pinned(self, size: int, value: int = 0) -> Bytes:
        """Pinned memory as an array."""
        address = int(self.ok(self.rt.cudaHostAlloc(size, 0)))
        self._undo.append(lambda: self.rt.cudaFreeHost(address))
        array: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        array[:] = value
        return array

    def pageable(self, size: int, value: int = 0) -> Bytes:
        """Host memory that CUDA doesn't know. It lives as long as this object: a fact may keep its
        address alone."""
        return self._kept(np.full(size, value, np.uint8))

    def pattern(self, size: int, seed: int = 1) -> Bytes:
        """`pageable` memory with bytes of which no two stretches are alike.

        Its words are all different: a multiplication by an odd number and a shifted exclusive or
        can be undone. A generator of random numbers takes ten times as long.
        """
        first = (seed << 32) + 1
        words = np.arange(first, first + size // WORD + 1, dtype=np.uint64)
        words *= np.uint64(MIX)
        words ^= words >> np.uint64(32)
        return self._kept(words.view(np.uint8)[:size])

    def _kept(self, array: Bytes) -> Bytes:
        self.keep(array)
        return array

    def stream(self, flags: int = 0) -> Any:
        handle = self.ok(self.rt.cudaStreamCreateWithFlags(flags))
        self._undo.append(lambda: self.rt.cudaStreamDestroy(handle))
        return handle

    def event(self, flags: int = 0) -> Any:
        handle = self.ok(self.rt.cudaEventCreateWithFlags(flags))
        self._undo.append(lambda: self.rt.cudaEventDestroy(handle))
        return handle

    def registered(self, size: int, flags: int = 0) -> Bytes:
        """The caller's own memory, registered; whole pages, as nothing else may share them."""
        whole = np.zeros(size + HOST_PAGE, np.uint8)
        start = -whole.ctypes.data % HOST_PAGE
        array = whole[start : start + size]
        self.ok(self.rt.cudaHostRegister(array.ctypes.data, size, flags))
        self._undo.append(lambda: self.rt.cudaHostUnregister(array.ctypes.data))
        return array

    def later(self, undo: Callable[[], Any]) -> None:
        """Call this when the fact is through."""
        self._undo.append(undo)

    def keep(self, thing: Any) -> None:
        """Keep something alive as long as this object."""
        self._alive.append(thing)

    def clean_up(self) -> int:
        """Wait for all work and give everything back; what a fact freed itself is refused again.

        Returns
        -------
        int
            What the device said to the waiting: not 0 when it is of no use any more.
        """
        code = int(self.rt.cudaDeviceSynchronize()[0])
        while self._undo:
            self._undo.pop()()
        self.rt.cudaGetLastError()
        return code

    # --- bytes to and from the device ---

    def put(self, address: int, data: Bytes) -> None:
        self.ok(self.rt.cudaMemcpy(address, data.ctypes.data, data.size, H2D))

    def get(self, address: int, size: int) -> Bytes:
        back = np.full(size, 0xA5, np.uint8)
        self.ok(self.rt.cudaMemcpy(back.ctypes.data, address, size, D2H))
        return back

    # --- streams ---

    def query(self, stream: Any) -> int:
        return int(self.rt.cudaStreamQuery(stream)[0])

    def while_busy(self, stream: Any, observe: Callable[[], T]) -> T:
        """What ``observe()`` returned from a time when work on ``stream`` was surely unfinished.

        It may be called several times. Its own work comes behind the unfinished work if it is on
        that stream.
        """
        longer = True
        while longer:
            since = time.monotonic()
            guard = self._occupy(stream)
            seen = observe()
            still = int(self.rt.cudaEventQuery(guard)[0])
            self.ok(self.rt.cudaDeviceSynchronize())
            if still == NOT_READY:
                return seen
            longer = self._work.grow(self.rt, time.monotonic() - since)
        raise FactBroken(
            "the work of the stream was always done when the call under test returned: "
            "it waited for the stream, or nothing is asynchronous here"
        )

    def waits(self, stream: Any, call: Callable[[], Any]) -> bool:
        """Whether ``call()`` returned only after work that was unfinished when it was called."""
        longer = True
        while longer:
            since = time.monotonic()
            guard = self._occupy(stream)
            before = int(self.rt.cudaEventQuery(guard)[0])
            call()
            after = int(self.rt.cudaEventQuery(guard)[0])
            self.ok(self.rt.cudaDeviceSynchronize())
            if before == NOT_READY:
                return after == 0
            longer = self._work.grow(self.rt, time.monotonic() - since)
        raise FactBroken("nothing is asynchronous here: work is done as soon as it was issued")

    def _occupy(self, stream: Any) -> Any:
        guard = self.event(2)
        self._work.queue(self, stream)
        self.ok(self.rt.cudaEventRecord(guard, stream))
        return guard

    def in_thread(self, call: Callable[[], T]) -> T:
        """What ``call()`` returns in another host thread, which then ends."""
        results: list[T] = []
        thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
        thread.start()
        thread.join(THREAD_LIMIT)
        if not results:
            raise FactBroken("the call failed or hung in another thread")
        return results[0]
