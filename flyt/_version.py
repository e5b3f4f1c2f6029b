# SPDX-License-Identifier: Apache-2.0
"""The version, in the one place that the build and the program both read."""

from __future__ import annotations

__version__ = "0.1.0"
