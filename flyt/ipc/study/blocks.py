# SPDX-License-Identifier: Apache-2.0
"""Blocks of the second process, allocated and exported there, opened here: both kinds of sharing.

"vmm" is CUDA's virtual memory management, as `flyt.ipc` uses it; "legacy" is cudaIpcGetMemHandle.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from flyt.ipc.buffer import Buffer, IPCBufferDescriptor
from flyt.ipc.driver import get_driver
from flyt.ipc.memory import VirtualMemoryResource
from flyt.ipc.study.peer import Peer

if TYPE_CHECKING:
    from flyt.ipc.study.gpu import Gpu

VMM, LEGACY = "vmm", "legacy"
WAY_NAMES = {VMM: "VMM", LEGACY: "legacy IPC"}


def ways() -> tuple[str, ...]:
    """The kinds of sharing that this driver has."""
    return (VMM, LEGACY) if get_driver().kind == "cuda" else (VMM,)


def memory_in_use() -> Callable[[], int | None]:
    """What tells the bytes in use on the device, by everybody; on the emulated one nothing does."""
    if get_driver().kind != "cuda":
        return lambda: None
    from flyt.ipc.study.gpu import Gpu

    return Gpu().used_memory


@dataclasses.dataclass(slots=True)
class Opened:
    """Another process's block, here.

    Attributes
    ----------
    address : int
    mapped_size : int
    seconds : dict of str to float
        What each step took, in the process that did it.
    close : callable
    number : int
        The second process's name for it.
    """

    address: int
    mapped_size: int
    seconds: dict[str, float]
    close: Callable[[], None]
    number: int


def timed(seconds: dict[str, float], step: str, call: Callable[[], Any]) -> Any:
    """Call, and note how long it took."""
    start = time.perf_counter()
    result = call()
    seconds[step] = time.perf_counter() - start
    return result


def open_block(peer: Peer, way: str, size: int) -> Opened:
    """Have the second process share a block, and open it here."""
    answer, fds = peer.ask_fds("share", way=way, size=size)
    seconds = dict(answer["seconds"])
    try:
        if way == LEGACY:
            from flyt.ipc.study.gpu import close_legacy, open_legacy

            handle = bytes.fromhex(answer["handle"])
            address = timed(seconds, "import and map", lambda: open_legacy(handle))
            return Opened(address, size, seconds, lambda: close_legacy(address), answer["number"])
        resource = VirtualMemoryResource()
        descriptor = IPCBufferDescriptor(
            bytes.fromhex(answer["key"]), bytes.fromhex(answer["uuid"]), size,
            tuple(answer["chunks"]), tuple(fds),
        )  # fmt: skip
        buffer = timed(
            seconds, "import and map", lambda: Buffer.from_ipc_descriptor(resource, descriptor)
        )
        return Opened(buffer.handle, buffer.mapped_size, seconds, buffer.close, answer["number"])
    finally:
        for fd in fds:
            os.close(fd)


class _Owner:
    """In the second process: the blocks that it has shared."""

    def __init__(self) -> None:
        self._gpu: Gpu | None = None
        self._blocks: dict[int, tuple[str, Any]] = {}
        self._made = 0

    def gpu(self) -> Gpu:
        if self._gpu is None:
            from flyt.ipc.study.gpu import Gpu

            self._gpu = Gpu()
        return self._gpu

    def start(self, request: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        """Make its context, if there is a GPU, so that no later answer has to wait for it."""
        del request, fds
        if get_driver().kind == "cuda":
            self.gpu()
        return {}, []

    def share(
        self, request: dict[str, Any], fds: list[int]
    ) -> tuple[dict[str, Any], Sequence[int]]:
        del fds
        size = int(request["size"])
        seconds: dict[str, float] = {}
        self._made += 1
        answer: dict[str, Any] = {"number": self._made, "seconds": seconds}
        if request["way"] == LEGACY:
            from flyt.ipc.study.gpu import export_legacy

            gpu = self.gpu()
            address = timed(seconds, "allocate", lambda: gpu.allocate(size))
            self._blocks[self._made] = (LEGACY, address)
            answer["handle"] = timed(seconds, "export", lambda: export_legacy(address)).hex()
            return answer, ()
        resource = VirtualMemoryResource()
        block = timed(seconds, "allocate", lambda: resource.allocate(size))
        self._blocks[self._made] = (VMM, block)
        shared = timed(seconds, "export", lambda: block.ipc_descriptor)
        answer |= {"key": shared.key.hex(), "uuid": shared.uuid.hex(), "chunks": shared.chunks}
        return answer, shared.fds

    def free(self, request: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        del fds
        way, block = self._blocks.pop(request["number"])
        seconds: dict[str, float] = {}
        timed(seconds, "free", (lambda: self.gpu().free(block)) if way == LEGACY else block.close)
        return {"seconds": seconds}, []

    def address_of(self, number: int) -> int:
        way, block = self._blocks[number]
        return int(block if way == LEGACY else block.handle)


_owner = _Owner()

address_of = _owner.address_of
"""In the second process: where a block of its own lies."""

JOBS = {"start": _owner.start, "share": _owner.share, "free": _owner.free}
"""What the second process does of this."""
