# SPDX-License-Identifier: Apache-2.0
"""The main endpoint among strangers: garbage, liars, other versions, and good clients meanwhile."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from flyt.rpc.handshake import Feature
from flyt.rpc.messages import HELLOS, PROTOCOL_VERSION, Hello, Refused, StatusReport, Welcome

Connect = Callable[[str], Any]
Start = Callable[..., Any]
Eventually = Callable[[Callable[[], Any]], Any]


def test_welcome_says_all_that_a_client_needs(backend: Start, raw: Connect) -> None:
    one = backend(size="4M", extra=["--heartbeat", "2.5"])
    welcome = raw(one.endpoint).greet()
    assert isinstance(welcome, Welcome)
    assert welcome.session
    assert len(welcome.token) == 16
    assert welcome.region == one.region
    assert Path(welcome.lock_file).parent == one.runtime_dir
    assert Path(welcome.lock_file).name.startswith(Path(one.region).name + ".")
    assert (welcome.credits, welcome.inline_chunk) == (224, 1 << 20)
    assert welcome.heartbeat_ms == 2500
    assert welcome.snapshot["devices"]
    assert (one.folder / welcome.path).is_socket()


def test_sessions_have_ids_tokens_and_sockets_of_their_own(backend: Start, raw: Connect) -> None:
    one = backend(size="4M")
    welcomes = [raw(one.endpoint).greet() for _ in range(5)]
    for attribute in ("session", "token", "path"):
        assert len({getattr(w, attribute) for w in welcomes}) == 5


def test_a_client_without_regions_is_not_given_one(backend: Start, raw: Connect) -> None:
    one = backend(size="4M")
    welcome = raw(one.endpoint).greet(features=(Feature.INLINE,))
    assert (welcome.region, welcome.region_size) == ("", 0)


@pytest.mark.parametrize(
    "hello",
    [
        HELLOS.encode(Hello(PROTOCOL_VERSION + 1, (1, 2), 1, "newer")),
        msgpack.packb([1, PROTOCOL_VERSION + 7, {"all": "new"}]),
        msgpack.packb([1, 0]),
    ],
)
def test_another_version_hears_who_is_to_upgrade(
    backend: Start, raw: Connect, hello: bytes
) -> None:
    one = backend(size="4M")
    client = raw(one.endpoint)
    client.say(hello)
    answer = client.hear()
    assert isinstance(answer, Refused)
    assert answer.code == 100
    older = "frontend" if msgpack.unpackb(hello)[1] < PROTOCOL_VERSION else "backend"
    assert f"upgrade the {older}" in answer.text


def test_no_feature_in_common(backend: Start, raw: Connect) -> None:
    answer = raw(backend(size="4M").endpoint).greet(features=(99,))
    assert isinstance(answer, Refused)
    assert answer.code == 100


def test_garbage_gets_no_answer_and_a_good_client_notices_nothing(
    backend: Start, raw: Connect
) -> None:
    one = backend(size="4M")
    good, bad = raw(one.endpoint), raw(one.endpoint)
    source = random.Random(20)
    valid = HELLOS.encode(Hello(PROTOCOL_VERSION, (1, 2), 1, "x"))
    sent = 0
    for round_ in range(200):
        junk = source.randbytes(source.randrange(64))
        cut = valid[: source.randrange(len(valid))]
        for data in (junk, cut, valid + b"\0", b"", msgpack.packb([1, "one"]), b"\x91" * 500):
            bad.say(data)
            sent += 1
        bad.say(valid, b"a second frame")
        sent += 1
        if round_ % 50 == 0:
            assert isinstance(good.greet(), Welcome)
    assert isinstance(good.greet(), Welcome)
    assert bad.hear(0.2) is None
    report = good.status().report
    # Random bytes that happen to be another version's HELLO would be answered instead; none are.
    assert report["garbage"] == sent


def test_a_second_hello_before_the_welcome_makes_no_second_session(
    backend: Start, raw: Connect, eventually: Eventually
) -> None:
    one = backend(size="4M")
    watcher, client = raw(one.endpoint), raw(one.endpoint)
    worker = watcher.status().report["workers"][0]["pid"]
    os.kill(worker, signal.SIGSTOP)  # so that the WELCOME has to wait
    for _ in range(2):
        client.say(HELLOS.encode(Hello(PROTOCOL_VERSION, (1, 2), 1, "x")))
    eventually(lambda: watcher.status().report["garbage"])
    os.kill(worker, signal.SIGCONT)
    welcome = client.hear()
    assert isinstance(welcome, Welcome)
    assert [s["session"] for s in watcher.status().report["sessions"]] == [welcome.session]


def test_whoever_leaves_before_the_welcome_has_no_session(
    backend: Start, raw: Connect, eventually: Eventually
) -> None:
    one = backend(size="4M")
    watcher, client = raw(one.endpoint), raw(one.endpoint)
    worker = watcher.status().report["workers"][0]["pid"]
    os.kill(worker, signal.SIGSTOP)  # so that the WELCOME has to wait
    client.say(HELLOS.encode(Hello(PROTOCOL_VERSION, (1, 2), 4321, "early")))
    eventually(lambda: [s for s in watcher.status().report["sessions"] if s["pid"] == 4321])
    client.close()
    os.kill(worker, signal.SIGCONT)
    eventually(lambda: not watcher.status().report["sessions"])
    assert watcher.status().report["workers"][0]["pid"] == worker


def test_a_killed_worker_has_a_successor(
    backend: Start, raw: Connect, eventually: Eventually
) -> None:
    one = backend(size="4M")
    client = raw(one.endpoint)
    first = client.greet()
    report = client.status().report
    (worker,) = report["workers"]
    assert worker["principal"] == f"uid {os.getuid()}"
    assert [s["session"] for s in report["sessions"]] == [first.session]
    os.kill(worker["pid"], signal.SIGKILL)
    second = client.greet()
    assert isinstance(second, Welcome)
    report = client.status().report
    assert [s["session"] for s in report["sessions"]] == [second.session]
    assert report["workers"][0]["pid"] != worker["pid"]
    eventually(lambda: not (one.folder / first.path).exists())
    assert (one.folder / second.path).is_socket()


def test_a_hello_that_a_dying_worker_had_is_given_to_its_successor(
    backend: Start, raw: Connect, eventually: Eventually
) -> None:
    one = backend(size="4M")
    watcher, client = raw(one.endpoint), raw(one.endpoint)
    worker = watcher.greet() and watcher.status().report["workers"][0]["pid"]
    os.kill(worker, signal.SIGSTOP)
    client.say(HELLOS.encode(Hello(PROTOCOL_VERSION, (1, 2), 4321, "late")))
    eventually(lambda: [s for s in watcher.status().report["sessions"] if s["pid"] == 4321])
    os.kill(worker, signal.SIGKILL)
    assert isinstance(client.hear(), Welcome)


def test_whoever_leaves_early_leaves_no_worker_of_its_own(
    backend: Start, raw: Connect, eventually: Eventually
) -> None:
    one = backend(size="4M", extra=["--isolation", "process"])
    watcher = raw(one.endpoint)

    def workers() -> list[tuple[str, int]]:
        return [(w["state"], w["sessions"]) for w in watcher.status().report["workers"]]

    assert isinstance(watcher.greet(), Welcome)
    for _ in range(6):  # some find a ready spare, some one that is starting
        client = raw(one.endpoint)
        client.say(HELLOS.encode(Hello(PROTOCOL_VERSION, (1, 2), 4321, "early")))
        client.close()
    eventually(lambda: workers() == [("ready", 1), ("ready", 0)])
    assert len(one.descendants()) == 3, "keeper, worker, spare"


def test_a_broken_handshake_is_given_to_another_worker_of_its_own(
    backend: Start, raw: Connect, eventually: Eventually
) -> None:
    one = backend(size="4M", extra=["--isolation", "process"])
    watcher, client = raw(one.endpoint), raw(one.endpoint)
    spare = watcher.status().report["workers"][0]["pid"]
    os.kill(spare, signal.SIGSTOP)
    client.say(HELLOS.encode(Hello(PROTOCOL_VERSION, (1, 2), 4321, "late")))
    eventually(lambda: [s for s in watcher.status().report["sessions"] if s["pid"] == 4321])
    os.kill(spare, signal.SIGKILL)
    assert isinstance(client.hear(), Welcome)
    eventually(lambda: len(watcher.status().report["workers"]) == 2)


def test_two_principals_have_two_workers(backend: Start, raw: Connect, tmp_path: Path) -> None:
    one = backend(
        size="4M", listen=[f"ipc://{tmp_path}/b.sock", "tcp://127.0.0.1:*", "tcp://127.0.0.1:*"]
    )
    for endpoint in one.endpoints * 2:
        assert isinstance(raw(endpoint).greet(), Welcome)
    report = raw(one.endpoint).status().report
    hosts: dict[str, set[int]] = {}
    for session in report["sessions"]:
        hosts.setdefault(session["principal"], set()).add(session["worker"])
    assert len(hosts) == 3
    assert all(len(workers) == 1 for workers in hosts.values())
    assert len(set.union(*hosts.values())) == 3
    assert [w["sessions"] for w in report["workers"]] == [2, 2, 2]


def test_status_is_for_the_daemons_own_user(backend: Start, raw: Connect, tmp_path: Path) -> None:
    one = backend(size="4M", listen=[f"ipc://{tmp_path}/b.sock", "tcp://127.0.0.1:*"])
    own, other = (raw(endpoint).status() for endpoint in one.endpoints)
    assert isinstance(own, StatusReport)
    assert isinstance(other, Refused)
    assert own.report["pid"] == one.pid
    assert own.report["region"] == one.region
    assert own.report["isolation"] == "shared"
    assert [w["state"] for w in own.report["workers"]] == ["ready"]
    assert own.report["frames"]["total"] > 0
    assert own.report["frames"]["granted"] == own.report["frames"]["reclaiming"] == 0
    assert own.report["keeper"] in one.descendants()


def test_a_truncated_region_leaves_inline_sessions(
    backend: Start, raw: Connect, eventually: Eventually
) -> None:
    one = backend(size="4M")
    client = raw(one.endpoint)
    assert client.greet().region == one.region
    os.truncate(one.region, 1 << 20)
    welcome = client.greet()
    assert isinstance(welcome, Welcome)
    assert welcome.region == ""
    assert "truncated" in one.log


def test_whoever_dies_before_it_has_attached_leaves_no_session(
    backend: Start, raw: Connect, eventually: Eventually
) -> None:
    one = backend(size="4M")
    watcher, stays, leaves = (raw(one.endpoint) for _ in range(3))
    first = stays.greet(features=(1, 2, Feature.STAYS))
    second = leaves.greet(features=(1, 2))
    assert isinstance(first, Welcome)
    assert isinstance(second, Welcome)
    stays.close()
    leaves.close()
    # The other did not say that it would stay: it may attach all the same.
    eventually(
        lambda: [s["session"] for s in watcher.status().report["sessions"]] == [second.session]
    )
