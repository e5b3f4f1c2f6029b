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

FINISHED = ("0", "1", "5")
"""Exit statuses of a pytest that ran all its tests: they passed, some failed, there were none."""

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


def summed(folder: Path, way: str) -> tuple[dict[str, str], list[str]]:
    """The outcomes of all shards of numba's tests that ran one way, and the shards that were cut:
    pytest's exit status is none that it gives after the last test."""
    found: dict[str, str] = {}
    cut = []
    for path in sorted(folder.glob(f"numba-{way}-*.log")):
        status = path.with_suffix(".rc")
        if not status.exists() or status.read_text().strip() not in FINISHED:
            cut.append(path.stem)
        found |= outcomes(path.with_suffix(".xml"))
    return found, cut


def packages(told: dict[str, str]) -> dict[str, dict[str, int]]:
    """Counts of each package of tests."""
    names = sorted({name.partition(".")[0] for name in told})
    return {
        one: counts({name: kind for name, kind in told.items() if name.partition(".")[0] == one})
        for one in names
    }


def compare(folder: Path) -> dict[str, Any]:
    """numba's tests natively and through Flyt: counts, and the names of what differs."""
    native, cut = summed(folder, "native")
    ours, ours_cut = summed(folder, "flyt")
    passed = [name for name, told in native.items() if told == "passed"]
    known = ("passed", "xfailed")  # a known failure that passes is told as failed
    return {
        "native": packages(native),
        "flyt": packages(ours),
        "cut": cut + ours_cut,
        "only_native": {n: ours.get(n, "not run") for n in passed if ours.get(n) not in known},
        "known_failures": [n for n in passed if ours.get(n) == "xfailed"],
        "failed_natively": {n: ours.get(n, "not run") for n, t in native.items() if t == "failed"},
    }


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
    report["numba"] = numba = compare(folder)
    for way, name in (("native", "natively"), ("flyt", "through Flyt")):
        for package, told in numba[way].items():
            print(f"numba's {package} {name}: {told}")
    print(f"numba: {len(numba['failed_natively'])} tests fail natively, too")
    print(f"numba: {len(numba['known_failures'])} tests that pass natively are known failures")
    differ = numba["only_native"]
    print(f"numba: {len(differ)} tests pass natively, not through Flyt, and are no known failures")
    for name in list(differ)[:LISTED]:
        print("  ", name, differ[name])
    for name in numba["cut"]:
        print("cut before its end:", name)
    report["latency"] = found = latency(folder)
    for case in sorted({case for told in found.values() for case in told}):
        told = {name: one.get(case, float("nan")) for name, one in found.items()}
        line = ", ".join(f"{name} {value:.1f}" for name, value in told.items())
        if {"native", "flyt"} <= told.keys():
            line += f", ratio {told['flyt'] / told['native']:.2f}"
        print(f"latency {case}, us: {line}")
    (folder / "kernels.json").write_text(json.dumps(report, indent=1))
    return 1 if differ or numba["cut"] else 0


if __name__ == "__main__":
    sys.exit(main())
