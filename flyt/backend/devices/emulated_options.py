# SPDX-License-Identifier: Apache-2.0
"""What an emulated device can be told: its size, how slow its DMA is, and where it fails."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from flyt.errors import ConfigurationError

DEFAULT_MEMORY = 8 << 30
"""Costs address space only: the kernel gives a page when it is first written."""

MAX_DEVICES = 64
"""As many as CUDA itself shows to one process."""

MAX_MEMORY = 1 << 40
"""Devices lie this far apart."""

STREAM_OPERATIONS = frozenset(
    {"allocate", "free", "copy", "fill", "copy_rows", "fill_rows", "record", "wait_event"}
)
"""Operations that a stream carries out: only these can fail after the call has returned."""

OPERATIONS = STREAM_OPERATIONS | {
    "memory",
    "create_pool",
    "destroy_pool",
    "settle",
    "trim_pool",
    "pool_attribute",
    "set_pool_attribute",
    "gate",
    "register",
    "unregister",
    "create_stream",
    "destroy_stream",
    "create_event",
    "destroy_event",
    "query",
    "elapsed",
    "notify",
}

CHECKPOINTS = frozenset({"suspend", "resume"})
"""Operations on the whole process, which its owner asks for and no client."""

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_FAULT_FIELDS = (3, 4)  # OP:CODE:N, and perhaps :async
_GIGA = 1e9  # bandwidths count decimal bytes, as data sheets do


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """The ``nth`` call (from 1) of ``operation`` fails with ``code``.

    An ``asynchronous`` fault lets the call succeed and its work fail, as a kernel would: the next
    notification on that stream carries the code.
    """

    operation: str
    code: int
    nth: int
    asynchronous: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class EmulatedOptions:
    """The options of all emulated devices of a process.

    Attributes
    ----------
    memory : int
        Bytes of device memory, a multiple of 512.
    devices : int
    bandwidth : float
        Bytes per second of one copy; infinite: as fast as the machine copies.
    latency : float
        Seconds that a copy takes before its first byte moves.
    faults : tuple of Fault
    """

    memory: int = DEFAULT_MEMORY
    devices: int = 1
    bandwidth: float = math.inf
    latency: float = 0.0
    faults: tuple[Fault, ...] = ()


def parse(text: str) -> EmulatedOptions:
    """Reads ``memory=8G,devices=1,bandwidth=GBps,latency=seconds,fault=OP:CODE:N[:async]``.

    ``fault`` may appear several times, every other key once.
    """
    values: dict[str, object] = {}
    faults: list[Fault] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigurationError(f"emulated device: {item!r} is not of the form key=value")
        if key == "fault":
            faults.append(_fault(value))
        elif key not in _READERS:
            known = ", ".join([*_READERS, "fault"])
            raise ConfigurationError(f"emulated device: no option {key!r}; there are {known}")
        elif key in values:
            raise ConfigurationError(f"emulated device: option {key!r} is given twice")
        else:
            values[key] = _READERS[key](value)
    return dataclasses.replace(EmulatedOptions(faults=tuple(faults)), **values)  # type: ignore[arg-type]  # _READERS gives each key its type


def _memory(value: str) -> int:
    unit = _UNITS.get(value[-1:].upper(), 1)
    digits = value if unit == 1 else value[:-1]
    size = int(digits) * unit if digits.isdecimal() else 0
    if not 0 < size <= MAX_MEMORY or size % 512:
        raise ConfigurationError(
            f"emulated device: memory={value} must be a multiple of 512 bytes of at most 1T, "
            "such as 512M or 8G"
        )
    return size


def _devices(value: str) -> int:
    count = int(value) if value.isdecimal() else 0
    if not 0 < count <= MAX_DEVICES:
        raise ConfigurationError(f"emulated device: devices={value} must be 1 to {MAX_DEVICES}")
    return count


def _bandwidth(value: str) -> float:
    rate = _number(value)
    if rate <= 0:
        raise ConfigurationError(f"emulated device: bandwidth={value} must be above 0, in GB/s")
    return rate * _GIGA


def _latency(value: str) -> float:
    seconds = _number(value)
    if seconds < 0 or math.isinf(seconds):
        raise ConfigurationError(f"emulated device: latency={value} must be seconds, 0 or more")
    return seconds


def _number(value: str) -> float:
    """NaN and what is no number at all become -1, which no reader takes."""
    try:
        number = float(value)
    except ValueError:
        return -1.0
    return -1.0 if math.isnan(number) else number


def _fault(value: str) -> Fault:
    fields = value.split(":")
    last = fields[3:]
    if (
        len(fields) not in _FAULT_FIELDS
        or not (fields[1].isdecimal() and fields[2].isdecimal())
        or not (int(fields[1]) and int(fields[2]))
        or last not in ([], ["async"])
    ):
        raise ConfigurationError(
            f"emulated device: fault={value} must be OPERATION:CODE:N or OPERATION:CODE:N:async, "
            "where CODE is a cudaError_t and the N-th call fails, counted from 1"
        )
    known = STREAM_OPERATIONS if last else OPERATIONS | CHECKPOINTS
    if fields[0] not in known:
        raise ConfigurationError(
            f"emulated device: fault={value}: {fields[0]!r} is none of {', '.join(sorted(known))}"
        )
    return Fault(fields[0], int(fields[1]), int(fields[2]), bool(last))


_READERS: dict[str, Callable[[str], object]] = {
    "memory": _memory,
    "devices": _devices,
    "bandwidth": _bandwidth,
    "latency": _latency,
}
