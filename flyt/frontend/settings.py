# SPDX-License-Identifier: Apache-2.0
"""What the user may set, read from the environment once per session."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from flyt import environment as env
from flyt.errors import ConfigurationError
from flyt.rpc.curve import MAKE_KEYS
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.keys import ClientKeys, read_pair, read_public
from flyt.shm.runtime_dir import runtime_dir

FEW_SLOTS, MANY_SLOTS = 4, 8
"""Two overlap copy and DMA, two more hide the control message's way. Where the region has room,
twice as many let several be filled or drained at once."""

LARGEST_SLOT = 8 << 20
"""Bytes. Some 150 microseconds of DMA: longer than what Python takes for a slot, and short enough
for the first and the last slot, whose copy and DMA overlap with nothing."""

SHARE_OF_REGION = 32
"""One session stages through at most this part of the region, so that 32 clients fit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Everything a session is made from.

    Attributes
    ----------
    endpoint : str
        Where the backend listens, or ``emulated:[options]`` for a private one.
    region : str
        Path of the region here; "" takes the backend's word for it.
    key, server_key : str
        Paths of this client's secret key and of the backend's public key, for TCP; "" for none.
    slots : int
        Staging slots, at least 2; 0 derives them from the region's size.
    slot_size : int
        Bytes of one slot; 0 derives it from the region's size.
    copy_threads : int
        Threads of the copy engine, the caller's included; 0 for the default.
    connect_seconds : float
        Time limit of handshake and attach.
    """

    endpoint: str
    region: str = ""
    key: str = ""
    server_key: str = ""
    slots: int = 0
    slot_size: int = 0
    copy_threads: int = 0
    connect_seconds: float = 15.0

    @classmethod
    def read(
        cls,
        endpoint: str | None = None,
        region: str | None = None,
        key: str | None = None,
        server_key: str | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> Settings:
        """Arguments first, then ``FLYT_*`` variables, then the default local endpoint.

        Raises
        ------
        ConfigurationError
            Names the variable whose value can't be used.
        """
        env.check(environ)
        chosen = env.BACKEND.read(environ)
        if not endpoint and chosen:
            try:
                Endpoint.parse(chosen)
            except ConfigurationError as exc:
                raise ConfigurationError(f"{env.BACKEND.name}: {exc}") from exc
        return cls(
            endpoint=endpoint or chosen or f"ipc://{runtime_dir()}/backend.sock",
            region=region if region is not None else env.REGION.read(environ),
            key=key if key is not None else env.KEY.read(environ),
            server_key=server_key if server_key is not None else env.SERVER_KEY.read(environ),
            slots=env.STAGING_SLOTS.read(environ),
            slot_size=env.SLOT_SIZE.read(environ),
            copy_threads=env.COPY_THREADS.read(environ),
        )

    def keys(self) -> ClientKeys | None:
        """The keys for TCP, read from their files; None if there are none.

        Raises
        ------
        ConfigurationError
            There is only one of the two, or one can't be read, or others can read the secret one.
        """
        if not (self.key or self.server_key):
            return None
        if not (self.key and self.server_key):
            missing = "FLYT_SERVER_KEY" if self.key else "FLYT_KEY"
            raise ConfigurationError(f"{missing} is missing: {MAKE_KEYS}")
        return ClientKeys(
            read_pair(self.key, "FLYT_KEY"), read_public(self.server_key, "FLYT_SERVER_KEY")
        )

    def staging(self, region_size: int, page_size: int) -> tuple[int, int]:
        """Number of slots and bytes of each, whole pages together, for a region of this size."""
        share = region_size // SHARE_OF_REGION
        has_room = not self.slot_size and share >= MANY_SLOTS * LARGEST_SLOT
        slots = self.slots or (MANY_SLOTS if has_room else FEW_SLOTS)
        size = self.slot_size or min(LARGEST_SLOT, share // slots)
        size = max(4096, size // 4096 * 4096)
        pages = max(1, -(-size * slots // page_size))
        if not self.slot_size:
            size = min(LARGEST_SLOT, pages * page_size // slots // 4096 * 4096)
        return slots, size
