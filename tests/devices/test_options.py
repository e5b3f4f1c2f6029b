# SPDX-License-Identifier: Apache-2.0
"""Which devices open, and what the emulated one can be told."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest

from flyt.backend.devices import open_devices
from flyt.backend.devices.base import Device
from flyt.backend.devices.emulated_options import (
    CHECKPOINTS,
    OPERATIONS,
    EmulatedOptions,
    Fault,
    parse,
)
from flyt.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", EmulatedOptions(8 << 30, 1, math.inf, 0.0, ())),
        (" , ", EmulatedOptions()),
        ("memory=512", EmulatedOptions(memory=512)),
        ("memory=64K", EmulatedOptions(memory=65536)),
        ("memory=3m, devices=4", EmulatedOptions(memory=3 << 20, devices=4)),
        ("memory=1T", EmulatedOptions(memory=1 << 40)),
        ("bandwidth=12.5,latency=1e-3", EmulatedOptions(bandwidth=12.5e9, latency=0.001)),
        ("fault=copy:719:3", EmulatedOptions(faults=(Fault("copy", 719, 3),))),
        (
            "fault=free:1:1,memory=1G,fault=fill:700:2:async",
            EmulatedOptions(1 << 30, faults=(Fault("free", 1, 1), Fault("fill", 700, 2, True))),
        ),
    ],
)
def test_options(text, options):
    assert parse(text) == options


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("speed=1", "speed"),
        ("memory", "key=value"),
        ("memory=1G,memory=2G", "twice"),
        ("memory=0", "memory=0"),
        ("memory=513", "512"),
        ("memory=-1G", "memory=-1G"),
        ("memory=G", "memory=G"),
        ("memory=", "memory="),
        ("memory=1.5G", "memory=1.5G"),
        ("memory=2T", "1T"),
        ("devices=0", "devices=0"),
        ("devices=65", "64"),
        ("devices=two", "devices=two"),
        ("bandwidth=0", "bandwidth=0"),
        ("bandwidth=nan", "bandwidth=nan"),
        ("bandwidth=fast", "bandwidth=fast"),
        ("latency=-1", "latency=-1"),
        ("latency=inf", "latency=inf"),
        ("latency=", "latency="),
        ("fault=copy", "OPERATION:CODE:N"),
        ("fault=copy:719", "OPERATION:CODE:N"),
        ("fault=copy:0:1", "OPERATION:CODE:N"),
        ("fault=copy:719:0", "OPERATION:CODE:N"),
        ("fault=copy:719:1:sync", "OPERATION:CODE:N"),
        ("fault=copy:719:1:async:x", "OPERATION:CODE:N"),
        ("fault=launch:719:1", "launch"),
        ("fault=query:719:1:async", "query"),
    ],
)
def test_bad_options(text, named):
    with pytest.raises(ConfigurationError, match="emulated device: ") as caught:
        open_devices("emulated", text)
    assert named in str(caught.value)


def test_every_fault_can_be_asked_for():
    """The names are those of the interface."""
    # A gate must open whatever has happened; limit_sms is asked for before anybody works.
    others = {"snapshot", "close", "open_gate", "limit_sms"}
    assert Device.__abstractmethods__ - others == OPERATIONS | CHECKPOINTS


def test_unknown_kind():
    with pytest.raises(ConfigurationError, match=r"'rocm'.*auto, cupy, emulated"):
        open_devices("rocm")


@pytest.mark.parametrize("kind", ["auto", "cupy"])
def test_only_the_emulated_device_takes_options(kind):
    with pytest.raises(ConfigurationError, match="takes no options"):
        open_devices(kind, "memory=1G")


@pytest.mark.parametrize("kind", ["auto", "cupy"])
def test_without_a_gpu_nothing_is_emulated_in_silence(kind):
    program = (
        "from flyt.backend.devices import open_devices\n"
        "from flyt.errors import ConfigurationError\n"
        "try:\n"
        f"    open_devices({kind!r})\n"
        "except ConfigurationError as exc:\n"
        "    print(exc)\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "--device emulated" in done.stdout
    assert len(done.stdout.splitlines()) == 1
