# SPDX-License-Identifier: Apache-2.0
"""The links of this process: what a fork and the process's end mean for them."""

from __future__ import annotations

import functools
import os
import weakref
from multiprocessing import util
from typing import Protocol

LAST = -1000
"""multiprocessing's order of what it does at the end: after its queues are flushed and its children
have ended, which may use what is shared here until then."""


class Ending(Protocol):
    """What is asked of a link (`flyt.ipc.link.Link`)."""

    def close(self, *, wait: bool) -> None: ...
    def forget(self) -> None: ...


_links: weakref.WeakSet[Ending] = weakref.WeakSet()


def watch(link: Ending) -> None:
    """Have this link forgotten in a forked child, and closed before the interpreter ends."""
    _links.add(link)
    _register(os.getpid())


@functools.cache
def _register(_: int) -> None:
    """Once a process: a forked child starts without its parent's."""
    util.Finalize(None, _at_exit, exitpriority=LAST)


def _at_exit() -> None:
    # A thread that comes to Python while it ends is killed where it stands, in PyTorch's C++ too.
    for link in list(_links):
        link.close(wait=True)


def _after_fork() -> None:
    for link in list(_links):
        link.forget()


os.register_at_fork(after_in_child=_after_fork)
