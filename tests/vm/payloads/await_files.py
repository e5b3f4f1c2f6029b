# SPDX-License-Identifier: Apache-2.0
"""Waits until all files that are named exist, and prints what is in them."""

import sys
import time
from pathlib import Path

deadline = time.monotonic() + 80
for name in sys.argv[1:]:
    while not Path(name).exists():
        if time.monotonic() > deadline:
            sys.exit(f"no {name}")
        time.sleep(0.02)
    print(Path(name).read_text())
