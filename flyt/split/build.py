# SPDX-License-Identifier: Apache-2.0
"""Compiles loader, lower halves and stub libraries at their first use, into the user's cache."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from flyt.compiling import COMPILE_LIMIT, cache_folder, compiler
from flyt.errors import ConfigurationError
from flyt.split.prototypes import Table
from flyt.split.stubs import stub_source, table_source, version_script

NATIVE = Path(__file__).with_name("native")
INCLUDE = NATIVE / "include"

LOADER_BASE = 0xF0000000000
"""Where the loader is linked: pointers to its record stay right over a restart. 4 GiB are its."""

NO_COMPILER = (
    "split processes need a C compiler once: install one (Debian: gcc and libc6-dev) or name "
    "it in CC"
)

BASE = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-mfsgsbase", f"-I{NATIVE}")
LOADER = (
    *BASE, "-ffreestanding", "-fPIE", "-fno-stack-protector", "-mgeneral-regs-only",
    "-fcf-protection=none", "-fno-asynchronous-unwind-tables", "-fno-tree-loop-distribute-patterns",
    "-nostdlib", "-static", "-no-pie", "-Wl,-z,noexecstack", f"-Wl,-Ttext-segment={LOADER_BASE:#x}",
)  # fmt: skip
"""No C library, no TLS; its signal handler must not touch vector registers."""

SHARED = (
    *BASE, "-fPIC", "-shared", "-fvisibility=hidden", "-fno-stack-protector", "-pthread",
    "-Wl,-z,now",
)  # fmt: skip
"""Stubs change FS half-way: no stack protector, and nothing bound at the first call."""

LOWER = (*BASE, "-fPIE", "-pie", "-fno-stack-protector", "-pthread", "-rdynamic", "-Wl,-z,now")


def make(
    name: str,
    flags: Sequence[str],
    sources: Sequence[Path],
    *,
    generated: Mapping[str, str] | None = None,
    libraries: Sequence[str] = (),
    command: Sequence[str] = (),
) -> Path:
    """Compile one program or library, unless the cache has it; its path.

    Parameters
    ----------
    generated
        Files to write beside the output first; those that end in ``.c`` are compiled too, and
        ``{folder}`` in `flags` is where they lie.
    """
    command = command or compiler(NO_COMPILER)
    digest = hashlib.sha256(repr((name, flags, [*command], libraries, generated)).encode())
    for file in [*sources, *sorted(NATIVE.rglob("*.h"))]:
        digest.update(file.read_bytes())
    cache = cache_folder("programs", "split")
    folder = cache / digest.hexdigest()[:16]
    if (folder / name).exists():
        return folder / name
    with tempfile.TemporaryDirectory(dir=cache) as room:
        for file_name, text in (generated or {}).items():
            (Path(room) / file_name).write_text(text)
        files = [Path(room) / file for file in generated or {} if file.endswith(".c")]
        words = [*command, *(flag.replace("{folder}", room) for flag in flags)]
        words += ["-o", f"{room}/{name}", *map(str, [*sources, *files]), *libraries]
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=COMPILE_LIMIT, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise ConfigurationError(f"{command[0]} can't be run: {exc}") from exc
        if done.returncode:
            raise ConfigurationError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        os.replace(f"{room}/{name}", folder / name)  # whole or not at all: others may compile too
    return folder / name


def loader() -> Path:
    sources = sorted((NATIVE / "loader").glob("*.[cS]"))
    return make("flyt-loader", LOADER, sources)


def upper_library() -> Path:
    """libflytsplit.so, which all stub libraries use."""
    flags = (*SHARED, "-Wl,-soname,libflytsplit.so")
    return make("libflytsplit.so", flags, [NATIVE / "upper" / "upper.c"])


def stub_libraries(table: Table, include: Sequence[Path] = ()) -> list[Path]:
    """The stub library of a table, once per name."""
    upper = upper_library()
    flags = [*SHARED, *(f"-I{folder}" for folder in [INCLUDE, *include])]
    made = []
    for name in table.libraries:
        own = [*flags, f"-Wl,-soname,{name}", "-Wl,--version-script={folder}/versions"]
        generated = {"stub.c": stub_source(table), "versions": version_script(name)}
        link = [f"-L{upper.parent}", "-l:libflytsplit.so"]
        made.append(make(name, own, [], generated=generated, libraries=link))
    return made


def lower_half(
    table: Table,
    sources: Sequence[Path],
    *,
    name: str = "",
    flags: Sequence[str] = (),
    libraries: Sequence[str] = (),
    command: Sequence[str] = (),
) -> Path:
    """A lower half's program: its own sources, the generated table and the common main."""
    return make(
        name or f"{table.half}_lh",
        [*LOWER, *flags],
        [NATIVE / "lower" / "lower.c", *sources],
        generated={"table.c": table_source(table)},
        libraries=[*libraries, "-ldl"],
        command=command,
    )
