# SPDX-License-Identifier: Apache-2.0
"""Figures of matplotlib (the extra ``plot``): whether it is there, and how they are written."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flyt.errors import ConfigurationError

FORMATS = ("png", "svg")
DOTS_PER_INCH = 150


def require(what: str) -> None:
    """Make sure that matplotlib is there, before anything is measured.

    Parameters
    ----------
    what : str
        What needs it: the message begins so.

    Raises
    ------
    ConfigurationError
        It isn't; the message says how to get it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError(
            f"{what} need matplotlib: pip install '.[plot]' in Flyt's checkout, or leave --plot out"
        )


def save(figure: Any, folder: Path, name: str, caption: str, formats: Iterable[str]) -> list[Path]:
    """Write a figure with a small line under it, a file for each format; their paths."""
    import matplotlib as mpl

    figure.supxlabel(caption, x=0.01, ha="left", fontsize=7, color="#606060")
    written = []
    for kind in formats:
        path = folder / f"{name}.{kind}"
        # Text stays text, and the same samples give the same file.
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "flyt"}):
            metadata = {"Date": None} if kind == "svg" else None
            figure.savefig(path, dpi=DOTS_PER_INCH, metadata=metadata)
        written.append(path)
    return written
