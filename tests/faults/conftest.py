# SPDX-License-Identifier: Apache-2.0
"""What these tests share with those of pairs."""

from tests.pair.conftest import connect

__all__ = ["connect"]
