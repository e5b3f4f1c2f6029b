# SPDX-License-Identifier: Apache-2.0
"""A real QEMU guest for Flyt's tests, made from Debian packages and this Python."""
