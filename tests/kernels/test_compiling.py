# SPDX-License-Identifier: Apache-2.0
"""The compiler's process: what it compiles, what it says, and what it can't read. NVRTC needs no
GPU; without its library the backend says so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from flyt.backend import compiling
from flyt.errors import DeviceError, ProtocolError


def _has_nvrtc() -> bool:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError):
        return False
    return True


nvrtc_only = pytest.mark.skipif(not _has_nvrtc(), reason="NVRTC's library is not installed")
locked_only = pytest.mark.skipif(
    os.environ.get(compiling.UNCONFINED) == "1", reason="this kernel has no Landlock"
)

SOURCE = b"""
extern "C" __global__ void f(int *a) { *a = VALUE; }
template <class T> __global__ void g(T *a) { *a = 1; }
"""


def request(*options: str, expressions: tuple[str, ...] = ()) -> compiling.Request:
    asked: dict[str, Any] = {
        "name": "some.cu",
        "options": list(options),
        "expressions": list(expressions),
    }
    return compiling.checked(asked, "sm_90")


@nvrtc_only
def test_a_cubin_and_the_names_of_its_expressions() -> None:
    asked = request("-DVALUE=3", expressions=("g<int>", "g<float>"))
    cubin, names, log = compiling.compiled(SOURCE, asked)
    assert cubin.startswith(b"\x7fELF")
    assert names == ("_Z1gIiEvPT_", "_Z1gIfEvPT_")  # by the Itanium C++ ABI
    assert log == ""
    assert all(name.encode() in cubin for name in names)


@nvrtc_only
def test_a_source_at_fault() -> None:
    cubin, names, log = compiling.compiled(SOURCE, request())
    assert (cubin, names) == (b"", ())
    assert "some.cu" in log
    assert "VALUE" in log


@nvrtc_only
def test_an_expression_that_is_none() -> None:
    cubin, _, log = compiling.compiled(SOURCE, request("-DVALUE=1", expressions=("nobody<int>",)))
    assert cubin == b""
    assert "nobody" in log


@nvrtc_only
@locked_only
@pytest.mark.parametrize("how", ["include", "option", "dots", "macro", "link"])
def test_it_reads_no_file_but_cuda_s(tmp_path: Path, how: str) -> None:
    secret = tmp_path / "secret.h"
    secret.write_text("int nobody_may_know = unknown_word;\n")
    dots = "../" * 20 + str(secret).lstrip("/")
    link = tmp_path / "link.h"
    link.symlink_to(secret)
    source, options = {
        "include": (f'#include "{secret}"\n', ()),
        "option": ("", (f"--pre-include={secret}",)),
        "dots": (f'#include "{dots}"\n', ("-I/usr/include",)),
        "macro": (f'#define WHERE "{secret}"\n#include WHERE\n', ()),
        "link": (f'#include "{link}"\n', ()),
    }[how]
    cubin, _, log = compiling.compiled(source.encode(), request(*options))
    assert cubin == b""
    assert "nobody_may_know" not in log
    assert "unknown_word" not in log


@nvrtc_only
@locked_only
def test_it_writes_no_file(tmp_path: Path) -> None:
    target = tmp_path / "times.csv"
    compiling.compiled(SOURCE, request("-DVALUE=1", f"--time={target}"))
    assert not target.exists()


@nvrtc_only
def test_a_compiler_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "COMPILE_SECONDS", 0.05)
    with pytest.raises(DeviceError) as caught:
        compiling.compiled(SOURCE, request("-DVALUE=1"))
    assert caught.value.code == 999


def test_without_nvrtc_it_is_not_supported() -> None:
    if _has_nvrtc():
        pytest.skip("NVRTC's library is installed")
    with pytest.raises(DeviceError) as caught:
        compiling.compiled(SOURCE, request())
    assert caught.value.code == 801
    assert "nvidia-cuda-nvrtc" in caught.value.detail


def test_the_device_s_architecture_unless_one_is_named() -> None:
    assert request("-DX").options == ("--gpu-architecture=sm_90", "-DX")
    for given in ("-arch=sm_80", "--gpu-architecture=compute_90"):
        assert request(given).options == (given,)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"name": "a", "options": [], "expressions": [], "more": 1},
        {"name": 5, "options": [], "expressions": []},
        {"name": "a", "options": "no list", "expressions": []},
        {"name": "a", "options": [1], "expressions": []},
        {"name": "a", "options": ["x" * 5000], "expressions": []},
        {"name": "a", "options": ["a\0b"], "expressions": []},
        {"name": "a", "options": [], "expressions": ["f"] * 300},
    ],
)
def test_what_is_no_request(document: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="COMPILE"):
        compiling.checked(document, "sm_90")
