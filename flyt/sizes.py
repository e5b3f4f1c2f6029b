# SPDX-License-Identifier: Apache-2.0
"""Sizes as people write them: ``4096``, ``64K``, ``512M``, ``1G``."""

from __future__ import annotations

from flyt.errors import ConfigurationError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

_DIGITS = len(str(1 << 63))
"""``int`` itself refuses texts of thousands of digits with a ValueError."""


def parse_size(text: str) -> int:
    """Bytes of ``4096``, ``64K``, ``512M``, ``1G``, ``2T`` (powers of 1024; ``GiB`` is fine too).

    Raises
    ------
    ConfigurationError
        For anything else, and for what does not fit into 63 bits.
    """
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in "KMGT" else ""
    digits = number.removesuffix(unit)
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS
    if is_number and int(digits) * _UNITS[unit] < 1 << 63:
        return int(digits) * _UNITS[unit]
    raise ConfigurationError(f"size {text!r} is not understood; write bytes or 64K, 512M, 2G")
