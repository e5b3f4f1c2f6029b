# SPDX-License-Identifier: Apache-2.0
"""Every byte of the region that has a fixed place, declared once.

::

    0            superblock
    4096         inverted page table: one 32-byte entry per page frame
    data_offset  page frame 0, 1, 2, … (aligned to the page size)

All fields are little-endian. Words that both sides race on (the magic, the frame states, the
proofs) are aligned to 8 bytes and are read and written as one native 8-byte access; hosts with
CUDA are little-endian, so native is right.
"""

from __future__ import annotations

import dataclasses
import struct
from enum import IntEnum

from flyt.errors import ConfigurationError, RegionError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

MAGIC = int.from_bytes(b"FLYTSHM\0", "little")
LAYOUT_VERSION = 1

SUPERBLOCK_FIELDS = (
    ("magic", "Q"),
    ("version", "I"),
    ("page_size", "I"),
    ("page_count", "Q"),
    ("size", "Q"),
    ("data_offset", "Q"),
    ("epoch", "Q"),
    ("features", "Q"),
)
SUPERBLOCK = struct.Struct("<" + "".join(code for _, code in SUPERBLOCK_FIELDS))
MAGIC_OFFSET = 0

TABLE_OFFSET = 4096
"""The table starts on its own 4-KiB page, so that the superblock can be mapped alone."""
ENTRY = struct.Struct("<QQII8x")
"""State, session, pid, virtual page number, and 8 bytes that are zero."""
ENTRY_SIZE = ENTRY.size
OWNER = struct.Struct("<QII")
"""The owner's part of an entry: session, pid, virtual page number."""
STATE_OFFSET = 0
OWNER_OFFSET = 8

FRONTEND_PROOF = 0
"""Where in the control page the frontend writes its random word at ATTACH."""
BACKEND_PROOF = 8
"""Where in the control page the backend writes its random word at ATTACH."""

COMMAND_RING = 4096
"""Where in the control page the ring of commands begins (`flyt.shm.ring`)."""
REPLY_RING = 40_960
"""Where in the control page the ring of replies begins."""
RING_HEADER = 192
RING_ASLEEP = 128
"""Three words, each in a cache line of its own: written, taken, asleep."""
RING_ENTRY = 128
"""Bytes of one message's place: most commands and replies have under 60."""
COMMAND_PLACES = 256
REPLY_PLACES = 128
RINGS_END = REPLY_RING + RING_HEADER + REPLY_PLACES * RING_ENTRY

MIN_PAGE_SIZE = 64 * KIB
"""The largest base page of any kernel that CUDA runs on (aarch64): frames map one by one."""
MAX_PAGE_SIZE = 2 * MIB
"""A huge page; larger frames would only waste memory."""
SMALL_REGION = GIB
"""Below this size pages default to 64 KiB: 2-MiB pages would leave too few to share."""
MIN_PAGE_COUNT = 3
"""One session needs its control page and two staging slots."""
MAX_PAGE_COUNT = 1 << 20
"""As many frames as one message of the protocol may list; 2 TiB of 2-MiB pages."""


class FrameState(IntEnum):
    """What the first word of a table entry says."""

    FREE = 0
    OWNED = 1
    QUARANTINED = 2


def align_up(value: int, step: int) -> int:
    """The next multiple of ``step``."""
    return -(-value // step) * step


@dataclasses.dataclass(frozen=True, slots=True)
class Geometry:
    """Where the page frames of a region of ``size`` bytes lie; always as `plan` computes it."""

    size: int
    page_size: int
    page_count: int
    data_offset: int

    @classmethod
    def plan(cls, size: int, page_size: int | None = None) -> Geometry:
        """Lay out a region: as many frames as fit behind the header.

        Parameters
        ----------
        size : int
            Bytes of the whole region.
        page_size : int, optional
            A power of two from 64 KiB to 2 MiB; by default 2 MiB, or 64 KiB under 1 GiB.

        Raises
        ------
        ConfigurationError
            The page size is none of these, or the region is too small or too large for it.
        """
        if page_size is None:
            page_size = MIN_PAGE_SIZE if size < SMALL_REGION else MAX_PAGE_SIZE
        if not MIN_PAGE_SIZE <= page_size <= MAX_PAGE_SIZE or page_size & (page_size - 1):
            raise ConfigurationError(
                f"page size {page_size} is unusable: take a power of two "
                f"from {MIN_PAGE_SIZE} (64 KiB) to {MAX_PAGE_SIZE} (2 MiB)"
            )
        usable = size // page_size * page_size
        page_count = (usable - TABLE_OFFSET) // (page_size + ENTRY_SIZE)
        if page_count < MIN_PAGE_COUNT:
            raise ConfigurationError(
                f"a region of {size} bytes is too small for pages of {page_size} bytes: "
                f"give it at least {(MIN_PAGE_COUNT + 1) * page_size} bytes"
            )
        if page_count > MAX_PAGE_COUNT:
            raise ConfigurationError(
                f"a region of {size} bytes has {page_count} pages of {page_size} bytes, "
                f"more than {MAX_PAGE_COUNT}: take larger pages or a smaller region"
            )
        data_offset = align_up(TABLE_OFFSET + page_count * ENTRY_SIZE, page_size)
        return cls(size, page_size, page_count, data_offset)

    @property
    def header_size(self) -> int:
        """Bytes of the superblock and the table, in whole 4-KiB pages."""
        return align_up(TABLE_OFFSET + self.page_count * ENTRY_SIZE, TABLE_OFFSET)

    def offset(self, frame: int) -> int:
        """Where in the region a frame begins."""
        if not 0 <= frame < self.page_count:
            raise RegionError(f"frame {frame} is not among the region's {self.page_count} frames")
        return self.data_offset + frame * self.page_size


@dataclasses.dataclass(frozen=True, slots=True)
class Superblock:
    """The region's first bytes: what it is and how it is laid out."""

    geometry: Geometry
    epoch: int
    """Random, written at each format: tells a region from its successor under the same name."""
    features: int = 0

    def pack(self) -> bytes:
        """The bytes as they lie in the region."""
        g = self.geometry
        return SUPERBLOCK.pack(
            MAGIC,
            LAYOUT_VERSION,
            g.page_size,
            g.page_count,
            g.size,
            g.data_offset,
            self.epoch,
            self.features,
        )

    @classmethod
    def unpack(cls, data: bytes, file_size: int) -> Superblock:
        """Check the bytes that lie in a region of ``file_size`` bytes.

        Raises
        ------
        RegionError
            No magic, another layout version, or sizes that contradict each other or the file.
        """
        if len(data) < SUPERBLOCK.size:
            raise RegionError(f"a region of {file_size} bytes has no room for a superblock")
        magic, version, page_size, page_count, size, data_offset, epoch, features = (
            SUPERBLOCK.unpack_from(data)
        )
        if magic != MAGIC:
            raise RegionError(
                "the region holds no Flyt superblock: it was never formatted by flyt-backend, "
                "or it is another object"
            )
        if version != LAYOUT_VERSION:
            raise RegionError(
                f"the region has layout version {version}, this Flyt has {LAYOUT_VERSION}: "
                "install the same Flyt on both sides"
            )
        try:
            geometry = Geometry.plan(size, page_size)
        except ConfigurationError as exc:
            raise RegionError(f"the region's superblock is damaged: {exc}") from exc
        if (page_count, data_offset) != (geometry.page_count, geometry.data_offset):
            raise RegionError(
                f"the region's superblock is damaged: it claims {page_count} pages from offset "
                f"{data_offset}, its size allows {geometry.page_count} from {geometry.data_offset}"
            )
        if size > file_size:
            raise RegionError(
                f"the region's superblock claims {size} bytes but the file has {file_size}: "
                "it was truncated; restart flyt-backend"
            )
        return cls(geometry, epoch, features)
