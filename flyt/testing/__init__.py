# SPDX-License-Identifier: Apache-2.0
"""What ships for testing programs that use Flyt, and Flyt itself: `check_memcpy`."""

from flyt.testing._facts import Fact
from flyt.testing.memcpy import FACTS, ConformanceError, Report, check_memcpy

__all__ = ["FACTS", "ConformanceError", "Fact", "Report", "check_memcpy"]
