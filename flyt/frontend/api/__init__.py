# SPDX-License-Identifier: Apache-2.0
"""The CUDA runtime API with the conventions of ``cuda.bindings.runtime``, by subject."""
