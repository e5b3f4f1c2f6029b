# SPDX-License-Identifier: Apache-2.0
"""One client of ``flyt demo``: moves random bytes to the device and back and compares every one.

It speaks JSON lines. Out: ``ready``, ``progress``, ``result`` or ``failed``. In: ``go`` starts the
copies, the end of the input ends the process; between the two it keeps its memory, so that the
page table can be looked at. What is compared, and with what, is plain NumPy: nothing of Flyt
judges Flyt.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt

import flyt as cudart

Bytes = npt.NDArray[np.uint8]

SMALLEST_PINNED = 64 << 10
"""One page frame of the smallest size; a region without even that is of no use."""

H2D = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
D2H = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost


class Failure(Exception):
    """The demo went wrong in this client; the text says where."""


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def checked(step: str, answer: tuple[Any, ...]) -> Any:
    """The value of a CUDA call's answer (None if it has none); `Failure` for an error."""
    error, *values = answer
    if error != cudart.cudaError_t.cudaSuccess:
        reason = cudart.last_failure()
        raise Failure(f"{step}: {error.name}" + (f": {reason}" if reason else ""))
    return values[0] if values else None


class Meter:
    """Bytes and seconds of one kind of copy."""

    def __init__(self) -> None:
        self.bytes = 0
        self.seconds = 0.0

    def add(self, size: int, started: float) -> None:
        self.seconds += time.perf_counter() - started
        self.bytes += size

    @property
    def gbps(self) -> float:
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0


class Client:
    """The buffers of one client and the copies between them.

    Parameters
    ----------
    piece : int
        Bytes of the pageable buffers and of the device block.
    pinned : int
        Bytes of the pinned buffer to try for; halved while the region has no room for it.
    """

    def __init__(self, piece: int, pinned: int) -> None:
        self.random = np.random.default_rng(int.from_bytes(os.urandom(16), "little"))
        self.source: Bytes = self.random.integers(0, 256, piece, dtype=np.uint8)
        self.target: Bytes = np.full(piece, 0xFF, np.uint8)  # written, so its pages are there
        self.device: int = checked("cudaMalloc", cudart.cudaMalloc(piece))
        self.pinned_address, self.pinned = self._allocate_pinned(min(pinned, piece))
        self.meters = {
            name: Meter() for name in ("h2d", "d2h", "pinned_h2d", "pinned_d2h", "memcpy")
        }

    def _allocate_pinned(self, size: int) -> tuple[int, Bytes]:
        while True:
            answer = cudart.cudaHostAlloc(size, 0)
            full = answer[0] == cudart.cudaError_t.cudaErrorMemoryAllocation
            if full and size // 2 >= SMALLEST_PINNED:
                size //= 2
                continue
            address: int = checked(f"cudaHostAlloc of {size} bytes", answer)
            memory = (ctypes.c_uint8 * size).from_address(address)
            return address, np.frombuffer(memoryview(memory).cast("B"), np.uint8)

    def refresh(self) -> None:
        """Change every byte of the source, so that no old copy can pass for a new one."""
        mask = self.random.integers(1, 256, 8, dtype=np.uint8).view(np.uint64)
        words = self.source.view(np.uint64)
        np.bitwise_xor(words, mask, out=words)

    def compare(self, what: str, got: Bytes, wanted: Bytes) -> None:
        if not np.array_equal(got, wanted):
            wrong = np.flatnonzero(got != wanted)
            raise Failure(f"{what}: {wrong.size} bytes differ, the first at offset {wrong[0]}")

    def to_device(self, meter: str, address: int, source: Any, size: int) -> None:
        started = time.perf_counter()
        checked("cudaMemcpy H2D", cudart.cudaMemcpy(address, source, size, H2D))
        # The call returns once the source has been taken; the copy counts when it has arrived.
        checked("cudaDeviceSynchronize", cudart.cudaDeviceSynchronize())
        self.meters[meter].add(size, started)
        say("progress", bytes=size)

    def to_host(self, meter: str, target: Any, address: int, size: int) -> None:
        started = time.perf_counter()
        checked("cudaMemcpy D2H", cudart.cudaMemcpy(target, address, size, D2H))
        self.meters[meter].add(size, started)
        say("progress", bytes=size)

    def pageable_turn(self) -> None:
        """The whole piece from pageable memory to the device, back, and by plain memcpy."""
        size = self.source.size
        self.refresh()
        self.to_device("h2d", self.device, self.source, size)
        self.to_host("d2h", self.target, self.device, size)
        self.compare("pageable copies", self.target, self.source)
        started = time.perf_counter()
        ctypes.memmove(self.target.ctypes.data, self.source.ctypes.data, size)
        self.meters["memcpy"].add(size, started)

    def pinned_turn(self) -> None:
        """The whole piece through the pinned buffer, part by part."""
        self.refresh()
        for offset in range(0, self.source.size, self.pinned.size):
            wanted = self.source[offset : offset + self.pinned.size]
            buffer = self.pinned[: wanted.size]
            buffer[:] = wanted
            self.to_device("pinned_h2d", self.device + offset, self.pinned_address, wanted.size)
            np.invert(buffer, out=buffer)
            self.to_host("pinned_d2h", self.pinned_address, self.device + offset, wanted.size)
            self.compare("pinned copies", buffer, wanted)

    def result(self) -> dict[str, Any]:
        m = self.meters
        return {
            "pid": os.getpid(),
            "bytes_h2d": m["h2d"].bytes + m["pinned_h2d"].bytes,
            "bytes_d2h": m["d2h"].bytes + m["pinned_d2h"].bytes,
            **{f"{name}_gbps": round(meter.gbps, 3) for name, meter in m.items()},
        }

    def close(self) -> None:
        del self.pinned
        checked("cudaFreeHost", cudart.cudaFreeHost(self.pinned_address))
        checked("cudaFree", cudart.cudaFree(self.device))


def run(total: int, piece: int, pinned: int) -> None:
    client = Client(piece, pinned)
    say("ready", pid=os.getpid(), pinned=client.pinned.size)
    if sys.stdin.readline() != "go\n":
        raise Failure("the demo ended before it began")
    for _ in range(total // piece):
        client.pageable_turn()
        client.pinned_turn()
    say("result", **client.result())
    sys.stdin.read()
    client.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--total", type=int, required=True, help="bytes each way and kind")
    parser.add_argument("--piece", type=int, required=True, help="bytes a turn; divides the total")
    parser.add_argument("--pinned", type=int, required=True, help="bytes of the pinned buffer")
    options = parser.parse_args()
    try:
        run(options.total, options.piece, options.pinned)
    except Failure as failure:
        say("failed", text=str(failure))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
