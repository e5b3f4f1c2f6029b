# SPDX-License-Identifier: Apache-2.0
"""``python -m vm build|run``: see ``scripts/vm``."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import click

from vm.fetch import VmError
from vm.image import build
from vm.machine import BOOT_SECONDS, GRACE, Machine, Shared


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """A QEMU guest with this interpreter and this tree's Flyt."""


@main.command("build")
def _build() -> None:
    """Fetch and make what a guest needs; print where it lies."""
    start = time.monotonic()
    image = build()
    size = (image.initramfs.stat().st_size + image.disk.stat().st_size) >> 20
    print(
        f"{image.disk.parent} ({size} MiB), {image.accelerator}, {time.monotonic() - start:.1f} s"
    )


@main.command("run")
@click.argument("payload", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1)
@click.option(
    "--region",
    "regions",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="A region's file, for an ivshmem device of its size; may be repeated.",
)
@click.option("--env", "settings", multiple=True, metavar="NAME=VALUE", help="For the payload.")
@click.option("--seconds", default=120.0, show_default=True, help="The payload's time limit.")
def _run(
    payload: Path,
    arguments: tuple[str, ...],
    regions: tuple[Path, ...],
    settings: tuple[str, ...],
    seconds: float,
) -> None:
    """Run a Python file in a fresh guest; its exit code becomes ours.

    124: it ran out of time, or the guest hung. 70: the guest crashed. The host is 10.0.2.2 there.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    if wrong := [setting for setting in settings if "=" not in setting]:
        raise click.BadParameter(f"{wrong[0]} is not NAME=VALUE", param_hint="--env")
    shared = [Shared(str(path), path.stat().st_size) for path in regions]
    environment = dict(setting.partition("=")[::2] for setting in settings)
    life = BOOT_SECONDS + seconds + 2 * GRACE
    with Machine(build(), shared, preload=False, life=life) as machine:
        done = machine.run(*arguments, code=payload.read_text(), env=environment, seconds=seconds)
    print(done.out, end="" if done.out.endswith("\n") or not done.out else "\n")
    sys.exit(done.code if done.code >= 0 else 128 - done.code)


def _leave(number: int, _: object) -> None:
    """Whoever ends this program wants its guest to end too."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    try:
        main(prog_name="scripts/vm")
    except VmError as exc:
        sys.exit(f"scripts/vm: {exc}")
