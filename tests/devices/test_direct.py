# SPDX-License-Identifier: Apache-2.0
"""Which devices let compiled code put work on their streams, and what they give it for that."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from flyt.backend.devices import cupy_direct, open_devices
from flyt.shm.native import native
from flyt.shm.native.build import compiler

STAND_IN = """
#include <string.h>
int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t n, void *s) {
    memmove((void *)to, (void *)from, n); return s == (void *)7 ? 0 : 400;
}
int cuMemsetD8Async(unsigned long long to, unsigned char value, size_t n, void *s) {
    memset((void *)to, value, n); return s == (void *)7 ? 0 : 400;
}
int cuStreamQuery(void *s) { return s == (void *)7 ? 600 : 400; }
int cuEventRecord(void *e, void *s) { return e == (void *)9 && s == (void *)7 ? 0 : 400; }
int cuEventQuery(void *e) { return e == (void *)9 ? 600 : 400; }
int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned i, unsigned j, unsigned k,
                   unsigned shared, void *s, void **params, void **extra) {
    *(unsigned *)params[0] = x + y + z + i + j + k + shared;
    return f == (void *)9 && s == (void *)7 && !extra ? 0 : 400;
}
"""
"""The forms of the functions in CUDA's header cuda.h."""


@pytest.mark.parametrize(
    ("options", "offers"),
    [
        ("memory=64M", True),
        ("latency=0.1", False),
        ("bandwidth=1", False),
        ("fault=copy:1:9", False),
    ],
)
def test_the_emulated_device_offers_it_where_nothing_slows_it(options: str, offers: bool) -> None:
    [device] = open_devices("emulated", options)
    try:
        stream = device.create_stream()
        assert (device.direct(stream) is not None) is (offers and native() is not None)
        device.destroy_stream(stream)
    finally:
        device.close()


def test_the_drivers_functions_are_found_and_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = compiler()
    if command is None:
        pytest.skip("no C compiler")
    source, library = tmp_path / "driver.c", tmp_path / "driver.so"
    source.write_text(STAND_IN)
    subprocess.run([*command, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    monkeypatch.setattr(cupy_direct, "DRIVER", str(library))
    assert cupy_direct.direct(7, 2) is None, "the current context may be another device's"
    found = cupy_direct.direct(7, 1)
    assert found is not None
    assert found.stream == 7
    here, there = ctypes.create_string_buffer(b"abc", 8), ctypes.create_string_buffer(8)
    move = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
    )(found.move)
    query = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(found.query)
    assert move(ctypes.addressof(there), ctypes.addressof(here), 8, found.stream) == 0
    assert (there.raw, query(found.stream)) == (here.raw, 600)
    record = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(found.record)
    reached = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(found.reached)
    assert (record(9, found.stream), reached(9)) == (0, 600)
    launch = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3
    )(found.launch)
    params = (ctypes.c_void_p * 1)(ctypes.addressof(there))
    assert launch(9, 1, 2, 3, 4, 5, 6, 7, found.stream, ctypes.addressof(params), None) == 0
    assert there.raw[:4] == (28).to_bytes(4, "little")


def test_a_driver_that_lacks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("libc.so.6", "libnothing-of-that-name.so"):
        monkeypatch.setattr(cupy_direct, "DRIVER", library)
        assert cupy_direct.direct(7, 1) is None
