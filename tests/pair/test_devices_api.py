# SPDX-License-Identifier: Apache-2.0
"""What a client learns of devices, work on several of them, and cudaDeviceReset."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flyt
import flyt as cudart
from flyt.frontend import current

DATA = Path(__file__).parent.parent / "data"
STREAMS = json.loads((DATA / "cudart-h100-13.0-streams.json").read_text())
KINDS = json.loads((DATA / "cudart-h200-13.0-kinds.json").read_text())
ORACLE = json.loads((DATA / "cudart-h100-13.0.json").read_text())
K = cudart.cudaMemcpyKind
A = cudart.cudaDeviceAttr
H2D, D2H, D2D = K.cudaMemcpyHostToDevice, K.cudaMemcpyDeviceToHost, K.cudaMemcpyDeviceToDevice
MIB = 1 << 20
LIMIT = 60.0


def code(answer: tuple[Any, ...]) -> int:
    return int(answer[0])


def recorded_code(answer: str) -> int:
    """The error of a recorded tuple, such as ``(<cudaError_t.cudaSuccess: 0>, 0)``."""
    found = re.search(r": (\d+)>", answer)
    assert found, answer
    return int(found[1])


def random(size: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def read(address: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    back = np.zeros(size, np.uint8)
    assert cudart.cudaMemcpy(back, address, size, D2H) == (0,), flyt.last_failure()
    return back


@pytest.fixture(autouse=True)
def no_session_after_reset() -> Iterator[None]:
    """A session that a call after cudaDeviceReset made is nobody's: end it."""
    yield
    session = current.existing()
    if session is not None:
        session.close()
    current.thread.device = 0


@pytest.fixture(scope="module")
def two_devices(module_backend: Callable[..., Any], device_kind: str) -> Any:
    """A backend with two devices."""
    options = "memory=256M,devices=2" if device_kind == "emulated" else ""
    return module_backend(device_options=options)


@pytest.fixture
def two(two_devices: Any, connect: Callable[..., flyt.Session]) -> flyt.Session:
    """A session with two devices, of which 0 is current."""
    session = connect(two_devices)
    if len(session.devices) < 2:
        pytest.skip("emulated only: it takes two devices, and this machine has one")
    return session


# --- what they are ---

NATIVE = """
import json
from cuda.bindings import runtime
error, found = runtime.cudaGetDeviceProperties(0)
assert error == 0, error
plain = lambda v: v.hex() if isinstance(v, bytes) else v
names = [n for n in dir(found) if not n.startswith("_") and n not in ("getPtr", "reserved", "uuid")]
print(json.dumps({n: plain(getattr(found, n)) for n in names} | {"uuid": found.uuid.bytes.hex()}))
"""

COMPUTE_CAPABILITY_9 = {
    "major": 9,
    "minor": 0,
    "warpSize": 32,
    "maxThreadsPerBlock": 1024,
    "maxThreadsDim": [1024, 1024, 64],
    "maxGridSize": [2**31 - 1, 65535, 65535],
    "maxThreadsPerMultiProcessor": 2048,
    "maxBlocksPerMultiProcessor": 32,
    "regsPerMultiprocessor": 65536,
    "regsPerBlock": 65536,
    "totalConstMem": 65536,
    "sharedMemPerMultiprocessor": 228 << 10,
    "sharedMemPerBlockOptin": 227 << 10,
    "maxTexture1D": 131072,
    "maxTexture2D": [131072, 65536],
    "maxTexture3D": [16384, 16384, 16384],
    "unifiedAddressing": 1,
}
"""From the programming guide's table of technical specifications."""

UNTOLD = {"luid", "luidDeviceNodeMask", "unifiedFunctionPointers"}
"""Fields that no attribute tells, and that stay 0."""


def test_properties(session: flyt.Session, device_kind: str) -> None:
    error, found = cudart.cudaGetDeviceProperties(0)
    assert error == 0
    assert type(found) is cudart.cudaDeviceProp
    if device_kind == "cupy":
        native = subprocess.run(
            [sys.executable, "-c", NATIVE], capture_output=True, text=True, check=True, timeout=60
        )
        wanted = {n: v for n, v in json.loads(native.stdout).items() if n not in UNTOLD}
    else:
        wanted = {**COMPUTE_CAPABILITY_9, "name": b"Flyt emulated device".hex()}
        wanted["totalGlobalMem"] = cudart.cudaMemGetInfo()[2]
    for name, value in wanted.items():
        ours = found.uuid.bytes if name == "uuid" else getattr(found, name)
        assert (ours.hex() if isinstance(ours, bytes) else ours) == value, name
    assert any(found.uuid.bytes)


def test_properties_agree_with_attributes(session: flyt.Session) -> None:
    found = cudart.cudaGetDeviceProperties(0)[1]
    pairs = {
        A.cudaDevAttrWarpSize: found.warpSize,
        A.cudaDevAttrMaxThreadsPerBlock: found.maxThreadsPerBlock,
        A.cudaDevAttrMaxBlockDimZ: found.maxThreadsDim[2],
        A.cudaDevAttrMaxGridDimY: found.maxGridSize[1],
        A.cudaDevAttrMaxTexture2DHeight: found.maxTexture2D[1],
        A.cudaDevAttrMaxTexture3DDepthAlt: found.maxTexture3DAlt[2],
        A.cudaDevAttrMultiProcessorCount: found.multiProcessorCount,
        A.cudaDevAttrComputeCapabilityMajor: found.major,
        A.cudaDevAttrPciBusId: found.pciBusID,
        A.cudaDevAttrIpcEventSupport: found.ipcEventSupported,
        A.cudaDevAttrMaxAccessPolicyWindowSize: found.accessPolicyMaxWindowSize,
    }
    for attribute, value in pairs.items():
        assert cudart.cudaDeviceGetAttribute(attribute, 0) == (0, value), attribute.name
        assert cudart.cudaDeviceGetAttribute(int(attribute), 0) == (0, value), attribute.name


def test_bad_attributes_and_devices_as_recorded(session: flyt.Session) -> None:
    answers = {
        "attr_bad": [
            cudart.cudaDeviceGetAttribute(A.cudaDevAttrWarpSize, 9),
            cudart.cudaDeviceGetAttribute(9999, 0),
        ],
        "pci_bad": [cudart.cudaDeviceGetPCIBusId(32, 9)],
    }
    for name, found in answers.items():
        assert [code(a) for a in found] == [recorded_code(a) for a in STREAMS[name]], name
        assert all(a[1:] == (None,) for a in found), name
    recorded = recorded_code(STREAMS["props_bad"][0])
    assert [int(cudart.cudaGetDeviceProperties(d)[0]) for d in (9, -1)] == [recorded] * 2
    assert cudart.cudaGetDeviceProperties(9)[1] is None
    assert code(cudart.cudaSetDevice(99)) == ORACLE["setDevice_bad"]["rc"]
    assert code(cudart.cudaSetDevice(-1)) == KINDS["codes"]["setDevice_-1"]
    assert cudart.cudaGetDevice() == (0, 0)


def test_arguments_that_are_no_int(session: flyt.Session) -> None:
    for call in (cudart.cudaSetDevice, cudart.cudaGetDeviceProperties):
        with pytest.raises(TypeError):
            call("0")
        with pytest.raises(OverflowError):
            call(1 << 40)
    assert cudart.cudaSetDevice(np.int64(0)) == (0,)
    assert type(cudart.cudaGetDevice()[1]) is int


def test_pci_bus_id_as_recorded(session: flyt.Session) -> None:
    whole, short = STREAMS["pci"]
    form = re.compile(rb"[0-9A-F]{4}:[0-9A-F]{2}:[0-9A-F]{2}\.0\0 {19}")
    recorded = whole.split("b'")[1].removesuffix("')").encode().decode("unicode_escape").encode()
    assert form.fullmatch(recorded)
    error, found = cudart.cudaDeviceGetPCIBusId(32, 0)
    assert error == 0
    assert form.fullmatch(found)
    assert recorded_code(short) == code(cudart.cudaDeviceGetPCIBusId(5, 0)) == 1
    # CUDA's documentation: 13 characters with the terminating zero.
    assert cudart.cudaDeviceGetPCIBusId(13, 0) == (0, found[:13])
    assert cudart.cudaDeviceGetPCIBusId(12, 0)[0] == 1
    properties = cudart.cudaGetDeviceProperties(0)[1]
    place = (properties.pciDomainID, properties.pciBusID, properties.pciDeviceID)
    assert found.partition(b".")[0] == b"%04X:%02X:%02X" % place


def test_peers(session: flyt.Session) -> None:
    recorded = [recorded_code(answer) for answer in STREAMS["canaccess"]]
    assert STREAMS["canaccess"][0].endswith(", 0)")
    own, bad = cudart.cudaDeviceCanAccessPeer(0, 0), cudart.cudaDeviceCanAccessPeer(0, 99)
    assert [code(own), code(bad)] == recorded
    assert own[1] == 0
    assert code(cudart.cudaDeviceCanAccessPeer(99, 0)) == 101


# --- several ---


def test_two_devices_are_told_apart(two: flyt.Session) -> None:
    found = [cudart.cudaGetDeviceProperties(n)[1] for n in (0, 1)]
    assert found[0].uuid.bytes != found[1].uuid.bytes
    ids = [cudart.cudaDeviceGetPCIBusId(13, n)[1] for n in (0, 1)]
    assert ids[0] != ids[1]
    for one, other in ((0, 1), (1, 0)):
        error, reachable = cudart.cudaDeviceCanAccessPeer(one, other)
        assert (error, reachable in (0, 1)) == (0, True)


@pytest.mark.emulated_only(reason="whether two GPUs reach each other is the machine's affair")
def test_emulated_devices_are_peers(two: flyt.Session) -> None:
    assert cudart.cudaDeviceCanAccessPeer(0, 1) == (0, 1)
    assert cudart.cudaDeviceCanAccessPeer(1, 0) == (0, 1)


def test_the_current_device_is_the_threads_own(two: flyt.Session) -> None:
    assert cudart.cudaSetDevice(1) == (0,)
    both_set = threading.Barrier(2, timeout=LIMIT)

    def other(device: int) -> list[tuple[Any, ...]]:
        answers = [cudart.cudaGetDevice(), cudart.cudaSetDevice(device)]
        both_set.wait()
        pointer = cudart.cudaMalloc(512)[1]
        where = cudart.cudaPointerGetAttributes(pointer)[1].device
        answers += [cudart.cudaGetDevice(), (0, where), cudart.cudaFree(pointer)]
        return answers

    with ThreadPoolExecutor(2) as pool:
        for device, answers in enumerate(pool.map(other, (0, 1))):
            assert answers == [(0, 0), (0,), (0, device), (0, device), (0,)]
    assert cudart.cudaGetDevice() == (0, 1)


def test_stream_priorities_are_the_devices_own(session: flyt.Session) -> None:
    session.devices[0]["stream_priorities"][:] = [0, -2]  # as if it were another device
    assert cudart.cudaDeviceGetStreamPriorityRange() == (0, 0, -2)
    for asked, given in ((-9, -2), (-1, -1), (3, 0)):
        stream = cudart.cudaStreamCreateWithPriority(0, asked)[1]
        assert cudart.cudaStreamGetPriority(stream) == (0, given)
        assert cudart.cudaStreamDestroy(stream) == (0,)


@pytest.mark.emulated_only(reason="takes a backend with two devices and one with one")
def test_a_threads_device_ends_with_the_connection(
    two: flyt.Session, backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    """The new backend has fewer devices than the number that the thread has set."""

    def make() -> list[int]:
        stream = cudart.cudaStreamCreate()
        cudart.cudaStreamDestroy(stream[1])
        answers = [stream, cudart.cudaDeviceGetStreamPriorityRange(), cudart.cudaMalloc(512)]
        return [int(answer[0]) for answer in answers]

    with ThreadPoolExecutor(1) as other:
        assert other.submit(cudart.cudaSetDevice, 1).result() == (0,)
        assert other.submit(cudart.cudaGetDevice).result() == (0, 1)
        connect(backend())
        assert other.submit(make).result() == [0, 0, 0]
        assert other.submit(cudart.cudaGetDevice).result() == (0, 0)
        assert code(other.submit(cudart.cudaSetDevice, 1).result()) == 101


@pytest.mark.alone
def test_memory_lies_on_the_current_device(two: flyt.Session) -> None:
    free = []
    for device in (0, 1):
        assert cudart.cudaSetDevice(device) == (0,)
        free.append(cudart.cudaMemGetInfo()[1])
    pointer = cudart.cudaMalloc(64 * MIB)[1]
    pinned = cudart.cudaHostAlloc(4096, 0)[1]
    for address in (pointer, pointer + 64 * MIB - 1, pinned, pinned + 4095):
        assert cudart.cudaPointerGetAttributes(address)[1].device == 1
    assert cudart.cudaMemGetInfo()[1] <= free[1] - 64 * MIB
    assert cudart.cudaSetDevice(0) == (0,)
    assert cudart.cudaMemGetInfo()[1] > free[0] - 32 * MIB
    # With unified addressing a pointer names its device: the current one does not matter.
    data = random(MIB)
    assert cudart.cudaMemcpy(pointer, data, MIB, H2D) == (0,)
    assert (read(pointer, MIB) == data).all()
    assert cudart.cudaFree(pointer) == (0,)
    assert cudart.cudaFreeHost(pinned) == (0,)
    assert cudart.cudaSetDevice(1) == (0,)
    assert cudart.cudaMemGetInfo()[1] > free[1] - 32 * MIB


def allocate_on(device: int, size: int) -> int:
    assert cudart.cudaSetDevice(device) == (0,)
    error, pointer = cudart.cudaMalloc(size)
    assert error == 0, flyt.last_failure()
    return int(pointer)


@pytest.mark.parametrize("kind", [D2D, K.cudaMemcpyDefault])
@pytest.mark.parametrize("current_device", [0, 1])
def test_copies_between_devices(two: flyt.Session, kind: Any, current_device: int) -> None:
    size = 3 * MIB + 7
    data = random(size, current_device)
    blocks = [allocate_on(device, size + 1) for device in (0, 1)]
    assert cudart.cudaSetDevice(current_device) == (0,)
    assert cudart.cudaMemcpy(blocks[0], data, size, H2D) == (0,)
    assert cudart.cudaMemcpy(blocks[1] + 1, blocks[0], size, kind) == (0,)
    assert (read(blocks[1] + 1, size) == data).all()
    assert cudart.cudaMemset(blocks[0], 0, size) == (0,)
    assert cudart.cudaMemcpy(blocks[0], blocks[1] + 1, size, kind) == (0,)
    assert (read(blocks[0], size) == data).all()
    assert code(cudart.cudaMemcpy(blocks[1] + 2, blocks[0], size, kind)) == 1
    for block in blocks:
        assert cudart.cudaFree(block) == (0,)


SLOW = "memory=256M,devices=2,bandwidth=0.2"
"""A copy of 8 MiB takes 40 ms, and its bytes move at its end: who looks too early sees it."""


@pytest.mark.emulated_only(reason="only slowed DMA shows whether a copy is waited for")
def test_a_copy_between_devices_is_in_the_order_of_both(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    """cudaMemcpyPeer's clause: serialised with all work of both devices, also when the current
    device changes meanwhile."""
    connect(backend(device_options=SLOW))
    size = 8 * MIB
    data = random(size)
    first, second = (allocate_on(device, size) for device in (0, 1))
    assert cudart.cudaSetDevice(0) == (0,)
    assert cudart.cudaMemcpy(first, data, size, H2D) == (0,)
    assert cudart.cudaMemcpy(second, first, size, D2D) == (0,)
    assert cudart.cudaSetDevice(1) == (0,)
    assert (read(second, size) == data).all()
    assert cudart.cudaMemcpy(first, second, size, D2D) == (0,)
    assert cudart.cudaMemset(second, 0, size) == (0,)  # after the copy has read it
    assert cudart.cudaSetDevice(0) == (0,)
    assert (read(first, size) == data).all()


@pytest.mark.emulated_only(reason="only slowed DMA shows whether a copy is waited for")
def test_a_finished_copy_is_seen_from_every_device(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    """cudaMemcpy from the host is synchronous: whatever device is current then, it has happened."""
    connect(backend(device_options=SLOW))
    size = 8 * MIB
    data, block = random(size), allocate_on(1, size)
    assert cudart.cudaSetDevice(0) == (0,)
    assert cudart.cudaMemcpy(block, data, size, H2D) == (0,)
    assert cudart.cudaSetDevice(1) == (0,)
    assert (read(block, size) == data).all()


@pytest.mark.emulated_only(reason="only slowed DMA shows whether work is waited for")
def test_a_free_waits_for_the_copy_of_another_device(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    connect(backend(device_options=SLOW))
    size = 8 * MIB
    data = random(size)
    first, second = (allocate_on(device, size) for device in (0, 1))
    assert cudart.cudaSetDevice(0) == (0,)
    assert cudart.cudaMemcpy(first, data, size, H2D) == (0,)
    assert cudart.cudaMemcpy(second, first, size, D2D) == (0,)
    assert cudart.cudaSetDevice(1) == (0,)
    assert cudart.cudaFree(second) == (0,)
    again = allocate_on(1, size)  # most likely the same place, and zero
    assert not read(again, size).any()
    assert cudart.cudaDeviceSynchronize() == (0,)
    assert cudart.cudaSetDevice(0) == (0,)
    assert cudart.cudaDeviceSynchronize() == (0,)
    assert not read(again, size).any()


# --- cudaDeviceReset ---


def test_reset_as_recorded(session: flyt.Session) -> None:
    pointer = cudart.cudaMalloc(4096)[1]
    answers = [cudart.cudaDeviceReset(), cudart.cudaFree(pointer), cudart.cudaMalloc(4096)]
    assert [code(answer) for answer in answers] == STREAMS["reset"]


@pytest.mark.alone
def test_reset_takes_everything(session: flyt.Session) -> None:
    assert code(cudart.cudaDeviceReset()) == 0
    free = cudart.cudaMemGetInfo()[1]
    pointer = cudart.cudaMalloc(64 * MIB)[1]
    pinned = cudart.cudaHostAlloc(MIB, 0)[1]
    own = np.zeros(4096, np.uint8)
    array = flyt.pinned_empty(4096, np.uint8)
    array[:] = 7
    assert cudart.cudaHostRegister(own, own.nbytes, 0) == (0,)
    (_, stream), (_, event) = cudart.cudaStreamCreate(), cudart.cudaEventCreate()
    old = current.existing()
    assert cudart.cudaDeviceReset() == (0,)
    assert cudart.cudaMemGetInfo()[1] > free - 32 * MIB
    assert current.existing() is not old
    kinds = [int(cudart.cudaPointerGetAttributes(p)[1].type) for p in (pointer, pinned, own)]
    assert kinds == [0, 0, 0]
    assert code(cudart.cudaFreeHost(pinned)) == ORACLE["freeHost_twice"]["rc"]
    assert code(cudart.cudaHostUnregister(own)) == ORACLE["hostUnregister_twice"]["rc"]
    assert code(cudart.cudaStreamQuery(stream)) != 0
    assert code(cudart.cudaEventQuery(event)) != 0
    assert (array == 7).all()  # Flyt's own arrays stay readable
    fresh, data = cudart.cudaMalloc(MIB)[1], random(MIB)
    assert cudart.cudaMemcpy(fresh, data, MIB, H2D) == (0,)
    assert (read(fresh, MIB) == data).all()


def test_reset_keeps_settings_device_and_last_error(
    two_devices: Any, two: flyt.Session, connect: Callable[..., flyt.Session]
) -> None:
    session = flyt.connect(two_devices.endpoint, two_devices.region)  # not from the environment
    assert cudart.cudaSetDevice(1) == (0,)
    assert code(cudart.cudaMalloc(1 << 60)) == 2
    assert cudart.cudaDeviceReset() == (0,)
    assert cudart.cudaGetDevice() == (0, 1)
    assert code(cudart.cudaGetLastError()) == 2
    again = current.existing()
    assert again is not None
    assert again is not session
    assert again.settings == session.settings
    assert again.settings.region == two_devices.region
    # connect() starts anew: from its own arguments and the environment.
    assert connect(two_devices).settings.region == ""
    assert cudart.cudaGetDevice() == (0, 0)


def test_reset_with_work_in_flight(session: flyt.Session) -> None:
    size = 8 * MIB
    data = random(size)
    for _ in range(3):
        pointer = cudart.cudaMalloc(size)[1]
        assert cudart.cudaMemcpy(pointer, data, size, H2D) == (0,)
        assert cudart.cudaDeviceReset() == (0,)
    pointer = cudart.cudaMalloc(size)[1]
    assert not read(pointer, size).any()


@pytest.mark.emulated_only(reason="injects the failure of a copy that was posted")
def test_reset_reports_the_error_of_earlier_work(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    connect(backend(device_options="memory=64M,fault=copy:999:1:async"))
    pointer = cudart.cudaMalloc(4096)[1]
    assert cudart.cudaMemcpy(pointer, bytes(4096), 4096, H2D) == (0,)
    assert code(cudart.cudaDeviceReset()) == 999
    assert cudart.cudaDeviceReset() == (0,)
    assert cudart.cudaMalloc(4096)[0] == 0


RESETS = """
import flyt as cudart
pointer = cudart.cudaMalloc(4096)[1]
for _ in range(2):
    answer = cudart.cudaMemcpy(pointer, bytes(4096), 4096, cudart.cudaMemcpyKind(1))
    print(int(answer[0]), flush=True)
print(int(cudart.cudaDeviceReset()[0]), flush=True)
"""


@pytest.mark.emulated_only(reason="injects the failure of a copy that was posted, and delays it")
def test_a_slow_client_hears_of_the_error_before_its_ring_is_wiped(
    backend: Callable[..., Any], start_client: Callable[..., subprocess.Popen[str]]
) -> None:
    daemon = backend(device_options="memory=64M,latency=0.5,fault=copy:999:2:async")
    client = start_client(RESETS, daemon)
    assert client.stdout is not None
    assert client.stdout.readline() + client.stdout.readline() == "0\n0\n"
    time.sleep(0.2)  # the reset waits, the first copy is under way
    client.send_signal(signal.SIGSTOP)
    time.sleep(1.0)  # the second copy fails; a session that had said goodbye would be gone by now
    client.send_signal(signal.SIGCONT)
    assert client.stdout.readline() == "999\n"
    assert client.wait(LIMIT) == 0


def test_reset_of_a_lost_session(
    backend: Callable[..., Any], connect: Callable[..., flyt.Session]
) -> None:
    daemon = backend()
    session = connect(daemon)
    assert cudart.cudaMalloc(4096)[0] == 0
    for pid in daemon.descendants():
        os.kill(pid, signal.SIGKILL)
    wait_until_lost(session)
    assert code(cudart.cudaDeviceReset()) == 46  # without a word: cudaErrorDevicesUnavailable
    pointer = cudart.cudaMalloc(4096)[1]
    assert not read(pointer, 4096).any()
    assert cudart.cudaDeviceReset() == (0,)


def wait_until_lost(session: flyt.Session) -> None:
    for _ in range(1000):
        if cudart.cudaDeviceSynchronize()[0] or cudart.cudaMemGetInfo()[0]:
            break
    assert session.connection.lost is not None


def test_reset_of_a_private_backend(run_client: Callable[..., Any]) -> None:
    done = run_client(
        "import os, flyt\n"
        "os.environ['FLYT_BACKEND'] = ''\n"
        "session = flyt.connect('emulated:memory=96M')\n"
        "pointer = flyt.cudaMalloc(4096)[1]\n"
        "print(int(flyt.cudaDeviceReset()[0]), int(flyt.cudaFree(pointer)[0]))\n"
        "print(flyt.cudaMemGetInfo()[1:])\n",
        "ipc:///nowhere/at/all.sock",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0 1", str((96 * MIB, 96 * MIB))]


def test_reset_where_there_is_no_session(run_client: Callable[..., Any], one_backend: Any) -> None:
    lonely = run_client("import flyt; print(int(flyt.cudaDeviceReset()[0]))", "ipc:///nowhere")
    assert lonely.stdout.strip() == "100", lonely.stderr
    forked = run_client(
        "import os, flyt\n"
        "flyt.cudaMalloc(4096)\n"
        "if (child := os.fork()) == 0:\n"
        "    os._exit(int(flyt.cudaDeviceReset()[0]))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(flyt.cudaMalloc(8)[0]))\n",
        one_backend,
    )
    assert forked.stdout.strip() == "3 0", forked.stderr
    between = run_client(
        "import os, flyt\n"
        "flyt.cudaMalloc(4096); flyt.cudaDeviceReset()\n"
        "if (child := os.fork()) == 0:\n"
        "    os._exit(int(flyt.cudaMalloc(4096)[0]))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(flyt.cudaMalloc(8)[0]))\n",
        one_backend,
    )
    assert between.stdout.strip() == "0 0", between.stderr
