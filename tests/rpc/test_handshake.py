# SPDX-License-Identifier: Apache-2.0
"""Who can talk to whom, as a table that holds in both directions."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given, strategies as st

from flyt.errors import HandshakeError
from flyt.rpc.handshake import (
    Feature,
    Offer,
    foreign_version,
    negotiate,
    offer,
    offer_of,
)
from flyt.rpc.messages import HELLOS, PROTOCOL_VERSION, Hello

REGION, INLINE = Feature.REGION, Feature.INLINE


def _offers(versions: tuple[int, int], features: tuple[set[int], set[int]]) -> tuple[Offer, Offer]:
    frontend = Offer("frontend", versions[0], frozenset(features[0]))
    return frontend, Offer("backend", versions[1], frozenset(features[1]))


@pytest.mark.parametrize(
    ("frontend", "backend", "shared"),
    [
        ({1, 2}, {1, 2}, {REGION, INLINE}),
        ({1}, {1, 2}, {REGION}),
        ({2}, {1, 2}, {INLINE}),
        ({1, 2, 3, 99}, {1, 2}, {REGION, INLINE}),
        ({1, 99}, {1, 99}, {REGION}),  # a number that neither version knows is no feature
        ({0, 2}, {2}, {INLINE}),
    ],
)
def test_the_features_both_have(frontend: set[int], backend: set[int], shared: set[int]) -> None:
    one, other = _offers((1, 1), (frontend, backend))
    assert negotiate(one, other) == negotiate(other, one) == frozenset(shared)


@pytest.mark.parametrize(
    ("frontend", "backend"), [(set(), {1, 2}), ({1}, {2}), ({99}, {99}), ({99}, {1, 2}), ({0}, {1})]
)
def test_no_feature_in_common(frontend: set[int], backend: set[int]) -> None:
    one, other = _offers((1, 1), (frontend, backend))
    for local, remote in ((one, other), (other, one)):
        with pytest.raises(HandshakeError, match="share no way to move bytes; upgrade"):
            negotiate(local, remote)


@pytest.mark.parametrize(
    ("versions", "older", "newer"),
    [
        ((1, 2), "frontend", "backend"),
        ((2, 1), "backend", "frontend"),
        ((0, 1), "frontend", "backend"),
        ((1, (1 << 32) - 1), "frontend", "backend"),
    ],
)
def test_another_version_is_named_with_its_remedy(
    versions: tuple[int, int], older: str, newer: str
) -> None:
    one, other = _offers(versions, ({1, 2}, {1, 2}))
    for local, remote in ((one, other), (other, one)):
        with pytest.raises(HandshakeError) as caught:
            negotiate(local, remote)
        text = str(caught.value)
        assert f"{local.who} speaks Flyt protocol {local.version}" in text
        assert f"{remote.who} protocol {remote.version}" in text
        assert f"upgrade the {older} to the version of the {newer}" in text


def test_this_version_speaks_with_itself() -> None:
    one, other = (offer(who, ring=True, doorbell=True) for who in ("backend", "frontend"))
    assert negotiate(one, other) == frozenset(Feature)
    assert (one.who, other.who) == ("backend", "frontend")


@pytest.mark.parametrize("local", [False, True])
def test_rings_need_what_both_sides_have(local: bool) -> None:
    one, other = offer("backend", ring=local), offer("frontend", ring=not local)
    assert negotiate(one, other) == {
        Feature.REGION,
        Feature.INLINE,
        Feature.STAYS,
        Feature.KERNELS,
    }


@pytest.mark.parametrize(
    ("ring", "doorbell", "agreed"),
    [
        (True, False, {Feature.RING}),
        (False, True, set()),
        (True, True, {Feature.RING, Feature.DOORBELL}),
    ],
)
def test_a_doorbell_wakes_who_reads_rings(ring: bool, doorbell: bool, agreed: set[int]) -> None:
    one, other = (
        offer("backend", ring=True, doorbell=True),
        offer("frontend", ring=ring, doorbell=doorbell),
    )
    assert negotiate(one, other) == {
        Feature.REGION,
        Feature.INLINE,
        Feature.STAYS,
        Feature.KERNELS,
        *agreed,
    }


def test_rings_alone_move_no_bytes() -> None:
    one, other = _offers((1, 1), ({1, 3}, {2, 3}))
    with pytest.raises(HandshakeError, match="no way to move bytes"):
        negotiate(one, other)


def test_the_offer_in_a_hello() -> None:
    heard = offer_of(Hello(7, (2, 2, 1, 77), 1, "x"))
    assert heard == Offer("frontend", 7, frozenset({1, 2, 77}))


# --- a HELLO of another version --------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 2, 3, 1000, (1 << 32) - 1, 1 << 40])
@pytest.mark.parametrize(
    "rest",
    [[], [[1, 2], 4242, "python"], [{"features": []}], [None] * 20, [[[[]]], b"x"]],
    ids=["nothing", "as-now", "map", "many", "nested"],
)
def test_any_other_version_is_told_apart(version: int, rest: list[object]) -> None:
    assert foreign_version(msgpack.packb([1, version, *rest])) == version


def test_this_version_is_not_foreign() -> None:
    hello = HELLOS.encode(Hello(PROTOCOL_VERSION, (1,), 1, "x"))
    assert foreign_version(hello) is None
    assert foreign_version(msgpack.packb([1, PROTOCOL_VERSION, "malformed"])) is None


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="http"),
        pytest.param(b"\xc1" * 8, id="never-used"),
        pytest.param(b"\x92" * 100_000, id="deep"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="4-G-items"),
        pytest.param(msgpack.packb({1: 2}), id="map"),
        pytest.param(msgpack.packb([1]), id="no-version"),
        pytest.param(msgpack.packb([1, "2"]), id="text"),
        pytest.param(msgpack.packb([1, None]), id="nil"),
        pytest.param(msgpack.packb([1, 2.0]), id="float"),
        pytest.param(msgpack.packb([2, 2]), id="another-message"),
        pytest.param(msgpack.packb([0, 2]), id="code-0"),
        pytest.param(msgpack.packb([1, 2]) + b"\0", id="more"),
    ],
)
def test_what_is_no_hello_has_no_version(data: bytes) -> None:
    assert foreign_version(data) is None


def test_a_truncated_hello_has_no_version() -> None:
    hello = msgpack.packb([1, 1000, [1, 2], 4242, "python"])
    assert foreign_version(hello) == 1000
    for length in range(len(hello)):
        assert foreign_version(hello[:length]) is None


@given(data=st.binary(max_size=60))
def test_any_bytes_have_a_version_or_none(data: bytes) -> None:
    version = foreign_version(data)
    assert version is None or (isinstance(version, int) and version != PROTOCOL_VERSION)
