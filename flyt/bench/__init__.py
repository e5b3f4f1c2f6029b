# SPDX-License-Identifier: Apache-2.0
"""``flyt bench``: native CUDA and Flyt measured in one run, round by round, every byte compared.

The cases are a table (`plan`), the contenders are a table (`contenders`), the promises are a table
(`figures`); `harness` is the one thing that runs them.
"""
