# SPDX-License-Identifier: Apache-2.0
"""Images as programs give them: bytes, text, or the address of an image in memory."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from flyt.driver.convention import INVALID_VALUE
from flyt.errors import DeviceError

_ELF, _FATBIN, _WRAPPER = b"\x7fELF", 0xBA55ED50, 0x466243B1
_SECTION = struct.Struct("<IIQQQQIIQQ")
_NOBITS = 8


def image_of(given: Any) -> bytes:
    """The bytes of an image.

    Parameters
    ----------
    given : bytes, str, buffer, int
        An address is read as far as what lies there says that it goes, as CUDA does.
    """
    if isinstance(given, str):
        return given.encode()
    if isinstance(given, int):
        return _at(given)
    try:
        return bytes(memoryview(given))
    except TypeError:
        return _at(int(given))


def _at(address: int) -> bytes:
    if not address:
        raise DeviceError(INVALID_VALUE, "NULL is no image")
    (magic,) = struct.unpack("<I", ctypes.string_at(address, 4))
    if magic == _WRAPPER:  # what nvcc links into programs: version, then a pointer
        (address,) = struct.unpack("<Q", ctypes.string_at(address + 8, 8))
        (magic,) = struct.unpack("<I", ctypes.string_at(address, 4))
    if magic == _FATBIN:
        _, _, header, size = struct.unpack("<IHHQ", ctypes.string_at(address, 16))
        return ctypes.string_at(address, header + size)
    if magic == struct.unpack("<I", _ELF)[0]:
        return ctypes.string_at(address, _elf_size(address))
    return ctypes.string_at(address)


def _elf_size(address: int) -> int:
    head = ctypes.string_at(address, 64)
    program, sections = struct.unpack_from("<QQ", head, 32)
    program_size, programs, section_size, count = struct.unpack_from("<4H", head, 54)
    end: int = max(64, program + programs * program_size, sections + count * section_size)
    for n in range(count):
        fields = _SECTION.unpack(ctypes.string_at(address + sections + n * section_size, 64))
        if fields[1] != _NOBITS:
            end = max(end, fields[4] + fields[5])
    return end
