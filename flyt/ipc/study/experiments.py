# SPDX-License-Identifier: Apache-2.0
"""`EXPERIMENTS`: what measures each question, and what sums its rows up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from flyt.ipc.study import bandwidth, costs, crashes, litmus, matrix
from flyt.ipc.study.report import Row


@dataclasses.dataclass(frozen=True, slots=True)
class Experiment:
    """One question's.

    Attributes
    ----------
    measure : callable
        Yields the rows; it is given the name of the library of arrays.
    verdict : callable
        Sums up rows, of which there is at least one.
    needs_gpu : bool
    """

    measure: Callable[[str], Iterator[Row]]
    verdict: Callable[[list[Row]], str]
    needs_gpu: bool = False


EXPERIMENTS = {
    "costs": Experiment(lambda _like: costs.measure(), costs.verdict),
    "bandwidth": Experiment(lambda _like: bandwidth.measure(), bandwidth.verdict, needs_gpu=True),
    "coherence": Experiment(lambda _like: litmus.measure(), litmus.verdict, needs_gpu=True),
    "compatibility": Experiment(lambda _like: matrix.measure(), matrix.verdict, needs_gpu=True),
    "crashes": Experiment(crashes.measure, crashes.verdict),
}
"""By question."""
