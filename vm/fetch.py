# SPDX-License-Identifier: Apache-2.0
"""What a guest needs and Flyt does not bring: QEMU, a kernel and a shell, from Debian's packages.

QEMU is installed if it is missing (which needs root); kernel and busybox are only unpacked into the
cache, so the machine's own kernel is left alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

QEMU = "qemu-system-x86_64"
QEMU_PACKAGE = "qemu-system-x86"
MKE2FS = "mke2fs"
MKE2FS_PACKAGE = "e2fsprogs"
KERNEL_PACKAGE = "linux-image-cloud-amd64"
"""A meta-package: it depends on the newest kernel image. The cloud kernel is the smallest."""
BUSYBOX_PACKAGE = "busybox-static"
APT_SECONDS = 180.0
"""For one run of apt; on a slow mirror the 20 MB of QEMU take a minute."""


class VmError(Exception):
    """The machine can't be built or booted; the message says what is missing."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An unpacked kernel package.

    Attributes
    ----------
    image : Path
        ``vmlinuz``.
    modules : Path
        ``lib/modules/VERSION``.
    """

    image: Path
    modules: Path


def cache_folder() -> Path:
    """Where packages, root file systems and images are kept: ``$FLYT_VM_CACHE``."""
    chosen = os.environ.get("FLYT_VM_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "flyt-vm"


@contextlib.contextmanager
def alone(cache: Path) -> Iterator[None]:
    """Make the cache, and be the only program that fills it; others wait as long as it lives."""
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def qemu() -> str:
    """Path of QEMU, installed if it is missing."""
    if platform.machine() != "x86_64":
        raise VmError(f"scripts/vm makes x86-64 guests only; this is {platform.machine()}")
    return _program(QEMU, QEMU_PACKAGE)


def mke2fs() -> str:
    """Path of the program that makes the guest's disk, installed if it is missing."""
    return _program(MKE2FS, MKE2FS_PACKAGE)


def everything() -> None:
    """Fetch all of it. Needs nothing but the standard library."""
    cache = cache_folder()
    with alone(cache):
        for part in (qemu, mke2fs, lambda: kernel(cache), lambda: busybox(cache)):
            part()


def _program(name: str, package: str) -> str:
    # Debian keeps some programs off an ordinary user's PATH.
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    if shutil.which(name, path=path) is None:
        if os.geteuid() != 0:
            raise VmError(f"{name} is missing: install Debian's {package}")
        _apt("update", "-qq")
        _apt("install", "-qq", "-y", "--no-install-recommends", package)
    found = shutil.which(name, path=path)
    if found is None:
        raise VmError(f"{package} is installed, but there is no {name} on the PATH")
    return found


def kernel(cache: Path) -> Kernel:
    """The newest cloud kernel, unpacked in the cache."""
    root = _unpacked(cache / "kernel", _newest_kernel)
    (image,) = root.glob("boot/vmlinuz-*")
    (modules,) = root.glob("lib/modules/*")
    return Kernel(image, modules)


def busybox(cache: Path) -> Path:
    """A statically linked busybox."""
    return _unpacked(cache / "busybox", lambda: BUSYBOX_PACKAGE) / "bin" / "busybox"


def _unpacked(folder: Path, package: Callable[[], str]) -> Path:
    """A package's files under ``folder``, downloaded once."""
    if folder.exists():
        return folder
    if shutil.which("apt-get") is None:
        raise VmError("there is no apt-get: scripts/vm takes its kernel from Debian's packages")
    download = folder.with_suffix(".download")
    shutil.rmtree(download, ignore_errors=True)
    download.mkdir(parents=True)
    # apt's sandbox user can't write here, and says so at length.
    options = ("-qq", "-o", "APT::Sandbox::User=root")
    try:
        _apt("download", *options, package(), cwd=download)
    except VmError:
        _apt("update", "-qq")  # the lists were missing or old
        _apt("download", *options, package(), cwd=download)
    (archive,) = download.glob("*.deb")
    _run("dpkg", "-x", str(archive), str(download / "files"))
    (download / "files").rename(folder)
    shutil.rmtree(download)
    return folder


def _newest_kernel() -> str:
    text = _run("apt-cache", "depends", KERNEL_PACKAGE)
    match = re.search(r"Depends: (linux-image-\S+)", text)
    if match is None:
        raise VmError(f"apt knows no {KERNEL_PACKAGE}")
    return match[1]


def _apt(*arguments: str, cwd: Path | None = None) -> None:
    _run("apt-get", *arguments, cwd=cwd)


def _run(*command: str, cwd: Path | None = None) -> str:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=APT_SECONDS,
        )
    except subprocess.TimeoutExpired as exc:
        raise VmError(f"{' '.join(command)} took more than {APT_SECONDS:.0f} s") from exc
    if done.returncode:
        raise VmError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    try:
        everything()
    except VmError as exc:
        sys.exit(f"scripts/vm: {exc}")
