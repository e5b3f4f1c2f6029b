# SPDX-License-Identifier: Apache-2.0
"""`Terms`: what the daemon offers to every session, and what clients are told at the door."""

from __future__ import annotations

import os
from typing import Any

from flyt.backend.doorbell import Doorbell, free_bell
from flyt.backend.options import Options
from flyt.backend.orders import Opened
from flyt.backend.pool import WorkerPool
from flyt.backend.private import PrivateRegions
from flyt.backend.served import NO_REGION, ServedRegion
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.handshake import Feature
from flyt.rpc.messages import CREDITS, INLINE_CHUNK, Welcome
from flyt.shm.layout import Geometry

NO_DEVICE = 100
"""cudaErrorNoDevice: this client and this backend will never work together."""


class Terms:
    """The terms of one daemon.

    Parameters
    ----------
    options : Options
    pool : WorkerPool

    Attributes
    ----------
    served : ServedRegion or None
        The region, once there is one.
    private : PrivateRegions or None
        Those of the clients, likewise.
    doorbell : Doorbell or None
        Where guests ring, likewise.
    """

    def __init__(self, options: Options, pool: WorkerPool) -> None:
        self._options = options
        self._pool = pool
        self.served: ServedRegion | None = None
        self.private: PrivateRegions | None = None
        self.doorbell: Doorbell | None = None

    @property
    def memory_limit(self) -> int:
        """Bytes of device memory per session; 0 for no limit."""
        return self._options.memory_limit

    @property
    def sessions_per_user(self) -> int:
        """How many sessions one principal may have."""
        return self._options.sessions_per_user

    @property
    def session_ports(self) -> str:
        """TCP ports of session sockets: ``*`` or ``A-B``."""
        return self._options.session_ports

    @property
    def has_doorbell(self) -> bool:
        """Whether guests can ring."""
        return self.doorbell is not None

    def own_region(
        self, session: int, token: bytes, uid: str, endpoint: Endpoint
    ) -> tuple[int, Geometry] | None:
        """A region for this session alone, if that is how regions are given here: only over a UNIX
        socket can it be handed out."""
        if self.private is None or endpoint.scheme != "ipc":
            return None
        fd = self.private.make(session, token, uid, endpoint)
        return (fd, self.private.geometry) if fd >= 0 else None

    def not_opened(self, session: int) -> None:
        """A worker could not open this session."""
        if self.private is not None:
            self.private.release(session)

    def free_bell(self) -> int:
        """A bell that no session has; 0 if there is none."""
        return free_bell(r.bell for worker in self._pool for r in worker.sessions.values())

    def welcome(
        self,
        opened: Opened,
        token: bytes,
        snapshot: dict[str, Any],
        features: frozenset[Feature],
        bell: int,
    ) -> Welcome:
        """The words of welcome to a session that has its socket."""
        served = self.served
        if self.private is not None:
            shared = self.private.welcome(opened.session)
        elif served is None or Feature.REGION not in features or not served.is_whole():
            shared = NO_REGION
        else:
            served.mend()
            shared = served.welcome()
        return Welcome(
            session=opened.session,
            token=token,
            port=opened.port,
            path=os.path.basename(opened.path),
            credits=CREDITS,
            inline_chunk=INLINE_CHUNK,
            heartbeat_ms=self._options.heartbeat_ms,
            features=tuple(sorted(features)),
            snapshot=snapshot,
            bell=bell,
            **shared,
        )
