# SPDX-License-Identifier: Apache-2.0
"""The answer to AskStatus: who is connected, and who holds how much of the region."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping
from typing import Any

from flyt.backend.grants import FrameDesk
from flyt.backend.private import PrivateRegions
from flyt.backend.workers import WorkerProcess

FIGURES = ("device_bytes", "in_flight", "bytes_moved", "errors")
"""What a worker says of a session."""


def status_report(
    device: str,
    isolation: str,
    workers: Iterable[WorkerProcess],
    region: tuple[str, int],
    desk: FrameDesk | PrivateRegions | None,
    garbage: int,
    suspended: Container[int],
    figures: Mapping[int, Mapping[str, Any]],
) -> dict[str, Any]:
    """What `flyt.rpc.messages.StatusReport` carries.

    Parameters
    ----------
    device, isolation : str
        ``--device`` and ``--isolation``, as given.
    workers : iterable of WorkerProcess
    region : tuple of str and int
        Path and epoch; "" and 0 where the daemon serves without one.
    desk : FrameDesk, PrivateRegions or None
    garbage : int
        How many messages at the main endpoints were no HELLO.
    suspended : container of int
        Sessions.
    figures : mapping
        What workers say of their sessions; who is missing is shown with None.
    """
    running = list(workers)
    return {
        "pid": os.getpid(),
        "device": device,
        "isolation": isolation,
        "region": region[0],
        "epoch": region[1],
        "sessions": [
            {
                "session": record.session,
                "pid": record.pid,
                "program": record.program,
                "principal": str(worker.principal),
                "worker": worker.pid,
                "frames": desk.frames_of(record.session) if desk is not None else 0,
                "since": record.since,
                "suspended": record.session in suspended,
                **{name: figures.get(record.session, {}).get(name) for name in FIGURES},
            }
            for worker in running
            for record in worker.sessions.values()
        ],
        "workers": [
            {
                "pid": worker.pid,
                "principal": str(worker.principal) if worker.principal is not None else "",
                "sessions": len(worker.sessions),
                "state": worker.state,
            }
            for worker in running
        ],
        "keeper": desk.keeper if desk is not None else 0,
        "frames": (
            desk.figures() if desk is not None else {"total": 0, "granted": 0, "reclaiming": 0}
        ),
        "garbage": garbage,
    }
