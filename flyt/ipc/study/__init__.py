# SPDX-License-Identifier: Apache-2.0
"""The four questions about sharing, as experiments on the user's own machine: ``flyt ipc study``.

Written so far: what opening and closing costs, and what a crash leaves. Each result says which
driver gave it; a question that has no experiment yet says so, and no result is ever filled in.
"""
