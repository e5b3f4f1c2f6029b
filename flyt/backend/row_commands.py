# SPDX-License-Identifier: Apache-2.0
"""What a session does with rows of memory: cudaMemcpy2D and cudaMemset2D."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flyt.backend.blocks import Block
from flyt.backend.devices.base import Device, Handle, Row
from flyt.backend.memory_commands import inline, put
from flyt.errors import DeviceError, ProtocolError
from flyt.rpc import messages as m

if TYPE_CHECKING:
    from flyt.backend.session import Session

INVALID_PITCH = 12


def _checked(row: Row, width: int, height: int) -> int:
    """The bytes from the first to the last of the rows; the frontend sends none that overlap."""
    if not width or not height:
        raise ProtocolError("rows without a byte are answered by the frontend")
    if height > 1 and row.pitch < width:
        raise DeviceError(INVALID_PITCH, f"rows of {width} bytes overlap at a pitch of {row.pitch}")
    return row.span(width, height)


def copy_rows(session: Session, command: m.CopyRows, _: list[bytes]) -> None:
    blocks: list[Block] = []

    def located(row: Row, way: m.Way) -> Row:
        span = _checked(row, command.width, command.height)
        if command.way == way:
            registry = session.services.registry
            address = registry.locate(session.id, command.pid, row.address, span)
            return Row(address, row.pitch)
        blocks.append(session.holdings.blocks.find(row.address, span))
        return row

    if command.way > max(m.Way):
        raise ProtocolError(f"there is no way {command.way} for rows")
    source = located(Row(command.source, command.source_pitch), m.Way.IN)
    destination = located(Row(command.destination, command.destination_pitch), m.Way.OUT)

    def issue(device: Device, handle: Handle) -> None:
        device.copy_rows(destination, source, command.width, command.height, handle)

    size = command.width * command.height
    session.holdings.moved += size
    put(session, command, size, blocks, issue)


def fill_rows(session: Session, command: m.FillRows, _: list[bytes]) -> None:
    rows = Row(command.address, command.pitch)
    span = _checked(rows, command.width, command.height)
    block = session.holdings.blocks.find(command.address, span)

    def issue(device: Device, handle: Handle) -> None:
        device.fill_rows(rows, command.value, command.width, command.height, handle)

    put(session, command, command.width * command.height, [block], issue)


def push_rows(session: Session, command: m.PushRows, payload: list[bytes]) -> None:
    rows, block, size = _inline_rows(session, command)
    if len(payload) != 1 or len(payload[0]) != size:
        raise ProtocolError("a PUSH_ROWS whose payload is not of the size it names")

    def issue(slot: int, device: Device, handle: Handle) -> None:
        packed = Row(slot, command.width)
        device.copy_rows(rows, packed, command.width, command.height, handle)

    inline(session, command, size, block, issue, payload[0])


def pull_rows(session: Session, command: m.PullRows, _: list[bytes]) -> None:
    rows, block, size = _inline_rows(session, command)

    def issue(slot: int, device: Device, handle: Handle) -> None:
        packed = Row(slot, command.width)
        device.copy_rows(packed, rows, command.width, command.height, handle)

    inline(session, command, size, block, issue)


def _inline_rows(session: Session, command: m.PushRows | m.PullRows) -> tuple[Row, Block, int]:
    rows = Row(command.address, command.pitch)
    span = _checked(rows, command.width, command.height)
    block = session.holdings.blocks.find(command.address, span)
    return rows, block, command.width * command.height


HANDLERS: dict[type, Callable[[Any, Any, list[bytes]], None]] = {
    m.CopyRows: copy_rows,
    m.FillRows: fill_rows,
    m.PushRows: push_rows,
    m.PullRows: pull_rows,
}
