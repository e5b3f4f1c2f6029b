# SPDX-License-Identifier: Apache-2.0
"""Arrays to the device and back: every layout, dtype and buffer, and never treated as flat."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from tests.pair.conftest import free_bytes

D2H = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
H2D = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
CONTEXT_IS_DESTROYED = 709
INVALID_HANDLE = 400

Array = np.ndarray[Any, np.dtype[Any]]

LATENCY = 0.7
"""Seconds of each copy on a slowed device: enough to see that a call did not wait for one."""


def grid() -> Array:
    return np.arange(7 * 9, dtype=np.int32).reshape(7, 9)


def read_only() -> Array:
    made = grid()
    made.flags.writeable = False
    return made


PARTICLE = np.dtype([("id", "<u2"), ("position", "<f8", (3,)), ("name", "S5")], align=True)
OVERLAPPING = np.dtype({"names": ["x", "y"], "formats": ["<i4", "<i2"], "offsets": [0, 2]})

KEPT: dict[str, Callable[[], Array]] = {
    "C": grid,
    "rows of a matrix": lambda: grid()[2:5],
    "one dimension": lambda: np.arange(1000.0),
    "0-d": lambda: np.array(7.25),
    "empty": lambda: np.empty(0, np.float32),
    "zero-size dimension": lambda: np.empty((3, 0, 5), np.int16),
    "read-only": read_only,
    "extent 1 with odd strides": lambda: grid()[::3][:1],
    "structured": lambda: np.array([(1, (1, 2, 3), b"ab"), (2, (4, 5, 6), b"xyz")], PARTICLE),
    "overlapping fields": lambda: np.array([(1,), (70_000,)], [("x", "<i4")]).view(OVERLAPPING),
    "datetime64": lambda: np.array(["2026-11-27", "NaT"], "datetime64[s]"),
    "timedelta64": lambda: np.array([1, -5], "timedelta64[ns]"),
    "complex64": lambda: np.array([1 + 2j, -3j], np.complex64),
    "complex128": lambda: np.array([1 + 2j, -3j]).reshape(1, 2),
    "bool": lambda: np.array([True, False, True]),
    "float16": lambda: np.array([0.5, -0.0, np.inf], np.float16),
    "big-endian": lambda: np.arange(5, dtype=">i4"),
    "unicode": lambda: np.array(["ab", "cde"]),
    "void": lambda: np.array([b"12345678", b"abcdefgh"]).view("V8"),
    "scalar": lambda: np.float64(2.5),  # type: ignore[dict-item]  # a buffer, if no array
    "recarray": lambda: np.rec.array([(1, 2.0), (3, 4.0)], dtype="i4,f8"),
}
"""Contiguous in C's order, so kept as it lies."""

FORTRAN: dict[str, Callable[[], Array]] = {
    "Fortran": lambda: np.asfortranarray(grid()),
    "transposed": lambda: np.arange(24.0).reshape(2, 3, 4).T,
    "columns of a Fortran matrix": lambda: np.asfortranarray(grid())[:, 2:6],
}

PACKED: dict[str, Callable[[], Array]] = {
    "columns": lambda: grid()[:, 2:6],
    "2-d slice": lambda: grid()[1:6, 3:8],
    "steps": lambda: grid()[::2, ::3],
    "reversed": lambda: np.arange(10)[::-1],
    "reversed both ways": lambda: grid()[::-1, ::-2],
    "axes swapped": lambda: np.arange(24).reshape(2, 3, 4).swapaxes(1, 2),
    "field of a structure": lambda: np.array([(1, 2.5), (3, 4.5)], "u1,>f8")["f1"],
    "broadcast": lambda: np.broadcast_to(np.arange(3), (4, 3)),
    "unaligned": lambda: np.frombuffer(bytes(range(33)), "<f4", offset=1)[::2],
}


def bits(array: Array, order: Any = "C") -> bytes:
    """The bytes, by which NaN, NaT and -0.0 compare too."""
    return array.tobytes(order)


def on_device(made: flyt.DeviceArray) -> bytes:
    """The bytes as they lie on the device, without the code under test."""
    raw = np.empty(made.nbytes, np.uint8)
    assert cudart.cudaMemcpy(raw, made.ptr, raw.nbytes, D2H) == (0,), flyt.last_failure()
    return raw.tobytes()


LARGE = 64 << 20
"""Bytes; more than a GPU's memory pool takes and gives at once."""


@pytest.mark.parametrize(
    ("make", "order"),
    [
        *(pytest.param(make, "C", id=name) for name, make in KEPT.items()),
        *(pytest.param(make, "F", id=name) for name, make in FORTRAN.items()),
        *(pytest.param(make, "C", id=name) for name, make in PACKED.items()),
    ],
)
def test_every_layout_and_dtype_there_and_back(
    session: flyt.Session, make: Callable[[], Array], order: str
) -> None:
    source = make()
    wanted = np.asarray(source)
    image = bits(wanted, order)
    with flyt.to_device(source) as made:
        assert (made.shape, made.dtype, made.order) == (wanted.shape, wanted.dtype, order)
        assert made.nbytes == wanted.nbytes
        assert (made.ptr == 0) == (made.nbytes == 0)
        if made.nbytes:
            assert made.strides == np.empty(wanted.shape, wanted.dtype, order=order).strides
        assert on_device(made) == image
        back = made.copy_to_host()
        assert (back.shape, back.dtype, type(back)) == (wanted.shape, wanted.dtype, np.ndarray)
        assert back.flags.f_contiguous if order == "F" else back.flags.c_contiguous
        assert bits(back, order) == image
    assert bits(wanted, order) == image


BUFFERS: dict[str, Callable[[], Any]] = {
    "bytes": lambda: b"some bytes",
    "empty bytes": lambda: b"",
    "bytearray": lambda: bytearray(b"some bytes"),
    "memoryview": lambda: memoryview(b"some bytes"),
    "memoryview of steps": lambda: memoryview(b"some bytes")[::-2],
    "memoryview of 2 dimensions": lambda: memoryview(bytes(range(24))).cast("f", (2, 3)),
    "array.array": lambda: array.array("h", [1, -2, 3]),
    "ctypes": lambda: (ctypes.c_double * 3)(1, 2, 3),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_of_all_kinds_are_sources(session: flyt.Session, name: str) -> None:
    source = BUFFERS[name]()
    view = memoryview(source)
    with flyt.to_device(source) as made:
        assert (made.shape, made.nbytes) == (view.shape, view.nbytes)
        assert made.dtype.itemsize == view.itemsize
        assert on_device(made) == view.tobytes()


@pytest.mark.parametrize("kind", [bytearray, lambda data: memoryview(bytearray(data))])
def test_writable_buffers_are_destinations(
    session: flyt.Session, kind: Callable[[bytes], Any]
) -> None:
    out = kind(bytes(10))
    with flyt.to_device(b"some bytes") as made:
        back = made.copy_to_host(out)
        assert bytes(out) == b"some bytes"
        assert np.shares_memory(back, np.asarray(memoryview(out)))
        for frozen in (bytes(10), memoryview(bytes(10))):
            with pytest.raises(ValueError, match="read-only"):
                made.copy_to_host(frozen)
            assert bytes(frozen) == bytes(10)


def test_mapped_files_both_ways(session: flyt.Session, tmp_path: Path) -> None:
    wanted = np.random.default_rng(1).integers(0, 256, (300, 70), np.uint8)
    path = tmp_path / "file"
    path.write_bytes(wanted.tobytes())
    source: Array = np.memmap(path, np.uint8, "r", shape=wanted.shape)
    with flyt.to_device(source) as made, pytest.raises(ValueError, match="read-only"):
        made.copy_to_host(source)
    target: Array = np.memmap(tmp_path / "out", np.uint8, "w+", shape=(300, 140))
    with flyt.to_device(source[:, ::-1]) as made:
        made.copy_to_host(target[:, ::2])
        target.flush()
    found = np.fromfile(tmp_path / "out", np.uint8).reshape(300, 140)
    assert (found[:, ::2] == wanted[:, ::-1]).all()
    assert not found[:, 1::2].any()
    with (
        open(path, "r+b") as file,
        mmap.mmap(file.fileno(), 0) as area,
        flyt.to_device(area) as made,
    ):
        assert on_device(made) == wanted.tobytes()


VIEWS: dict[str, Callable[[Array], Array]] = {
    # from an array of (6, 16) int32 with guards all around to one of (4, 5)
    "C": lambda base: base.reshape(-1)[7:27].reshape(4, 5),
    "Fortran": lambda base: base.reshape(-1)[7:27].reshape(5, 4).T,
    "slice": lambda base: base[1:5, 3:8],
    "steps": lambda base: base[1:5, 2:12:2],
    "reversed": lambda base: base[4:0:-1, 7:2:-1],
    "reversed columns": lambda base: base[1:5, 12:2:-2],
}


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("name", VIEWS)
def test_out_of_every_layout_gets_its_elements_and_no_other(
    session: flyt.Session, name: str, order: Any
) -> None:
    wanted = np.arange(1, 21, dtype=np.int32).reshape(4, 5)
    base = np.full((6, 16), -1, np.int32)
    expected = base.copy()
    VIEWS[name](expected)[...] = wanted
    out = VIEWS[name](base)
    with flyt.to_device(np.array(wanted, order=order)) as made:
        assert made.order == order
        assert made.copy_to_host(out=out) is out
    assert (base == expected).all()


def test_out_in_structures_and_0_dimensions(session: flyt.Session) -> None:
    table = np.zeros(3, [("a", "u1"), ("b", ">f8"), ("c", "u1")])
    with flyt.to_device(np.array([1.5, 2.5, 3.5], ">f8")) as made:
        made.copy_to_host(table["b"])
    assert table.tolist() == [(0, 1.5, 0), (0, 2.5, 0), (0, 3.5, 0)]
    point = np.array(0)
    with flyt.to_device(np.array(5)) as made:
        made.copy_to_host(point)
    assert point == 5
    nothing = np.empty((0, 4), np.int8)
    with flyt.to_device(nothing) as made:
        assert made.copy_to_host(np.empty((0, 4), np.int8)).shape == (0, 4)


def test_an_out_that_does_not_fit_is_refused_before_a_byte_moves(session: flyt.Session) -> None:
    frozen = np.full((4, 5), 9, np.int32)
    frozen.flags.writeable = False
    with flyt.to_device(np.zeros((4, 5), np.int32)) as made:
        before = session.statistics()
        for out, says in (
            (frozen, "read-only"),
            (np.full((5, 4), 9, np.int32), "shape"),
            (np.full(20, 9, np.int32), "shape"),
            (np.full((4, 5), 9, np.uint32), "dtype"),
            (np.full((4, 5), 9, ">i4"), "dtype"),
            (np.full((4, 5), 9, np.int64), "dtype"),
            (np.broadcast_to(np.int32(9), (4, 5)), "read-only"),
        ):
            with pytest.raises(ValueError, match=says):
                made.copy_to_host(out)
            assert (out == 9).all()
        for other in ([[9] * 5] * 4, 9, None.__class__):
            with pytest.raises(TypeError, match="buffer protocol"):
                made.copy_to_host(other)
        with pytest.raises(TypeError, match="mask"):
            made.copy_to_host(np.ma.zeros((4, 5), np.int32))
        assert session.statistics() == before


def test_what_no_device_can_hold_is_refused(session: flyt.Session) -> None:
    for objects in (np.array([{}, None]), np.zeros(2, [("a", "i4"), ("b", "O")])):
        with pytest.raises(TypeError, match="Python objects"):
            flyt.to_device(objects)
    with pytest.raises(TypeError, match="mask"):
        flyt.to_device(np.ma.array([1, 2], mask=[0, 1]))
    for no_array in ([1, 2], "text", 5, None, object()):
        with pytest.raises(TypeError, match="buffer protocol"):
            flyt.to_device(no_array)
    with pytest.raises(TypeError, match="Python objects"):
        flyt.DeviceArray(3, object)
    with pytest.raises(ValueError, match="negative"):
        flyt.DeviceArray((2, -1))
    with pytest.raises(ValueError, match="order"):
        flyt.DeviceArray(2, order="K")  # type: ignore[arg-type]


def test_large_arrays(session: flyt.Session) -> None:
    size = 3 * session.statistics()["window_size"] + 12
    wanted = np.random.default_rng(3).integers(0, 256, size, np.uint8)
    with flyt.to_device(wanted[::-1]) as made:
        assert bits(made.copy_to_host()) == bits(wanted[::-1])
        out = np.zeros(2 * size, np.uint8)
        made.copy_to_host(out[::2])
        assert (out[::2] == wanted[::-1]).all()
        assert not out[1::2].any()


def test_a_new_array_is_zero_and_describes_itself(session: flyt.Session) -> None:
    with flyt.DeviceArray((2, 3), np.float32, "F") as made:
        assert not made.copy_to_host().any()
        assert made.__cuda_array_interface__ == {
            "version": 3,
            "shape": (2, 3),
            "typestr": "<f4",
            "descr": [("", "<f4")],
            "data": (made.ptr, False),
            "strides": (4, 8),
            "stream": 1,
        }
        assert repr(made) == (
            f"DeviceArray(shape=(2, 3), dtype=float32, order='F', ptr={made.ptr:#x})"
        )
        error, facts = cudart.cudaPointerGetAttributes(made.ptr)
        assert (error, facts.type, facts.device) == (
            0,
            cudart.cudaMemoryType.cudaMemoryTypeDevice,
            made.device,
        )
    assert "closed" in repr(made)
    assert flyt.DeviceArray(5).__cuda_array_interface__["strides"] is None
    assert flyt.DeviceArray(np.int64(5)).shape == (5,)
    # Version 3: an array without bytes has the address 0.
    assert flyt.DeviceArray((0, 5)).__cuda_array_interface__["data"] == (0, False)
    with flyt.to_device(KEPT["structured"]()) as made:
        assert made.__cuda_array_interface__["descr"] == PARTICLE.descr


def test_the_interface_names_the_stream_that_filled_it(session: flyt.Session) -> None:
    for given, shown in ((0, 1), (1, 1), (2, 2), (flyt.Stream.per_thread, 2)):
        with flyt.to_device(grid(), given) as made:
            assert made.__cuda_array_interface__["stream"] == shown
    with flyt.Stream() as stream:
        made = flyt.to_device(grid(), stream=stream)
        assert made.__cuda_array_interface__["stream"] == stream.handle
    assert made.__cuda_array_interface__["stream"] is None  # closed; its work is done
    assert on_device(made) == bits(grid())
    made.stream = 5
    assert made.__cuda_array_interface__["stream"] == 5
    made.close()


@pytest.mark.alone
def test_close_gives_the_memory_back_once(
    session: flyt.Session, is_back: Callable[[int], bool]
) -> None:
    before = free_bytes()
    made = flyt.DeviceArray(LARGE, np.uint8)
    assert free_bytes() <= before - LARGE // 2
    closers = [threading.Thread(target=made.close) for _ in range(8)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(30)
    assert made.closed
    assert is_back(before)
    for use in (lambda: made.ptr, made.copy_to_host, lambda: made.__cuda_array_interface__):
        with pytest.raises(ValueError, match="closed"):
            use()
    made.close()


@pytest.mark.alone
def test_a_dropped_array_is_freed_by_the_next_call(
    session: flyt.Session, is_back: Callable[[int], bool]
) -> None:
    before = free_bytes()
    made = flyt.DeviceArray(LARGE, np.uint8)
    cycle = [made]
    cycle.append(cycle)  # type: ignore[arg-type]
    facts = session.statistics()
    del made, cycle
    gc.collect()
    now = session.statistics()
    assert (now["calls"], now["posts"]) == (facts["calls"], facts["posts"])  # nothing was sent
    assert cudart.cudaDeviceSynchronize() == (0,)
    assert is_back(before)


@pytest.mark.alone
def test_a_failed_copy_leaves_no_memory_behind(
    session: flyt.Session, is_back: Callable[[int], bool]
) -> None:
    before = free_bytes()
    with pytest.raises(flyt.DeviceError) as caught:
        flyt.to_device(np.zeros(LARGE, np.uint8), stream=0xBAD1)
    assert caught.value.code == INVALID_HANDLE
    assert is_back(before)
    with pytest.raises(flyt.DeviceError) as caught:
        flyt.DeviceArray(1 << 50, np.uint8)
    assert caught.value.code == cudart.cudaError_t.cudaErrorMemoryAllocation
    assert is_back(before)


def test_an_array_ends_with_its_session(
    one_backend: Any, connect: Callable[..., flyt.Session]
) -> None:
    connect(one_backend)
    old, dropped = flyt.to_device(grid()), flyt.to_device(grid())
    connect(one_backend)
    new = [flyt.to_device(grid()) for _ in range(2)]  # at the old addresses, as like as not
    for use in (lambda: old.ptr, old.copy_to_host):
        with pytest.raises(flyt.DeviceError) as caught:
            use()
        assert caught.value.code == CONTEXT_IS_DESTROYED
    old.close()
    del dropped
    gc.collect()
    for made in new:
        assert bits(made.copy_to_host()) == bits(grid())
        made.close()


def test_without_a_backend_the_code_says_so(
    connect: Callable[..., flyt.Session], one_backend: Any
) -> None:
    with connect(one_backend):
        made = flyt.to_device(grid())
    for use in (made.copy_to_host, lambda: flyt.to_device(grid())):
        with pytest.raises(flyt.DeviceError) as caught:
            use()
        assert caught.value.code == cudart.cudaError_t.cudaErrorDevicesUnavailable
    made.close()


# --- with a stream ---


def test_copies_are_in_the_streams_order(session: flyt.Session) -> None:
    with flyt.Stream(non_blocking=True) as stream:
        for n in range(20):
            wanted = np.full(100_000 + n, n, np.uint32)
            source = wanted.copy()
            made = flyt.to_device(source, stream=stream)
            source[:] = 0xDEAD  # pageable memory may be changed at once
            packed = flyt.to_device(wanted[::-1], stream)
            assert (made.copy_to_host(stream=stream) == wanted).all()
            out = np.zeros((2, len(wanted)), np.uint32)
            packed.copy_to_host(out[1], stream)
            packed.copy_to_host(out.T[:, 0], stream)
            assert (out == wanted).all()
            made.close()
            packed.close()


@pytest.fixture
def slowed(backend: Callable[..., Any], connect: Callable[..., flyt.Session]) -> flyt.Session:
    return connect(backend(device_options=f"latency={LATENCY}"))


@pytest.mark.emulated_only(reason="only the emulated device can slow its copies down")
def test_pinned_memory_is_copied_while_the_caller_goes_on(slowed: flyt.Session) -> None:
    source, out = flyt.pinned_empty((50, 40), np.float64), flyt.pinned_empty((50, 40))
    wanted = np.random.default_rng(5).random((50, 40))
    source[:] = wanted
    with flyt.Stream(non_blocking=True) as stream:
        made = flyt.to_device(source, stream)
        assert not stream.is_done
        assert made.copy_to_host(out, stream) is out
        assert not stream.is_done
        assert not out.any()
        stream.sync()
        assert (out == wanted).all()
        made.close()


@pytest.mark.emulated_only(reason="only the emulated device can slow its copies down")
def test_pageable_and_packed_out_are_complete_on_return(slowed: flyt.Session) -> None:
    wanted = grid()
    pinned = flyt.pinned_empty((7, 18), np.int32)
    with flyt.Stream(non_blocking=True) as stream, flyt.to_device(wanted, stream) as made:
        assert not stream.is_done
        assert (made.copy_to_host(stream=stream) == wanted).all()
        made.copy_to_host(pinned[:, ::2], stream)
        assert (pinned[:, ::2] == wanted).all()
        assert not pinned[:, 1::2].any()
