# SPDX-License-Identifier: Apache-2.0
"""The handshake's messages, on the daemon's main endpoint."""

from __future__ import annotations

from dataclasses import field

from flyt.rpc.codec import U32, U64, Document, Numbers, Text, Token, Vocabulary, message


@message
class Hello:
    """First words of a client. ``version`` comes first for ever: any version is told apart."""

    version: U32
    features: Numbers
    pid: U32
    program: Text
    """Command name of the client, for status displays only."""


@message
class Welcome:
    session: U64
    token: Token = field(repr=False)
    port: U32
    """TCP port of the session socket on the host that was dialled; 0: the one that was dialled
    (the daemon relays), or ipc."""
    path: Text
    """File name of the session socket, in the folder of the ipc endpoint that was dialled."""
    epoch: U64
    region: Text
    """Path of the region on the backend's host; "" when the backend serves without one."""
    region_size: U64
    page_size: U32
    lock_file: Text
    credits: U32
    inline_chunk: U64
    heartbeat_ms: U32
    features: Numbers
    """What both sides can do."""
    snapshot: Document
    """{"runtime_version", "driver_version", "devices": [{"name", "total_memory", …}]}."""
    bell: U32 = 0
    """The session's peer number at the backend's ivshmem doorbell; 0: it has none. A client that
    can rings once before ATTACH, whose answer says whether that was heard."""


@message
class Refused:
    """The backend won't have this client. ``code`` is a cudaError_t."""

    code: U32
    text: Text


@message
class AskStatus:
    """Who is connected? Answered only to peers of the daemon's own user over ipc."""


@message
class StatusReport:
    report: Document


@message
class Suspend:
    """Take this session off the GPU. From the daemon's own user over ipc, as `Resume`; answered by
    `Obeyed` once that is done."""

    session: U64
    patience: U32
    """Seconds that a call of its client waits before it fails with cudaErrorSystemNotReady."""


@message
class Resume:
    """Bring this session back to the GPU."""

    session: U64


@message
class Obeyed:
    """What was asked for is done."""


Question = Hello | AskStatus | Suspend | Resume
Answer = Welcome | Refused | StatusReport | Obeyed

HELLO_CODES = {1: Hello, 2: AskStatus, 3: Suspend, 4: Resume}
WELCOME_CODES = {1: Welcome, 2: Refused, 3: StatusReport, 4: Obeyed}

HELLOS = Vocabulary("the client", HELLO_CODES)
WELCOMES = Vocabulary("the backend", WELCOME_CODES)
