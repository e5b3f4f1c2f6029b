# SPDX-License-Identifier: Apache-2.0
"""Whether KVM boots a guest here: /dev/kvm may open and yet run nothing, so it is tried.

Where it doesn't, guests run under TCG: every instruction translated, so what they show is
correctness, never speed.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

PROBE_SECONDS = 10
"""KVM brings a kernel to its panic in two."""
MARKER = "Kernel panic"
"""A kernel without a root file system gets this far, and needs nothing but a processor for it."""
KINDS = ("kvm", "tcg")


def accelerator(cache: Path, qemu: str, kernel: Path) -> str:
    """``kvm`` if it boots the kernel, else ``tcg``; asked once a machine start."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "tcg"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    note = cache / f"accelerator-{boot}"
    if not note.exists():
        note.write_text("kvm" if _boots(qemu, kernel) else "tcg")
    found = note.read_text()
    return found if found in KINDS else "tcg"


def _boots(qemu: str, kernel: Path) -> bool:
    with tempfile.NamedTemporaryFile() as console:
        command = ["timeout", "-k", "2", str(PROBE_SECONDS), qemu, "-nodefaults", "-M", "pc"]
        command += ["-accel", "kvm", "-cpu", "max", "-m", "256", "-display", "none", "-no-reboot"]
        command += ["-kernel", str(kernel), "-append", "console=ttyS0 panic=-1"]
        command += ["-serial", f"file:{console.name}"]
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        return MARKER in Path(console.name).read_text(errors="replace")
