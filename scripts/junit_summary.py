# SPDX-License-Identifier: Apache-2.0
"""Adds up the groups of a test run: ``junit_summary.py FOLDER [JSON]``. Exit 1 unless all passed.

FOLDER holds a file for each group, and beside it ``NAME.xml``, which pytest has written, and the
status that it ended with, ``NAME.rc``.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

ENDED = {0, 1, 5}
"""pytest's: all passed, some failed, none were selected. Others were cut, as by a time limit."""


def main(folder: Path, target: Path | None) -> int:
    """Print the closing line of all groups together; write it as JSON."""
    counts: Counter[str] = Counter()
    failures, unfinished = [], []
    for group in sorted(p for p in folder.iterdir() if not p.suffix):
        report, status = group.with_suffix(".xml"), group.with_suffix(".rc")
        if not status.exists() or int(status.read_text()) not in ENDED:
            unfinished.append(group.name)
        if not report.exists():
            continue
        for case in ET.parse(report).getroot().iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            skipped = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                counts["failed"] += 1
                failures.append(name)
            elif skipped is None:
                counts["passed"] += 1
            elif "emulated only" in (skipped.get("message") or ""):
                counts["emulated_only"] += 1
            else:
                counts["skipped"] += 1
    result = {
        **{key: counts[key] for key in ("passed", "failed", "emulated_only", "skipped")},
        "unfinished_groups": unfinished,
        "failures": sorted(failures),
    }
    if target is not None:
        target.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"suite: {counts['passed']} passed, {counts['failed']} failed, "
        f"{counts['emulated_only']} skipped as emulated_only, {counts['skipped']} skipped otherwise"
    )
    for name in [*(f"group {g} did not end" for g in unfinished), *result["failures"]]:
        print(f"  {name}")
    return 0 if counts["passed"] and not counts["failed"] and not unfinished else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None))
