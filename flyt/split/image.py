# SPDX-License-Identifier: Apache-2.0
"""An image of an upper half: all of it is checked, before anything is made of it."""

from __future__ import annotations

import os
import stat
import struct
import zlib
from dataclasses import dataclass

from flyt.errors import ConfigurationError
from flyt.split.layout import Window

MAGIC = b"FLYTSPLT"
VERSION = 2
PAGE = 4096
HALVES = 8
"""As in abi.h: SPLIT_HALVES."""

HEAD = struct.Struct("<8sIIQIIIIQQ")
HALF = struct.Struct("<16sQQQ")
CRC_AT = 12
"""Where the header's own checksum lies; it is 0 while that is computed."""

CHUNK = 1 << 20


@dataclass(frozen=True)
class Image:
    """What an image's header says.

    Attributes
    ----------
    upper, arena
        Windows of the upper half and of device memory, where they have to be again.
    halves
        Names of the lower halves, in the order of loading.
    """

    path: str
    upper: Window
    arena: Window
    halves: tuple[str, ...]


def _damaged(path: str, what: str) -> ConfigurationError:
    return ConfigurationError(f"{path} is damaged: {what}; use another image")


def _parse(path: str, page: bytes, size: int) -> tuple[Image, int]:
    """The header's content, and the checksum of what follows it."""
    if not page.startswith(MAGIC):
        raise ConfigurationError(f"{path} is no image of a split process")
    if len(page) < PAGE:
        raise _damaged(path, "it ends within its header")
    _, version, header_crc, length, crc, count, _, _, arena, arena_size = HEAD.unpack_from(page)
    if version != VERSION:
        raise ConfigurationError(
            f"{path} is an image of version {version}; this Flyt reads version {VERSION}: restart "
            "it with the Flyt that made it"
        )
    if zlib.crc32(page[:CRC_AT] + b"\0\0\0\0" + page[CRC_AT + 4 :]) != header_crc:
        raise _damaged(path, "its header's checksum is wrong")
    if size != PAGE + length:
        raise _damaged(path, f"it has {size} bytes in place of {PAGE + length}")
    if not 0 < count <= HALVES:
        raise _damaged(path, f"it names {count} halves")
    halves = [HALF.unpack_from(page, HEAD.size + HALF.size * index) for index in range(count)]
    names = tuple(name.rstrip(b"\0").decode(errors="replace") for name, *_ in halves)
    upper = Window(halves[0][2], halves[0][3])
    return Image(path, upper, Window(arena, arena_size), names[1:]), crc


def read(path: str) -> Image:
    """Read an image's header, and check all of the image.

    Raises
    ------
    ConfigurationError
        It can't be read, is no image, of another version, or damaged.
    """
    path = os.path.abspath(path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ConfigurationError(f"the image {path} is no regular file")
        with open(path, "rb") as file:
            found, wanted = _parse(path, file.read(PAGE), os.fstat(file.fileno()).st_size)
            crc = 0
            while chunk := file.read(CHUNK):
                crc = zlib.crc32(chunk, crc)
    except OSError as exc:
        raise ConfigurationError(f"the image {path} can't be read: {exc.strerror}") from exc
    if crc != wanted:
        raise _damaged(path, "its checksum is wrong")
    return found
