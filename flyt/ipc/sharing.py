# SPDX-License-Identifier: Apache-2.0
"""`send` and `recv`: an array on one side, the same memory as an array on the other.

Order: what the sender's stream had to do with the array is done before the receiver uses it. By
default ``send`` waits for the stream; with ``order="event"`` the receiver's stream waits for an
interprocess event. When a received array dies, the receiver's device finishes its work before the
sender is told.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, Literal

from flyt.errors import ProtocolError, SharingError
from flyt.ipc import frames
from flyt.ipc.arrays import Described, Owner, adapter, adapter_for, packed_layout
from flyt.ipc.blocks import blocks
from flyt.ipc.buffer import Buffer
from flyt.ipc.connection import TIMEOUT, Connection
from flyt.ipc.driver import Driver, get_driver
from flyt.ipc.memory import VirtualMemoryResource
from flyt.ipc.messages import REMEMBERED, Block, Layout, Share, require_layout
from flyt.ipc.outgoing import Outgoing
from flyt.ipc.torch_pool import adopt_preloaded

Order = Literal["synchronize", "event"]


def empty(
    shape: tuple[int, ...] | int,
    dtype: str = "float32",
    *,
    like: str = "numpy",
    resource: VirtualMemoryResource | None = None,
) -> Any:
    """A new array in memory that can be shared, of any content.

    Parameters
    ----------
    shape : tuple of int, or int
    dtype : str
        A name of `flyt.ipc.dtypes.ITEMSIZES`, ``"bfloat16"`` for instance.
    like : {"numpy", "torch", "cupy"}
        The library; NumPy for the emulated driver only.
    resource : VirtualMemoryResource, optional
        By default one of device 0.
    """
    layout = packed_layout(like, dtype, (shape,) if isinstance(shape, int) else tuple(shape))
    buffer = (resource or VirtualMemoryResource()).allocate(layout.extent)
    owner = Owner(buffer, 0, layout.extent) if layout.extent else None
    return adapter(like).build(layout, owner, read_only=False)


def outgoing(
    array: object,
    *,
    order: Order = "synchronize",
    stream: int | None = None,
    whole_device: bool = False,
) -> Outgoing:
    """Describe an array for another process, and order its use after ``stream``.

    With ``whole_device``, wait for all of this process's work on the device instead.
    """
    ours, own = adapter_for(array)
    what = ours.describe(own)
    if what.layout.extent == 0:
        return Outgoing(None, (), what.layout, b"", [what.keep])
    buffer = _block_of(what)
    layout = _place(what.layout, what.start - buffer.handle, buffer.size)
    driver, device = buffer.memory_resource.driver, buffer.device_id
    descriptor = buffer.ipc_descriptor
    block = Block(descriptor.key, descriptor.uuid, descriptor.size, descriptor.chunks)
    keep: list[Any] = [what.keep, buffer]
    event = b""
    at = ours.stream(device) if stream is None else stream
    if whole_device:
        driver.synchronize(device)
    elif order == "event":
        made, event = driver.export_event(device, at)
        keep.append(_KeptEvent(driver, made))
    else:
        driver.synchronize(device, at)
    return Outgoing(block, descriptor.fds, layout, event, keep)


def find_block(what: Described) -> Buffer | None:
    """The shareable block that an array lies in, if it does."""
    found = blocks.find(what.start)
    if found is None and adopt_preloaded():
        found = blocks.find(what.start)
    return found if isinstance(found, Buffer) else None


def _block_of(what: Described) -> Buffer:
    found = find_block(what)
    if found is None:
        raise SharingError(
            "this array does not lie in memory that can be shared, and no copy is made in silence: "
            "make it with flyt.ipc.empty, over a VirtualMemoryResource's buffer, within "
            "flyt.ipc.torch_pool(), or run the program with 'flyt ipc run'"
        )
    if what.device is not None and what.device != found.device_id:
        raise SharingError(
            f"its library says device {what.device}, but the memory lies on {found.device_id}"
        )
    return found


@functools.lru_cache(REMEMBERED)
def _place(layout: Layout, storage: int, size: int) -> Layout:
    """The layout with its storage there, in a block of that size."""
    placed = layout._replace(storage=storage)
    require_layout(placed, size)
    return placed


class _KeptEvent:
    """An interprocess event, used again once the receiver has let go of the share."""

    def __init__(self, driver: Driver, event: Any) -> None:
        weakref.finalize(self, driver.return_event, event).atexit = False


def send(
    connection: Connection,
    array: object,
    *,
    order: Order = "synchronize",
    stream: int | None = None,
    timeout: float = TIMEOUT,
) -> None:
    """Share an array with the process at the other end. Nothing is copied.

    The array's memory stays allocated until the receiver's array is gone, or the receiver is.

    Parameters
    ----------
    connection : Connection
    array : tensor or array
        Of PyTorch, CuPy or NumPy, in memory that can be shared (`empty`, `torch_pool`, a buffer).
    order : {"synchronize", "event"}
        Wait here for the stream, or let the receiver's stream wait for an interprocess event.
    stream : int, optional
        The stream that wrote the array; by default its library's current one.
    timeout : float
        Seconds that the peer may take to make room for the message.

    Raises
    ------
    SharingError
        The array can't be shared; the message says why.
    PeerLost, PeerTimeout
    """
    connection.share(outgoing(array, order=order, stream=stream), timeout)


def recv(
    connection: Connection,
    *,
    like: str | None = None,
    device: int | None = None,
    read_only: bool = False,
    timeout: float = TIMEOUT,
) -> Any:
    """The next array from the other end, over the very same memory.

    Parameters
    ----------
    connection : Connection
    like : {"numpy", "torch", "cupy"}, optional
        The library to make it of; by default the sender's.
    device : int, optional
        Which device of this process will use it, besides the one that holds the memory; by default
        the library's current device.
    read_only : bool
        Map it without the right to write; a write then faults.
    timeout : float
        Seconds.

    Raises
    ------
    PeerLost, PeerTimeout
    SharingError
        This process can't use it: GPU not visible, no peer access, element type unknown.
    """
    share, fds = connection.next_share(timeout)
    return rebuild(connection, share, fds, like=like, device=device, read_only=read_only)


def rebuild(
    connection: Connection,
    share: Share,
    fds: tuple[int, ...],
    *,
    like: str | None = None,
    device: int | None = None,
    read_only: bool = False,
) -> Any:
    """The array of a share; closes the descriptors, and lets go of the share if it fails."""
    try:
        ours = adapter(like or share.layout.library)
        if share.block is None:
            connection.holdings.refuse(share.id)  # nothing to hold
            return ours.build(share.layout, None, read_only=read_only)
        user = ours.device() if device is None else device
        buffer = _mapping(share.block, fds, user, read_only)
        if buffer.is_imported:
            connection.holdings.keep_idle(buffer.key, buffer)
        owner = Owner(buffer, share.layout.storage, share.layout.extent)
        driver, resident = buffer.memory_resource.driver, buffer.device_id
        if share.event:
            driver.wait_event(resident, ours.stream(resident), share.event)
        array = ours.build(share.layout, owner, read_only=read_only)
    except BaseException:
        connection.holdings.refuse(share.id)
        raise
    finally:
        frames.close_all(fds)
    users = {buffer.memory_resource.device_id, resident}
    connection.holdings.hold(owner, share.id, driver, users)
    return array


_imports: weakref.WeakValueDictionary[tuple[bytes, int, bool], Buffer] = (
    weakref.WeakValueDictionary()
)
"""Mappings of other processes' blocks: one a block, device and right."""
_imports_lock = threading.RLock()


def _mapping(block: Block, fds: tuple[int, ...], device: int | None, read_only: bool) -> Buffer:
    own = blocks.own(block.key)
    if isinstance(own, Buffer) and not own.is_closed and not read_only:
        return _same(own, block)  # our own memory has come home
    with _imports_lock:
        driver = get_driver()
        user = driver.device_of(block.uuid) if device is None else device
        key = (block.key, -1 if user is None else user, read_only)
        known = _imports.get(key)
        if known is not None and not known.is_closed:
            return _same(known, block)
        other = None if fds else _any_mapping(block)
        descriptor = block.descriptor(fds) if other is None else other.ipc_descriptor
        resource = VirtualMemoryResource(0 if user is None else user, driver=driver)
        new = Buffer.from_ipc_descriptor(resource, descriptor, read_only=read_only)
        _imports[key] = new
        return new


def _any_mapping(block: Block) -> Buffer:
    """One of another device or right; from the first on the peer sends no descriptors."""
    for (key, _, _), buffer in _imports.items():
        if key == block.key and not buffer.is_closed:
            return _same(buffer, block)
    raise ProtocolError("the peer shares a block that is not known here, without descriptors")


def _same(buffer: Buffer, block: Block) -> Buffer:
    if (buffer.size, buffer.mapped_size) != (block.size, sum(block.chunks)):
        raise ProtocolError("the peer names a known block but describes another")
    return buffer
