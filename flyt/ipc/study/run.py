# SPDX-License-Identifier: Apache-2.0
"""Runs experiments one after the other, each in a process of its own with a limit.

What one experiment breaks (a context, a process, the time) is lost to no other one, and the rows
that it had found are kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from flyt.ipc.study.experiments import EXPERIMENTS
from flyt.ipc.study.report import Answer, Row

Progress = Callable[[str, int], None]
"""Takes what is measured now and how many experiments have ended since the last time."""

NEEDS_GPU = "needs a GPU: it runs kernels, or CUDA's own allocators, which are not emulated"

LIMIT = 60.0
"""Seconds for all experiments."""

LINE_BYTES = 1 << 16


def run(
    questions: Sequence[str], kind: str, like: str, limit: float, progress: Progress
) -> list[Answer]:
    """Ask these questions.

    Parameters
    ----------
    questions : sequence of str
    kind : str
        "cuda" or "emulated"; what needs a GPU is not tried on the latter.
    like : str
        Library of arrays that the crashes share.
    limit : float
        Seconds, of all together; what runs then is ended, what has not begun says so.
    progress : callable
    """
    deadline = time.monotonic() + limit
    answers = []
    for question in questions:
        progress(question, 0)
        if EXPERIMENTS[question].needs_gpu and kind != "cuda":
            answers.append(Answer(question, NEEDS_GPU, []))
        else:
            start = time.monotonic()
            answer = _ask(question, like, deadline, progress)
            answer.seconds = round(time.monotonic() - start, 1)
            answers.append(answer)
        progress(question, 1)
    return answers


def _ask(question: str, like: str, deadline: float, progress: Progress) -> Answer:
    if time.monotonic() >= deadline:
        return _answer(question, [], "no time was left: ask it alone, or raise the limit")
    rows: list[Row] = []
    with tempfile.TemporaryFile() as errors, _worker(question, like, errors) as worker:
        for row in _rows(worker, deadline):
            rows.append(row)
            progress(f"{question}: {len(rows)} rows", 0)
        try:
            code = worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return _answer(question, rows, "it was ended when the time was over")
        errors.seek(0)
        words = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
    if code:
        died = f"its process ended with exit code {code}"
        return _answer(question, rows, words if code > 0 and words else died)
    return _answer(question, rows, None if rows else "it has found nothing")


@contextlib.contextmanager
def _worker(question: str, like: str, errors: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The experiment's process; it and its children are gone afterwards."""
    with subprocess.Popen(
        [sys.executable, "-m", "flyt.ipc.study.worker", question, like],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
    ) as worker:
        try:
            yield worker
        finally:
            with contextlib.suppress(ProcessLookupError):  # they have all ended
                os.killpg(worker.pid, signal.SIGKILL)


def _rows(worker: subprocess.Popen[bytes], deadline: float) -> Iterator[Row]:
    """Until its stdout is closed or the time is over."""
    if worker.stdout is None:
        return
    rest = b""
    poll = select.poll()
    poll.register(worker.stdout, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        if not poll.poll(left * 1000):
            return
        octets = os.read(worker.stdout.fileno(), LINE_BYTES)
        if not octets:
            return
        *lines, rest = (rest + octets).split(b"\n")
        yield from map(json.loads, lines)


def _answer(question: str, rows: list[Row], error: str | None) -> Answer:
    verdict = EXPERIMENTS[question].verdict(rows) if rows else f"not answered: {error}"
    return Answer(question, verdict, rows, error)
