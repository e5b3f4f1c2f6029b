# SPDX-License-Identifier: Apache-2.0
"""What a client may say about code, and what becomes of one that lies. None of it needs a GPU: on
the emulated device images are kept and commands checked, and whatever reaches the device is
cudaErrorNotSupported."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import flyt
from flyt.rpc import messages as m
from flyt.rpc.kernel_commands import MAX_IMAGE_BYTES
from tests.pair.raw import RawClient, eventually

NOT_SUPPORTED = 801
INVALID_HANDLE = 400
INVALID_DEVICE = 101
MEMORY_ALLOCATION = 2
IMAGE = b".version 7.0 // no code, but bytes" * 40
DIGEST = hashlib.sha256(IMAGE).digest()
NOBODY = 0x7777_0000
REQUEST = {"name": "a.cu", "options": [], "expressions": []}


@pytest.fixture
def client(one_backend: Any) -> Iterator[RawClient]:
    """A client with a window, and another session on the same backend that must not suffer."""
    with RawClient(one_backend.endpoint) as other, RawClient(one_backend.endpoint) as one:
        for each in (other, one):
            result = each.attach()
            assert result.status == 0, result
        yield one
        assert other.lives()


def refused(client: RawClient, number: int, why: str) -> None:
    """The session ended in a protocol error that says why."""
    result = client.answer(number)
    assert result.status == m.Status.PROTOCOL
    assert why in result.text
    assert client.ends()


def send_image(client: RawClient, image: bytes, step: int = m.INLINE_CHUNK) -> list[int]:
    digest = hashlib.sha256(image).digest()
    parts = range(0, len(image), step)
    numbers = [
        client.post(m.ImagePart, digest, at, len(image), payload=image[at : at + step])
        for at in parts
    ]
    return [client.answer(number).status for number in numbers]


LAUNCH = (1, 1, 1, 1, 1, 1, 0, 0, (), b"", False)

UNKNOWN = {
    "unload": (m.ModuleUnload, NOBODY),
    "function": (m.FunctionGet, NOBODY, 1 << 20, "f"),
    "global": (m.GlobalGet, NOBODY, "v"),
    "attribute": (m.FunctionSet, NOBODY, 8, 1),
    "occupancy": (m.Occupancy, NOBODY, 32, 0, 0),
    "launch": (m.Launch, NOBODY, *LAUNCH),
}


@pytest.mark.parametrize("command", UNKNOWN.values(), ids=UNKNOWN)
def test_what_nobody_loaded_is_an_invalid_handle(client: RawClient, command: Any) -> None:
    assert client.call(*command).status == INVALID_HANDLE
    assert client.lives()


@pytest.mark.parametrize("kind", ["load", "compile"])
def test_a_device_without_kernels_says_so_at_once(
    emulated: None, client: RawClient, kind: str
) -> None:
    command = (
        (m.ModuleLoad, 1 << 20, 0, DIGEST) if kind == "load" else (m.Compile, 0, DIGEST, REQUEST)
    )
    assert client.call(*command).status == NOT_SUPPORTED
    assert client.lives()


def test_a_device_that_does_not_exist(client: RawClient) -> None:
    assert client.call(m.ModuleLoad, 1 << 20, 99, DIGEST).status == INVALID_DEVICE
    assert client.call(m.Compile, 99, DIGEST, REQUEST).status == INVALID_DEVICE


def test_images_come_whole_or_in_parts(client: RawClient) -> None:
    assert send_image(client, IMAGE) == [0]
    assert set(send_image(client, IMAGE, 7)) == {0}
    assert client.lives()


def test_an_image_that_is_too_large(client: RawClient) -> None:
    number = client.post(m.ImagePart, DIGEST, 0, MAX_IMAGE_BYTES + 1, payload=IMAGE)
    assert client.answer(number).status == MEMORY_ALLOCATION
    assert client.lives()


def test_many_large_images_at_once_are_bounded(one_backend: Any) -> None:
    clients = [RawClient(one_backend.endpoint) for _ in range(6)]
    try:
        told = []
        for client in clients:
            assert client.attach().status == 0
            number = client.post(m.ImagePart, DIGEST, 0, MAX_IMAGE_BYTES, payload=b"x")
            told.append(client.answer(number).status)
        assert told == [0, 0, 0, 0, MEMORY_ALLOCATION, MEMORY_ALLOCATION]
    finally:
        for client in clients:
            client.close()
    with RawClient(one_backend.endpoint) as again:  # what they had expected is free again
        assert again.attach().status == 0
        first = (m.ImagePart, DIGEST, 0, MAX_IMAGE_BYTES)
        assert eventually(lambda: again.call(*first, payload=b"x").status == 0)


LIES = {
    "another digest": ((bytes(32), 0, len(IMAGE)), IMAGE, "digest"),
    "an empty part": ((DIGEST, 0, len(IMAGE)), b"", "size"),
    "more than it said": ((DIGEST, 0, 10), IMAGE, "size"),
    "too long a part": ((DIGEST, 0, 4 << 20), bytes(m.INLINE_CHUNK + 1), "at most"),
}


@pytest.mark.parametrize(("fields", "payload", "why"), LIES.values(), ids=LIES)
def test_lies_about_images(client: RawClient, fields: Any, payload: bytes, why: str) -> None:
    refused(client, client.post(m.ImagePart, *fields, payload=payload), why)


def test_parts_out_of_order(client: RawClient) -> None:
    first = client.post(m.ImagePart, DIGEST, 0, len(IMAGE), payload=IMAGE[:10])
    assert client.answer(first).status == 0
    refused(client, client.post(m.ImagePart, DIGEST, 11, len(IMAGE), payload=IMAGE[11:]), "order")


def test_a_part_without_a_payload(client: RawClient) -> None:
    refused(client, client.post(m.ImagePart, DIGEST, 0, 5), "payload")


def test_parameters_beyond_cuda_s_limit(client: RawClient) -> None:
    # The decoder refuses it before it is anybody's command.
    client.post(m.Launch, NOBODY, *LAUNCH[:-2], bytes(32_765), False)
    refused(client, 0, "32764 bytes")


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"name": "a", "options": [], "expressions": [], "more": 1},
        {"name": 5, "options": [], "expressions": []},
        {"name": "a", "options": "no list", "expressions": []},
        {"name": "a", "options": [1], "expressions": []},
        {"name": "a", "options": ["x" * 5000], "expressions": []},
        {"name": "a", "options": ["a\0b"], "expressions": []},
        {"name": "a", "options": [], "expressions": ["f"] * 300},
    ],
)
def test_malformed_requests_to_compile(gpu: None, client: RawClient, request_: Any) -> None:
    assert send_image(client, IMAGE) == [0]
    refused(client, client.post(m.Compile, 0, DIGEST, request_), "COMPILE")


def test_a_handle_of_another_session(gpu: None, one_backend: Any) -> None:
    with RawClient(one_backend.endpoint) as owner, RawClient(one_backend.endpoint) as thief:
        for each in (owner, thief):
            assert each.attach().status == 0
        assert send_image(owner, PTX) == [0]
        digest = hashlib.sha256(PTX).digest()
        assert owner.call(m.ModuleLoad, 1 << 20, 0, digest).status == 0
        assert owner.call(m.FunctionGet, 1 << 20, 2 << 20, "empty").status == 0
        assert thief.call(m.FunctionGet, 1 << 20, 3 << 20, "empty").status == INVALID_HANDLE
        assert thief.call(m.Launch, 2 << 20, *LAUNCH).status == INVALID_HANDLE
        assert owner.call(m.Launch, 2 << 20, *LAUNCH).status == 0
        assert owner.call(m.Launch, 2 << 20, *LAUNCH[:-2], b"1234", False).status == 1
        refused(owner, owner.post(m.ModuleLoad, 1 << 20, 0, digest), "taken")


PTX = b""".version 7.0
.target sm_75
.address_size 64
.visible .entry empty() { ret; }
"""


def test_the_face_says_not_supported(
    emulated: None, one_backend: Any, connect: Callable[..., flyt.Session]
) -> None:
    connect(one_backend)
    with pytest.raises(flyt.DeviceError) as caught:
        flyt.RawKernel('extern "C" __global__ void f() {}', "f")(1, 1, ())
    assert caught.value.code == NOT_SUPPORTED
    assert flyt.to_device(np.arange(4)).copy_to_host().sum() == 6
