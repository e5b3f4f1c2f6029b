# SPDX-License-Identifier: Apache-2.0
"""Split processes: a program without CUDA and MPI of its own beside lower halves that have them."""
