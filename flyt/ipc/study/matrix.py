# SPDX-License-Identifier: Apache-2.0
"""Question 3: each allocator with each call that exports, by trying it.

One process allocates and exports, a second one imports and compares all bytes; this one only
carries what crosses, so that a call that takes its process down costs one cell.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flyt.errors import DeviceError, FlytError
from flyt.ipc.study.peer import Peer
from flyt.ipc.study.report import Row

if TYPE_CHECKING:
    from flyt.ipc.study.allocations import Allocation
    from flyt.ipc.study.gpu import Gpu

SHARED = "shared"
EXPORTED = "exported only"
REFUSED = "refused"
UNALLOCATED = "not allocated"
BROKEN = "broken"
RESULTS = (SHARED, EXPORTED, REFUSED, UNALLOCATED, BROKEN)


class _Pair:
    """The two processes; whoever has died is replaced."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}

    def ask(self, who: str, job: str, fds: tuple[int, ...], **arguments: Any) -> Any:
        if who not in self._peers:
            self._peers[who] = Peer("matrix")
            self._peers[who].ask("start")
        try:
            return self._peers[who].ask_fds(job, fds, **arguments)
        except DeviceError:
            raise
        except FlytError:  # it has ended, or answers no more
            self._peers.pop(who).close()
            raise

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


def measure() -> Iterator[Row]:
    """One row a cell."""
    from flyt.ipc.study.allocations import ALLOCATORS, WAYS

    with contextlib.closing(_Pair()) as pair:
        for allocator in ALLOCATORS:
            for way in WAYS:
                yield _cell(pair, allocator, way)


def _cell(pair: _Pair, allocator: str, way: str) -> Row:
    row: Row = {
        "driver": "cuda", "allocator": allocator, "export": way, "result": UNALLOCATED,
        "export_code": None, "import_code": None, "detail": "",
    }  # fmt: skip
    step = "export_code"
    fds: list[int] = []
    try:
        pair.ask("exporter", "allocate", (), allocator=allocator)
        row["result"] = REFUSED
        answer, fds = pair.ask("exporter", "export", (), allocator=allocator, way=way)
        row[step] = 0
        step = "import_code"
        row["result"] = EXPORTED
        arguments = {"way": way, "octets": answer["octets"]}
        same = pair.ask("importer", "import", tuple(fds), **arguments)[0]["same"]
        row[step] = 0
        row["result"] = SHARED if same else BROKEN
        if not same:
            row["detail"] = "the bytes are not those that were written"
    except DeviceError as exc:
        row[step], row["detail"] = exc.code, exc.detail
    except FlytError as exc:
        row["result"], row["detail"] = BROKEN, str(exc)
    finally:
        for fd in fds:
            os.close(fd)
    return row


def verdict(rows: list[Row]) -> str:
    """What the rows say: which cells work."""
    told = []
    for way in dict.fromkeys(row["export"] for row in rows):
        here = [row for row in rows if row["export"] == way]
        works = [row["allocator"] for row in here if row["result"] == SHARED]
        exported = [row["allocator"] for row in here if row["result"] == EXPORTED]
        text = f"{way}: {'; '.join(works) or 'shares nothing'}"
        if exported:
            text += f" (exported, but not imported: {'; '.join(exported)})"
        told.append(text)
    broken = [f"{r['allocator']} × {r['export']}" for r in rows if r["result"] == BROKEN]
    if broken:
        told.append(f"BROKEN: {'; '.join(broken)}")
    return "cuda: what is shared, all bytes intact: " + " | ".join(told)


class _Cells:
    """In the exporter and the importer."""

    def __init__(self) -> None:
        self._gpu: Gpu | None = None
        self._memory: dict[str, Allocation] = {}

    def start(self, request: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        del request, fds
        self._device()
        return {}, []

    def _device(self) -> Gpu:
        from flyt.ipc.study.gpu import Gpu

        if self._gpu is None:
            self._gpu = Gpu()
        return self._gpu

    def allocate(self, request: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        """Once for an allocator."""
        del fds
        from flyt.ipc.study.allocations import ALLOCATORS

        name = request["allocator"]
        if name not in self._memory:
            memory = ALLOCATORS[name]()
            memory.fill(self._device())
            self._memory[name] = memory
        return {}, []

    def export(
        self, request: dict[str, Any], fds: list[int]
    ) -> tuple[dict[str, Any], tuple[int, ...]]:
        del fds
        from flyt.ipc.study.allocations import WAYS

        exported = WAYS[request["way"]].export(self._memory[request["allocator"]])
        return {"octets": exported.octets.hex()}, exported.fds

    def receive(self, request: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        from flyt.ipc.study.allocations import PATTERN, SIZE, WAYS, Exported

        exported = Exported(bytes.fromhex(request["octets"]), tuple(fds))
        octets = WAYS[request["way"]].receive(exported, self._device())
        return {"same": octets == bytes([PATTERN]) * SIZE}, []


_cells = _Cells()

JOBS = {
    "start": _cells.start,
    "allocate": _cells.allocate,
    "export": _cells.export,
    "import": _cells.receive,
}
"""What the second processes do of this."""
