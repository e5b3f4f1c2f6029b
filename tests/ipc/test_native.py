# SPDX-License-Identifier: Apache-2.0
"""The C allocators and `CudaDriver` against a stand-in for libcuda that is made of memfds.

The stand-in shows that calls are made, in which order, with which structures, and that memory
crosses. What a real driver answers is for ``test_gpu.py``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flyt import ipc
from flyt.compiling import compiler
from flyt.errors import ConfigurationError
from flyt.ipc import native_build

HERE = Path(__file__).with_name("native")
LIMIT = 90.0

pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="no C compiler here"
)


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stubs")
    cc = compiler(native_build.NO_COMPILER)[0]
    base = [cc, "-O1", "-g", "-w"]
    shared = [*base, "-shared", "-fPIC"]
    for source, target in (("stub_cuda", "libcuda.so.1"), ("stub_cudart", "libcudart.so")):
        name = f"-Wl,-soname,{target}"
        command = [*shared, name, "-o", str(folder / target), str(HERE / f"{source}.c"), "-ldl"]
        subprocess.run(command, check=True, timeout=LIMIT)
    subprocess.run(
        [*base, "-o", str(folder / "program"), str(HERE / "program.c"), f"-L{folder}", "-lcudart"],
        check=True,
        timeout=LIMIT,
    )
    return folder


@pytest.fixture
def environment(stubs: Path, tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(stubs),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "STUB_LOG": str(tmp_path / "log"),
    }


def log_of(environment: dict[str, str]) -> list[str]:
    return Path(environment["STUB_LOG"]).read_text().splitlines()


def run(code: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_pool_s_memory_is_shared_and_its_end_is_told(
    environment: dict[str, str], peer: Callable[..., Any]
) -> None:
    other = peer(
        "import ctypes\n"
        "from flyt.ipc import native_build, foreign\n"
        "lib = native_build.load('pool'); foreign.adopt('pool', lib)\n"
        "alloc, free = lib.flyt_pool_alloc, lib.flyt_pool_free\n"
        "alloc.restype = ctypes.c_void_p\n"
        "alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]\n"
        "free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]\n"
        "class Memory:\n"
        "  def __init__(self, n):\n"
        "    self.n, self.at = n, alloc(n, 1, None)\n"
        "    self.__array_interface__ = {'shape': (n,), 'typestr': '|u1', 'version': 3,\n"
        "      'data': (self.at, False)}\n"
        "m = Memory(3 << 20); a = np.asarray(m); a[:] = 5\n"
        "ipc.send(conn, a[100:200]); ipc.send(conn, a[150:])\n"
        "hear(); say(a[120]); conn.wait_released(20); del a\n"
        "free(m.at, m.n, 1, None); say('freed')\n"
        "n = Memory(1 << 20); say(n.at == m.at); b = np.asarray(n); b[:] = 6\n"
        "ipc.send(conn, b); hear()\n",
        env={k: environment[k] for k in ("LD_LIBRARY_PATH", "XDG_CACHE_HOME", "STUB_LOG")},
    )
    one, two = ipc.recv(other.conn), ipc.recv(other.conn)
    assert (one.sum(), two.size) == (500, (3 << 20) - 150)
    one[50:] = 9
    assert two[0] == 9
    one[20] = 8
    other.say()
    assert other.hear() == "8"
    address = one.ctypes.data
    from flyt.ipc.blocks import blocks

    assert blocks.find(address) is not None
    del one, two
    assert other.hear() == "freed"
    other.hear()
    new = ipc.recv(other.conn)  # new memory, though it may have the old address there
    assert new.sum() == 6 << 20
    for _ in range(500):  # the idle mapping of the freed block goes
        if blocks.find(address) in (None, blocks.find(new.ctypes.data)):
            break
        __import__("time").sleep(0.01)
    assert blocks.find(address) in (None, blocks.find(new.ctypes.data))
    other.say()


def test_the_pool_asks_the_driver_as_cuda_says(environment: dict[str, str]) -> None:
    code = (
        "import ctypes\n"
        "from flyt.ipc import native_build\n"
        "lib = native_build.load('pool')\n"
        "p, ours = ctypes.c_void_p(), ctypes.c_int()\n"
        "print(lib.flyt_vmm_alloc(ctypes.c_size_t(1), 1, ctypes.byref(p)),\n"
        "      lib.flyt_vmm_free(p, ctypes.byref(ours)), ours.value,\n"
        "      lib.flyt_vmm_alloc(ctypes.c_size_t(1 << 40), 0, ctypes.byref(p)), p.value,\n"
        "      lib.flyt_vmm_alloc(ctypes.c_size_t(1), 7, ctypes.byref(p)))\n"
    )
    told = run(code, {**environment, "STUB_MEMORY": str(1 << 30)})
    assert told.split() == ["0", "0", "1", "2", "None", "101"]
    size = 2 << 20
    assert log_of(environment)[:9] == [
        f"create {size} on 1",
        f"reserve {size}",
        f"map {size}",
        "access 1: 3",
        "synchronize 1001",
        f"unmap {size}",
        f"unreserve {size}",
        "release",
        f"create {1 << 40} on 0",
    ]


def test_a_program_that_is_left_as_it_is(environment: dict[str, str], stubs: Path) -> None:
    plain = subprocess.run(
        [stubs / "program"], env=environment, capture_output=True, timeout=LIMIT, check=False
    )
    assert plain.returncode != 0  # the stand-in's cudaMalloc gives no 3 MiB
    done = subprocess.run(
        [sys.executable, "-m", "flyt.cli.main", "ipc", "run", "--", str(stubs / "program")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1 7 0 0 0 1 1\n"
    assert [line.split()[0] for line in log_of(environment)].count("release") == 2
    assert f"create {4 << 20} on 1" in log_of(environment)


def test_a_missing_compiler_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="C compiler"):
        native_build.library_path("pool")
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(ConfigurationError, match="no-such-compiler"):
        native_build.library_path("pool")
    assert list((tmp_path / "flyt").iterdir()) == []


def test_a_cache_that_others_can_write_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "flyt").mkdir()
    (tmp_path / "flyt").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match="mode 700"):
        native_build.library_path("pool")


def test_a_library_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = native_build.library_path("preload")
    stamp = first.stat().st_mtime_ns
    assert native_build.library_path("preload") == first
    assert first.stat().st_mtime_ns == stamp
    assert first.parent.stat().st_mode & 0o777 == 0o700


CUDA = """
import ctypes, os
from flyt.ipc import *
from flyt.ipc.cuda_driver import CudaDriver
"""


def cuda(code: str, environment: dict[str, str], **more: str) -> str:
    return run(CUDA + code, {**environment, "FLYT_IPC_DRIVER": "cuda", **more})


def test_the_cuda_driver_shares_a_buffer(environment: dict[str, str]) -> None:
    told = cuda(
        "r = VirtualMemoryResource(0, VirtualMemoryResourceOptions(chunk_size=2 << 20))\n"
        "b = r.allocate(3 << 20)\n"
        "d = b.ipc_descriptor\n"
        "o = Buffer.from_ipc_descriptor(VirtualMemoryResource(1), d)\n"
        "ctypes.memset(b.handle, 65, b.size)\n"
        "print(r.minimum_granularity, r.recommended_granularity, b.mapped_size, d.uuid,\n"
        "      ctypes.string_at(o.handle + (2 << 20) - 2, 4), o.device_id, o.handle != b.handle,\n"
        "      [os.get_inheritable(fd) for fd in d.fds], b.__cuda_array_interface__['shape'],\n"
        "      hasattr(b, '__array_interface__'))\n"
        "o.close(); b.close()\n",
        environment,
    )
    assert told == (
        f"65536 {2 << 20} {4 << 20} b'flyt-ipc-twin-00' b'AAAA' 0 True [False, False] "
        f"({3 << 20},) False\n"
    )
    log = [line for line in log_of(environment) if not line.startswith("attribute")]
    chunk = f"{2 << 20}"
    made = [f"create {chunk} on 0", f"map {chunk}"]
    assert log[:6] == [f"reserve {4 << 20}", *made, *made, "access 0: 3"]
    assert log[6:8] == ["export", "export"]
    # Access for the device that maps and for the one that holds the memory.
    importing = log[8:15]
    assert importing[0] == f"reserve {4 << 20}"
    assert importing[-2:] == ["access 1: 3", "access 0: 3"]
    # Nothing is unmapped before the devices' work is done, and all goes in reverse order.
    undone = [f"unmap {chunk}", "release"] * 2 + [f"unreserve {4 << 20}"]
    assert log[15:] == [
        "synchronize 1000", "synchronize 1001", *undone, "synchronize 1000", *undone,
    ]  # fmt: skip


def test_the_cuda_driver_s_events(environment: dict[str, str]) -> None:
    told = cuda(
        "d = CudaDriver()\n"
        "e, h = d.export_event(1, 5); d.wait_event(0, 6, h); d.return_event(e)\n"
        "f, g = d.export_event(1, 7); d.export_event(1, 8); d.export_event(0, 9)\n"
        "d.synchronize(1, 9); print(h == g == b'h' * 64)\n",
        environment,
    )
    assert told == "True\n"
    assert [line for line in log_of(environment) if not line.startswith("attribute")] == [
        "event 6 in 1001",  # CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS
        "record 77 on 5",
        "open hhhh in 1000",
        "stream 6 waits for 88",
        "destroy 88",
        "record 77 on 7",  # it was returned, so it serves again
        "event 6 in 1001",  # it is in use
        "record 77 on 8",
        "event 6 in 1000",  # events belong to a device
        "record 77 on 9",
        "synchronize stream 9",
    ]


def test_the_cuda_driver_keeps_so_many_events(environment: dict[str, str]) -> None:
    cuda(
        "d = CudaDriver()\n"
        "for e in [d.export_event(0, 5)[0] for _ in range(70)]: d.return_event(e)\n",
        environment,
    )
    log = log_of(environment)
    assert (log.count("event 6 in 1000"), log.count("destroy 77")) == (70, 6)


def test_a_context_that_is_current_stays_so(environment: dict[str, str]) -> None:
    """The stand-in keeps one current context, no stack: whoever pushes and pops loses it."""
    told = cuda(
        "from cuda.bindings import driver as cu\n"
        "d = CudaDriver(); d.uuid(0); here = d._context(0)\n"
        "cu.cuCtxPushCurrent(here)\n"
        "d.synchronize(0, 5); d.synchronize(0)\n"
        "print(cu.cuCtxGetCurrent()[1] == here)\n"
        "d.synchronize(1)\n"
        "print(cu.cuCtxGetCurrent()[1] == here)\n",
        environment,
    )
    assert told == "True\nFalse\n"
    log = [line for line in log_of(environment) if line.startswith("synchronize")]
    assert log == ["synchronize stream 5", "synchronize 1000", "synchronize 1001"]


def test_the_cuda_driver_s_refusals(environment: dict[str, str]) -> None:
    told = cuda(
        "from flyt.errors import *\n"
        "r = VirtualMemoryResource(0)\n"
        "try: r.allocate(1 << 34)\nexcept DeviceError as e: print(e)\n"
        "b = r.allocate(1)\n"
        "try: Buffer.from_ipc_descriptor(VirtualMemoryResource(1), b.ipc_descriptor)\n"
        "except SharingError as e: print(e)\n",
        environment,
        STUB_NO_PEER="1",
        STUB_MEMORY=str(1 << 30),
    )
    assert "CUDA error 2: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY" in told
    assert "no peer access" in told


def test_without_a_driver_nothing_is_emulated_in_silence() -> None:
    code = (
        "from flyt.errors import ConfigurationError\nfrom flyt import ipc\n"
        "try: ipc.VirtualMemoryResource()\nexcept ConfigurationError as e: print(e)\n"
        "else: print('a GPU is here')\n"
    )
    told = run(code, {k: v for k, v in os.environ.items() if k != "FLYT_IPC_DRIVER"})
    assert "FLYT_IPC_DRIVER=emulated" in told or "a GPU is here" in told
