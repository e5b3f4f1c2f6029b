# SPDX-License-Identifier: Apache-2.0
"""The compiler's process: a request and a source on stdin, a cubin on stdout.

Before it looks at the source it gives up the file system, but for the folders of NVRTC and of
CUDA's headers (Landlock), and most of its memory and time.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flyt.backend.compiling import _NO_COMPILER, COMPILE_SECONDS, UNCONFINED
from flyt.environment import NVRTC_UNCONFINED

MEMORY_BYTES = 16 << 30
"""Address space: NVRTC's own libraries take some 200 MB of it, and heavy templates a few GB."""

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System calls; the same numbers on every architecture."""

_ALL_ACCESS = (1 << 13) - 1
"""Every access that Landlock's first version handles."""

_READ = 1 << 2 | 1 << 3
"""Reading files and listing folders."""

_PATH_BENEATH = 1
_NO_NEW_PRIVS = 38


class _Unable(Exception):
    """The compiler can't run here; the argument says why."""


def main() -> int:
    """Entry point of ``python -m flyt.backend.compiler``."""
    try:
        from cuda.bindings import nvrtc

        version = nvrtc.nvrtcVersion()  # loads the library
    except (ImportError, RuntimeError, OSError) as exc:
        sys.stderr.write(f"the backend has no NVRTC ({exc}): pip install nvidia-cuda-nvrtc")
        return _NO_COMPILER
    head, _, source = sys.stdin.buffer.read().partition(b"\n")
    request = json.loads(head)
    headers = _headers()
    try:
        _warm_up(nvrtc)
        _confine([*headers, *_library_folders()])
    except _Unable as exc:
        sys.stderr.write(f"NVRTC {version[1:]} can't be locked in here: {exc}")
        return _NO_COMPILER
    seconds = int(COMPILE_SECONDS)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    cubin, names, log = _compile(nvrtc, source, request, headers)
    told = json.dumps({"names": names, "log": log}).encode()
    sys.stdout.buffer.write(struct.pack("<I", len(told)) + told + cubin)
    return 0


def _headers() -> list[str]:
    """Folders with CUDA's headers, as far as there are any."""
    found = [
        os.path.join(os.environ.get(name, ""), "include") for name in ("CUDA_PATH", "CUDA_HOME")
    ]
    found.append("/usr/local/cuda/include")
    try:
        from cuda import pathfinder
    except ImportError:
        pathfinder = None
    for name in ("cudart", "cccl"):
        where = pathfinder.locate_nvidia_header_directory(name) if pathfinder else None
        if where is not None:
            found.insert(0, where.abs_path)
    return [path for path in dict.fromkeys(found) if os.path.isabs(path) and os.path.isdir(path)]


def _library_folders() -> set[str]:
    """Where NVRTC lies: it loads its built-in functions from there."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "nvrtc" in line}
    return {os.path.dirname(path) for path in paths}


def _warm_up(nvrtc: Any) -> None:
    """Compile nothing once: what NVRTC loads at its first use is loaded now."""
    _, program = nvrtc.nvrtcCreateProgram(b"", b"nothing.cu", 0, [], [])
    nvrtc.nvrtcCompileProgram(program, 0, [])
    nvrtc.nvrtcDestroyProgram(program)


def _confine(readable: Iterable[str]) -> None:
    """Give up all files but those beneath ``readable`` (Landlock)."""
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = struct.pack("<Q", _ALL_ACCESS)
    ruleset = libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        if NVRTC_UNCONFINED.read():
            return
        raise _Unable(
            f"the kernel has no Landlock ({os.strerror(ctypes.get_errno())}); {UNCONFINED}=1 in "
            "the daemon's environment does without, and lets clients read its files"
        )
    try:
        for path in readable:
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                rule = struct.pack("<Qi", _READ, folder)
                if libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0):
                    raise _Unable(f"{path}: {os.strerror(ctypes.get_errno())}")
            finally:
                os.close(folder)
        libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
        if libc.syscall(_RESTRICT_SELF, ruleset, 0):
            raise _Unable(f"Landlock: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(ruleset)


def _compile(
    nvrtc: Any, source: bytes, request: dict[str, Any], headers: list[str]
) -> tuple[bytes, list[str], str]:
    code, program = nvrtc.nvrtcCreateProgram(source, request["name"].encode(), 0, [], [])
    if int(code):
        return b"", [], f"nvrtcCreateProgram: {code.name}"
    for expression in request["expressions"]:
        code = nvrtc.nvrtcAddNameExpression(program, expression.encode())[0]
        if int(code):
            return b"", [], f"{expression}: {code.name}"
    options = [o.encode() for o in [*request["options"], *(f"-I{path}" for path in headers)]]
    code = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    if int(code):
        return b"", [], log or code.name
    names = []
    for expression in request["expressions"]:
        code, name = nvrtc.nvrtcGetLoweredName(program, expression.encode())
        if int(code):
            return b"", [], f"{expression}: {code.name}"
        names.append(bytes(name).decode())
    image = _binary(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    if not image:  # a virtual architecture was asked for
        image = _binary(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    return image, names, log


def _binary(size_of: Any, get: Any, program: Any) -> bytes:
    code, size = size_of(program)
    if int(code) or not size:
        return b""
    data = b" " * size
    return data if not int(get(program, data)[0]) else b""


def _text(size_of: Any, get: Any, program: Any) -> str:
    return _binary(size_of, get, program).rstrip(b"\0 ").decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
