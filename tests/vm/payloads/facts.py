# SPDX-License-Identifier: Apache-2.0
"""Flyt's list of facts about CUDA, asked in the guest, and proof that the bytes took the region.

Arguments: names of facts; none for all.
"""

import sys
from pathlib import Path

import flyt
from flyt.frontend.current import current
from flyt.testing import check_memcpy

report = check_memcpy(flyt, sys.argv[1:] or None)
print(report)
print(flyt.statistics())
mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
bars = {name.rpartition("/")[2] for name in mapped if "/0000:00:05.0/" in name}
print(current().memory, bars)
if bars != {"resource2", "resource2_wc"}:
    sys.exit("the region is not mapped through both files of the BAR")
counts = flyt.statistics()
if counts["inline_h2d_bytes"] or counts["inline_d2h_bytes"] or not counts["pinned_d2h_bytes"]:
    sys.exit("bytes went inline")
sys.exit(bool(report.failed) or len(report.passed) < (len(sys.argv) - 1 or 100))
