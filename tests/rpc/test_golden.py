# SPDX-License-Identifier: Apache-2.0
"""The bytes on the wire, written out by MessagePack's specification: they may never change."""

from __future__ import annotations

from typing import Any

import pytest

from flyt.backend import orders
from flyt.rpc import greetings, messages as m
from flyt.rpc.codec import Vocabulary

TOKEN = bytes(range(16))
TOKEN_HEX = "c410 00010203 04050607 08090a0b 0c0d0e0f"

DIGEST = bytes(range(32))
DIGEST_HEX = f"c420 {DIGEST.hex()}"
MIB, MIB2 = "ce00100000", "ce00200000"

GOLDEN = [
    (m.HELLOS, m.Hello(1, (1, 2), 4242, "python"), "95 01 01 920102 cd1092 a6707974686f6e"),
    (m.HELLOS, m.AskStatus(), "91 02"),
    (m.HELLOS, greetings.Suspend(1 << 63, 300), "93 03 cf8000000000000000 cd012c"),
    (m.HELLOS, greetings.Resume(5), "92 04 05"),
    (m.WELCOMES, greetings.Obeyed(), "91 04"),
    (m.WELCOMES, m.Refused(801, "\N{GREEK SMALL LETTER MU}"), "93 02 cd0321 a2cebc"),
    (m.WELCOMES, m.StatusReport({"a": [None, True]}), "92 03 81 a161 92 c0 c3"),
    (
        m.WELCOMES,
        m.Welcome(
            1 << 63,
            TOKEN,
            5000,
            "",
            7,
            "/r",
            1 << 26,
            1 << 16,
            "l",
            256,
            1 << 20,
            30_000,
            (2, 3),
            {},
            9,
        ),
        (
            f"dc0010 01 cf8000000000000000 {TOKEN_HEX} cd1388 a0 07 a22f72 ce04000000 ce00010000"
            "a16c cd0100 ce00100000 cd7530 920203 80 09"
        ),
    ),
    (
        m.COMMANDS,
        m.Attach(1, TOKEN, False, 1 << 44, 1 << 26, ((5, 1), (9, 4)), 0x0102030405060708, True),
        (
            f"99 01 01 {TOKEN_HEX} c2 cf0000100000000000 ce04000000 92 920501 920904"
            "cf0102030405060708 c3"
        ),
    ),
    (m.COMMANDS, m.Grow(2, 128, ((300, 1),)), "94 02 02 cc80 91 92cd012c01"),
    (m.COMMANDS, m.Shrink(3, 127), "93 03 03 7f"),
    (m.COMMANDS, m.Malloc(4, 0, 5 << 30, 0), "95 04 04 00 cf0000000140000000 00"),
    (m.COMMANDS, m.Free(5, 1 << 45), "93 05 05 cf0000200000000000"),
    (
        m.COMMANDS,
        m.CopyIn(6, 1 << 45, 1 << 21, 4097, 1234, 257),
        "97 06 06 cf0000200000000000 ce00200000 cd1001 cd04d2 cd0101",
    ),
    (
        m.COMMANDS,
        m.CopyOut(7, 1 << 45, 1 << 21, 255, 1234, 0),
        "97 07 07 cf0000200000000000 ce00200000 ccff cd04d2 00",
    ),
    (m.COMMANDS, m.CopyOn(8, 1, 2, 3, 4), "96 08 08 01 02 03 04"),
    (m.COMMANDS, m.Push(9, 1, 65535, 5), "95 09 09 01 cdffff 05"),
    (m.COMMANDS, m.Pull(10, 1, 65536, 6), "95 0a 0a 01 ce00010000 06"),
    (m.COMMANDS, m.Memset(11, 1, 0xFF, 2, 7), "96 0b 0b 01 ccff 02 07"),
    (m.COMMANDS, m.MemInfo(12, 0), "93 0c 0c 00"),
    (m.COMMANDS, m.StreamCreate(13, 256, 0, 1, 5), "96 0d 0d cd0100 00 01 05"),
    (m.COMMANDS, m.StreamDestroy(16, 256), "93 10 10 cd0100"),
    (m.COMMANDS, m.StreamWait(17, 256, 272), "94 11 11 cd0100 cd0110"),
    (m.COMMANDS, m.EventCreate(18, 272, 0, 2), "95 12 12 cd0110 00 02"),
    (m.COMMANDS, m.EventDestroy(19, 272), "93 13 13 cd0110"),
    (m.COMMANDS, m.EventRecord(20, 272, 0), "94 14 14 cd0110 00"),
    (m.COMMANDS, m.Elapsed(21, 272, 288), "94 15 15 cd0110 cd0120"),
    (m.COMMANDS, m.ImagePart(22, DIGEST, 1 << 20, 1 << 21), f"95 60 16 {DIGEST_HEX} {MIB} {MIB2}"),
    (m.COMMANDS, m.ModuleLoad(23, 1 << 20, 1, DIGEST), f"95 61 17 {MIB} 01 {DIGEST_HEX}"),
    (m.COMMANDS, m.ModuleUnload(24, 1 << 20), f"93 62 18 {MIB}"),
    (m.COMMANDS, m.FunctionGet(25, 1, 2, "f"), "95 63 19 01 02 a166"),
    (m.COMMANDS, m.FunctionSet(26, 2, 8, 255), "95 64 1a 02 08 ccff"),
    (m.COMMANDS, m.GlobalGet(27, 1, "v"), "94 65 1b 01 a176"),
    (m.COMMANDS, m.Occupancy(28, 2, 128, 0, 1), "96 66 1c 02 cc80 00 01"),
    (
        m.COMMANDS,
        m.Launch(29, 2, 3, 4, 5, 6, 7, 8, 9, 256, (2, 1, 0, 0), b"\1\2", True),
        "9e 67 1d 02 03 04 05 06 07 08 09 cd0100 9402010000 c4020102 c3",
    ),
    (
        m.COMMANDS,
        m.Compile(30, 0, DIGEST, {"name": ""}),
        f"95 68 1e 00 {DIGEST_HEX} 81a46e616d65a0",
    ),
    (m.COMMANDS, m.Reach(31, 256), "93 69 1f cd0100"),
    (m.COMMANDS, m.Printed(32, 0), "93 6a 20 00"),
    (m.COMMANDS, m.Ping(14), "92 0e 0e"),
    (
        m.COMMANDS,
        m.CopyRows(22, m.Way.OUT, 1, 2, 1 << 45, 512, 100, 300, 4242, 256),
        "9b 40 16 01 01 02 cf0000200000000000 cd0200 64 cd012c cd1092 cd0100",
    ),
    (m.COMMANDS, m.PushRows(23, 1, 128, 100, 3, 4), "97 41 17 01 cc80 64 03 04"),
    (m.COMMANDS, m.PullRows(24, 1, 128, 100, 3, 4), "97 42 18 01 cc80 64 03 04"),
    (m.COMMANDS, m.FillRows(25, 1, 128, 255, 100, 3, 4), "98 43 19 01 cc80 ccff 64 03 04"),
    (m.COMMANDS, m.MallocAsync(26, 256, 4096, 0, 272), "96 44 1a cd0100 cd1000 00 cd0110"),
    (m.COMMANDS, m.FreeAsync(27, 1 << 45, 0), "94 45 1b cf0000200000000000 00"),
    (m.COMMANDS, m.PoolCreate(28, 256, 1, 65536), "95 46 1c cd0100 01 ce00010000"),
    (m.COMMANDS, m.PoolDestroy(29, 256), "93 47 1d cd0100"),
    (m.COMMANDS, m.PoolTrim(30, 0, 5), "94 48 1e 00 05"),
    (m.COMMANDS, m.PoolGet(31, 0, 7), "94 49 1f 00 07"),
    (m.COMMANDS, m.PoolSet(32, 0, 4, 1 << 32), "95 4a 20 00 04 cf0000000100000000"),
    (m.COMMANDS, m.ShareMemory(33, 1), "93 4b 21 01"),
    (m.COMMANDS, m.OpenMemory(34, TOKEN), f"93 4c 22 {TOKEN_HEX}"),
    (m.COMMANDS, m.CloseMemory(35, 1), "93 4d 23 01"),
    (m.COMMANDS, m.ShareEvent(36, 272), "93 4e 24 cd0110"),
    (m.COMMANDS, m.OpenEvent(37, 272, TOKEN), f"94 4f 25 cd0110 {TOKEN_HEX}"),
    (m.COMMANDS, m.EventQuery(38, 272), "93 50 26 cd0110"),
    (m.COMMANDS, m.HostCall(39, 256), "93 51 27 cd0100"),
    (m.COMMANDS, m.HostReturn(40, 39), "93 52 28 27"),
    (m.COMMANDS, m.Passed(41, 256), "93 53 29 cd0100"),
    (m.COMMANDS, m.Bye((1 << 64) - 1), "92 0f cfffffffffffffffff"),
    (m.REPLIES, m.Result(3, 0, 3, (1 << 45,), ""), "96 01 03 00 03 91cf0000200000000000 a0"),
    (m.REPLIES, m.Result(4, m.Status.PROTOCOL, 4, (), "no"), "96 01 04 ce00010004 04 90 a26e6f"),
    (m.REPLIES, m.Credit(64), "92 02 40"),
    (m.REPLIES, m.Done(7, 5, 300), "94 04 07 05 cd012c"),
    (m.REPLIES, m.Sticky(700, "x"), "93 03 cd02bc a178"),
    (orders.TO_KEEPER, orders.Leave(), "91 04"),
    (orders.FROM_KEEPER, orders.Owned((1, 2), (9, 1 << 32)), "93 03 920102 9209cf0000000100000000"),
]


@pytest.mark.parametrize(
    ("vocabulary", "message", "expected"), GOLDEN, ids=[type(g[1]).__name__ for g in GOLDEN]
)
def test_bytes(vocabulary: Vocabulary, message: Any, expected: str) -> None:
    data = bytes.fromhex(expected)
    assert vocabulary.encode(message).hex() == data.hex()
    assert vocabulary.decode(data) == message


def test_every_message_between_frontend_and_backend_is_here() -> None:
    here = {type(message) for _, message, _ in GOLDEN}
    for vocabulary in (m.HELLOS, m.WELCOMES, m.COMMANDS, m.REPLIES):
        assert {shape.cls for shape in vocabulary._shapes.values()} <= here


def test_status_codes() -> None:
    assert {status.name: int(status) for status in m.Status} == {
        "ADDRESS_TAKEN": 65_537,
        "FRAMES_REFUSED": 65_538,
        "PROOF_FAILED": 65_539,
        "PROTOCOL": 65_540,
        "UNKNOWN_IMAGE": 65_541,
    }
    assert m.PROTOCOL_VERSION == 1
