# SPDX-License-Identifier: Apache-2.0
"""Memory and events that clients of one backend share (cudaIpc*).

A handle is 64 bytes, of which the first 16 are a token of the backend's; the rest says what it is
the handle of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyt.errors import DeviceError, ProtocolError
from flyt.frontend.inflight import Pending
from flyt.frontend.pointers import Allocation, Space
from flyt.frontend.streams import DISABLE_TIMING, INTERPROCESS, Event
from flyt.rpc import messages as m

if TYPE_CHECKING:
    from flyt.frontend.session import Session

INVALID_VALUE = 1
MAP_FAILED = 205
INVALID_HANDLE = 400

HANDLE_BYTES = 64
TOKEN_BYTES = 16
MEMORY, EVENT = b"flyt memory", b"flyt event"


class Sharing:
    """What one session shares, and what it has opened."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._connection = session.connection
        self._opened: dict[bytes, list[int]] = {}
        """By token: the address, and how often it is open."""

    # --- memory ---

    def export_memory(self, address: int) -> bytes:
        with self._connection.lock.reading:
            block = self._session.pointers.find(address)
        if block is None or block.space != Space.DEVICE or block.address != address:
            raise DeviceError(INVALID_VALUE, f"{address:#x} is not the start of device memory")
        if block.pool or block.imported:
            raise DeviceError(INVALID_VALUE, f"{address:#x} was not allocated by cudaMalloc")
        answer = self._connection.call(lambda number: m.ShareMemory(number, address))
        return _handle(answer, MEMORY)

    def open_memory(self, handle: bytes) -> int:
        """The address, which is the exporter's; opening once more counts."""
        token = _token(handle, MEMORY)
        with self._connection.lock:
            known = self._opened.get(token)
            if known is not None:
                known[1] += 1
                return known[0]
        answer = self._connection.call(lambda number: m.OpenMemory(number, token))
        if len(answer.values) != 3:
            raise ProtocolError("the backend's answer to OPEN_MEMORY is not three numbers")
        address, size, device = answer.values
        with self._connection.lock:
            if taken := self._session.reservations.take(address, size):
                block = Allocation(Space.DEVICE, address, size, device, imported=True)
                self._session.pointers.add(block)
                self._opened[token] = [address, 1]
        if not taken:
            self._connection.call(lambda number: m.CloseMemory(number, address))
            raise DeviceError(MAP_FAILED, f"{address:#x} is in use in this process")
        return address

    def close_memory(self, address: int) -> None:
        session = self._session
        with self._connection.lock:
            token = next((t for t, known in self._opened.items() if known[0] == address), None)
            if token is None:
                raise DeviceError(INVALID_VALUE, f"{address:#x} is no memory that was opened")
            self._opened[token][1] -= 1
            if self._opened[token][1]:
                return
            del self._opened[token]
            block = session.pointers.take_back(address)
        self._connection.call(lambda number: m.CloseMemory(number, address))
        with self._connection.lock:
            session.reservations.give(address, block.size)

    # --- events ---

    def export_event(self, event: Event) -> bytes:
        if not event.flags & INTERPROCESS or (event.shared and not event.exported):
            raise DeviceError(
                INVALID_HANDLE, "only an event of this process, made with cudaEventInterprocess"
            )
        if not event.exported:
            event.shared = True
            answer = self._connection.call(lambda number: m.ShareEvent(number, event.number))
            event.exported = _handle(answer, EVENT)
        return event.exported

    def open_event(self, handle: bytes) -> Event:
        token, scheduler = _token(handle, EVENT), self._session.scheduler
        with self._connection.lock:
            number = scheduler.table.mint()
        answer = self._connection.call(lambda n: m.OpenEvent(n, number, token))
        if len(answer.values) != 1:
            raise ProtocolError("the backend's answer to OPEN_EVENT holds no device")
        flags = INTERPROCESS | DISABLE_TIMING
        event = Event(number, answer.values[0], flags, shared=True)
        with self._connection.lock:
            scheduler.table.add_event(event)
        return event


def _handle(answer: Pending, kind: bytes) -> bytes:
    if len(answer.values) != 2:
        raise ProtocolError(f"the backend's answer to {answer.name} is no token")
    token = b"".join(half.to_bytes(TOKEN_BYTES // 2, "little") for half in answer.values)
    return (token + kind).ljust(HANDLE_BYTES, b"\0")


def _token(handle: bytes, kind: bytes) -> bytes:
    if len(handle) != HANDLE_BYTES or handle[TOKEN_BYTES:] != kind.ljust(
        HANDLE_BYTES - TOKEN_BYTES, b"\0"
    ):
        raise DeviceError(INVALID_VALUE, "this is no handle that Flyt has made for such a thing")
    return handle[:TOKEN_BYTES]
