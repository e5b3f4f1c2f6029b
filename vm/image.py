# SPDX-License-Identifier: Apache-2.0
"""`build`: all that a guest boots from, made once and kept in the cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vm import fetch, probe
from vm.disk import disk
from vm.initramfs import initramfs
from vm.machine import Image


def build() -> Image:
    """Everything a guest boots from, made or found in the cache."""
    cache = fetch.cache_folder()
    with fetch.alone(cache):
        return _built(cache)


def _built(cache: Path) -> Image:
    qemu = fetch.qemu()
    kernel = fetch.kernel(cache)
    busybox = fetch.busybox(cache)
    with ThreadPoolExecutor() as pool:  # the probe mostly waits
        accelerator = pool.submit(probe.accelerator, cache, qemu, kernel.image)
        root = disk(cache, busybox, fetch.mke2fs())
        archive = initramfs(cache, kernel, busybox)
    return Image(qemu, kernel.image, archive, root, accelerator.result())
