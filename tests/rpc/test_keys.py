# SPDX-License-Identifier: Apache-2.0
"""Key files: who may read them, what is refused, what of them is ever shown."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import zmq

from flyt.errors import ConfigurationError
from flyt.rpc.keys import AuthorizedKeys, ClientKeys, make, read_pair, read_public

NO_KEYS = [b"short", b"x" * 41, b"~" * 40, b"#" * 40, b"\xff" * 40]
"""Too short, too long, characters that Z85 lacks, groups of five that exceed 32 bits."""


def mode_of(path: str | Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_a_made_pair_is_one_and_for_its_owner_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        public, secret, key = make(str(tmp_path / "keys"), "client")
    finally:
        os.umask(old)
    assert [mode_of(tmp_path / "keys"), mode_of(public), mode_of(secret)] == [0o700, 0o600, 0o600]
    assert sorted(os.listdir(tmp_path / "keys")) == ["client.key", "client.key_secret"]
    pair = read_pair(secret, "FLYT_KEY")
    assert zmq.curve_public(pair.secret) == pair.public == key == read_public(public, "x")
    assert pair.secret.decode() not in Path(public).read_text()


def test_no_repr_shows_the_secret(tmp_path: Path) -> None:
    _, secret, _ = make(str(tmp_path / "keys"), "client")
    pair = read_pair(secret, "FLYT_KEY")
    for shown in (repr(pair), str(ClientKeys(pair, pair.public))):
        assert pair.secret.decode() not in shown
        assert pair.public.decode() in shown


def test_an_older_key_is_never_overwritten(tmp_path: Path) -> None:
    folder = str(tmp_path / "keys")
    _, secret, _ = make(folder, "server")
    before = Path(secret).read_bytes()
    with pytest.raises(ConfigurationError, match=r"server\.key: exists"):
        make(folder, "server")
    assert Path(secret).read_bytes() == before


def test_a_folder_that_others_enter_gets_no_key(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigurationError, match="chmod 700"):
        make(str(tmp_path), "server")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["", "../up", "a/b", "x" * 65])
def test_names_that_are_no_file_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="name"):
        make(str(tmp_path / "keys"), name)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    _, secret, _ = make(str(tmp_path / "keys"), "client")
    os.chmod(secret, 0o640)
    with pytest.raises(ConfigurationError, match=r"FLYT_KEY .* mode 640 .* chmod 600"):
        read_pair(secret, "FLYT_KEY")


def test_a_key_file_that_is_not_there(tmp_path: Path) -> None:
    for read in (read_pair, read_public):
        with pytest.raises(ConfigurationError, match=r"FLYT_KEY .*/none: No such file"):
            read(str(tmp_path / "none"), "FLYT_KEY")


def test_what_is_no_key_file(tmp_path: Path) -> None:
    public, *_ = make(str(tmp_path / "keys"), "client")
    with pytest.raises(ConfigurationError, match="holds no secret key"):
        read_pair(public, "FLYT_KEY")
    contents = [b"", b"rubbish", *(b"public-key = " + key for key in NO_KEYS)]
    for content in contents:
        file = tmp_path / "rubbish.key"
        file.write_bytes(content)
        with pytest.raises(ConfigurationError, match=r"FLYT_SERVER_KEY .*rubbish\.key"):
            read_public(str(file), "FLYT_SERVER_KEY")
    with pytest.raises(ConfigurationError, match="FLYT_KEY"):
        read_pair(str(tmp_path / "none"), "FLYT_KEY")


def test_a_public_key_of_another_secret(tmp_path: Path) -> None:
    _, secret, key = make(str(tmp_path / "keys"), "client")
    other = make(str(tmp_path / "keys"), "other")[2]
    content = Path(secret).read_bytes().replace(key, other)
    Path(secret).write_bytes(content)
    with pytest.raises(ConfigurationError, match="is not that of its secret key"):
        read_pair(secret, "FLYT_KEY")


def test_authorized_keys_come_and_go(tmp_path: Path) -> None:
    source, folder = tmp_path / "keys", tmp_path / "authorized"
    folder.mkdir(mode=0o700)
    pairs = {name: make(str(source), name) for name in ("a", "b")}
    authorized = AuthorizedKeys(str(folder), "--authorized-keys")
    assert authorized.current() == frozenset()
    for name, (public, _, key) in pairs.items():
        (folder / f"{name}.key").write_bytes(Path(public).read_bytes())
        assert key in authorized.current()
    (folder / "rubbish.key").write_text("rubbish")
    assert authorized.current() == {key for *_, key in pairs.values()}, "one bad file harms none"
    (folder / "a.key").unlink()
    assert authorized.current() == {pairs["b"][2]}
    (folder / "b.key").unlink()
    (folder / "rubbish.key").unlink()
    folder.rmdir()
    assert authorized.current() == frozenset(), "without the folder nobody is authorized"


def test_a_folder_where_others_can_add_keys_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    with pytest.raises(ConfigurationError, match="chmod 700"):
        AuthorizedKeys(str(tmp_path), "--authorized-keys")
    tmp_path.chmod(0o700)
    with pytest.raises(ConfigurationError, match="none: No such file"):
        AuthorizedKeys(str(tmp_path / "none"), "--authorized-keys")


@pytest.mark.parametrize("read", [read_pair, read_public])
def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path: Path, read: Any) -> None:
    path = str(tmp_path / "none.key")
    with pytest.raises(ConfigurationError) as caught:
        read(path, "FLYT_KEY")
    assert str(caught.value) == f"FLYT_KEY {path}: No such file or directory"


@pytest.mark.parametrize("text", ["", "public-key", "rubbish"])
def test_a_file_that_is_no_key_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.key").write_text(text)
    with pytest.raises(ConfigurationError, match=r"FLYT_KEY .*a\.key: no key is in it"):
        read_public(str(tmp_path / "a.key"), "FLYT_KEY")
