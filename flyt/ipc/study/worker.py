# SPDX-License-Identifier: Apache-2.0
"""The process of one experiment: its rows as lines of JSON on stdout, each as soon as it is found.

``python -m flyt.ipc.study.worker QUESTION LIBRARY``; what breaks it off is the last line of stderr.
"""

from __future__ import annotations

import json
import os
import sys

from flyt.errors import FlytError
from flyt.ipc.study.experiments import EXPERIMENTS


def main() -> int:
    """Measure, and say what."""
    question, like = sys.argv[1:]
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is no row
    try:
        for row in EXPERIMENTS[question].measure(like):
            lines.write(json.dumps(row) + "\n")
    except FlytError as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    except BrokenPipeError:  # nobody wants more
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
