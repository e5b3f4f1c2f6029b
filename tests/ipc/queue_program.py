# SPDX-License-Identifier: Apache-2.0
"""A program of two processes and two queues, started with ``spawn``; it prints what it found."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys
from typing import Any

from flyt import ipc


def child(there: Any, back: Any) -> None:
    ipc.install_reducers()
    array = there.get(timeout=60)
    saw = [float(x) for x in array]
    array[5] = 50
    back.put(saw)
    back.put(array)
    private = there.get(timeout=60)
    private[0] = 7
    back.put([float(x) for x in private][1:])
    one, two = there.get(timeout=60), there.get(timeout=60)
    one[2] = 33
    back.put(float(two[0]) == 33)
    there.get(timeout=60)  # until then this process holds what it was given


def main(library: str) -> None:
    if library == "torch":
        method: Any = importlib.import_module("torch.multiprocessing").get_context("spawn")
        private = importlib.import_module("torch").ones(3)
    else:
        method = multiprocessing.get_context("spawn")
        private = importlib.import_module("numpy").ones(3)
    ipc.install_reducers()
    there, back = method.Queue(), method.Queue()
    process = method.Process(target=child, args=(there, back))
    process.start()
    array = ipc.empty((6,), "float32", like=library)
    for i in range(6):
        array[i] = i
    there.put(array)
    told: dict[str, Any] = {"child saw": back.get(timeout=60)}
    again = back.get(timeout=60)
    told["parent sees what the child wrote"] = float(array[5])

    def address(a: Any) -> int:
        return int(a.data_ptr() if library == "torch" else a.ctypes.data)

    told["came back over the same address"] = address(again) == address(array)
    there.put(private)
    told["private"] = back.get(timeout=60)
    told["private is a copy"] = library == "torch" or float(private[0]) == 1
    there.put(array[1:])
    there.put(array[3:])
    told["two from one block share it"] = back.get(timeout=60)
    there.put(None)
    process.join(60)
    sys.stdout.write(json.dumps(told))
    del again
    ipc.close_desk()
    sys.exit(process.exitcode)


if __name__ == "__main__":
    main(sys.argv[1])
