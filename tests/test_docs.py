# SPDX-License-Identifier: Apache-2.0
"""What the documentation names as proof exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from flyt.testing import FACTS

ROOT = Path(__file__).resolve().parent.parent
SEMANTICS = (ROOT / "docs" / "semantics.md").read_text()

TESTS = sorted(set(re.findall(r"(tests/[\w/]+\.py)::(\w+)", SEMANTICS)))
FACT_NAMES = sorted(set(re.findall(r"fact: (\w+\.\w+)", SEMANTICS)))


@pytest.mark.parametrize(("file", "name"), TESTS, ids=[f"{f}::{n}" for f, n in TESTS])
def test_a_test_that_is_named_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", FACT_NAMES)
def test_a_fact_that_is_named_exists(name: str) -> None:
    assert name in {fact.name for fact in FACTS}


def test_every_row_of_a_table_names_its_proof() -> None:
    rows = [
        line
        for line in SEMANTICS.splitlines()
        if line.startswith("| ") and not line.startswith("| CUDA")
    ]
    assert len(rows) > 30
    proof = re.compile(r"(fact: \w+\.\w+|tests/[\w/]+\.py::\w+)[^|]*\|$")
    assert [row for row in rows if not proof.search(row)] == []
