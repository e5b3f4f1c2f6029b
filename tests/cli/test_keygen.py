# SPDX-License-Identifier: Apache-2.0
"""``flyt keygen``: what it says leads from no keys to a connected client."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flyt.rpc.keys import read_pair


def keygen(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flyt.cli.main", "keygen", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **env},
    )


def made(folder: Path, who: str) -> tuple[str, str]:
    """Public and secret file, as the command says."""
    done = keygen(who, "--folder", str(folder))
    assert done.returncode == 0, done.stderr
    public = re.search(r"public key (\S{40}): (\S+)", done.stdout)
    secret = re.search(r"secret key: (\S+)", done.stdout)
    assert public is not None
    assert secret is not None
    pair = read_pair(secret[1], "it")
    assert pair.public.decode() == public[1]
    assert pair.secret.decode() not in done.stdout + done.stderr
    return public[2], secret[1]


def test_from_nothing_to_a_session(
    tmp_path: Path, backend: Callable[..., Any], run_client: Callable[..., Any]
) -> None:
    server, server_secret = made(tmp_path / "server", "server")
    client, client_secret = made(tmp_path / "client", "client")
    authorized = tmp_path / "server" / "authorized"
    assert stat.S_IMODE(authorized.stat().st_mode) == 0o700
    extra = ["--server-key", server_secret, "--authorized-keys", str(authorized)]
    served = backend(listen=["tcp://127.0.0.1:*"], extra=extra)
    code = "import flyt; print(int(flyt.cudaMalloc(4096)[0]), flyt.last_failure())"
    env = {"FLYT_KEY": client_secret, "FLYT_SERVER_KEY": server}
    assert "does not know this client's key" in run_client(code, served, env=env).stdout
    shutil.copy(client, authorized / "anybody.key")
    assert run_client(code, served, env=env).stdout.startswith("0 "), "it need not start anew"
    (authorized / "anybody.key").unlink()
    assert "does not know this client's key" in run_client(code, served, env=env).stdout


def test_keys_by_argument(
    tmp_path: Path, backend: Callable[..., Any], run_client: Callable[..., Any]
) -> None:
    server, server_secret = made(tmp_path / "server", "server")
    client, client_secret = made(tmp_path / "client", "client")
    authorized = tmp_path / "server" / "authorized"
    shutil.copy(client, authorized)
    extra = ["--server-key", server_secret, "--authorized-keys", str(authorized)]
    served = backend(listen=["tcp://127.0.0.1:*"], extra=extra)
    code = f"import flyt; flyt.connect(key={client_secret!r}, server_key={server!r}); print('in')"
    assert run_client(code, served).stdout == "in\n"


@pytest.mark.parametrize("missing", ["FLYT_KEY", "FLYT_SERVER_KEY"])
def test_half_of_the_keys_is_an_error(
    tmp_path: Path, run_client: Callable[..., Any], missing: str
) -> None:
    server, _ = made(tmp_path / "server", "server")
    _, client_secret = made(tmp_path / "client", "client")
    env = {"FLYT_KEY": client_secret, "FLYT_SERVER_KEY": server}
    del env[missing]
    code = "import flyt; print(int(flyt.cudaMalloc(4096)[0]), flyt.last_failure())"
    assert f"{missing} is missing" in run_client(code, "tcp://127.0.0.1:1", env=env).stdout


def test_default_folder_and_a_second_time(tmp_path: Path) -> None:
    first = keygen("client", XDG_CONFIG_HOME=str(tmp_path))
    assert first.returncode == 0, first.stderr
    before = (tmp_path / "flyt" / "client.key_secret").read_bytes()
    again = keygen("client", XDG_CONFIG_HOME=str(tmp_path))
    assert again.returncode == 1
    assert "exists" in again.stderr
    assert (tmp_path / "flyt" / "client.key_secret").read_bytes() == before
