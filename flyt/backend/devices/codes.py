# SPDX-License-Identifier: Apache-2.0
"""The `cudaError_t` values that devices answer with, by CUDA's names."""

from __future__ import annotations

SUCCESS = 0
INVALID_VALUE = 1
MEMORY_ALLOCATION = 2
INVALID_PITCH = 12
INVALID_DEVICE = 101
OPERATING_SYSTEM = 304
INVALID_RESOURCE_HANDLE = 400
NOT_READY = 600
ILLEGAL_ADDRESS = 700
CONTEXT_IS_DESTROYED = 709
HOST_MEMORY_ALREADY_REGISTERED = 712
HOST_MEMORY_NOT_REGISTERED = 713
LAUNCH_FAILURE = 719
NOT_PERMITTED = 800
NOT_SUPPORTED = 801
SYSTEM_NOT_READY = 802

STICKY = frozenset({226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911})
"""Errors after which a context answers nothing else: only a fresh process gets the GPU back."""
