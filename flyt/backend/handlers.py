# SPDX-License-Identifier: Apache-2.0
"""Which function serves which command of a session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flyt.backend import (
    kernel_commands,
    memory_commands,
    pool_commands,
    row_commands,
    sharing_commands,
    stream_commands,
    window_commands,
)

HANDLERS: dict[type, Callable[[Any, Any, list[bytes]], None]] = {
    **window_commands.HANDLERS,
    **memory_commands.HANDLERS,
    **row_commands.HANDLERS,
    **pool_commands.HANDLERS,
    **sharing_commands.HANDLERS,
    **stream_commands.HANDLERS,
    **kernel_commands.HANDLERS,
}
