# SPDX-License-Identifier: Apache-2.0
"""Questions about sharing, as experiments on the user's own machine: ``flyt ipc study``.

What opening and closing costs; whether kernels use another process's memory as fast as their own;
when one process sees what another has written; which allocator's memory can be exported by which
call; what a crash leaves. Each experiment runs in a process of its own (`run`, `worker`) and yields
rows; no result is ever filled in.
"""
