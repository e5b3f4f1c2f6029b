# SPDX-License-Identifier: Apache-2.0
"""Images of device code: what a worker keeps, and what it gives to the driver.

cuModuleLoadData takes no length: it believes what the image says of itself. So what the image says
is held against its size first; the driver still parses a stranger's bytes, as it does everywhere.
"""

from __future__ import annotations

import collections
import hashlib
import struct
import threading

from flyt.errors import DeviceError
from flyt.rpc.kernel_commands import MAX_IMAGE_BYTES

INVALID_IMAGE = 200
MEMORY_ALLOCATION = 2

STORE_BYTES = 256 << 20
"""Images a worker keeps, and as much again of those that are on their way to it."""

_ELF = b"\x7fELF"
_FATBIN = struct.pack("<I", 0xBA55ED50)
_NOBITS = 8
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")


class ImageStore:
    """Images by the digest of their bytes, the least recently used go first. For all threads."""

    def __init__(self, limit: int = STORE_BYTES) -> None:
        self._limit = limit
        self._images: collections.OrderedDict[bytes, bytes] = collections.OrderedDict()
        self._used = self._coming = 0
        self._lock = threading.Lock()

    def get(self, digest: bytes) -> bytes | None:
        """The bytes of an image, or None."""
        with self._lock:
            image = self._images.get(digest)
            if image is not None:
                self._images.move_to_end(digest)
            return image

    def put(self, image: bytes) -> bytes:
        """Keep an image; its digest."""
        digest = hashlib.sha256(image).digest()
        self.keep(digest, image)
        return digest

    def keep(self, key: bytes, data: bytes) -> None:
        """Keep bytes under a key that is a digest of what they follow from."""
        with self._lock:
            if key not in self._images:
                self._images[key] = data
                self._used += len(data)
            while self._used > self._limit and len(self._images) > 1:
                _, gone = self._images.popitem(last=False)
                self._used -= len(gone)

    def expect(self, size: int) -> None:
        """Room for an image that is on its way; DeviceError cudaErrorMemoryAllocation."""
        with self._lock:
            if size > MAX_IMAGE_BYTES or self._coming + size > self._limit:
                raise DeviceError(
                    MEMORY_ALLOCATION,
                    f"an image of {size} bytes: the backend takes {MAX_IMAGE_BYTES} at most, and "
                    f"{self._limit} at once",
                )
            self._coming += size

    def arrived(self, size: int) -> None:
        """What was expected is there, or never will be."""
        with self._lock:
            self._coming -= size


class Upload:
    """An image whose parts are coming."""

    def __init__(self, digest: bytes, total: int) -> None:
        self.digest = digest
        self.total = total
        self.data = bytearray()

    def is_whole(self) -> bool:
        return len(self.data) == self.total


def checked(image: bytes) -> bytes:
    """The image, if its own lengths lie within it.

    Raises
    ------
    DeviceError
        cudaErrorInvalidKernelImage (200).
    """
    try:
        if image.startswith(_ELF):
            _check_elf(image)
        elif image.startswith(_FATBIN):
            _check_fatbin(image)
        else:
            _check_ptx(image)
    except struct.error as exc:
        raise _bad("it ends within a header") from exc
    return image


def _bad(why: str) -> DeviceError:
    return DeviceError(INVALID_IMAGE, f"no image of device code: {why}")


def _check_elf(image: bytes) -> None:
    if image[4:6] != b"\x02\x01":
        raise _bad("an ELF file, but not of 64 bits and little-endian")
    program, sections = struct.unpack_from("<QQ", image, 32)
    program_size, programs, section_size, count = struct.unpack_from("<4H", image, 54)
    if section_size != _SECTION_HEADER.size or sections + count * section_size > len(image):
        raise _bad("its table of sections leaves it")
    if program + programs * program_size > len(image):
        raise _bad("its table of segments leaves it")
    for n in range(count):
        _, kind, _, _, offset, size, *_ = _SECTION_HEADER.unpack_from(
            image, sections + n * section_size
        )
        if kind not in (0, _NOBITS) and offset + size > len(image):
            raise _bad(f"its section {n} leaves it")


def _check_fatbin(image: bytes) -> None:
    _, _, header, size = struct.unpack_from("<IHHQ", image)
    if header + size > len(image):
        raise _bad("its payload leaves it")


def _check_ptx(image: bytes) -> None:
    text = image.rstrip(b"\0")
    if b"\0" in text or b".version" not in text:
        raise _bad("neither cubin nor fatbin nor PTX")
