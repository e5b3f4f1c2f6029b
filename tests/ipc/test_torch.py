# SPDX-License-Identifier: Apache-2.0
"""PyTorch's tensors on the emulated driver (CPU): dtypes, layouts, gradients, shared storages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flyt import ipc
from flyt.errors import SharingError
from flyt.ipc.dtypes import ITEMSIZES
from tests.ipc.test_sharing import eventually

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

# PyTorch opens all GPUs at its first backward: before anybody counts descriptors.
torch.ones(1, requires_grad=True).sum().backward()

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")

LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda t: t,
    "0-d": lambda t: t[1, 2],
    "transposed": lambda t: t.t(),
    "strided": lambda t: t[::2, 1::2],
    "offset": lambda t: t[2:, 3:],
    "expanded": lambda t: t[0].expand(3, 5),
    "empty": lambda t: t[:0],
    "overlapping": lambda t: t.as_strided((3, 3), (1, 1)),
}


def tensor() -> Any:
    return ipc.empty((4, 5), "float32", like="torch").copy_(torch.arange(20.0).reshape(4, 5))


ECHO = "import torch\nwhile True: ipc.send(conn, ipc.recv(conn))"


@pytest.fixture(scope="module")
def echo() -> Any:
    """A peer that sends each tensor back over its own mapping."""
    from tests.ipc.conftest import Peer

    peer = Peer(ECHO)
    yield peer
    peer.dispose()


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_goes_and_comes(name: str, echo: Any) -> None:
    view = LAYOUTS[name](tensor())
    ipc.send(echo.conn, view)
    got = ipc.recv(echo.conn)
    assert got.shape == view.shape
    assert torch.equal(got, view)
    if view.numel():
        assert (got.stride(), got.storage_offset()) == (view.stride(), view.storage_offset())
        assert got.data_ptr() == view.data_ptr()


@pytest.mark.parametrize("dtype", sorted(ITEMSIZES))
def test_every_dtype_goes_and_comes(dtype: str, echo: Any) -> None:
    if not hasattr(torch, dtype):
        pytest.skip(f"this PyTorch has no {dtype}")
    sent = ipc.empty((2, 8), dtype, like="torch")
    raw = sent.untyped_storage()
    for i in range(raw.nbytes()):
        raw[i] = i % 2
    ipc.send(echo.conn, sent[1:])
    got = ipc.recv(echo.conn)
    assert (got.dtype, got.element_size()) == (getattr(torch, dtype), ITEMSIZES[dtype])
    assert got.data_ptr() == sent[1:].data_ptr()


def test_another_process_reads_and_writes_the_same_bytes(peer: Callable[..., Any]) -> None:
    other = peer(
        "import torch\n"
        "t = ipc.recv(conn); say(t.dtype, float(t.sum())); t.mul_(2); say()\n"
        "n = ipc.recv(conn, like='numpy'); say(n.dtype, n.strides); n[0, 0] = 99; say(); hear()\n"
    )
    sent = tensor().to(torch.float32)
    half = ipc.empty((3,), "bfloat16", like="torch").fill_(1.5)
    ipc.send(other.conn, half)
    assert other.hear() == "torch.bfloat16 4.5"
    other.hear()
    assert half.tolist() == [3, 3, 3]
    mine = tensor()
    ipc.send(other.conn, mine.t())
    assert other.hear() == "float32 (4, 20)"
    other.hear()
    assert mine[0, 0] == 99
    assert sent[0, 0] == 0
    other.say()


def test_views_of_a_storage_share_it_over_there(peer: Callable[..., Any]) -> None:
    other = peer(
        "import torch\n"
        "a, b = ipc.recv(conn), ipc.recv(conn)\n"
        "say(a.untyped_storage()._cdata == b.untyped_storage()._cdata, b.storage_offset())\n"
        "del a; b[0] = 7; say(float(b[0])); del b; say(); hear()\n"
    )
    sent = tensor()
    ipc.send(other.conn, sent[0])
    ipc.send(other.conn, sent[2])
    assert other.hear() == "True 10"
    assert other.hear() == "7.0"
    assert sent[2, 0] == 7
    other.hear()
    other.conn.wait_released(20)
    other.say()


def test_the_storage_outlives_the_sender_s_tensor(peer: Callable[..., Any]) -> None:
    other = peer("import torch\nt = ipc.recv(conn); say(); hear(); say(float(t.sum()))")
    sent = tensor()
    ipc.send(other.conn, sent)
    other.hear()
    del sent
    other.say()
    assert other.hear() == "190.0"


def test_a_leaf_keeps_its_gradient_flag(echo: Any) -> None:
    leaf = tensor().requires_grad_()
    ipc.send(echo.conn, leaf)
    got = ipc.recv(echo.conn)
    assert got.requires_grad
    assert got.is_leaf
    (got * 2).sum().backward()
    assert got.grad[0, 0] == 2
    parameter = torch.nn.Parameter(tensor(), requires_grad=False)
    ipc.send(echo.conn, parameter)
    got = ipc.recv(echo.conn)
    assert isinstance(got, torch.nn.Parameter)
    assert not got.requires_grad


class Named(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: tensor().requires_grad_() * 2, "not a leaf"),
        (lambda: torch.zeros(3), "no copy is made in silence"),
        (lambda: tensor().to_sparse(), "strided"),
        (lambda: ipc.empty((3,), "complex64", like="torch").conj(), "conjugation"),
        (lambda: tensor().as_subclass(Named), "subclass"),
        (lambda: torch.zeros(3, device="meta"), "on meta"),
    ],
    ids=["non-leaf", "private", "sparse", "conjugated", "subclass", "meta"],
)
def test_what_can_not_cross_is_refused_with_the_reason(
    make: Callable[[], Any], reason: str, both: tuple[ipc.Connection, ipc.Connection]
) -> None:
    with pytest.raises(SharingError, match=reason):
        ipc.send(both[0], make())
    assert both[0].shares_out == 0


def test_what_the_other_library_lacks_is_told(
    both: tuple[ipc.Connection, ipc.Connection],
) -> None:
    half = ipc.empty((3,), "bfloat16", like="torch")
    ipc.send(both[0], half)
    with pytest.raises(SharingError, match="like='torch'"):
        ipc.recv(both[1], like="numpy")
    both[0].wait_released(20)  # what can't be used is let go
    backwards = ipc.empty((3,), "int32")[::-1]
    ipc.send(both[0], backwards)
    with pytest.raises(SharingError, match="like='numpy'"):
        ipc.recv(both[1], like="torch")


def test_storages_that_are_no_more_are_forgotten(
    both: tuple[ipc.Connection, ipc.Connection],
) -> None:
    from flyt.ipc.arrays import adapter
    from flyt.ipc.torch_arrays import FEW_STORAGES

    storages = adapter("torch")._storages  # type: ignore[attr-defined]
    block = ipc.VirtualMemoryResource().allocate(1 << 16)
    for i in range(5 * FEW_STORAGES):
        ipc.send(both[0], _part(block, 64 * i))
        got = ipc.recv(both[1])
        assert got.data_ptr() == block.handle + 64 * i
        del got
    both[0].wait_released(60)
    assert len(storages) <= 2 * FEW_STORAGES
    block.close()


def test_the_sender_keeps_the_storage_until_the_release(
    both: tuple[ipc.Connection, ipc.Connection],
) -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    sent = tensor()
    storage = StorageWeakRef(sent.untyped_storage())
    ipc.send(both[0], sent)
    del sent
    assert not storage.expired()
    ipc.recv(both[1])
    both[0].wait_released(60)
    assert eventually(storage.expired)


def _part(block: ipc.Buffer, start: int) -> Any:
    """A tensor with a storage of its own within a block."""
    import numpy as np

    return torch.from_numpy(np.asarray(block)[start : start + 64])
