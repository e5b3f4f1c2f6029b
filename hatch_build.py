# SPDX-License-Identifier: Apache-2.0
"""Build hook: compiles the C library where there is a compiler, else Flyt is pure Python."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeLibrary(BuildHookInterface):  # type: ignore[type-arg]
    """Puts ``libflyt.so`` into the wheel; it fits every Python of the platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        if self.target_name != "wheel":
            return
        module = runpy.run_path(str(Path(self.root) / "flyt/shm/native/build.py"))
        problem = module["build"]()
        if problem:
            self.app.display_warning(f"Flyt is installed without its compiled library: {problem}")
            return
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append("flyt/shm/native/libflyt.so")
