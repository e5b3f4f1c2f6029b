# SPDX-License-Identifier: Apache-2.0
"""A guest without a GPU: its processes share one region, a real ivshmem device, with the host."""

from __future__ import annotations

import json

import numpy as np
import pytest

from flyt.shm.layout import FrameState
from tests.pair.raw import RegionView, eventually
from tests.vm.conftest import HOST, JAILED, MIB, MORTAL_SIZE, Lab, port_of

pytestmark = pytest.mark.timeout(300)

BACK_SECONDS = 30.0
"""For frames of the dead; some two seconds, and a guest that has to notice first."""


def test_three_processes_share_the_region_and_one_dies(lab: Lab) -> None:
    running = [lab.start("share", str(n), "64", seconds=150) for n in range(3)]
    reports = [json.loads(line) for line in lab.await_files(*(f"/tmp/share.{n}" for n in range(3)))]
    assert len({report["session"] for report in reports}) == 3

    with RegionView(lab.backend.region) as view:
        geometry = view.table.geometry
        memory = np.memmap(lab.backend.region, np.uint8, "r")
        entries = view.table.snapshot()
        for number, report in enumerate(reports):
            # The host reads the region's bytes through the page table: what the device had.
            mine = [e for e in entries if e.session == report["session"]]
            assert {e.pid for e in mine} == {report["pid"]}
            assert {e.state for e in mine} == {FrameState.OWNED}
            frames = {e.vpn: e.frame for e in mine}
            pages = range(report["vpn"], report["vpn"] + MIB // geometry.page_size)
            shown = [memory[geometry.offset(frames[vpn]) :][: geometry.page_size] for vpn in pages]
            words = np.arange(63 * MIB // 8, 64 * MIB // 8, dtype=np.uint64) * np.uint64(
                2 * number + 3
            )
            assert np.concatenate(shown).tobytes() == words.tobytes()
            assert report["counts"]["staged_h2d_bytes"] == 64 * MIB
            assert report["counts"]["staged_d2h_bytes"] == 64 * MIB
            assert report["counts"]["pinned_d2h_bytes"] == MIB
        held = [e.frame for e in entries]
        assert len(set(held)) == len(held)
        del memory

        victim = reports[1]
        frames_of_victim = view.frames_of(victim["pid"])
        lab.do("touch", "/tmp/forever.1")
        lab.await_files("/tmp/state.1")
        lab.do("kill", "-9", str(victim["pid"]))
        assert running[1].wait().code == -9
        state = lab.do("head", "-c1", "/tmp/state.1")
        assert state == "\x01", f"it was not in mid-copy: {state!r}"
        assert eventually(lambda: view.are_free(frames_of_victim), BACK_SECONDS)
        assert view.dirty(frames_of_victim) == []

        lab.do("touch", "/tmp/go.0", "/tmp/go.2")
        for number in (0, 2):
            done = running[number].wait()
            assert done.code == 0, done.out
        frames = [frame for report in reports for frame in view.frames_of(report["pid"])]
        assert eventually(lambda: view.are_free(frames), BACK_SECONDS)


def test_a_copy_of_ten_times_the_region(lab: Lab) -> None:
    done = lab.run("large", str(10 * MORTAL_SIZE), backend=lab.mortal, seconds=120)
    assert done.code == 0, done.out


def test_an_ordinary_user_needs_what_the_udev_rule_does(lab: Lab) -> None:
    folder = "/sys/bus/pci/devices/0000:00:05.0"
    # The lock file is the group's, so that all users of the guest share it.
    as_user = {"user": "user", "env": {"FLYT_RUNTIME_DIR": "/run/flyt"}}
    refused = lab.copies(**as_user)
    assert refused["right"]
    assert not refused["region"]
    assert f"can't open {folder}/resource2_wc: Permission denied" in refused["warnings"][0]
    assert "udev" in refused["warnings"][0]

    rule = f"chgrp user {folder}/resource2* && chmod 660 {folder}/resource2*"
    lab.do("sh", "-c", rule)
    served = lab.copies(**as_user)
    assert served["right"]
    assert served["region"]
    assert served["warnings"] == []


def test_a_doorbell_wakes_the_backend(lab: Lab) -> None:
    done = lab.run("doorbell", backend=lab.mortal, env={"FLYT_SLOT_SIZE": "131072"})
    assert done.code == 0, done.out
    report = json.loads(done.out.splitlines()[-1])
    assert report["fallback"] == 0
    assert report["rings"] > 0


def test_an_ordinary_user_may_ring_once_the_udev_rule_says_so(lab: Lab) -> None:
    folder = "/sys/bus/pci/devices/0000:00:08.0"
    as_user = {"user": "user", "env": {"FLYT_RUNTIME_DIR": "/run/flyt", "FLYT_SLOT_SIZE": "131072"}}
    lab.do("sh", "-c", f"chgrp user {folder}/resource2* && chmod 660 {folder}/resource2*")
    silent = lab.copies(backend=lab.mortal, **as_user)
    assert (silent["right"], silent["region"], silent["counts"]["doorbell_rings"]) == (
        True,
        True,
        0,
    )
    assert f"can't map {folder}/resource0: [Errno 13]" in silent["warnings"][0]

    lab.do("sh", "-c", f"chgrp user {folder}/resource0 && chmod 660 {folder}/resource0")
    ringing = lab.copies(backend=lab.mortal, **as_user)
    assert (ringing["right"], ringing["region"], ringing["warnings"]) == (True, True, [])
    assert ringing["counts"]["doorbell_rings"] > 0


NOTHING_ELSE = """
import socket, sys
for host in ("10.0.3.2", "10.0.3.100"):
    for port in map(int, sys.argv[1:]):
        try:
            socket.create_connection((host, port), 3).close()
        except OSError:
            continue
        sys.exit(f"{host}:{port} is open")
"""


def test_a_network_that_leads_to_one_port(lab: Lab) -> None:
    # restrict=on with guestfwd: no other port of the host, and --single-port needs no other.
    done = lab.machine.run(port_of(lab.mortal), port_of(lab.backend), code=NOTHING_ELSE)
    assert done.code == 0, done.out
    env = {"FLYT_BACKEND": f"tcp://{JAILED}", "FLYT_SLOT_SIZE": "131072"}
    report = lab.copies(backend=lab.mortal, env=env)
    assert report["right"], report
    assert report["region"]
    assert report["warnings"] == []


DOCTOR = """
from flyt.cli import doctor
del doctor.STEPS["probe"]  # under TCG its copies take long
doctor.doctor(["--json"])
"""


def test_doctor_in_the_guest(lab: Lab) -> None:
    env = {"FLYT_BACKEND": f"tcp://{HOST}:{port_of(lab.backend)}"}
    done = lab.machine.run(code=DOCTOR, env=env)
    assert done.code == 0, done.out
    (text,) = (step["text"] for step in json.loads(done.out) if step["step"] == "region")
    assert text.startswith("pci:0000:00:05.0, 32 MiB, seen by both sides; write-combining")

    env |= {"FLYT_BACKEND": f"tcp://{HOST}:{port_of(lab.lone)}"}
    done = lab.machine.run(code=DOCTOR, env=env)
    assert done.code == 1
    steps = json.loads(done.out[done.out.index("[\n") :])
    (text,) = (step["text"] for step in steps if step["step"] == "region")
    assert "several ivshmem devices have 16777216 bytes" in text


KEYGEN = """
from flyt.cli.main import main
main(["keygen", "client", "--name", "vm1", "--folder", "/tmp/keys"])
"""


def test_a_key_that_was_made_in_the_guest(lab: Lab) -> None:
    # As docs/deploy-vm.md has it: only the public files travel.
    done = lab.machine.run(code=KEYGEN)
    assert done.code == 0, done.out
    server = (lab.keys / "server.key").read_text()
    done = lab.machine.run(
        server, code="import pathlib, sys; pathlib.Path('/tmp/server.key').write_text(sys.argv[1])"
    )
    assert done.code == 0, done.out
    env = {"FLYT_KEY": "/tmp/keys/vm1.key_secret", "FLYT_SERVER_KEY": "/tmp/server.key"}
    env["FLYT_SLOT_SIZE"] = "131072"
    stranger = lab.copies(backend=lab.keyed, env=env)
    assert stranger["error"] == 100  # cudaErrorNoDevice
    assert "the backend does not know this client's key (FLYT_KEY)" in stranger["why"]

    (lab.keys / "authorized" / "vm1.key").write_text(lab.do("cat", "/tmp/keys/vm1.key"))
    report = lab.copies(backend=lab.keyed, env=env)
    assert (report["error"], report["right"], report["region"]) == (0, True, True), report
    assert report["warnings"] == []


def test_the_facts_about_copies_hold_over_ivshmem(lab: Lab) -> None:
    done = lab.facts.wait()
    assert done.code == 0, done.out
