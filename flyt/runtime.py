# SPDX-License-Identifier: Apache-2.0
"""``cupy.cuda.runtime``, as far as Flyt goes: ``from flyt import runtime`` in its stead.

The same names and signatures: ints in, values out, `CUDARuntimeError` raised. The work is done by
the functions of `flyt` (`flyt.frontend.cupy_face`), and the process has one session for both.
"""

from __future__ import annotations

from flyt.frontend.cupy_face import NAMES as _NAMES

globals().update(_NAMES)

__all__ = sorted(_NAMES)  # noqa: PLE0605 - the table's names
