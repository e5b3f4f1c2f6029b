# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for numba-cuda's own tests, as its wheel ships them.

``pytest -p numba_suite [-p flyt.numba] --known-failures FILE --pyargs numba.cuda.tests.cudadrv``.
The wheel lacks the fixture that its test classes ask for; and a list of known failures, a reason
each, is strict: an entry that passes fails the run, an entry that no test has fails it too. With
``--no-kernels`` a test that ends because the emulated device runs none counts as skipped, and the
lines whose reason begins with [emulated] count too. With ``-p flyt.numba`` the Python processes
that a test starts go through Flyt, too.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--known-failures", help="file of lines: test id, two blanks, reason")
    parser.addoption("--no-kernels", action="store_true", help="the backend emulates a device")
    parser.addoption("--dump-failed-filechecks", action="store_true", help="numba's own")


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("flyt.numba"):
        import flyt.numba

        others = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([flyt.numba.SITE, *([others] if others else [])])


@pytest.fixture(scope="class")
def initialize_from_pytest_config(request: pytest.FixtureRequest) -> None:
    """numba's own conftest has it; the wheel has not."""
    request.cls._dump_failed_filechecks = request.config.getoption("dump_failed_filechecks")


NO_KERNELS = "the emulated device runs no kernels"
EMULATED = "[emulated]"


def read(path: str, *, emulated: bool) -> dict[str, str]:
    """Known failures: test ids (from the file's name on) and reasons."""
    known: dict[str, str] = {}
    for line in Path(path).read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, reason = line.partition("  ")
            if not reason.strip():
                raise pytest.UsageError(f"{path}: {name} has no reason")
            if emulated or not reason.strip().startswith(EMULATED):
                known[name] = reason.strip()
    return known


def name_of(item: Any) -> str:
    # Not the node id alone: what it begins with depends on where pytest is run.
    return f"{item.path.name}::{item.nodeid.partition('::')[2]}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path = config.getoption("--known-failures")
    if not path:
        return
    known = read(path, emulated=config.getoption("--no-kernels"))
    names = {name_of(item) for item in items}
    files = {name.partition("::")[0] for name in names}
    gone = [n for n in known if n.partition("::")[0] in files and n not in names]
    if gone and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"{path} names tests that do not exist: {gone}")
    for item in items:
        reason = known.get(name_of(item))
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if item.config.getoption("--no-kernels") and call.excinfo is not None:
        chain = [call.excinfo.value]
        while (more := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(more)
        if any(NO_KERNELS in str(one) for one in chain):
            report.outcome = "skipped"
            report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {NO_KERNELS}")
    return report
