# SPDX-License-Identifier: Apache-2.0
"""With this folder (`flyt.numba.SITE`) on ``PYTHONPATH`` a Python process has numba-cuda through
Flyt, whoever starts it: ``flyt.numba.install()`` is called at its import of ``numba.cuda``.

Python imports ``sitecustomize`` at its start. So nothing is imported here that a process without
numba would have to pay for.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _AtTheImport:
    """A finder that knows ``numba.cuda`` alone, once."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != "numba.cuda":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_install(module: ModuleType) -> None:
            run(module)
            import flyt.numba

            flyt.numba.install()

        vars(spec.loader)["exec_module"] = run_and_install
        return spec


def _run_next() -> None:
    """Run the next file of this name on the path, the machine's or its owner's: ours hides it."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [folder for folder in sys.path if os.path.abspath(folder) != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _AtTheImport())
_run_next()
