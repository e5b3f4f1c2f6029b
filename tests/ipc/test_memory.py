# SPDX-License-Identifier: Apache-2.0
"""The allocator on the emulated driver: sizes, chunks, rights, and what a failure leaves behind."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys

import numpy as np
import pytest

from flyt.errors import DeviceError, SharingError
from flyt.ipc import (
    Buffer,
    IPCBufferDescriptor,
    TwinDriver,
    VirtualMemoryResource,
    VirtualMemoryResourceOptions,
)

MIB = 1 << 20
LEAST, LARGE = 64 << 10, 2 * MIB


def file_behind(address: int) -> tuple[str, int]:
    """Inode and offset of the memory at an address: equal ones are the same physical pages."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, offset, _, inode = line.split()[:5]
            low, high = (int(x, 16) for x in span.split("-"))
            if low <= address < high:
                return inode, int(offset, 16) + address - low
    raise AssertionError(f"nothing is mapped at {address:#x}")


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("size", "granularity", "mapped"),
    [
        (1, "minimum", LEAST),
        (LEAST, "minimum", LEAST),
        (LEAST + 1, "minimum", 2 * LEAST),
        (1, "recommended", LARGE),
        (LARGE, "recommended", LARGE),
        (LARGE + 1, "recommended", 2 * LARGE),
    ],
)
def test_sizes_are_rounded_up_and_both_are_told(size: int, granularity: str, mapped: int) -> None:
    options = VirtualMemoryResourceOptions(granularity=granularity)  # type: ignore[arg-type]
    with VirtualMemoryResource(0, options).allocate(size) as buffer:
        assert (buffer.size, buffer.mapped_size) == (size, mapped)
        assert buffer.handle % LEAST == 0
        bytes_ = np.asarray(buffer)
        assert bytes_.shape == (size,)
        bytes_[-1] = 7
        assert bytes_[-1] == 7


def test_an_empty_buffer_has_nothing_to_share() -> None:
    buffer = VirtualMemoryResource().allocate(0)
    assert (buffer.handle, buffer.size, buffer.mapped_size) == (0, 0, 0)
    with pytest.raises(SharingError, match="empty"):
        _ = buffer.ipc_descriptor
    buffer.close()


@pytest.mark.parametrize("size", [-1, (1 << 47) + 1, 1 << 70])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(SharingError):
        VirtualMemoryResource().allocate(size)


def test_memory_that_is_not_there_is_out_of_memory() -> None:
    before = open_descriptors()
    with pytest.raises(DeviceError) as caught:
        VirtualMemoryResource().allocate(1 << 46)
    assert caught.value.code == 2  # CUDA_ERROR_OUT_OF_MEMORY
    assert open_descriptors() == before


def test_chunks_lie_side_by_side_and_cross_one_by_one() -> None:
    options = VirtualMemoryResourceOptions(chunk_size=LARGE)
    with VirtualMemoryResource(0, options).allocate(5 * MIB) as buffer:
        descriptor = buffer.ipc_descriptor
        assert descriptor.chunks == (LARGE, LARGE, LARGE)
        ours = np.asarray(buffer)
        ours[:] = np.arange(5 * MIB, dtype=np.uint64).astype(np.uint8)
        with Buffer.from_ipc_descriptor(VirtualMemoryResource(), descriptor) as other:
            assert other.handle != buffer.handle
            for at in (0, LARGE - 1, LARGE, 5 * MIB - 1):
                assert file_behind(buffer.handle + at) == file_behind(other.handle + at)
            assert (np.asarray(other) == ours).all()


def test_more_chunks_than_one_message_carries_are_refused() -> None:
    options = VirtualMemoryResourceOptions(granularity="minimum", chunk_size=1)
    resource = VirtualMemoryResource(0, options)
    with pytest.raises(SharingError, match="larger ones"):
        resource.allocate(254 * LEAST)
    with resource.allocate(253 * LEAST) as buffer:
        assert len(buffer.ipc_descriptor.fds) == 253


def test_writes_are_seen_through_a_second_mapping() -> None:
    with VirtualMemoryResource().allocate(100) as buffer:
        other = Buffer.from_ipc_descriptor(VirtualMemoryResource(1), buffer.ipc_descriptor)
        np.asarray(buffer)[:] = 1
        np.asarray(other)[3] = 9
        assert np.asarray(buffer)[:5].tolist() == [1, 1, 1, 9, 1]
        assert (other.device_id, other.memory_resource.device_id) == (0, 1)  # resident, mapping
        other.close()


def test_physical_memory_outlives_the_buffer_that_made_it() -> None:
    buffer = VirtualMemoryResource().allocate(100)
    np.asarray(buffer)[:] = 5
    other = Buffer.from_ipc_descriptor(VirtualMemoryResource(), buffer.ipc_descriptor)
    buffer.close()
    assert np.asarray(other).sum() == 500
    other.close()


def test_a_read_only_mapping_faults_on_a_write() -> None:
    code = (
        "import ctypes, numpy as np\n"
        "from flyt.ipc import *\n"
        "b = VirtualMemoryResource().allocate(8)\n"
        "r = VirtualMemoryResource()\n"
        "o = Buffer.from_ipc_descriptor(r, b.ipc_descriptor, read_only=True)\n"
        "assert not np.asarray(o).flags.writeable and o.is_read_only\n"
        "print(ctypes.string_at(o.handle, 1), flush=True)\n"
        "ctypes.memset(o.handle, 1, 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "FLYT_IPC_DRIVER": "emulated", "PYTHONFAULTHANDLER": ""},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == b"b'\\x00'\n", done.stderr
    assert done.returncode == -signal.SIGSEGV


def test_close_gives_everything_back_once() -> None:
    before = open_descriptors()
    buffer = VirtualMemoryResource().allocate(3 * MIB)
    assert len(buffer.ipc_descriptor.fds) == 1
    address = buffer.handle
    buffer.close()
    buffer.close()
    assert buffer.is_closed
    assert open_descriptors() == before
    with pytest.raises(AssertionError, match="nothing is mapped"):
        file_behind(address)
    with pytest.raises(SharingError, match="closed"):
        np.asarray(buffer)


def test_an_array_keeps_its_buffer() -> None:
    before = open_descriptors()
    array = np.asarray(VirtualMemoryResource().allocate(100))
    array[:] = 3
    assert array.sum() == 300
    del array
    assert open_descriptors() == before


def test_a_descriptor_does_not_pickle() -> None:
    with VirtualMemoryResource().allocate(1) as buffer, pytest.raises(TypeError, match="send"):
        pickle.dumps(buffer.ipc_descriptor)


def spoilt(descriptor: IPCBufferDescriptor, last: int) -> IPCBufferDescriptor:
    fds = (*descriptor.fds[:-1], last)
    return IPCBufferDescriptor(
        descriptor.key, descriptor.uuid, descriptor.size, descriptor.chunks, fds
    )


def test_an_import_that_fails_half_way_leaves_nothing() -> None:
    options = VirtualMemoryResourceOptions(chunk_size=LARGE)
    with VirtualMemoryResource(0, options).allocate(3 * LARGE) as buffer:
        good = buffer.ipc_descriptor
        read, write = os.pipe()
        short = os.memfd_create("flyt-ipc-" + good.uuid.hex(), os.MFD_ALLOW_SEALING)
        unsealed = os.memfd_create("flyt-ipc-" + good.uuid.hex(), os.MFD_ALLOW_SEALING)
        os.truncate(unsealed, LARGE)
        before = open_descriptors()
        with open("/proc/self/maps") as maps:
            mappings = len(maps.readlines())
        for bad in (read, short, unsealed):
            with pytest.raises(DeviceError) as caught:
                Buffer.from_ipc_descriptor(VirtualMemoryResource(), spoilt(good, bad))
            assert caught.value.code == 1  # CUDA_ERROR_INVALID_VALUE
        assert open_descriptors() == before
        with open("/proc/self/maps") as maps:
            assert len(maps.readlines()) <= mappings + 1
        for fd in (read, write, short, unsealed):
            os.close(fd)


def test_a_chunk_that_is_smaller_than_it_says_is_refused() -> None:
    # Mapping behind a file's end would be SIGBUS at the first touch.
    small = VirtualMemoryResource(0, VirtualMemoryResourceOptions(granularity="minimum"))
    with small.allocate(1) as buffer:
        d = buffer.ipc_descriptor
        lie = IPCBufferDescriptor(d.key, d.uuid, LARGE, (LARGE,), d.fds)
        with pytest.raises(DeviceError):
            Buffer.from_ipc_descriptor(VirtualMemoryResource(), lie)


@pytest.mark.parametrize(
    "change",
    [
        {"key": b"short"},
        {"uuid": b""},
        {"chunks": ()},
        {"fds": ()},
        {"chunks": (0,)},
        {"chunks": (-1,)},
        {"size": 0},
        {"size": LARGE + 1},
        {"size": 1 << 60, "chunks": (1 << 60,)},
    ],
)
def test_a_description_that_does_not_fit_is_refused(change: dict[str, object]) -> None:
    fields = {"key": bytes(16), "uuid": bytes(16), "size": 1, "chunks": (LARGE,), "fds": (0,)}
    IPCBufferDescriptor(**fields)  # type: ignore[arg-type]
    with pytest.raises(SharingError):
        IPCBufferDescriptor(**{**fields, **change})  # type: ignore[arg-type]


def test_a_gpu_is_named_by_its_uuid_not_by_its_number() -> None:
    # The importer sees the host's devices in another order, as with CUDA_VISIBLE_DEVICES.
    with VirtualMemoryResource(1).allocate(10) as buffer:
        swapped = VirtualMemoryResource(0, driver=TwinDriver(visible=(1, 0)))
        with Buffer.from_ipc_descriptor(swapped, buffer.ipc_descriptor) as other:
            assert other.device_id == 0
        blind = VirtualMemoryResource(0, driver=TwinDriver(visible=(0,)))
        with pytest.raises(SharingError, match="CUDA_VISIBLE_DEVICES"):
            Buffer.from_ipc_descriptor(blind, buffer.ipc_descriptor)


def test_a_gpu_that_the_sender_misnames_is_refused() -> None:
    with VirtualMemoryResource(1).allocate(10) as buffer:
        d = buffer.ipc_descriptor
        lie = IPCBufferDescriptor(d.key, TwinDriver().uuid(0), d.size, d.chunks, d.fds)
        with pytest.raises(SharingError, match="does not lie"):
            Buffer.from_ipc_descriptor(VirtualMemoryResource(), lie)


def test_access_needs_peer_access() -> None:
    apart = TwinDriver(peer_access=False)
    with VirtualMemoryResource(0, driver=apart).allocate(10) as buffer:
        with pytest.raises(SharingError, match="peer access"):
            Buffer.from_ipc_descriptor(
                VirtualMemoryResource(1, driver=apart), buffer.ipc_descriptor
            )
        both = VirtualMemoryResourceOptions(peers=(1,))
        with pytest.raises(SharingError, match="peer access"):
            VirtualMemoryResource(0, both, driver=apart).allocate(10)
