# SPDX-License-Identifier: Apache-2.0
"""Rings of short messages in a session's control page: commands one way, replies the other.

The control page is shared with a process that may be hostile or dead. Positions are kept in private
memory, and move in the same call as the message, so that an interrupt (Ctrl-C) tears nothing. A
message is copied out before it is looked at; words that can't be are `RingDamaged`. A message too
long for its place travels by ZeroMQ, and an empty entry keeps its place in the order.

Uses the compiled library: Python has no store with release order, and no fence.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from flyt.environment import RING
from flyt.errors import RegionError
from flyt.shm import layout, memory
from flyt.shm.native import Native, native

LARGEST = layout.RING_ENTRY - 4
"""Bytes of a message; its length takes four."""

ELSEWHERE = b""
"""The entry of a message that comes by ZeroMQ."""

_EMPTY, _FULL = -1, -3
_MORE = 1 << 32
_SLEEPS = (1 << 63) - 1


def usable() -> Native | None:
    """What rings need; None without the compiled library, or where ``FLYT_RING=0`` forbids them."""
    return native() if RING.read() else None


class RingDamaged(RegionError):
    """The words of a ring contradict each other: the other side, or a neighbour, overwrote them."""


class RingFull(RegionError):
    """The other side has not read for so long that no place is left."""


class _End:
    def __init__(self, native: Native, address: int, places: int) -> None:
        self._native = native
        self._address = address
        self._places = places
        self.position = (ctypes.c_uint64 * 2)()
        """Messages that this end has moved; of a reader also how many of them were `ELSEWHERE`. The
        library counts them, in the call that moves a message."""

    @property
    def place(self) -> tuple[int, int, int]:
        """Addresses of the ring and of this end's position, and the ring's places."""
        return self._address, ctypes.addressof(self.position), self._places

    def _damaged(self) -> RingDamaged:
        return RingDamaged(f"the ring at {self._address:#x} of the control page is damaged")


class RingWriter(_End):
    """The writing end. One thread at a time."""

    def __init__(self, native: Native, address: int, places: int) -> None:
        super().__init__(native, address, places)
        self.woken = 0
        """The sleep of the reader for which it was woken last."""

    @property
    def written(self) -> int:
        """Messages published so far."""
        return int(self.position[0])

    def sleeper(self) -> int:
        """The number of the reader's sleep that nobody has ended yet; 0 while it is awake."""
        asleep = memory.load_word(self._address + layout.RING_ASLEEP) & _SLEEPS
        return 0 if asleep == self.woken else asleep

    def room(self) -> int:
        """How many messages fit now.

        Raises
        ------
        RingDamaged
        """
        room = int(self._native.ring_room(self._address, self.position, self._places))
        if room < 0:
            raise self._damaged()
        return room

    def write(self, message: bytes) -> bool:
        """Publish a message of at most `LARGEST` bytes.

        Raises
        ------
        RingFull, RingDamaged
            Nothing was published.

        Returns
        -------
        bool
            Whether the reader sleeps and must be woken: once for each of its sleeps.
        """
        asleep = self.publish(message)
        if asleep in (0, self.woken):
            return False
        self.woken = asleep
        return True

    def publish(self, message: bytes) -> int:
        """`write`, for who may be in the middle of another call: returns the number of the reader's
        sleep, 0 while it is awake. Who has woken it sets ``woken``, not before."""
        if len(message) > LARGEST:
            raise RegionError(f"a message of {len(message)} bytes for a place of {LARGEST}")
        asleep = self._native.ring_write(
            self._address,
            self.position,
            self._places,
            layout.RING_ENTRY,
            message,
            len(message),
        )
        if asleep < 0:
            raise (
                self._damaged()
                if asleep != _FULL
                else RingFull(
                    f"all {self._places} places of the ring are taken: the other side reads nothing"
                )
            )
        return int(asleep)


class RingReader(_End):
    """The reading end. One thread at a time, but `wait` may run beside `read`.

    Attributes
    ----------
    has_more : bool
        Whether another message was there already when the last one was read, or dropped.
    """

    def __init__(self, native: Native, address: int, places: int) -> None:
        super().__init__(native, address, places)
        self.has_more = False
        self._spare: list[tuple[ctypes.Array[ctypes.c_char], memoryview]] = []
        self._sleeps = 0

    @property
    def taken(self) -> int:
        """Messages read so far."""
        return int(self.position[0])

    def read(self) -> bytes | None:
        """The next message, `ELSEWHERE` for one that comes by ZeroMQ, None when there is none.

        Raises
        ------
        RingDamaged
        """
        length, message = self._copied(self._native.ring_read)
        self.has_more = length >= _MORE
        return message

    def peek(self) -> tuple[bytes | None, int]:
        """`read`, but the message stays the next one until it is dropped: who is interrupted before
        that, also by a call of a handler's, gets it once more.

        Returns
        -------
        bytes or None
        int
            For `drop`.

        Raises
        ------
        RingDamaged
        """
        at = self.taken  # first: who drops what came at a later place drops nothing
        return self._copied(self._native.ring_peek)[1], at

    def drop(self, message: bytes, at: int) -> None:
        """Take the message that `peek` gave, if nobody has done so since."""
        is_empty = message == ELSEWHERE
        self.has_more = bool(self._native.ring_drop(self._address, self.position, at, is_empty))

    def _copied(self, how: Callable[..., int]) -> tuple[int, bytes | None]:
        try:  # not one for all: a signal's handler may read in the middle of this
            buffer, view = self._spare.pop()
        except IndexError:
            buffer = ctypes.create_string_buffer(layout.RING_ENTRY)
            view = memoryview(buffer)
        length = int(how(self._address, self.position, self._places, layout.RING_ENTRY, buffer))
        message = bytes(view[: length % _MORE]) if length >= 0 else None
        self._spare.append((buffer, view))
        if length < 0:
            self.has_more = False
            if length != _EMPTY:
                raise self._damaged()
        return length, message

    def wait(self, seconds: float, *, polite: bool) -> bool:
        """Spin for at most ``seconds``, without the GIL, until there is a message.

        Parameters
        ----------
        polite : bool
            Offer the processor to other threads meanwhile, where there are few.
        """
        nanoseconds = int(seconds * 1e9)
        return bool(self._native.ring_wait(self._address, self.position, nanoseconds, polite))

    def fall_asleep(self) -> bool:
        """Have the writer wake this side at its next message; False when one is there already."""
        self._sleeps += 1
        return not self._native.ring_sleep(self._address, self.position, self._sleeps)

    def wake_up(self) -> None:
        """Look for messages by itself again: the writer need not wake this side."""
        self._native.ring_wake(self._address)


def frontend_rings(native: Native, control_page: int) -> tuple[RingWriter, RingReader]:
    """The frontend's ends: it writes commands and reads replies."""
    return (
        RingWriter(native, control_page + layout.COMMAND_RING, layout.COMMAND_PLACES),
        RingReader(native, control_page + layout.REPLY_RING, layout.REPLY_PLACES),
    )


def backend_rings(native: Native, control_page: int) -> tuple[RingReader, RingWriter]:
    """The backend's ends: it reads commands and writes replies."""
    return (
        RingReader(native, control_page + layout.COMMAND_RING, layout.COMMAND_PLACES),
        RingWriter(native, control_page + layout.REPLY_RING, layout.REPLY_PLACES),
    )
