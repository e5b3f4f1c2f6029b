# SPDX-License-Identifier: Apache-2.0
"""The GPU's side: a supervisor without CUDA, workers with it, a session thread per client."""
