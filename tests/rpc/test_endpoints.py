# SPDX-License-Identifier: Apache-2.0
"""Endpoints: what is understood, what is refused, and in which words."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from flyt.errors import ConfigurationError
from flyt.rpc.endpoints import SUN_PATH_LIMIT, Endpoint, port_range


@pytest.mark.parametrize(
    ("text", "parsed", "said"),
    [
        ("ipc:///run/flyt/b.sock", Endpoint("ipc", path="/run/flyt/b.sock"), None),
        ("ipc://b.sock", Endpoint("ipc", path="b.sock"), None),
        ("ipc:///a b", Endpoint("ipc", path="/a b"), None),
        ("tcp://10.0.2.2:5555", Endpoint("tcp", host="10.0.2.2", port=5555), None),
        ("tcp://gpu-host:1", Endpoint("tcp", host="gpu-host", port=1), None),
        ("tcp://gpu-host:65535", Endpoint("tcp", host="gpu-host", port=65535), None),
        ("tcp://[::1]:5555", Endpoint("tcp", host="::1", port=5555), None),
        ("tcp://::1:5555", Endpoint("tcp", host="::1", port=5555), "tcp://[::1]:5555"),
        ("tcp://0.0.0.0:*", Endpoint("tcp", host="0.0.0.0"), None),
        ("tcp://0.0.0.0:0", Endpoint("tcp", host="0.0.0.0"), "tcp://0.0.0.0:*"),
        ("tcp://*:*", Endpoint("tcp", host="*"), None),
        ("emulated:", Endpoint("emulated"), None),
        ("emulated:memory=1G", Endpoint("emulated", path="memory=1G"), None),
    ],
)
def test_forms(text: str, parsed: Endpoint, said: str | None) -> None:
    assert Endpoint.parse(text) == parsed
    assert str(parsed) == (said or text)
    assert Endpoint.parse(str(parsed)) == parsed


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "ipc", "ipc:", "ipc:/x", "ipc://", "/run/b.sock", "emulated", "emulate:"),
        *("IPC:///x", "tcp", "tcp:", "tcp:host:5", "udp://h:5", "http://h:5", " tcp://h:5"),
        *("tcp://", "tcp://h", "tcp://h:", "tcp://:5", "tcp://[]:5", "tcp://h:-1", "tcp://h:65536"),
        *("tcp://h:5x", "tcp://h:٥", "tcp://h:²", "tcp://h: 5", "tcp://h:5-9", "tcp://h:1.0"),
        "tcp://h:" + "9" * 5000,
    ],
)
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Endpoint.parse(text)
    assert repr(text) in str(caught.value)
    assert "tcp://host:port" in str(caught.value)


@given(text=st.text(max_size=40) | st.text(max_size=20).map("tcp://h:".__add__))
def test_any_text(text: str) -> None:
    try:
        endpoint = Endpoint.parse(text)
    except ConfigurationError:
        return
    assert Endpoint.parse(str(endpoint)) == endpoint


def test_a_socket_path_has_107_bytes() -> None:
    longest = "/" + "x" * 106
    assert SUN_PATH_LIMIT == 107
    assert Endpoint.parse(f"ipc://{longest}").path == longest
    wide = "/" + "ü" * 53  # 54 characters, 107 bytes
    assert Endpoint.parse(f"ipc://{wide}").path == wide
    for path in (longest + "x", wide + "x"):
        with pytest.raises(ConfigurationError, match=r"107 bytes.*FLYT_RUNTIME_DIR"):
            Endpoint.parse(f"ipc://{path}")


@pytest.mark.parametrize(
    ("dialled", "port", "path", "expected"),
    [
        ("tcp://10.0.2.2:5555", 6000, "", "tcp://10.0.2.2:6000"),
        ("tcp://[fe80::1]:5555", 6000, "", "tcp://[fe80::1]:6000"),
        ("tcp://host:5555", 6000, "/evil", "tcp://host:6000"),
        ("ipc:///run/flyt/b.sock", 0, "s-1.sock", "ipc:///run/flyt/s-1.sock"),
        ("ipc:///mnt/run/b.sock", 7, "/run/flyt/s-1.sock", "ipc:///mnt/run/s-1.sock"),
        ("ipc:///run/flyt/b.sock", 0, "../../etc/s", "ipc:///run/flyt/s"),
        ("ipc://b.sock", 0, "s-1.sock", "ipc://s-1.sock"),
    ],
)
def test_a_session_is_where_the_dialled_endpoint_is(
    dialled: str, port: int, path: str, expected: str
) -> None:
    assert str(Endpoint.parse(dialled).session(port, path)) == expected


@pytest.mark.parametrize(
    ("text", "loopback"),
    [
        ("ipc:///x", True),
        ("emulated:", True),
        ("tcp://127.0.0.1:5", True),
        ("tcp://127.9.8.7:5", True),
        ("tcp://[::1]:5", True),
        ("tcp://localhost:5", True),
        ("tcp://10.0.2.2:5", False),
        ("tcp://0.0.0.0:5", False),
        ("tcp://[::]:5", False),
        ("tcp://*:5", False),
        ("tcp://localhost.example:5", False),
        ("tcp://127.0.0.1.example:5", False),
    ],
)
def test_loopback(text: str, loopback: bool) -> None:
    assert Endpoint.parse(text).is_loopback() is loopback


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1-65535", (1, 65535)), ("5000-5009", (5000, 5009)), ("7-7", (7, 7)), ("007-08", (7, 8))],
)
def test_port_ranges(text: str, expected: tuple[int, int]) -> None:
    assert port_range(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "-",
            "5",
            "5-",
            "-5",
            "0-5",
            "6-5",
            "1-65536",
            "1-2-3",
            "a-b",
            " 1-2",
            "1- 2",
            "+1-2",
        ),
        *("1--2", "1:2", "²-5", "1-²", "1-" + "9" * 5000),
    ],
)
def test_anything_else_is_no_port_range(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        port_range(text)
    assert f"{text!r} needs the form A-B" in str(caught.value)


@given(text=st.text(max_size=12) | st.text("0123456789-", max_size=12))
def test_any_text_as_port_range(text: str) -> None:
    try:
        low, high = port_range(text)
    except ConfigurationError:
        return
    assert 1 <= low <= high <= 65535
