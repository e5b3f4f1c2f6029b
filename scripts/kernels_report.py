# SPDX-License-Identifier: Apache-2.0
"""The table of ``scripts/gpu-kernels``, and ``kernels.json`` beside its logs."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

LISTED = 40
"""Names of tests that are printed; all are in the file."""

PACKAGES = ("numba-cuda", "cuda-bindings", "cuda-core", "cupy-cuda13x", "cupy-cuda12x", "numba")


def outcomes(path: Path) -> dict[str, str]:
    """Each test of a junit file: passed, failed, skipped or xfailed."""
    if not path.exists():
        return {}
    found = {}
    for case in ET.parse(path).iter("testcase"):
        kinds = {child.tag for child in case}
        told = "failed" if kinds & {"failure", "error"} else "passed"
        if "skipped" in kinds:
            skipped = case.find("skipped")
            kind = skipped.get("type", "") if skipped is not None else ""
            told = "xfailed" if "xfail" in kind else "skipped"
        found[f"{case.get('classname', '').rpartition('.tests.')[2]}::{case.get('name')}"] = told
    return found


def counts(told: dict[str, str]) -> dict[str, int]:
    kinds = ("passed", "failed", "skipped", "xfailed")
    return {kind: sum(one == kind for one in told.values()) for kind in kinds}


def latency(folder: Path) -> dict[str, dict[str, float]]:
    """The lower of the rounds' medians, a contender each."""
    found: dict[str, dict[str, float]] = {}
    for path in sorted(folder.glob("latency-*.json")):
        name = path.stem.split("-")[1]
        try:
            told = json.loads(path.read_text())
        except ValueError:
            continue
        known = found.setdefault(name, told)
        found[name] = {case: min(known[case], told[case]) for case in told}
    return found


def main() -> int:
    folder = Path(sys.argv[1])
    report: dict[str, Any] = {"versions": {}}
    for package in PACKAGES:
        try:
            report["versions"][package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    print("versions:", report["versions"])
    report["kernels"] = outcomes(folder / "kernels.xml")
    print("tests/kernels:", counts(report["kernels"]))
    failed = [name for name, told in report["kernels"].items() if told == "failed"]
    for name in failed[:LISTED]:
        print("  failed:", name)
    native, ours = outcomes(folder / "numba-native.xml"), outcomes(folder / "numba-flyt.xml")
    report["numba"] = {"native": native, "flyt": ours}
    print("numba natively:    ", counts(native))
    print("numba through Flyt:", counts(ours))
    known = ("passed", "xfailed")  # a known failure that passes is told as failed
    differ = [n for n, told in native.items() if told == "passed" and ours.get(n) not in known]
    report["numba"]["only_native"] = differ
    print(f"numba: {len(differ)} tests pass natively, not through Flyt, and are no known failures")
    for name in differ[:LISTED]:
        print("  ", name, ours.get(name, "not run"))
    report["latency"] = found = latency(folder)
    for case in sorted({case for told in found.values() for case in told}):
        told = {name: one.get(case, float("nan")) for name, one in found.items()}
        line = ", ".join(f"{name} {value:.1f}" for name, value in told.items())
        if {"native", "flyt"} <= told.keys():
            line += f", ratio {told['flyt'] / told['native']:.2f}"
        print(f"latency {case}, us: {line}")
    (folder / "kernels.json").write_text(json.dumps(report, indent=1))
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
