# SPDX-License-Identifier: Apache-2.0
"""Images: what is kept, and what is refused before the driver sees it."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings, strategies as st

from flyt.backend import images
from flyt.backend.images import ImageStore
from flyt.errors import DeviceError, ProtocolError
from flyt.rpc.kernel_commands import Compiled, FunctionFacts

INVALID_IMAGE = 200


def elf(sections: list[tuple[int, int, int]], *, table: int = 64, pad: int = 0) -> bytes:
    """A little-endian ELF file of 64 bits; sections are (type, offset, size)."""
    head = bytearray(64)
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<QQ", head, 32, 0, table)
    struct.pack_into("<4H", head, 54, 56, 0, 64, len(sections))
    rows = b"".join(
        struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, offset, size, 0, 0, 0, 0)
        for kind, offset, size in sections
    )
    return bytes(head) + rows + bytes(pad)


GOOD = {
    "cubin": elf([(0, 0, 0), (1, 192, 8)], pad=8),
    "a section without bytes": elf([(8, 1 << 40, 1 << 40)]),
    "fatbin": struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 8) + bytes(8),
    "ptx": b"//\n.version 7.0\n.target sm_75\n\0",
}

BAD = {
    "rubbish": b"no image at all",
    "zeros": bytes(64),
    "half a header": b"\x7fELF\x02\x01" + bytes(20),
    "32 bits": b"\x7fELF\x01\x01" + bytes(100),
    "big-endian": b"\x7fELF\x02\x02" + bytes(100),
    "a section beyond the end": elf([(1, 128, 1 << 20)]),
    "a section that wraps": elf([(1, (1 << 64) - 8, 16)]),
    "a table beyond the end": elf([(1, 0, 0)], table=1 << 40),
    "fatbin beyond the end": struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 40) + bytes(8),
    "half a fatbin": struct.pack("<I", 0xBA55ED50),
    "ptx with a zero inside": b".version 7.0\0.target sm_75",
}


@pytest.mark.parametrize("image", GOOD.values(), ids=GOOD)
def test_what_holds_its_own_lengths(image: bytes) -> None:
    assert images.checked(image) is image


@pytest.mark.parametrize("image", BAD.values(), ids=BAD)
def test_what_does_not(image: bytes) -> None:
    with pytest.raises(DeviceError) as caught:
        images.checked(image)
    assert caught.value.code == INVALID_IMAGE


@given(st.sampled_from([b"\x7fELF\x02\x01", struct.pack("<I", 0xBA55ED50), b""]), st.binary())
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_taken_or_refused(head: bytes, rest: bytes) -> None:
    try:
        images.checked(head + rest)
    except DeviceError as exc:
        code = exc.code
    else:
        code = INVALID_IMAGE
    assert code == INVALID_IMAGE


def test_the_least_recently_used_goes_first() -> None:
    store = ImageStore(limit=100)
    digests = [store.put(bytes([n]) * 40) for n in range(2)]
    assert store.get(digests[0])
    digests.append(store.put(b"\2" * 40))
    assert [store.get(digest) is not None for digest in digests] == [True, False, True]


def test_one_that_is_larger_than_the_store_is_kept_alone() -> None:
    store = ImageStore(limit=10)
    small, large = store.put(b"1"), store.put(b"2" * 50)
    assert store.get(small) is None
    assert store.get(large) == b"2" * 50


def test_what_is_on_its_way_is_bounded() -> None:
    store = ImageStore(limit=100)
    store.expect(60)
    with pytest.raises(DeviceError):
        store.expect(60)
    store.arrived(60)
    store.expect(100)


def test_facts_come_back() -> None:
    facts = FunctionFacts({0: 1024, 9: -1}, ((0, 8), (8, 4)))
    assert FunctionFacts.unpack(facts.pack()) == facts
    assert facts.size == 12
    assert FunctionFacts({}, ()).size == 0
    compiled = Compiled(bytes(range(32)), ("_Z1fv", "g"), "words \N{SNOWMAN}")
    assert Compiled.unpack(compiled.pack()) == compiled
    assert Compiled.unpack(Compiled(b"", (), "").pack()) == Compiled(b"", (), "")


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_facts_or_a_protocol_error(data: bytes) -> None:
    for kind in (FunctionFacts, Compiled):
        try:
            kind.unpack(data)
        except ProtocolError:
            continue


@pytest.mark.parametrize(
    "data", [None, b"", struct.pack("<2I", 1 << 30, 0), struct.pack("<2I", 0, 1 << 30)]
)
def test_sizes_that_lie(data: bytes | None) -> None:
    with pytest.raises(ProtocolError):
        FunctionFacts.unpack(data)
    with pytest.raises(ProtocolError):
        Compiled.unpack(data)
