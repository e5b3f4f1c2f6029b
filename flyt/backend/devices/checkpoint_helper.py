# SPDX-License-Identifier: Apache-2.0
"""``python -m flyt.backend.devices.checkpoint_helper suspend|resume PID``: asks the driver.

It has CUDA initialised, as the driver wants it for a restore, and no context, so it takes no device
memory. Written by the driver's documentation; what asks the driver has not been run yet.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from flyt.backend.devices import codes

LOCK_MS = 10_000
"""How long the driver may wait for the process to be quiet. Its session has waited before."""


class _Refused(Exception):
    """The driver's code and what was asked of it."""


def _ask(call: Callable[..., Any], *arguments: Any) -> Any:
    code, *values = call(*arguments)
    if code:
        raise _Refused(int(code), f"{call.__name__}: {code.name}")
    return values[0] if values else None


def _suspend(driver: Any, pid: int) -> None:
    lock = driver.CUcheckpointLockArgs()
    lock.timeoutMs = LOCK_MS
    _ask(driver.cuCheckpointProcessLock, pid, lock)
    _ask(driver.cuCheckpointProcessCheckpoint, pid, None)


def _resume(driver: Any, pid: int) -> None:
    """From whatever state a suspension has reached."""
    states = driver.CUprocessState
    state = _ask(driver.cuCheckpointProcessGetState, pid)
    if state == states.CU_PROCESS_STATE_CHECKPOINTED:
        _ask(driver.cuCheckpointProcessRestore, pid, None)
        state = states.CU_PROCESS_STATE_LOCKED
    if state == states.CU_PROCESS_STATE_LOCKED:
        _ask(driver.cuCheckpointProcessUnlock, pid, None)
    elif state != states.CU_PROCESS_STATE_RUNNING:
        raise _Refused(codes.NOT_PERMITTED, f"the driver says {state.name}: nothing brings it back")


def main(action: str, pid: int) -> int:
    """One suspension or resumption; a failure is told on stdout, as [code, text]."""
    from cuda.bindings import driver

    try:
        _ask(driver.cuInit, 0)
        {"suspend": _suspend, "resume": _resume}[action](driver, pid)
    except _Refused as exc:
        print(json.dumps(exc.args))  # noqa: T201 - the answer
        return 1
    except RuntimeError as exc:  # cuda-bindings: no driver, or one without this function
        print(json.dumps([codes.NOT_SUPPORTED, f"the driver lacks it ({exc})"]))  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
