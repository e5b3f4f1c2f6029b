# SPDX-License-Identifier: Apache-2.0
"""Two processes and one memory: both ways, no copy, every layout; lives and deaths of both ends."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flyt import ipc
from flyt.errors import HandshakeError, PeerLost, PeerTimeout, SharingError
from flyt.ipc.dtypes import NUMPY_NAMES
from flyt.ipc.link import Link
from tests.ipc.test_memory import file_behind

CYCLES = int(os.environ.get("FLYT_TEST_CYCLES", "10000"))
"""Send and receive cycles of the leak test."""

PATIENCE = 20.0
"""Seconds for something that another process or thread does; it bounds a hang only."""


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def shared(values: Any, dtype: str = "float32") -> np.ndarray[Any, Any]:
    values = np.asarray(values, dtype)
    array = ipc.empty(values.shape, dtype)
    array[...] = values
    return array


def is_mapped(address: int) -> bool:
    try:
        file_behind(address)
    except AssertionError:
        return False
    return True


def physical_page(pid: int, address: int) -> int:
    """Frame number of the page, as the kernel tells root; 0 for others."""
    with open(f"/proc/{pid}/pagemap", "rb") as pagemap:
        pagemap.seek(address // 4096 * 8)
        return int.from_bytes(pagemap.read(8), "little") & (1 << 55) - 1


def test_two_processes_use_the_same_physical_pages(peer: Callable[..., Any]) -> None:
    other = peer(
        "a = ipc.recv(conn)\n"
        "from tests.ipc.test_memory import file_behind\n"
        "at = a.__array_interface__['data'][0]\n"
        "a[0, 1] = a[1, 0] + 0.5\n"
        "say(at, *file_behind(at)); hear()\n"
    )
    array = shared(np.arange(6).reshape(2, 3))
    address = array.__array_interface__["data"][0]
    ipc.send(other.conn, array)
    theirs, inode, offset = other.hear().split()
    assert (inode, int(offset)) == file_behind(address)
    assert array[0, 1] == 3.5  # written there, read here
    ours, its = physical_page(os.getpid(), address), physical_page(other.process.pid, int(theirs))
    assert ours == its
    assert ours != 0 or os.geteuid() != 0
    other.say()


def test_memory_of_the_other_process_comes_here_and_goes_home(peer: Callable[..., Any]) -> None:
    other = peer(
        "a = ipc.empty((4,), 'int32'); a[:] = 7\n"
        "ipc.send(conn, a); b = ipc.recv(conn)\n"
        "say(np.shares_memory(a, b), b.ctypes.data == a.ctypes.data); say(*a); hear()\n"
    )
    array = ipc.recv(other.conn)
    array[2] = 9
    ipc.send(other.conn, array)  # its own memory, not a second mapping of it
    assert other.hear() == "True True"
    assert other.hear() == "7 7 9 7"
    other.say()


LAYOUTS: dict[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    "plain": lambda a: a,
    "0-d": lambda a: a[1, 2],
    "transposed": lambda a: a.T,
    "strided": lambda a: a[::2, 1::2],
    "offset": lambda a: a[2:, 3:],
    "reversed": lambda a: a[::-1, ::-2],
    "expanded": lambda a: np.broadcast_to(a[0], (3, *a[0].shape)),
    "empty": lambda a: a[:0],
    "one": lambda a: a[3:4, 4:5],
    "three axes": lambda a: a.reshape(2, 2, 5).swapaxes(0, 2),
    "read-only": lambda a: np.lib.stride_tricks.as_strided(a, writeable=False),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_arrives_as_it_is(
    name: str, both: tuple[ipc.Connection, ipc.Connection]
) -> None:
    left, right = both
    array = shared(np.arange(20).reshape(4, 5))
    view = np.asarray(LAYOUTS[name](array)) if name != "0-d" else array[1:2, 2:3].reshape(())
    ipc.send(left, view)
    got = ipc.recv(right)
    assert got.shape == view.shape
    assert got.dtype == view.dtype
    assert got.tolist() == view.tolist()
    if view.size:
        assert got.strides == view.strides
        assert got.__array_interface__["data"] == view.__array_interface__["data"]
        assert got.flags.writeable == view.flags.writeable


@pytest.mark.parametrize("dtype", sorted(NUMPY_NAMES))
def test_every_numpy_dtype_crosses(dtype: str, peer: Callable[..., Any]) -> None:
    other = peer("a = ipc.recv(conn); say(a.dtype, a.tobytes().hex()); a[...] = a[::-1]; say()")
    array = ipc.empty((3,), dtype)
    array.view(np.uint8)[:] = np.arange(array.nbytes) % 2
    before = array.copy()
    ipc.send(other.conn, array)
    assert other.hear() == f"{dtype} {before.tobytes().hex()}"
    other.hear()
    assert array.tobytes() == before[::-1].tobytes()


def test_views_of_one_block_arrive_sharing_it(peer: Callable[..., Any]) -> None:
    other = peer(
        "a, b = ipc.recv(conn), ipc.recv(conn)\n"
        "b[0] = 50\n"
        "with open('/proc/self/maps') as m: count = m.read().count('memfd:flyt-ipc')\n"
        "say(np.shares_memory(a, b), a[5], count)\n"
    )
    array = shared(np.arange(10))
    ipc.send(other.conn, array[:8])
    ipc.send(other.conn, array[5:])
    assert other.hear() == "True 50.0 1"


def test_received_memory_is_passed_on(peer: Callable[..., Any]) -> None:
    forward = peer(
        "l = ipc.Listener(); say(l.name); onward = l.connection()\n"
        "a = ipc.recv(conn); ipc.send(onward, a); del a\n"
        "hear()\n"
    )
    with ipc.connect(forward.hear()) as last:
        array = shared([1, 2, 3])
        ipc.send(forward.conn, array)
        got = ipc.recv(last)
        got[1] = 20
        assert array.tolist() == [1, 20, 3]
        # The one in the middle has dropped its array, but passed it on: it is still held there.
        assert forward.conn.shares_out == 1
        del got
        forward.conn.wait_released(PATIENCE)
    forward.say()


def test_the_exporter_keeps_the_memory_until_it_is_released(peer: Callable[..., Any]) -> None:
    other = peer("a = ipc.recv(conn); say('got'); hear(); say(a.sum()); del a; say(); hear()")
    array = shared([1, 2, 3])
    address = array.__array_interface__["data"][0]
    ipc.send(other.conn, array)
    del array
    gc.collect()
    other.hear()
    assert other.conn.shares_out == 1
    file_behind(address)  # still mapped here
    other.say()
    assert other.hear() == "6.0"
    other.hear()
    other.conn.wait_released(PATIENCE)
    assert eventually(lambda: not is_mapped(address))
    other.say()


def test_a_killed_importer_releases_all_it_had(peer: Callable[..., Any]) -> None:
    other = peer("a, b = ipc.recv(conn), ipc.recv(conn); say(); hear()")
    array = shared([1, 2, 3])
    ipc.send(other.conn, array)
    ipc.send(other.conn, array[1:])
    ipc.send(other.conn, array[2:])  # never received
    other.hear()
    assert other.conn.shares_out == 3
    os.kill(other.process.pid, signal.SIGKILL)
    other.conn.wait_released(PATIENCE)
    with pytest.raises(PeerLost):
        ipc.recv(other.conn)
    with pytest.raises(PeerLost):
        ipc.send(other.conn, array)
    assert array.tolist() == [1, 2, 3]


def test_a_killed_exporter_leaves_the_importer_its_memory(peer: Callable[..., Any]) -> None:
    other = peer("a = ipc.empty((1 << 18,), 'uint8'); a[:] = 3; ipc.send(conn, a); hear()")
    array = ipc.recv(other.conn)
    address = array.__array_interface__["data"][0]
    os.kill(other.process.pid, signal.SIGKILL)
    other.end()
    assert array.sum() == 3 << 18
    array[:] = 4
    assert array.sum() == 4 << 18
    with pytest.raises(PeerLost):
        ipc.recv(other.conn)
    del array  # the last of the physical memory
    with pytest.raises(AssertionError, match="nothing is mapped"):
        file_behind(address)


def test_what_was_sent_before_a_death_still_arrives(peer: Callable[..., Any]) -> None:
    other = peer("a = ipc.empty((3,)); a[:] = 1\nfor i in range(3): ipc.send(conn, a)\nos._exit(0)")
    other.end()
    assert [ipc.recv(other.conn).sum() for _ in range(3)] == [3, 3, 3]
    with pytest.raises(PeerLost):
        ipc.recv(other.conn)


def test_an_idle_mapping_is_used_again_and_goes_with_its_block(peer: Callable[..., Any]) -> None:
    other = peer(
        "def count():\n"
        "  with open('/proc/self/maps') as m: return m.read().count('memfd:flyt-ipc')\n"
        "a = ipc.recv(conn); at = a.ctypes.data; del a; say(count())\n"
        "a = ipc.recv(conn); say(at == a.ctypes.data); del a; say(); hear()\n"
        "while count(): pass\n"
        "say(count()); hear()\n"
    )
    array = shared([1])
    ipc.send(other.conn, array)
    assert other.hear() == "1"
    ipc.send(other.conn, array)
    assert other.hear() == "True"
    other.hear()
    other.conn.wait_released(PATIENCE)
    del array  # the block is no more: the peer is told
    other.say()
    assert other.hear() == "0"
    other.say()


def test_ten_thousand_cycles_leave_nothing(
    peer: Callable[..., Any], usage: Callable[[int], Any]
) -> None:
    other = peer(
        "for i in range(int(sys.argv[2])):\n"
        "    a = ipc.recv(conn); a[0] += 1; b = a[:1]; ipc.send(conn, b); del a, b\n"
        "    if i == 200: say('warm'); hear()\n"
        "say('done'); hear()\n",
        str(CYCLES),
    )
    small = ipc.VirtualMemoryResource(0, ipc.VirtualMemoryResourceOptions(granularity="minimum"))
    keep = shared([0] * 1000)
    before: list[Any] = []
    for i in range(CYCLES):
        # Every other cycle a block of its own: allocated, exported, imported, unmapped, freed.
        array = keep if i % 2 else ipc.empty((1000,), resource=small)
        ipc.send(other.conn, array)
        got = ipc.recv(other.conn)
        assert got.shape == (1,)
        del got
        if i == 200:
            other.hear()
            other.conn.wait_released(PATIENCE)
            before = [usage(os.getpid()), usage(other.process.pid)]
            other.say()
    del array
    other.hear()
    other.conn.wait_released(PATIENCE)
    assert keep[0] == CYCLES // 2
    # The last block's end reaches the peer a moment later.
    limits = [(b.descriptors, b.mappings, b.resident) for b in before]

    def settled() -> bool:
        now = [usage(os.getpid()), usage(other.process.pid)]
        return all(
            n.descriptors <= d + 2 and n.mappings <= m + 8 and n.resident <= r + (8 << 20)
            for n, (d, m, r) in zip(now, limits, strict=True)
        )

    assert eventually(settled), [vars(usage(p)) for p in (os.getpid(), other.process.pid)] + [
        vars(b) for b in before
    ]
    other.say()


def test_private_memory_is_refused_not_copied(both: tuple[ipc.Connection, ipc.Connection]) -> None:
    with pytest.raises(SharingError, match="no copy is made in silence"):
        ipc.send(both[0], np.zeros(3))


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros(2, object), "elements"),
        (np.zeros(2, "M8[s]"), "elements"),
        (np.zeros(2, [("a", "i4")]), "elements"),
        (np.zeros(2, ">i4"), "native"),
        (np.zeros((2, 2)).view(np.matrix) if hasattr(np, "matrix") else np.zeros(1), "subclass"),
        ([1, 2], "no array"),
    ],
    ids=["object", "time", "structured", "big-endian", "subclass", "list"],
)
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_what_can_not_cross_is_refused_with_the_reason(
    array: object, reason: str, both: tuple[ipc.Connection, ipc.Connection]
) -> None:
    with pytest.raises(SharingError, match=reason):
        ipc.send(both[0], array)
    assert both[0].shares_out == 0


def test_a_read_only_import_can_not_be_written(peer: Callable[..., Any]) -> None:
    other = peer(
        "a = ipc.recv(conn, read_only=True)\n"
        "try: a[0] = 1\nexcept ValueError as e: say(a[0], e)\nhear()"
    )
    array = shared([5])
    ipc.send(other.conn, array)
    assert other.hear().startswith("5.0 assignment destination is read-only")
    other.say()


def test_after_a_loop_of_hand_offs_nobody_wakes_up_in_vain(
    both: tuple[ipc.Connection, ipc.Connection],
) -> None:
    array = shared([1])
    for _ in range(300):
        ipc.send(both[0], array)
        ipc.recv(both[1])
    both[0].wait_released(PATIENCE)
    time.sleep(0.5)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    time.sleep(1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before < 100


def test_a_loop_of_hand_offs_does_not_wake_the_thread_each_time(
    both: tuple[ipc.Connection, ipc.Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    woken = 0
    wake = Link.wake

    def counted(link: Link) -> None:
        nonlocal woken
        woken += 1
        wake(link)

    monkeypatch.setattr(Link, "wake", counted)
    array = shared([1])
    for _ in range(400):
        ipc.send(both[0], array)
        ipc.recv(both[1])
    both[0].wait_released(PATIENCE)
    assert 0 < woken < 200


def test_no_thread_is_left_when_the_interpreter_ends() -> None:
    code = (
        "import atexit, threading\n"  # what is registered first is called last
        "atexit.register(lambda: print([t.name for t in threading.enumerate()]))\n"
        "from flyt import ipc\n"
        "left, right = (ipc.Connection(sock) for sock in ipc.pair())\n"
        "ipc.send(left, ipc.empty((3,))); a = ipc.recv(right)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "FLYT_IPC_DRIVER": "emulated"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("['MainThread']\n", 0), done.stderr


def test_a_receiver_looks_only_briefly_before_it_sleeps(
    both: tuple[ipc.Connection, ipc.Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    # While the connection's thread reads the greeting, a receiver leaves the looking to it.
    assert eventually(lambda: both[1]._greeted and not both[1]._link._reading.locked())
    looked: list[float] = []
    monkeypatch.setattr("flyt.ipc.link.give_way", lambda: looked.append(time.monotonic()))
    # Also where there is one processor, and where others have it for long.
    both[1]._link._spin = 0.2
    with pytest.raises(PeerTimeout):
        ipc.recv(both[1], timeout=1)
    assert looked
    assert looked[-1] - looked[0] < 0.5


def test_a_known_block_is_mapped_again_without_its_descriptors(peer: Callable[..., Any]) -> None:
    other = peer(
        "ipc.recv(conn)\n"  # its release says that the block is mapped
        "a = ipc.recv(conn, read_only=True); b = ipc.recv(conn, device=1)\n"
        "b[0] = 6; say(a[0], b[0], a.ctypes.data != b.ctypes.data); hear()"
    )
    array = shared([5])
    ipc.send(other.conn, array)
    other.conn.wait_released(PATIENCE)
    ipc.send(other.conn, array)
    ipc.send(other.conn, array)
    assert other.hear() == "6.0 6.0 True"
    other.say()


def test_an_array_on_another_device_says_where_it_lies(peer: Callable[..., Any]) -> None:
    other = peer(
        "a = ipc.recv(conn, device=0)\n"
        "from flyt.ipc.blocks import blocks\n"
        "b = blocks.find(a.ctypes.data); say(b.device_id, b.memory_resource.device_id); hear()"
    )
    array = ipc.empty((3,), resource=ipc.VirtualMemoryResource(1))
    ipc.send(other.conn, array)
    assert other.hear() == "1 0"
    other.say()


def test_an_event_orders_as_well(both: tuple[ipc.Connection, ipc.Connection]) -> None:
    array = shared([1, 2])
    ipc.send(both[0], array, order="event")
    assert ipc.recv(both[1]).tolist() == [1, 2]


def test_close_lets_shared_arrays_live(peer: Callable[..., Any]) -> None:
    other = peer(
        "a = ipc.recv(conn)\n"
        "try: ipc.recv(conn)\nexcept ipc_errors as e: say(type(e).__name__)\n"
        "hear(); say(a.sum()); del a; say(); hear()\n".replace(
            "ipc_errors", "__import__('flyt.errors').errors.PeerLost"
        )
    )
    array = shared([1, 2])
    ipc.send(other.conn, array)
    other.conn.close()
    assert other.hear() == "PeerLost"  # it is told that nothing more comes
    array[0] = 10
    other.say()
    assert other.hear() == "12.0"
    other.hear()
    assert eventually(lambda: other.conn.shares_out == 0)
    with pytest.raises(SharingError, match="closed here"):
        ipc.send(other.conn, array)
    other.say()


def test_nothing_comes_within_the_bound(both: tuple[ipc.Connection, ipc.Connection]) -> None:
    with pytest.raises(PeerTimeout):
        ipc.recv(both[0], timeout=0.05)


def test_a_peer_that_does_not_receive_stops_the_sender(
    both: tuple[ipc.Connection, ipc.Connection],
) -> None:
    left, right = both
    array = shared([1])
    sent = 0

    def flood() -> None:
        nonlocal sent
        for _ in range(5000):
            ipc.send(left, array, timeout=0.2)
            sent += 1

    with pytest.raises(PeerTimeout, match="not read"):
        flood()
    assert 256 <= sent < 5000
    for _ in range(sent):  # all of it arrives, and nothing is lost
        assert ipc.recv(right).tolist() == [1]
    ipc.send(left, array)
    assert ipc.recv(right).tolist() == [1]


def test_a_dead_peer_is_noticed_behind_a_full_inbox(peer: Callable[..., Any]) -> None:
    other = peer(
        "a = ipc.empty((3,)); a[:] = 1; say('up')\n"
        "b = ipc.recv(conn)\n"
        "try:\n"
        "  while True: ipc.send(conn, a, timeout=0.5)\n"
        "except Exception as e: say(type(e).__name__)\n"
        "hear()\n"
    )
    array = shared([1])
    other.hear()
    ipc.send(other.conn, array)
    assert other.hear() == "PeerTimeout"
    os.kill(other.process.pid, signal.SIGKILL)
    other.conn.wait_released(PATIENCE)  # though this process has not received what is queued
    other.end()
    busy = time.process_time()
    time.sleep(1)
    assert time.process_time() - busy < 0.5  # nothing spins on the end that is not read yet


def test_another_driver_is_told_at_the_handshake(peer: Callable[..., Any]) -> None:
    # The peer can't have CUDA here, so it only says that it has.
    other = peer(
        "import time\n",
        env={},
    )
    other.end()
    ours, theirs = ipc.pair()
    from flyt.ipc import frames

    frames.send(theirs, frames.encode({"kind": "hello", "version": 2, "driver": "cuda"}))
    conn = ipc.Connection(ours)
    with pytest.raises(HandshakeError, match="FLYT_IPC_DRIVER"):
        ipc.recv(conn)
    conn.abort()
    theirs.close()


def test_another_version_is_told_at_the_handshake() -> None:
    from flyt.ipc import frames

    ours, theirs = ipc.pair()
    frames.send(theirs, frames.encode({"kind": "hello", "version": 3, "driver": "emulated"}))
    conn = ipc.Connection(ours)
    with pytest.raises(HandshakeError, match="same Flyt"):
        ipc.recv(conn)
    conn.abort()
    theirs.close()


def test_a_forked_child_has_no_connection(both: tuple[ipc.Connection, ipc.Connection]) -> None:
    left, right = both
    array = shared([1, 2])
    ipc.send(left, array)
    got = ipc.recv(right)
    pid = os.fork()
    if pid == 0:
        del got  # its release would be the parent's
        gc.collect()
        try:
            ipc.send(left, array)
        except PeerLost:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert left.shares_out == 1
    del got
    left.wait_released(PATIENCE)
