# SPDX-License-Identifier: Apache-2.0
"""What a worker's kernels print: kept whole, in order, and in so much memory and no more. Each in a
process of its own, whose standard output it is."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flyt.backend.prints import may_print

LIMIT = 60

BEGIN = """
import ctypes, os, sys, threading
from flyt.backend.prints import MOST_BYTES, Prints
prints = Prints()

def memory():
    return os.stat("/proc/self/fd/1").st_blocks * 512

def everything():
    parts = []
    while part := prints.take():
        parts.append(part)
    return b"".join(parts)
"""

CASES = {
    "what the C library keeps back": """
ctypes.CDLL(None).printf(b"hop %d\\n", 3)
assert prints.take() == b"hop 3\\n"
assert prints.take() == b""
""",
    "more than one answer holds": """
text = bytes(range(256)) * (3 << 12) + b"end"
os.write(1, text)
parts = [prints.take() for _ in range(5)]
assert [len(part) for part in parts] == [1 << 20] * 3 + [3, 0]
assert b"".join(parts) == text
assert memory() <= 8192, memory()
""",
    "nobody asks": """
for n in range(64):
    os.write(1, bytes([n]) * (1 << 20))
    prints.bound()
    assert memory() <= MOST_BYTES + 8192, memory()
text = everything()
assert len(text) == MOST_BYTES and text[-1] == 63 and text[0] == 64 - len(text) // (1 << 20)
""",
    "a thread of the driver writes meanwhile": """
lines = [b"%d\\n" % n for n in range(20000)]
thread = threading.Thread(target=lambda: [os.write(1, line) for line in lines])
thread.start()
text = b""
while thread.is_alive():
    text += prints.take()
text += everything()
assert text == b"".join(lines)
""",
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_lost_and_no_memory(case: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + CASES[case]],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_where_sessions_share_the_worker_each_line_goes_out_at_once() -> None:
    """To a pipe, and the worker ends without the C library's farewell."""
    code = (
        "import ctypes, os; from flyt.backend import prints; "
        "assert prints.begin(alone=False) is None; "
        "ctypes.CDLL(None).printf(b'hop\\n'); os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.stdout == "hop\n", done.stderr


@pytest.mark.parametrize(
    ("image", "may"),
    [
        (b"\x7fELF...\0vprintf\0...", True),
        (b".version 8.0\n.extern .func (.param .b32 r) vprintf\n", True),
        (b"\x50\xed\x55\xba" + b"compressed", True),
        (b"\x7fELF...\0kernel\0...", False),
        (b".version 8.0\n", False),
    ],
)
def test_images_that_may_print(image: bytes, may: bool) -> None:
    assert may_print(image) is may
