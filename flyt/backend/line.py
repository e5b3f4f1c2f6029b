# SPDX-License-Identifier: Apache-2.0
"""`Line`: a client's commands in their order, also while the first of them can't be done yet.

Whatever happens commands are received: the one that the first waits for may be among them, and so
may the question whether the session lives; and libzmq reads no heartbeats behind messages that
nobody takes. Who waits in line keeps its credit, so an honest client stops by itself.
"""

from __future__ import annotations

import collections

from flyt.backend.wire import Wire
from flyt.rpc import messages as m

MOST = m.CREDITS + 32
"""Commands in line: who sends more has sent what it had no credit for, and is not read on."""

UNORDERED = (m.HostReturn, m.Ping)
"""Commands that are ordered with nothing."""


class Line:
    """Of one session, whose thread alone uses it.

    Parameters
    ----------
    wire : Wire
        Where commands come from.

    Attributes
    ----------
    held : list of bytes or None
        The command that was taken and can't be done yet.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._waiting: collections.deque[list[bytes]] = collections.deque()
        self.held: list[bytes] | None = None

    def __bool__(self) -> bool:
        """Whether commands wait that were not taken."""
        return bool(self._waiting)

    @property
    def is_empty(self) -> bool:
        """Whether the next command is one that was not received yet."""
        return self.held is None and not self._waiting

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= MOST

    def next(self) -> list[bytes] | None:
        """The next command that may be done now, or None; never waits. There is none while the
        client does not read its replies.

        Raises
        ------
        ProtocolError
        """
        if self.held is not None:
            return self.unordered()
        if self._wire.is_full:
            return None
        return self._waiting.popleft() if self._waiting else self._wire.receive()

    def unordered(self) -> list[bytes] | None:
        """The next command that is ordered with nothing, or None; all others that have come get in
        line.

        Raises
        ------
        ProtocolError
        """
        while not (self.is_full or self._wire.is_full):
            if (frames := self._wire.receive()) is None:
                return None
            if isinstance(m.COMMANDS.decode(frames[0] if frames else b""), UNORDERED):
                return frames
            self._waiting.append(frames)
        return None

    def drop(self) -> list[tuple[list[bytes], bool]]:
        """Take out all that are there, the held one first; with each whether it was taken."""
        held, self.held = self.held, None
        dropped = [(frames, False) for frames in self._waiting]
        self._waiting.clear()
        return dropped if held is None else [(held, True), *dropped]
