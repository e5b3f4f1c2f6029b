# SPDX-License-Identifier: Apache-2.0
"""The programs of ``test_gpu.py``: ``gpu_program.py NAME`` runs one, with a child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from flyt import ipc
from flyt.ipc.dtypes import ITEMSIZES

MIB = 1 << 20


def child(
    code: str, descriptors: tuple[int, ...] = ()
) -> tuple[ipc.Connection, subprocess.Popen[bytes]]:
    ours, theirs = ipc.pair()
    prelude = "import sys, os, time, torch\nfrom flyt import ipc\n"
    prelude += "conn = ipc.Connection(int(sys.argv[1]))\n"
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", prelude + code, str(theirs.fileno())],
            pass_fds=(theirs.fileno(), *descriptors),
        )
    return ipc.Connection(ours), process


def used() -> int:
    """Bytes in use on GPU 0, by everybody."""
    free, total = torch.cuda.mem_get_info(0)
    return int(total - free)


def tensor(shape: tuple[int, ...], dtype: str = "float32", device: int = 0) -> torch.Tensor:
    resource = ipc.VirtualMemoryResource(device)
    made: torch.Tensor = ipc.empty(shape, dtype, like="torch", resource=resource)
    return made


ECHO = "while True: ipc.send(conn, ipc.recv(conn))\n"


def round_trips() -> None:
    conn, process = child(ECHO)
    base = tensor((64, 64))
    base.copy_(torch.arange(4096.0, device="cuda").reshape(64, 64))
    layouts: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t,
        lambda t: t[3, 4],
        lambda t: t.t(),
        lambda t: t[::2, 1::3],
        lambda t: t[5].expand(7, 64),
        lambda t: t[:0],
    ]
    for layout in layouts:
        sent = layout(base)
        ipc.send(conn, sent)
        got = ipc.recv(conn)
        assert torch.equal(got, sent)
        assert got.numel() == 0 or got.data_ptr() == sent.data_ptr()
        assert got.device == torch.device("cuda", 0)
    for name in ITEMSIZES:
        if hasattr(torch, name):
            sent = tensor((16,), name)
            ipc.send(conn, sent)
            got = ipc.recv(conn)
            assert (got.dtype, got.data_ptr()) == (sent.dtype, sent.data_ptr())
    # No copy: a GiB there and back uses no second GiB.
    big = tensor((256 * MIB,))
    before = used()
    ipc.send(conn, big)
    assert ipc.recv(conn).data_ptr() == big.data_ptr()
    assert used() - before < 256 * MIB
    process.kill()
    process.wait()


def exporter_killed() -> None:
    conn, process = child(
        "t = ipc.empty((1 << 20,), like='torch'); t.fill_(3); ipc.send(conn, t); time.sleep(60)\n"
    )
    got = ipc.recv(conn)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert float(got.sum()) == 3 * (1 << 20)
    got.fill_(2)
    assert float(got.sum()) == 2 * (1 << 20)


def memory_comes_back() -> None:
    torch.cuda.mem_get_info(0)
    before = used()
    one = "t = ipc.recv(conn); ipc.send(conn, t); time.sleep(60)\n"
    conn, importer = child(one)
    relay = tensor((256 * MIB,))
    ipc.send(conn, relay)
    got = ipc.recv(conn)
    importer.kill()
    importer.wait()
    conn.wait_released()
    conn.abort()
    del got, relay
    deadline = time.monotonic() + 30
    while used() - before > 64 * MIB and time.monotonic() < deadline:
        time.sleep(0.1)
    assert used() - before <= 64 * MIB, f"{(used() - before) / MIB:.0f} MiB are not back"


def train() -> torch.nn.Module:
    model = torch.nn.Linear(256, 256).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 256, device="cuda")
    first = last = 0.0
    for step in range(20):
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = float(loss)
        first = first or last
        assert step == 0 or last < 2 * first
    assert last < first
    return model


def share_model(model: torch.nn.Module) -> None:
    conn, process = child("while True:\n  t = ipc.recv(conn)\n  with torch.no_grad(): t.mul_(2)\n"
                          "  torch.cuda.synchronize(); ipc.send(conn, t)\n")  # fmt: skip
    for parameter in model.parameters():
        before = parameter.detach().clone()
        ipc.send(conn, parameter)
        got = ipc.recv(conn)
        assert got.data_ptr() == parameter.data_ptr()
        assert torch.equal(parameter.detach(), before * 2)  # the child's write is seen here
    process.kill()
    process.wait()


def pool_trains() -> None:
    with ipc.torch_pool():
        model = train()
    share_model(model)


def preload_trains() -> None:
    share_model(train())


def thousand_cycles() -> None:
    conn, process = child(ECHO)
    start = 0
    for i in range(1000):
        sent = tensor((MIB,))
        ipc.send(conn, sent)
        assert ipc.recv(conn).data_ptr() == sent.data_ptr()
        del sent
        if i == 100:
            start, descriptors = used(), len(os.listdir("/proc/self/fd"))
    conn.wait_released()
    time.sleep(1)
    assert used() - start <= 32 * MIB
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 4
    process.kill()
    process.wait()


def event_order() -> None:
    conn, process = child(
        "for i in range(20):\n"
        "  t = ipc.recv(conn); s = float(t.sum()); assert s == (i + 1) * t.numel(), s\n"
        "  del t\nprint('in order', flush=True)\n"
    )
    sent = tensor((16 * MIB,))
    for i in range(20):
        torch.cuda._sleep(20_000_000)
        sent.fill_(i + 1)
        ipc.send(conn, sent, order="event")
        conn.wait_released()
    assert process.wait(60) == 0


def mean_hand_off(hand_over: Callable[[], None], acknowledged: Callable[[], Any]) -> float:
    """Seconds from sending to the receiver's one byte that it holds the tensor."""
    start = 0.0
    for i in range(300):
        if i == 100:
            start = time.perf_counter()
        hand_over()
        acknowledged()
    return (time.perf_counter() - start) / 200


def queue_child(tensors: Any, acknowledge: Any) -> None:
    while (got := tensors.get(timeout=60)) is not None:
        acknowledge.send_bytes(b"x")
        del got


def queue_time(sent: torch.Tensor) -> float:
    context = torch.multiprocessing.get_context("spawn")
    tensors, (heard, acknowledge) = context.Queue(), context.Pipe(duplex=False)
    process = context.Process(target=queue_child, args=(tensors, acknowledge), daemon=True)
    process.start()

    def acknowledged() -> None:
        assert heard.poll(60), "the child says nothing"
        heard.recv_bytes()

    taken = mean_hand_off(lambda: tensors.put(sent), acknowledged)
    tensors.put(None)
    process.join(60)
    return taken


def our_time(sent: torch.Tensor) -> float:
    heard, acknowledge = os.pipe()
    conn, process = child(
        f"while True:\n  got = ipc.recv(conn); os.write({acknowledge}, b'x'); del got\n",
        descriptors=(acknowledge,),
    )
    os.close(acknowledge)

    def acknowledged() -> None:
        assert os.read(heard, 1), "the child has ended"

    taken = mean_hand_off(lambda: ipc.send(conn, sent), acknowledged)
    process.kill()
    process.wait()
    return taken


def hand_off_time() -> None:
    """Ours against torch.multiprocessing, one after the other in this run: it only tells."""
    for mib in (1, 64, 1024):
        ours = our_time(tensor((mib * MIB // 4,)))
        theirs = queue_time(torch.zeros(mib * MIB // 4, device="cuda"))
        told = f"{mib} MiB: ours {ours * 1e3:.3f} ms, torch.multiprocessing {theirs * 1e3:.3f} ms"
        sys.stdout.write(f"{told}, ratio {ours / theirs:.2f}\n")


def two_gpus() -> None:
    conn, process = child(
        "t = ipc.recv(conn, device=1)\n"
        "assert t.device == torch.device('cuda', 0), t.device\n"  # the masquerade
        "with torch.cuda.device(1):\n"
        "  s = torch.empty(1 << 20, device='cuda:1'); s.copy_(t)\n"
        "  assert float(s.sum()) == 3 << 20\n"
        # PyTorch runs kernels where it says the tensor is; CuPy, told otherwise, on GPU 1.
        "import cupy\n"
        "with cupy.cuda.Device(1):\n"
        "  there = cupy.cuda.UnownedMemory(t.data_ptr(), 4 << 20, t, device_id=1)\n"
        "  seen = cupy.ndarray(1 << 20, cupy.float32, cupy.cuda.MemoryPointer(there, 0))\n"
        "  double = cupy.ElementwiseKernel('float32 x', 'float32 y', 'y = 2 * x', 'double_it')\n"
        "  doubled = double(seen)\n"
        "  assert doubled.device.id == 1 and float(doubled.sum()) == 6 << 20\n"
        "t.fill_(4); torch.cuda.synchronize(0); ipc.send(conn, t); time.sleep(60)\n"
    )
    sent = tensor((1 << 20,))
    sent.fill_(3)
    ipc.send(conn, sent)
    got = ipc.recv(conn)
    assert got.data_ptr() == sent.data_ptr()
    assert float(sent.sum()) == 4 << 20
    process.kill()
    process.wait()


PROGRAMS: dict[str, Callable[[], Any]] = {
    f.__name__: f
    for f in (
        round_trips, exporter_killed, memory_comes_back, pool_trains, preload_trains,
        thousand_cycles, event_order, hand_off_time, two_gpus,
    )
}  # fmt: skip

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
