# SPDX-License-Identifier: Apache-2.0
"""What ships for testing programs that use Flyt."""
