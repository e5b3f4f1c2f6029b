# SPDX-License-Identifier: Apache-2.0
"""What kernels have printed, written where CUDA's driver writes it: to descriptor 1, at a
synchronising call."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from flyt.rpc import messages as m

if TYPE_CHECKING:
    from flyt.frontend.connection import Connection

MOST_PARTS = 16
"""Of 1 MiB, written by one call; other threads' kernels may go on printing."""


def show(connection: Connection, device: int) -> None:
    """Fetch and write it; after the wait for the kernels.

    Raises
    ------
    DeviceError, Lost, CommandTimeout
    """
    for _ in range(MOST_PARTS):
        text = connection.call(lambda number: m.Printed(number, device)).payload
        if not text:
            return
        with contextlib.suppress(OSError):  # closed, or nobody reads: the driver says nothing
            while text:
                text = text[os.write(1, text) :]
