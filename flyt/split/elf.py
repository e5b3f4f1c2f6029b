# SPDX-License-Identifier: Apache-2.0
"""What a program's file says, and whether a half can be made of it."""

from __future__ import annotations

import os
import re
import stat
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

from flyt.errors import ConfigurationError
from flyt.split.layout import LOWEST

HEADER = struct.Struct("<4sBBB9xHHIQQQIHHH")
PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
PT_LOAD, PT_INTERP = 1, 3
ET_EXEC, ET_DYN = 2, 3
CLASS_64, LITTLE, X86_64 = 2, 1, 62

LIST_LIMIT = 30.0
"""Seconds for ld.so to list what a program needs; it takes milliseconds."""

MISSING = re.compile(r"error while loading shared libraries: (\S+): cannot open")
LISTED = re.compile(r"(?:=> )?(?P<path>/\S+) \(0x[0-9a-f]+\)$")


@dataclass(frozen=True)
class Program:
    """An x86-64 program that names its ld.so.

    Attributes
    ----------
    interpreter
        Path of its ld.so.
    position_independent
        Whether it may be mapped anywhere (PIE).
    span
        Bytes of address space from its first to its last segment.
    """

    path: Path
    interpreter: str
    position_independent: bool
    span: int


def _read(path: Path) -> bytes:
    """Bytes of a file; what is no file, as a pipe, may never end or never begin."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigurationError(f"{path} is no regular file")
        return path.read_bytes()
    except OSError as exc:
        raise ConfigurationError(f"{path}: {exc.strerror}") from exc


def _parts(path: Path) -> tuple[int, list[tuple[int, ...]], bytes]:
    """Type, program headers and bytes of an ELF file of this machine."""
    data = _read(path)
    if len(data) < HEADER.size or data[:4] != b"\x7fELF":
        raise ConfigurationError(f"{path} is no ELF file: name the program itself, not a script")
    _, bits, order, _, kind, machine, _, _, at, _, _, _, size, count = HEADER.unpack_from(data)
    if bits != CLASS_64:
        raise ConfigurationError(f"{path} is of the wrong ELF class: a half is a 64-bit program")
    if order != LITTLE or machine != X86_64:
        raise ConfigurationError(f"{path} is not for x86-64")
    if (
        kind not in {ET_EXEC, ET_DYN}
        or size != PROGRAM_HEADER.size
        or at + size * count > len(data)
    ):
        raise ConfigurationError(f"{path} is no whole program: its ELF header is damaged")
    headers = [PROGRAM_HEADER.unpack_from(data, at + size * index) for index in range(count)]
    return kind, headers, data


def _span(headers: list[tuple[int, ...]]) -> int:
    loads = [(h[3], h[3] + h[6]) for h in headers if h[0] == PT_LOAD]
    return max(end for _, end in loads) - min(start for start, _ in loads) if loads else 0


def read(path: Path) -> Program:
    """Read a program.

    Raises
    ------
    ConfigurationError
        It can't be read, is of another class or machine, or has no interpreter.
    """
    kind, headers, data = _parts(path)
    for entry in headers:
        if entry[0] == PT_INTERP:
            interpreter = os.fsdecode(data[entry[2] : entry[2] + entry[5]].partition(b"\0")[0])
            break
    else:
        raise ConfigurationError(
            f"{path} names no interpreter: a half is a dynamically linked program, and this is a "
            "static one or a library"
        )
    if not os.path.exists(interpreter):
        raise ConfigurationError(f"{path}: its interpreter {ascii(interpreter)[1:-1]} is missing")
    if any(entry[0] == PT_INTERP for entry in _parts(Path(interpreter))[1]):
        raise ConfigurationError(f"{path}: its interpreter {interpreter} is no ld.so")
    highest = max((entry[3] for entry in headers if entry[0] == PT_LOAD), default=0)
    if kind == ET_EXEC and highest >= LOWEST:
        raise ConfigurationError(
            f"{path} is linked to lie at {highest:#x}: what is not position-independent must lie "
            f"below {LOWEST:#x}"
        )
    if not os.access(path, os.X_OK):
        raise ConfigurationError(f"{path} may not be executed: chmod +x it")
    return Program(path, interpreter, kind == ET_DYN, _span(headers))


def needs(program: Program, library_path: str = "") -> int:
    """Bytes of address space for the program, its ld.so and its libraries as ld.so finds them.

    Raises
    ------
    ConfigurationError
        A library is missing; the message names it.
    """
    option = ["--library-path", library_path] if library_path else []
    try:
        done = subprocess.run(
            [program.interpreter, *option, "--list", str(program.path)],
            capture_output=True, text=True, check=False, timeout=LIST_LIMIT,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ConfigurationError(f"{program.interpreter} can't be run: {exc}") from exc
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    missing = [line.partition(" =>")[0] for line in lines if line.endswith("not found")]
    missing += [match[1] for line in lines if (match := MISSING.search(line))]
    if missing:
        raise ConfigurationError(
            f"{program.path}: missing library: {', '.join(missing)}; install it or name its folder "
            "in LD_LIBRARY_PATH"
        )
    if done.returncode:
        why = done.stderr.strip() or f"ld.so ended with {done.returncode}"
        raise ConfigurationError(f"{program.path} can't be loaded: {why}")
    found = [match["path"] for line in lines if (match := LISTED.search(line))]
    return program.span + sum(
        _span(_parts(Path(path))[1]) for path in {*found, program.interpreter}
    )
