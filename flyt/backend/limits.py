# SPDX-License-Identifier: Apache-2.0
"""The limits of the operating system that a daemon with many sessions runs into."""

from __future__ import annotations

import resource


def raise_descriptor_limit() -> None:
    """Allow as many descriptors as the administrator does: a session needs about six, and the usual
    soft limit of 1,024 would end at some 170 sessions."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
