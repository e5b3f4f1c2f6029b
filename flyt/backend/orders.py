# SPDX-License-Identifier: Apache-2.0
"""What the supervisor, its workers and its keeper say to each other, declared once.

These messages never leave the host: they travel over socket pairs that the supervisor made
(`flyt.backend.channel`). They use the same codec as the public wire, so that a worker whose
context runs wild can't confuse the supervisor either.
"""

from __future__ import annotations

from dataclasses import field

from flyt.rpc.codec import U32, U64, Document, Flag, Frames, Runs, Text, Token, Vocabulary, message

# --- supervisor to worker ---


@message
class Open:
    """Serve one more session: bind its socket and wait for its ATTACH.

    ``address`` is a whole endpoint (``ipc:///path``, ``tcp://host:*``, ``tcp://host:5000-5009``).
    """

    session: U64
    token: Token = field(repr=False)
    pid: U32
    address: Text
    peer: Text
    """Who may attach: a uid on ipc, a CURVE key on TCP; "" where anyone with the token may."""
    memory_limit: U64
    """Bytes of device memory this session may hold; 0 means no limit of its own."""
    bell: U32
    """Which of the worker's doorbells is the session's, from 1; 0: none."""
    region_size: U64 = 0
    """Bytes of the session's own region, whose descriptor comes with this message; 0: it uses the
    worker's, if there is one."""
    page_size: U32 = 0


@message
class Granted:
    """Answer to `Request`: empty ``refused`` means that the frames are in the ledger now."""

    session: U64
    request: U64
    refused: Frames


@message
class End:
    """End this session now; the reason goes to the log."""

    session: U64
    reason: Text
    unless_attached: Flag = False


@message
class Leave:
    """End all sessions and exit."""


@message
class Measure:
    """Say what the sessions hold; answered by `Measured`."""


@message
class Suspend:
    """Move the process's GPU state to host memory and hold the commands of this session, its only
    one; answered by `Paused`."""

    session: U64
    patience: U32
    """Seconds that a command waits before it is refused."""


@message
class Resume:
    """Undo `Suspend`; answered by `Paused`."""

    session: U64


WORKER_ORDERS = {1: Open, 2: Granted, 3: End, 4: Leave, 6: Measure, 7: Suspend, 8: Resume}

# --- worker to supervisor ---


@message
class Ready:
    """The devices work. ``snapshot`` is what WELCOME carries."""

    snapshot: Document


@message
class Failed:
    """The devices can't be used; the worker exits. ``code`` is a cudaError_t."""

    code: U32
    text: Text


@message
class Opened:
    session: U64
    port: U32
    path: Text
    error: Text
    """"" when the socket is bound; else why it could not be."""


@message
class Request:
    """The session asks for these frames; answered by `Granted` with the same ``request``."""

    session: U64
    request: U64
    frames: Runs


@message
class Returned:
    """The session no longer uses these frames: no DMA, no mapping in use. Answered by
    `Reclaimed` once they are FREE again."""

    session: U64
    request: U64
    frames: Runs


@message
class Closed:
    """The session is over: its work is done, its memory freed, its frames out of use."""

    session: U64
    reason: Text


@message
class Broken:
    """The context is gone with this sticky cudaError_t; the worker exits."""

    code: U32
    text: Text


@message
class Measured:
    """For people: what `flyt.backend.holdings.Holdings.figures` says, by session in hexadecimal."""

    sessions: Document


@message
class Paused:
    """Answer to `Suspend` and `Resume`: whether the session is suspended now, and why it is not as
    it was to be ("": it is)."""

    session: U64
    paused: Flag
    error: Text


WORKER_WORDS = {
    1: Ready,
    2: Failed,
    3: Opened,
    4: Request,
    5: Returned,
    6: Closed,
    7: Broken,
    8: Measured,
    9: Paused,
}

# --- supervisor to keeper and back ---


@message
class Format:
    """Write a fresh superblock and set all frames FREE and zero, but those of each `Spare`."""

    epoch: U64


@message
class Spare:
    """Processes of an earlier daemon still have these frames: OWNED, with the bytes they hold."""

    frames: Runs


@message
class Reclaim:
    """Quarantine and zero these frames; answered by `Reclaimed`, followed by `Free`."""

    request: U64
    frames: Runs


@message
class Free:
    """Set these frames FREE: they were reclaimed, and the ledger has let go of them."""

    frames: Runs


@message
class Sweep:
    """Report all frames that are OWNED; answered by `Owned`."""


@message
class Formatted:
    error: Text


@message
class Reclaimed:
    """Keeper: done. Supervisor passes it on to the worker that sent `Returned`, with its
    session and request."""

    session: U64
    request: U64


@message
class Owned:
    frames: Frames
    sessions: Frames
    """Same length: the owner that the table names for each frame."""


KEEPER_ORDERS = {1: Format, 2: Reclaim, 3: Sweep, 4: Leave, 5: Free, 6: Spare}
KEEPER_WORDS = {1: Formatted, 2: Reclaimed, 3: Owned}
WORKER_ORDERS[5] = Reclaimed

TO_WORKER = Vocabulary("the supervisor", WORKER_ORDERS)
FROM_WORKER = Vocabulary("the worker", WORKER_WORDS)
TO_KEEPER = Vocabulary("the supervisor", KEEPER_ORDERS)
FROM_KEEPER = Vocabulary("the keeper", KEEPER_WORDS)
