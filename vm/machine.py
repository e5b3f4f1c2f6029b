# SPDX-License-Identifier: Apache-2.0
"""`Machine`: one running guest, and what the host asks of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vm.fetch import VmError

BOOT_SECONDS = 90.0
"""Under TCG, with both cores busy, a boot takes 10."""
LIFE_SECONDS = 600.0
"""Of a QEMU; no test needs more."""
GRACE = 15.0
"""Seconds beyond a request's own limit until the guest counts as hung."""
MEMORY = 2048
"""MiB: 180 are the root file system, and tests that run side by side copy hundreds."""
APPEND = "console=ttyS0 quiet panic=-1 tsc=reliable norandmaps init_on_alloc=0 mitigations=off"
"""The kernel's command line. The last four are for TCG: its processors have one clock, which Linux
doubts and would ask a slow device instead; code at addresses that it had before need not be
translated again; and what guards against neighbours costs, where there are none."""
CRASHED = 70
"""Exit code of a program whose guest was lost (EX_SOFTWARE)."""
HUNG = 124
"""Exit code of a program that ran out of time, as timeout(1) has it."""


@dataclasses.dataclass(frozen=True)
class Image:
    """What boots: kernel, its first archive, the root's disk, QEMU and its accelerator."""

    qemu: str
    kernel: Path
    initramfs: Path
    disk: Path
    accelerator: str


@dataclasses.dataclass(frozen=True)
class Shared:
    """A region for the guest: a file, its size, and whether QEMU shares it (``share=on``).

    With ``doorbell``, the path of a daemon's socket, QEMU gets file and size from there.
    """

    path: str
    size: int
    share: bool = True
    doorbell: str = ""


@dataclasses.dataclass(frozen=True)
class Done:
    """How a program in the guest ended: exit code (negative: signal), and its output."""

    code: int
    out: str


class Running:
    """A program in the guest."""

    def __init__(self, seconds: float) -> None:
        self._done: Done | None = None
        self._event = threading.Event()
        self._limit = seconds + GRACE

    def finish(self, done: Done) -> None:
        self._done = done
        self._event.set()

    def wait(self) -> Done:
        """Its end; a guest that is lost or silent is one, with a code of its own."""
        self._event.wait(self._limit)
        return self._done or Done(HUNG, f"the guest does not answer after {self._limit:.0f} s")


class Machine:
    """A guest, booted by the constructor; a context manager that leaves nothing behind.

    Parameters
    ----------
    image : Image
    regions : iterable of Shared
        Each becomes an ivshmem device, plain or doorbell, from slot 00:05.0 on.
    options : iterable of str
        More for QEMU's command line.
    reboots : bool
        Whether a guest that resets boots again; else QEMU ends.
    preload : bool
        Whether Flyt is imported once, before the guest is ready, or by each program.
    life : float
        Seconds after which QEMU ends, whatever became of this process.
    """

    def __init__(
        self,
        image: Image,
        regions: Iterable[Shared] = (),
        *,
        options: Iterable[str] = (),
        reboots: bool = False,
        preload: bool = True,
        life: float = LIFE_SECONDS,
    ) -> None:
        # Not below a test's own folder: the path of a socket has 107 bytes at most.
        self._folder = Path(tempfile.mkdtemp(prefix="flyt-vm-"))
        self._stack = contextlib.ExitStack()
        self._stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self._requests: dict[int, Running] = {}
        self._next = 0
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self.boots = 0
        try:
            with open(self._folder / "qemu", "wb") as log:
                self._process = subprocess.Popen(
                    [
                        *("timeout", "-k", "5", str(int(life))),
                        *self._command(image, regions, options, reboots, preload),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            self._stack.callback(self._end)
            self._port = self._connect()
            self._reader = threading.Thread(target=self._read, name="vm-agent", daemon=True)
            self._reader.start()
            self.await_boot(1)
        except BaseException:
            self.close()
            raise

    def _command(
        self,
        image: Image,
        regions: Iterable[Shared],
        options: Iterable[str],
        reboots: bool,
        preload: bool,
    ) -> list[str]:
        kvm = image.accelerator == "kvm"
        command = [
            image.qemu,
            "-nodefaults",
            "-M",
            "pc",
            "-cpu",
            "max",
            "-m",
            str(MEMORY),
            "-smp",
            "2",
        ]
        command += ["-display", "none"]
        command += ["-accel", "kvm" if kvm else "tcg,thread=multi"]
        command += ["-kernel", str(image.kernel), "-initrd", str(image.initramfs)]
        command += ["-append", APPEND + " flyt.preload" * preload]
        command += ["-drive", f"file={_quoted(image.disk)},format=raw,if=none,id=root,readonly=on"]
        command += ["-device", "virtio-blk-pci,drive=root,addr=3"]
        command += [] if reboots else ["-no-reboot"]
        command += ["-serial", f"file:{self._folder}/console"]
        command += ["-serial", f"unix:{self._folder}/agent,server=on,wait=off"]
        command += ["-netdev", "user,id=net"]
        command += ["-device", "virtio-net-pci,netdev=net,romfile=,addr=4"]
        for slot, region in enumerate(regions, 5):
            if region.doorbell:
                command += ["-chardev", f"socket,id=d{slot},path={_quoted(region.doorbell)}"]
                command += ["-device", f"ivshmem-doorbell,chardev=d{slot},addr={slot}"]
                continue
            share = "on" if region.share else "off"
            command += ["-object", f"memory-backend-file,id=m{slot},share={share}"]
            command[-1] += f",mem-path={_quoted(region.path)},size={region.size}"
            command += ["-device", f"ivshmem-plain,memdev=m{slot},addr={slot}"]
        return [*command, *options]

    # --- life ---

    def __enter__(self) -> Machine:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End QEMU and remove every trace. May be called again."""
        self._stack.close()

    def _end(self) -> None:
        self._process.terminate()  # timeout(1) hands it on, and kills after its own grace
        self._process.wait(GRACE)

    def kill(self) -> None:
        """End the guest as a power failure would."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait(GRACE)

    @property
    def pid(self) -> int:
        """QEMU's."""
        pid = self._process.pid  # timeout(1), whose only child is QEMU
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())

    @property
    def log(self) -> str:
        """What QEMU and the guest's console said last."""
        texts = [self._folder / name for name in ("qemu", "console")]
        return "\n".join(p.read_text(errors="replace")[-4000:] for p in texts if p.exists())

    def await_boot(self, number: int) -> None:
        """Wait until the guest has booted for the ``number``-th time."""
        deadline = time.monotonic() + BOOT_SECONDS
        while self.boots < number:
            self._ready.clear()
            if self.boots >= number:
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise VmError(f"the guest did not boot:\n{self.log}")
            self._ready.wait(0.5)

    # --- the agent ---

    def _connect(self) -> socket.socket:
        port = socket.socket(socket.AF_UNIX)
        self._stack.callback(port.close)
        deadline = time.monotonic() + BOOT_SECONDS
        while True:
            try:
                port.connect(str(self._folder / "agent"))
                return port
            except (FileNotFoundError, ConnectionRefusedError) as exc:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise VmError(f"QEMU did not start:\n{self.log}") from exc
                time.sleep(0.05)  # bounded by BOOT_SECONDS

    def _read(self) -> None:
        with self._port.makefile("r", encoding="ascii", errors="replace") as lines:
            try:
                for line in lines:
                    self._hear(line)
            except OSError:  # closed by close()
                pass
        self._lose("the guest is gone")

    def _hear(self, line: str) -> None:
        try:
            answer = json.loads(line)
        except ValueError:  # the firmware's, or a kernel's that crashed
            return
        match answer:
            case {"ready": True}:
                self._lose("the guest was booted again")
                self.boots += 1
                self._ready.set()
            case {"id": int(number), "code": int(code), "out": str(out)}:
                if (running := self._requests.pop(number, None)) is not None:
                    running.finish(Done(code, out))
            # Anything else is not the agent's: root in the guest may write here too.

    def _lose(self, reason: str) -> None:
        with self._lock:
            lost, self._requests = self._requests, {}
        for running in lost.values():
            running.finish(Done(CRASHED, f"{reason}:\n{self.log}"))

    def start(
        self,
        *argv: str,
        code: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str = "",
        seconds: float = 60.0,
    ) -> Running:
        """Start a program in the guest.

        Parameters
        ----------
        argv : str
            Program and arguments; with ``code``, arguments alone.
        code : str, optional
            Python code, to run in a process that has Flyt imported.
        env : mapping, optional
            Added to the environment.
        user : str
            ``"user"``, or "" for root.
        seconds : float
            It is killed after this time, with the code `HUNG`.
        """
        running = Running(seconds)
        with self._lock:
            self._next += 1
            number = self._next
            self._requests[number] = running
        request: dict[str, Any] = {"id": number, "argv": argv, "code": code, "user": user}
        request |= {"env": dict(env or {}), "seconds": seconds}
        try:
            self._port.sendall(json.dumps(request).encode("ascii") + b"\n")
        except OSError as exc:
            running.finish(Done(CRASHED, f"the guest is gone: {exc}\n{self.log}"))
        return running

    def run(self, *argv: str, **details: Any) -> Done:
        """`start`, and wait for its end."""
        return self.start(*argv, **details).wait()


def _quoted(path: Path | str) -> str:
    """As QEMU has it in the middle of an option."""
    return str(path).replace(",", ",,")
