# SPDX-License-Identifier: Apache-2.0
"""What the documentation names as proof exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from flyt.testing import FACTS, Report

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


def test_what_is_to_be_installed_is_had_from_a_checkout() -> None:
    """Nothing is published: `pip install flyt[gpu]` finds nothing, or somebody else's."""
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("flyt/**/*.py")]
    named = re.compile(r"install\s+'?flyt\b")
    assert [path.name for path in texts if named.search(path.read_text())] == []


def test_the_readme_s_use_of_the_checker_is_sound() -> None:
    (snippet,) = re.findall(
        r"```python\n(import flyt\nfrom flyt.testing import check_memcpy.*?)```",
        (ROOT / "README.md").read_text(),
        re.DOTALL,
    )
    compile(snippet, "README.md", "exec")
    assert set(re.findall(r"report\.(\w+)", snippet)) <= set(dir(Report))
