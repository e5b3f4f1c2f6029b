# SPDX-License-Identifier: Apache-2.0
"""`check_memcpy`: whether an implementation copies as CUDA does, by one list of facts.

The list is the same for every implementation, and each fact is true of a real GPU: what the
documentation says, or what one was seen to answer. Nothing in it depends on time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from flyt.errors import FlytError
from flyt.testing._facts import Fact, FactSkipped
from flyt.testing._facts_callbacks import FACTS as CALLBACKS
from flyt.testing._facts_copies import FACTS as COPIES
from flyt.testing._facts_errors import FACTS as ERRORS
from flyt.testing._facts_events import FACTS as EVENTS
from flyt.testing._facts_memory import FACTS as MEMORY
from flyt.testing._facts_order import FACTS as ORDER
from flyt.testing._facts_pools import FACTS as POOLS
from flyt.testing._facts_registration import FACTS as REGISTRATION
from flyt.testing._facts_rows import FACTS as ROWS
from flyt.testing._facts_streams import FACTS as STREAMS
from flyt.testing._lab import FactBroken, Lab, Work

FACTS: tuple[Fact, ...] = (
    *MEMORY,
    *REGISTRATION,
    *COPIES,
    *ERRORS,
    *STREAMS,
    *EVENTS,
    *ORDER,
    *ROWS,
    *POOLS,
    *CALLBACKS,
)
"""Everything that `check_memcpy` knows, in the order in which it asks."""


class ConformanceError(FlytError, AssertionError):
    """An implementation breaks facts; the message lists them with their clauses."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What `check_memcpy` found.

    Attributes
    ----------
    passed : tuple of str
        Names of facts.
    failed, skipped : dict of str to str
        Names of facts, and why.
    """

    passed: tuple[str, ...]
    failed: dict[str, str]
    skipped: dict[str, str]

    def raise_if_failed(self) -> None:
        """Raise `ConformanceError` unless nothing failed."""
        if self.failed:
            raise ConformanceError(str(self))

    def __str__(self) -> str:
        clauses = {fact.name: fact.clause for fact in FACTS}
        counts = (len(self.passed), len(self.failed), len(self.skipped))
        lines = ["{} facts hold, {} are broken, {} were skipped".format(*counts)]
        lines += [f"BROKEN {name}: {why}\n    {clauses[name]}" for name, why in self.failed.items()]
        lines += [f"skipped {name}: {why}" for name, why in self.skipped.items()]
        return "\n".join(lines)


def check_memcpy(impl: Any, only: Collection[str] | None = None) -> Report:
    """Ask an implementation of the CUDA runtime about every fact.

    Parameters
    ----------
    impl : module-like
        Has the functions of ``cuda.bindings.runtime``: ``flyt``, or that module itself.
    only : collection of str, optional
        Names of the facts to check; default all of `FACTS`.

    Returns
    -------
    Report
        ``raise_if_failed()`` turns broken facts into an exception.

    Notes
    -----
    Works on the current device and needs some 250 MiB of its memory (1 GiB
    where work ends soon) and 4 MiB of pinned memory.
    Waits for all work of the device (cudaDeviceSynchronize), clears the thread's last error, and
    frees what it allocated. It never uses a handle that was destroyed, which CUDA leaves undefined.
    """
    unknown = set(only or ()) - {fact.name for fact in FACTS}
    if unknown:
        raise ConformanceError(f"there are no facts named {', '.join(sorted(unknown))}")
    passed: list[str] = []
    failed: dict[str, str] = {}
    skipped: dict[str, str] = {}
    work = Work()
    lost = ""
    for fact in FACTS:
        if only is not None and fact.name not in only:
            continue
        if lost:
            failed[fact.name] = lost
            continue
        lab = Lab(impl, work)
        try:
            fact.check(lab)
            passed.append(fact.name)
        except FactSkipped as reason:
            skipped[fact.name] = str(reason)
        except FactBroken as reason:
            failed[fact.name] = str(reason)
        except Exception as exc:  # noqa: BLE001 - whatever it raises instead of answering breaks it
            failed[fact.name] = f"{type(exc).__name__}: {exc}"
        code = lab.clean_up()
        if code:
            lost = f"not asked: the device answered {code} after {fact.name}"
    work.free(impl)
    return Report(tuple(passed), failed, skipped)
