# SPDX-License-Identifier: Apache-2.0
"""Flyt: the GPU of the host, for processes that have none.

``import flyt as cudart`` replaces ``from cuda.bindings import runtime as cudart``: the same names,
enum types, argument order and tuple returns, executed by ``flyt-backend`` on the GPU's host.

What it offers stands in `flyt.frontend.public`. The daemon's children, which are modules of this
package too, say ``FLYT_DAEMON=1`` and go without it: they start in half the time without NumPy and
CUDA's bindings.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flyt.frontend.public import *  # noqa: F403 - for type checkers; the names are in its __all__


def __getattr__(name: str) -> Any:
    """CUDA's own types, and where nothing was loaded yet all the rest."""
    if name.startswith("__") and name not in ("__all__", "__version__"):
        raise AttributeError(f"module 'flyt' has no attribute {name!r}")
    from flyt.frontend import public

    globals().update({one: getattr(public, one) for one in public.__all__}, __all__=public.__all__)
    return globals()[name] if name in globals() else public.cuda_name(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})


if os.environ.get("FLYT_DAEMON") != "1":
    # Now, not at the first use: a program may give up its rights, or its root, in between.
    __getattr__("__all__")
