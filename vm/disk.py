# SPDX-License-Identifier: Apache-2.0
"""The guest's root file system: this interpreter, what Flyt requires, and a shell.

A disk that the guest only reads: of its 180 MB it fetches what it uses, and QEMU copies that.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from vm.fetch import VmError
from vm.stage import compile_all, digest, keep, staged

SITE = "opt/flyt"
"""Where packages lie in the guest; PYTHONPATH names it."""
PYTHON = "usr/bin/python3"
"""The interpreter in the guest, a link to the place it has on this machine."""

UNUSED = shutil.ignore_patterns(
    *("__pycache__", "test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip"),
    *("site-packages", "dist-packages", "config-*", "pydoc_data", "_tkinter*", "_sqlite3*"),
    *("*.pyi", "*.pyx", "*.pxd", "*.h", "*.a"),
)
"""Half of the standard library's bytes, and what only compilers read."""

LIBC_PARTS = ("libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1")
"""Empty since glibc 2.34, but loaded by name (cuda-pathfinder does)."""

SLACK = 1.25
"""Of the disk's size over its files': blocks that are not full, and the file system's tables."""
MAKE_SECONDS = 120.0


def disk(cache: Path, busybox: Path, mke2fs: str) -> Path:
    """The disk, made once for these versions; it changes with the interpreter and its packages."""
    distributions = _required()
    facts = [sys.version, sys.executable, Path(__file__).read_text()]
    facts += [f"{name} {d.version}" for name, d in sorted(distributions.items())]
    made = cache / f"root-{digest(facts)}.ext4"
    if made.exists():
        return made
    with staged(cache) as root:
        _system(root, busybox)
        site = Path(sysconfig.get_path("purelib"))
        for distribution in distributions.values():
            _packages(root, distribution, site)
        _interpreter(root)
        compile_all(root)
        _format(root, made, mke2fs)
    return made


def _format(root: Path, made: Path, mke2fs: str) -> None:
    part = made.with_suffix(".part")
    part.unlink(missing_ok=True)
    size = int(sum(4096 + p.lstat().st_size for p in root.rglob("*")) * SLACK)
    # No journal: nobody writes.
    command = [
        mke2fs,
        "-q",
        "-t",
        "ext4",
        "-b",
        "4096",
        "-O",
        "^has_journal",
        "-m",
        "0",
        "-d",
        str(root),
    ]
    command += [str(part), f"{size // 1024}k"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=MAKE_SECONDS
    )
    if done.returncode:
        raise VmError(f"the guest's disk can't be made:\n{done.stderr}")
    keep(part, made)


# --- what goes in ---


def _system(root: Path, busybox: Path) -> None:
    for folder in ("bin", "dev", "etc", "proc", "run", "site", "sys", "tmp", "usr/bin"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    shutil.copy(busybox, root / "bin" / "busybox")
    listing = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)
    for name in set(listing.stdout.split()) - {"busybox"}:
        (root / "bin" / name).symlink_to("busybox")
    (root / "etc" / "passwd").write_text("root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n")
    (root / "etc" / "group").write_text("root:x:0:\nuser:x:1000:\n")
    (root / "etc" / "hosts").write_text("127.0.0.1 localhost\n")


def _interpreter(root: Path) -> None:
    """Python where it lies on this machine, its library, and every shared object they load."""
    binary = Path(os.path.realpath(sys.executable))
    library = Path(sysconfig.get_path("stdlib", vars={"base": sys.base_prefix}))
    _copy(binary, root)
    shutil.copytree(library, root / library.relative_to("/"), ignore=UNUSED, dirs_exist_ok=True)
    (root / PYTHON).symlink_to(binary)
    objects = [binary, *library.glob("lib-dynload/*.so"), *(root / SITE).rglob("*.so*")]
    listing = subprocess.run(
        ["ldd", *map(str, objects)], capture_output=True, text=True, check=False
    ).stdout
    for text in sorted(set(re.findall(r"(?:=> |^\t)(/\S+) \(0x", listing, re.MULTILINE))):
        if not Path(text).is_relative_to(root):
            _copy(Path(text), root)
        if Path(text).name == "libc.so.6":
            for part in LIBC_PARTS:
                _copy(Path(text).with_name(part), root)
    if not (root / library.relative_to("/") / "os.py").exists():
        raise VmError(f"the standard library is not at {library}")


def _copy(path: Path, root: Path) -> None:
    target = root / path.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, target)


def _required() -> dict[str, importlib.metadata.Distribution]:
    """Flyt's requirements as they are installed here, and theirs, by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    names = [_name(text) for text in importlib.metadata.requires("flyt") or ()]
    while names:
        name = names.pop()
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # for other platforms
            if name and name not in found:
                found[name] = importlib.metadata.distribution(name)
                names += [_name(text) for text in found[name].requires or ()]
    return found


def _name(requirement: str) -> str:
    """The project's name; "" for what only an extra asks for."""
    name, _, marker = requirement.partition(";")
    match = re.match(r"[\w.-]+", name)
    return match[0].lower() if match and "extra" not in marker else ""


def _packages(root: Path, distribution: importlib.metadata.Distribution, site: Path) -> None:
    for file in distribution.files or ():
        source = Path(os.path.normpath(str(distribution.locate_file(file))))
        ignored = UNUSED("", [*Path(str(file)).parts])
        if source.is_relative_to(site) and source.is_file() and not ignored:
            target = root / SITE / source.relative_to(site)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
