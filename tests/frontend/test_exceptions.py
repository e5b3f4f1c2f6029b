# SPDX-License-Identifier: Apache-2.0
"""Public exceptions survive a process pool: one that can't be unpickled hangs it."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from flyt import errors
from flyt.errors import DeviceError, FlytError
from flyt.frontend.connection import Lost

CLASSES = [
    cls
    for cls in vars(errors).values()
    if inspect.isclass(cls) and issubclass(cls, FlytError) and cls is not DeviceError
]
EXCEPTIONS = [
    *(cls("who broke what, and how to mend it") for cls in CLASSES),
    DeviceError(700),
    DeviceError(2, "5 bytes were asked for"),
    Lost(46, "the backend closed the connection (in flight: CopyIn #7)"),
]


@pytest.mark.parametrize("exception", EXCEPTIONS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_and_back(exception: FlytError, protocol: int) -> None:
    back = pickle.loads(pickle.dumps(exception, protocol))
    for other in (back, copy.copy(exception), copy.deepcopy(exception)):
        assert type(other) is type(exception)
        assert other.args == exception.args
        assert str(other) == str(exception)
        assert vars(other) == vars(exception)


def test_all_are_flyt_errors() -> None:
    assert len(CLASSES) >= 8
    raised = [cls for cls in vars(errors).values() if inspect.isclass(cls)]
    assert all(issubclass(cls, FlytError) for cls in raised)


def test_what_they_say() -> None:
    assert str(DeviceError(2, "5 bytes")) == "CUDA error 2: 5 bytes"
    assert str(DeviceError(700)) == "CUDA error 700"
    assert DeviceError(2, "x").code == 2
    lost = Lost(46, "gone")
    assert (lost.code, lost.reason, str(lost)) == (46, "gone", "gone")
    assert isinstance(lost, errors.SessionLost)
