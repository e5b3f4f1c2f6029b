# SPDX-License-Identifier: Apache-2.0
"""The guest's root file system: this interpreter, what Flyt requires, Flyt, and an init.

Two archives, one after the other, as the kernel allows: a base that changes with the interpreter
and its packages, and a small one with the sources of this tree.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import lzma
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from vm.fetch import Kernel, VmError

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent
SITE = "opt/flyt"
"""Where packages lie in the guest; PYTHONPATH names it."""
PYTHON = "usr/bin/python3"
"""The interpreter in the guest, a link to the place it has on this machine."""

MODULES = (
    "net/core/failover",
    "drivers/net/net_failover",
    "drivers/virtio/virtio_ring",
    "drivers/virtio/virtio",
    "drivers/virtio/virtio_pci_modern_dev",
    "drivers/virtio/virtio_pci_legacy_dev",
    "drivers/virtio/virtio_pci",
    "drivers/net/virtio_net",
)
"""A network card, in the order of loading."""

UNUSED = shutil.ignore_patterns(
    *("__pycache__", "test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip"),
    *("site-packages", "dist-packages", "config-*", "pydoc_data", "_tkinter*", "_sqlite3*"),
    *("*.pyi", "*.pyx", "*.pxd", "*.h", "*.a"),
)
"""Half of the standard library's bytes, and what only compilers read."""

LIBC_PARTS = ("libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1")
"""Empty since glibc 2.34, but loaded by name (cuda-pathfinder does)."""

COMPILE_SECONDS = 120.0
KEPT = 2
"""Archives of each kind in the cache: one may be another tree's or interpreter's."""


def base(cache: Path, kernel: Kernel, busybox: Path) -> Path:
    """The archive with everything but Flyt itself, made once for these versions."""
    distributions = _required()
    facts = [
        sys.version,
        str(kernel.image),
        (HERE / "init").read_text(),
        Path(__file__).read_text(),
    ]
    facts += [f"{name} {d.version}" for name, d in sorted(distributions.items())]
    archive = cache / f"base-{_digest(facts)}.cpio"
    if archive.exists():
        return archive
    with _staged(cache) as root:
        _system(root, kernel, busybox)
        site = Path(sysconfig.get_path("purelib"))
        for distribution in distributions.values():
            _packages(root, distribution, site)
        _interpreter(root)
        _compile(root)
        _pack(root, archive)
    return archive


def flyt(cache: Path) -> Path:
    """The archive with this tree's ``flyt`` and the agent, made once for these sources."""
    # The compiled library is part of it, where it was built.
    found = sorted(p for p in (ROOT / "flyt").rglob("*") if p.suffix in (".py", ".so"))
    sources = [HERE / "agent.py", *found]
    archive = cache / f"flyt-{_digest(p.read_bytes().hex() for p in sources)}.cpio"
    if archive.exists():
        return archive
    with _staged(cache) as root:
        shutil.copytree(ROOT / "flyt", root / SITE / "flyt", ignore=UNUSED_OF_FLYT)
        shutil.copy(HERE / "agent.py", root / "agent.py")
        _compile(root)
        _pack(root, archive)
    return archive


UNUSED_OF_FLYT = shutil.ignore_patterns("__pycache__")


def _digest(facts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _staged(cache: Path) -> Iterator[Path]:
    root = cache / f"stage-{os.getpid()}"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    try:
        yield root
    finally:
        shutil.rmtree(root)


# --- what goes in ---


def _system(root: Path, kernel: Kernel, busybox: Path) -> None:
    for folder in ("bin", "dev", "etc", "proc", "run", "sys", "tmp", "usr/bin"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    shutil.copy(busybox, root / "bin" / "busybox")
    shutil.copy(HERE / "init", root / "init")
    (root / "init").chmod(0o755)
    (root / "etc" / "passwd").write_text("root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n")
    (root / "etc" / "group").write_text("root:x:0:\nuser:x:1000:\n")
    (root / "etc" / "hosts").write_text("127.0.0.1 localhost\n")
    (root / "modules").mkdir()
    for number, name in enumerate(MODULES):
        (found,) = kernel.modules.glob(f"kernel/{name}.ko*")
        data = found.read_bytes()
        if found.suffix == ".xz":
            data = lzma.decompress(data)
        (root / "modules" / f"{number}.ko").write_bytes(data)


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


def _compile(root: Path) -> None:
    """Byte code that is never checked against its source: under TCG each look costs."""
    command = [sys.executable, "-m", "compileall", "-q", "-j0", "--invalidation-mode"]
    command += ["unchecked-hash", "-s", str(root), "-p", "/", str(root)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=COMPILE_SECONDS,
    )
    if done.returncode:
        raise VmError(f"the guest's Python files don't compile:\n{done.stdout}")


# --- the archive ---


def _pack(root: Path, archive: Path) -> None:
    part = archive.with_suffix(".part")
    with part.open("wb") as out:
        for number, path in enumerate(sorted(root.rglob("*")), 1):
            _entry(out, number, path, str(path.relative_to(root)))
        _header(out, 0, 0, 0, "TRAILER!!!")
    part.rename(archive)
    kind = archive.stem.partition("-")[0]
    archives = sorted(archive.parent.glob(f"{kind}-*.cpio"), key=lambda p: p.stat().st_mtime)
    for old in archives[:-KEPT]:
        old.unlink()


def _entry(out: BinaryIO, number: int, path: Path, name: str) -> None:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        data = os.fsencode(os.readlink(path))
    else:
        data = path.read_bytes() if path.is_file() else b""
    _header(out, number, mode, len(data), name)
    out.write(data + bytes(-len(data) % 4))


def _header(out: BinaryIO, number: int, mode: int, size: int, name: str) -> None:
    """Of the "newc" format: thirteen numbers in hexadecimal, then the name, padded to four."""
    encoded = os.fsencode(name) + b"\0"
    fields = (number, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, len(encoded), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
    out.write(head + bytes(-len(head) % 4))
