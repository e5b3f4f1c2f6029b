# SPDX-License-Identifier: Apache-2.0
"""What the command accepts, and what its errors name."""

from __future__ import annotations

import os
from typing import Any

import pytest

from flyt.backend.options import Options
from flyt.errors import ConfigurationError
from flyt.sizes import parse_size

IPC = ("ipc:///run/x/b.sock",)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64K", 65_536),
        ("64k", 65_536),
        ("48M", 48 * 1024 * 1024),
        ("1G", 1024**3),
        ("1GiB", 1024**3),
        ("1gb", 1024**3),
        ("2T", 2 * 1024**4),
        (" 5 G ".replace(" ", ""), 5 * 1024**3),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "G",
        "-1",
        "1.5G",
        "1X",
        "1GG",
        "0x10",
        "٣",
        "9223372036854775808",
        "8388608T",
        "9" * 5000,
    ],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigurationError, match="write bytes or 64K"):
        parse_size(text)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ({"device": "opencl"}, "--device opencl"),
        ({"isolation": "threads"}, "--isolation threads"),
        ({"max_workers": 0}, "--max-workers 0"),
        ({"max_workers": 1001}, "--max-workers 1001"),
        ({"session_ports": "9-1"}, "9-1"),
        ({"session_ports": "0-5"}, "0-5"),
        ({"listen": ()}, "--listen"),
        ({"listen": ("http://x",)}, "http://x"),
        ({"listen": ("emulated:",)}, "emulated:"),
        ({"listen": ("ipc://relative",)}, "absolute"),
        ({"listen": ("ipc:///" + "x" * 95,)}, "too long"),
        ({"listen": ("tcp://0.0.0.0:7000",)}, "--insecure"),
        ({"listen": ("tcp://0.0.0.0:7000",)}, "--server-key"),
        ({"listen": ("tcp://0.0.0.0:7000",), "server_key": "k"}, "belong together"),
        ({"listen": ("tcp://0.0.0.0:7000",), "authorized_keys": "k"}, "belong together"),
        ({"server_key": "k", "authorized_keys": "k"}, "for TCP"),
        ({"listen": ("tcp://[::]:7000",)}, "--insecure"),
        ({"listen": ("tcp://example.com:7000",)}, "--insecure"),
        ({"region": "per-client", "listen": ("tcp://127.0.0.1:7000",)}, "add --listen ipc"),
        ({"sm_limit": -1}, "--sm-limit -1"),
        ({"sm_limit": 32}, "--isolation process"),
        ({"region": "per-client", "keep_region": True}, "--keep-region"),
        ({"region": "per-client", "doorbell": "/run/bell"}, "--doorbell"),
        ({"heartbeat": -1.0}, "--heartbeat"),
        ({"heartbeat": float("nan")}, "--heartbeat"),
        ({"drain": float("inf")}, "--drain"),
        ({"sweep": 0.0}, "--sweep"),
        ({"ready_fd": 1 << 40}, "--ready-fd"),
        ({"parent_fd": 9999}, "--with-parent-fd"),
    ],
)
def test_faults_are_named(fault: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named.replace("[", r"\[")):
        Options(**{"listen": IPC, **fault})


@pytest.mark.parametrize(
    "listen", ["tcp://127.0.0.1:7000", "tcp://localhost:*", "tcp://[::1]:7000", *IPC]
)
def test_local_endpoints_need_no_leave(listen: str) -> None:
    assert Options(listen=(listen,)).listen == (listen,)


def test_anybody_may_be_let_in_on_purpose() -> None:
    assert Options(listen=("tcp://0.0.0.0:7000",), insecure=True).insecure
    options = Options(listen=("tcp://0.0.0.0:7000",), server_key="k", authorized_keys="a")
    assert options.keys == ("k", "a")


def test_a_path_that_leaves_room_for_session_sockets() -> None:
    longest = "/" + "x" * (107 - 17 - 1)
    Options(listen=(f"ipc://{longest}",))
    with pytest.raises(ConfigurationError):
        Options(listen=(f"ipc://{longest}x",))


def test_heartbeats_may_be_fractions() -> None:
    assert Options(listen=IPC, heartbeat=0.25).heartbeat_ms == 250
    assert Options(listen=IPC, heartbeat=0).heartbeat_ms == 0
    assert Options(listen=IPC, heartbeat=0.0001).heartbeat_ms == 1, "not 0: that means never"


def test_descriptors_must_be_open() -> None:
    read, write = os.pipe()
    Options(listen=IPC, ready_fd=write)
    os.close(write)
    with pytest.raises(ConfigurationError):
        Options(listen=IPC, ready_fd=write)
    os.close(read)
