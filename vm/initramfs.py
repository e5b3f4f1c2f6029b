# SPDX-License-Identifier: Apache-2.0
"""The small archive that the kernel unpacks: modules, a shell, an init, and this tree's Flyt.

All else lies on a disk: the guest's processor copies every byte of an archive, and under TCG that
takes seconds for what an interpreter and its packages have.
"""

from __future__ import annotations

import lzma
import os
import shutil
import stat
from pathlib import Path
from typing import BinaryIO

from vm.fetch import Kernel
from vm.stage import compile_all, digest, keep, staged

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SITE = "site"
"""Where the agent and Flyt lie in the guest; ``init`` knows the name too."""

MODULES = (
    "net/core/failover",
    "drivers/net/net_failover",
    "drivers/virtio/virtio_ring",
    "drivers/virtio/virtio",
    "drivers/virtio/virtio_pci_modern_dev",
    "drivers/virtio/virtio_pci_legacy_dev",
    "drivers/virtio/virtio_pci",
    "drivers/net/virtio_net",
    "drivers/block/virtio_blk",
)
"""A network card and a disk, in the order of loading."""


def initramfs(cache: Path, kernel: Kernel, busybox: Path) -> Path:
    """The archive, made once for this kernel and these sources."""
    # The compiled library is part of it, where it was built.
    found = sorted(p for p in (ROOT / "flyt").rglob("*") if p.suffix in (".py", ".so"))
    sources = [HERE / "agent.py", HERE / "init", Path(__file__), *found]
    facts = [str(kernel.image), *(p.read_bytes().hex() for p in sources)]
    archive = cache / f"initramfs-{digest(facts)}.cpio"
    if archive.exists():
        return archive
    with staged(cache) as root:
        _system(root, kernel, busybox)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "flyt", root / SITE / "flyt", ignore=ignored)
        shutil.copy(HERE / "agent.py", root / SITE / "agent.py")
        compile_all(root)
        _pack(root, archive)
    return archive


def _system(root: Path, kernel: Kernel, busybox: Path) -> None:
    for folder in ("bin", "dev", "modules", "proc", "root"):
        (root / folder).mkdir()
    shutil.copy(busybox, root / "bin" / "busybox")
    shutil.copy(HERE / "init", root / "init")
    (root / "init").chmod(0o755)
    for number, name in enumerate(MODULES):
        (found,) = kernel.modules.glob(f"kernel/{name}.ko*")
        data = found.read_bytes()
        if found.suffix == ".xz":
            data = lzma.decompress(data)
        (root / "modules" / f"{number}.ko").write_bytes(data)


# --- the archive ---


def _pack(root: Path, archive: Path) -> None:
    part = archive.with_suffix(".part")
    with part.open("wb") as out:
        for number, path in enumerate(sorted(root.rglob("*")), 1):
            _entry(out, number, path, str(path.relative_to(root)))
        _header(out, 0, 0, 0, "TRAILER!!!")
    keep(part, archive)


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
