# SPDX-License-Identifier: Apache-2.0
"""``python -m flyt.numba script.py …``: runs a numba-cuda program, unmodified, through Flyt."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from flyt import numba


def main() -> None:
    """Run the script, or with ``-m`` the module, that the arguments name."""
    arguments = sys.argv[1:]
    module = arguments[:1] == ["-m"]
    if module:
        arguments = arguments[1:]
    if not arguments:
        sys.exit("usage: python -m flyt.numba [-m] script.py [arguments]")
    numba.install()
    sys.argv = arguments
    if module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
