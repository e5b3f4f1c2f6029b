# SPDX-License-Identifier: Apache-2.0
"""What a session answers."""

from __future__ import annotations

from flyt.rpc.codec import U32, U64, Numbers, Text, message


@message
class Result:
    """The one answer to command ``id``."""

    id: U64
    status: U32
    """A cudaError_t, or a `Status`."""
    taken: U64
    """How many commands of the session were taken so far: each gives its credit back."""
    values: Numbers
    text: Text
    """For people: why it failed."""


@message
class Done:
    """Answers the commands from ``first`` on, ``count`` of them: success, with no values."""

    taken: U64
    first: U64
    count: U32


@message
class Credit:
    """Gives credits back when many commands were taken and none has finished."""

    taken: U64


@message
class Sticky:
    """The worker's last word: its context is gone with this cudaError_t."""

    code: U32
    text: Text
