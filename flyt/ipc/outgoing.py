# SPDX-License-Identifier: Apache-2.0
"""`Outgoing`: an array on its way to another process."""

from __future__ import annotations

import dataclasses
from typing import Any

from flyt.ipc.messages import Block, Layout


@dataclasses.dataclass(slots=True, eq=False)
class Outgoing:
    """An array on its way out: what is said of it, and what keeps it alive meanwhile."""

    block: Block | None
    fds: tuple[int, ...]
    layout: Layout
    event: bytes
    keep: list[Any]
    """Dropped once the receiver has let go."""
