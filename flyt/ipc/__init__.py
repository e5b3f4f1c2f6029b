# SPDX-License-Identifier: Apache-2.0
"""Zero-copy sharing of GPU memory between processes of one host. See ``docs/ipc.md``."""

from __future__ import annotations

from flyt.ipc.buffer import Buffer, IPCBufferDescriptor
from flyt.ipc.connection import Connection
from flyt.ipc.driver import Driver, get_driver, set_driver
from flyt.ipc.listening import Listener, connect
from flyt.ipc.memory import VirtualMemoryResource, VirtualMemoryResourceOptions
from flyt.ipc.reducers import close_desk, install_reducers
from flyt.ipc.sharing import empty, recv, send
from flyt.ipc.sockets import pair
from flyt.ipc.torch_pool import torch_pool
from flyt.ipc.twin import TwinDriver

__all__ = [
    "Buffer",
    "Connection",
    "Driver",
    "IPCBufferDescriptor",
    "Listener",
    "TwinDriver",
    "VirtualMemoryResource",
    "VirtualMemoryResourceOptions",
    "close_desk",
    "connect",
    "empty",
    "get_driver",
    "install_reducers",
    "pair",
    "recv",
    "send",
    "set_driver",
    "torch_pool",
]
