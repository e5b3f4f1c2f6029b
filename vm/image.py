# SPDX-License-Identifier: Apache-2.0
"""`build`: all that a guest boots from, made once and kept in the cache."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor

from vm import fetch, initramfs, probe
from vm.machine import Image


def build() -> Image:
    """Everything a guest boots from, made or found in the cache."""
    cache = fetch.cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    qemu = fetch.qemu()
    kernel = fetch.kernel(cache)
    with ThreadPoolExecutor() as pool:  # the probe mostly waits
        accelerator = pool.submit(probe.accelerator, cache, qemu, kernel.image)
        base = initramfs.base(cache, kernel, fetch.busybox(cache))
        tree = initramfs.flyt(cache)
    image = cache / f"{base.stem}-{tree.stem}.img"
    if not image.exists():
        for old in cache.glob("*.img"):
            old.unlink()
        part = image.with_suffix(".part")
        with part.open("wb") as out:
            for archive in (base, tree):
                with archive.open("rb") as source:
                    shutil.copyfileobj(source, out)
        part.rename(image)
    return Image(qemu, kernel.image, image, accelerator.result())
