# SPDX-License-Identifier: Apache-2.0
"""Set-ups that are wrong: each is noticed, says what to do, and no byte comes out wrong."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vm.conftest import Lab

pytestmark = pytest.mark.timeout(300)

OF_MAIN, WITHOUT_SHARE, OF_NEWER = "0000:00:05.0", "0000:00:06.0", "0000:00:07.0"


def inline(report: dict[str, Any]) -> str:
    """The one warning of a session whose bytes went inline, and right."""
    assert report["error"] == 0, report
    assert report["right"]
    assert not report["region"]
    assert report["counts"]["inline_h2d_bytes"] == report["counts"]["inline_d2h_bytes"] == 300_007
    assert report["counts"]["fallback_inline"] == 1
    (warning,) = report["warnings"]
    assert "inline, which is slow" in warning
    return str(warning)


def test_qemu_without_share_on(lab: Lab) -> None:
    warning = inline(lab.copies(f"pci:{WITHOUT_SHARE}", backend=lab.lone))
    assert "other memory than the backend's" in warning
    assert "share=on" in warning


def test_two_regions_swapped(lab: Lab) -> None:
    warning = inline(lab.copies(f"pci:{OF_NEWER}", backend=lab.lone))
    assert f"pci:{OF_NEWER} has epoch" in warning
    assert "another backend's region" in warning


def test_two_devices_that_fit(lab: Lab) -> None:
    warning = inline(lab.copies(backend=lab.lone))
    assert WITHOUT_SHARE in warning
    assert OF_NEWER in warning
    assert "set FLYT_REGION=pci:SLOT" in warning


def test_a_region_of_another_size(lab: Lab) -> None:
    warning = inline(lab.copies(f"pci:{OF_MAIN}", backend=lab.lone))
    assert f"{OF_MAIN} has 33554432 bytes, the backend's region 16777216" in warning


def test_a_region_that_is_not_there(lab: Lab) -> None:
    warning = inline(lab.copies("pci:0000:00:1f.0"))
    assert "0000:00:1f.0" in warning
    assert OF_MAIN in warning


def test_a_backend_of_another_version(lab: Lab) -> None:
    report = lab.copies(backend=lab.newer)
    assert report["error"] == 100  # cudaErrorNoDevice
    assert "upgrade the frontend to the version of the backend" in report["why"]
