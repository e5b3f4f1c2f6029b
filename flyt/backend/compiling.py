# SPDX-License-Identifier: Apache-2.0
"""Compiling a client's source with NVRTC: in a process of its own, bounded and locked in.

NVRTC reads whatever file a source includes, and its log quotes it; a source can also keep it busy
for ever or take all memory there is. So the compiler is `flyt.backend.compiler`, a child that may
read the toolkit's files and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import subprocess
import sys
from typing import Any

from flyt.environment import NVRTC_UNCONFINED
from flyt.errors import DeviceError, ProtocolError

COMPILE_SECONDS = 120.0
"""What is not compiled by then never will be; large templates take some ten seconds."""

MAX_OPTIONS = 256
MAX_OPTION_CHARS = 4096
"""Options, and expressions, of one compilation."""

UNCONFINED = NVRTC_UNCONFINED.name
"""Set to 1 in the daemon's environment where the kernel has no Landlock: then clients may read, by
way of compiler messages, what the daemon may read."""

NOT_SUPPORTED = 801
UNKNOWN = 999

_NO_COMPILER = 3
"""Exit status of the child: no NVRTC, or nothing to lock it in."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """How a source is to be compiled."""

    name: str
    options: tuple[str, ...]
    expressions: tuple[str, ...]

    def key(self) -> bytes:
        """What the result follows from, beside the source."""
        return json.dumps(dataclasses.astuple(self)).encode()


def checked(document: dict[str, Any], architecture: str) -> Request:
    """A client's request, with the device's architecture unless it names one.

    Raises
    ------
    ProtocolError
        It is none.
    """
    name = document.get("name")
    lists: list[Any] = [document.get("options"), document.get("expressions")]
    if type(name) is not str or len(name) > MAX_OPTION_CHARS or len(document) != 3:
        raise ProtocolError("a COMPILE without a name, options and expressions")
    for one in lists:
        if type(one) not in (list, tuple) or len(one) > MAX_OPTIONS:
            raise ProtocolError(f"COMPILE wants lists of at most {MAX_OPTIONS} options")
        if not all(type(o) is str and len(o) <= MAX_OPTION_CHARS and "\0" not in o for o in one):
            raise ProtocolError(f"an option of COMPILE is no text of {MAX_OPTION_CHARS} characters")
    options, expressions = (tuple(one) for one in lists)
    flat = " ".join(options)
    if "-arch" not in flat and "--gpu-architecture" not in flat:
        options = (f"--gpu-architecture={architecture}", *options)
    return Request(name, options, expressions)


def compiled(source: bytes, request: Request) -> tuple[bytes, tuple[str, ...], str]:
    """Compile; the cubin (empty when the source is at fault), the expressions' names, the log.

    Raises
    ------
    DeviceError
        cudaErrorNotSupported when there is no NVRTC here, cudaErrorUnknown when the compiler was
        ended.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "flyt.backend.compiler"],
            input=json.dumps(dataclasses.asdict(request)).encode() + b"\n" + source,
            capture_output=True,
            timeout=COMPILE_SECONDS,
            env={**os.environ, "FLYT_DAEMON": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise DeviceError(UNKNOWN, f"the compiler was ended after {COMPILE_SECONDS:.0f} s") from exc
    except OSError as exc:
        raise DeviceError(UNKNOWN, f"the compiler can't be started: {exc}") from exc
    words = done.stderr.decode(errors="replace").strip()[-2000:]
    if done.returncode == _NO_COMPILER:
        raise DeviceError(NOT_SUPPORTED, words)
    if done.returncode:
        raise DeviceError(UNKNOWN, f"the compiler ended with {done.returncode}: {words}")
    return _parts(done.stdout)


def _parts(output: bytes) -> tuple[bytes, tuple[str, ...], str]:
    try:
        (length,) = struct.unpack_from("<I", output)
        head = json.loads(output[4 : 4 + length])
        return output[4 + length :], tuple(map(str, head["names"])), str(head["log"])
    except (struct.error, ValueError, KeyError, TypeError) as exc:
        raise DeviceError(UNKNOWN, f"the compiler's answer can't be read: {exc}") from exc
