# SPDX-License-Identifier: Apache-2.0
"""What ``flyt demo`` shows: the inverted page table as a map, and a table of speeds.

Owners are told apart by letters, not by colour alone: output may be a file.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from flyt.shm.layout import FrameState
from flyt.shm.table import Entry

COLUMNS = 64
"""Cells in a line: fits an 80-column terminal with the frame number in front."""

MOST_CELLS = 12 * COLUMNS
"""A larger table shows several frames in one cell, so that it still fits a screen."""

COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")

FREE, RESERVED, MIXED = "·", "x", "+"


def owned_frames(entries: Iterable[Entry]) -> int:
    """How many frames of a snapshot belong to some process."""
    return sum(1 for entry in entries if entry.state == FrameState.OWNED)


def _runs(frames: Sequence[int]) -> int:
    return sum(1 for i, f in enumerate(frames) if i == 0 or f != frames[i - 1] + 1)


def _cell(owners: Sequence[str]) -> str:
    """One character for a few frames: capital if they are all one owner's, small if but a part."""
    kinds = set(owners)
    if len(kinds) == 1:
        return owners[0]
    kinds.discard(FREE)
    return kinds.pop().lower() if len(kinds) == 1 else MIXED


def page_table(entries: Sequence[Entry], page_count: int, page_size: int) -> Text:
    """Draw which frames belong to which process.

    Parameters
    ----------
    entries : sequence of Entry
        The frames that are not free.
    page_count, page_size : int
        Frames in the region, bytes in a frame.
    """
    frames: dict[int, list[int]] = {}
    for entry in sorted(entries):
        if entry.state == FrameState.OWNED:
            frames.setdefault(entry.pid, []).append(entry.frame)
    letters = dict(zip(sorted(frames), string.ascii_uppercase, strict=False))
    colours = {letter: COLOURS[i % len(COLOURS)] for i, letter in enumerate(letters.values())}

    owners = [FREE] * page_count
    for entry in entries:
        owned = entry.state == FrameState.OWNED
        owners[entry.frame] = letters.get(entry.pid, MIXED) if owned else RESERVED

    a_cell = -(-page_count // MOST_CELLS)
    text = Text(no_wrap=True)
    for start in range(0, page_count, a_cell * COLUMNS):
        text.append(f"{start:>8}  ", "dim")
        for first in range(start, min(start + a_cell * COLUMNS, page_count), a_cell):
            cell = _cell(owners[first : first + a_cell])
            text.append(cell, colours.get(cell.upper(), "dim"))
        text.append("\n")
    for pid, letter in letters.items():
        mine = frames[pid]
        runs = _runs(mine)
        text.append(f"\n       {letter}  ", colours[letter])
        text.append(
            f"pid {pid}: {len(mine)} frames, {len(mine) * page_size / 2**20:.1f} MiB, "
            f"in {runs} run{'s' if runs > 1 else ''}"
        )
    free = Counter(owners)[FREE]
    text.append(f"\n       {FREE}  {free} of {page_count} frames of {page_size >> 10} KiB free")
    if a_cell > 1:
        text.append(
            f"\n          a cell is {a_cell} frames; small letter: in part, {MIXED}: several"
        )
    return text


def speeds(clients: Sequence[Mapping[str, Any]], memcpy_gbps: float) -> Table:
    """Tabulate each client's speeds beside that of a plain memcpy."""
    table = Table(title="GB/s, all clients at once", title_justify="left")
    table.add_column("pid", justify="right")
    columns = {
        "pageable H2D": "h2d_gbps",
        "pageable D2H": "d2h_gbps",
        "pinned H2D": "pinned_h2d_gbps",
        "pinned D2H": "pinned_d2h_gbps",
    }
    for title in ("MiB", *columns):
        table.add_column(title, justify="right")
    for client in clients:
        moved = f"{client['bytes_h2d'] >> 20} + {client['bytes_d2h'] >> 20}"
        table.add_row(
            str(client["pid"]), moved, *(f"{client[key]:.2f}" for key in columns.values())
        )
    table.caption = f"plain memcpy of the same bytes: {memcpy_gbps:.2f} GB/s a process"
    table.caption_justify = "left"
    return table
