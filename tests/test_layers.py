# SPDX-License-Identifier: Apache-2.0
"""The shape of the code itself: imports run down only, one concept a module, licence lines."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "flyt"

LONGEST_MODULE = 350
"""Lines; what is longer holds more than one concept."""

GROUND = {"errors", "_version", "sizes", "environment"}
FACES = {"__init__", "runtime", "driver"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "_version": set(),
    "sizes": {"errors"},
    "plotting": {"errors"},
    "environment": {"errors", "sizes"},
    "rpc": GROUND,
    "shm": GROUND,
    "frontend": GROUND | {"rpc", "shm"},
    "backend": GROUND | {"rpc", "shm"},
    "compiling": GROUND,
    "ipc": GROUND | {"compiling", "plotting"},
    "split": GROUND | {"compiling"},
    **{face: GROUND | FACES | {"frontend"} for face in FACES},
    "numba": GROUND | FACES | {"frontend"},
    "bench": GROUND | FACES | {"rpc", "shm", "frontend", "plotting"},
    "cli": GROUND
    | FACES
    | {"rpc", "shm", "frontend", "backend", "testing", "bench", "ipc", "split"},
    "testing": GROUND | FACES | {"rpc", "shm", "frontend", "backend"},
}
"""Each room of the package and what it may import besides itself."""

ONLY_IN = {
    "cupy": ("flyt/backend/devices/", "flyt/ipc/"),
    "msgpack": ("flyt/rpc/", "flyt/ipc/"),
    "numba": ("flyt/numba/",),
    "posix_ipc": ("flyt/shm/",),
    "torch": ("flyt/ipc/",),
}
"""Packages and the rooms that may use them."""

MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted(
    path
    for folder in ("flyt", "tests", "benchmarks", "scripts", "examples", ".ci")
    for path in (ROOT / folder).rglob("*")
    if path.is_file()
    and (path.suffix == ".py" or not path.suffix)
    and "__pycache__" not in str(path)
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports_of(path: Path) -> Iterator[str]:
    """Dotted names that a module imports, relative ones resolved."""
    package = list(path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def room_of_import(name: str) -> str:
    """The room that ``flyt...`` lies in; a name of the package's face counts as the face."""
    parts = name.split(".")
    if len(parts) == 1:
        return "__init__"
    is_module = (PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").is_file()
    return parts[1] if is_module else "__init__"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_run_down_only(path: Path) -> None:
    room = room_of(path)
    assert room in MAY_IMPORT, f"{name_of(path)}: name its room in MAY_IMPORT"
    used = {room_of_import(name) for name in imports_of(path) if name.split(".")[0] == "flyt"}
    too_high = used - MAY_IMPORT[room] - {room}
    assert not too_high, f"{name_of(path)} may not import {sorted(too_high)}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_packages_stay_in_their_room(path: Path) -> None:
    for name in {name.split(".")[0] for name in imports_of(path)} & ONLY_IN.keys():
        assert name_of(path).startswith(ONLY_IN[name]), f"{name} belongs to {ONLY_IN[name]}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_holds_one_concept_and_says_which(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), "it has no docstring"
    lines = text.count("\n")
    assert lines <= LONGEST_MODULE, f"{lines} lines: split it"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_licence_line(path: Path) -> None:
    head = path.read_text().splitlines()[:2]
    assert "# SPDX-License-Identifier: Apache-2.0" in head
