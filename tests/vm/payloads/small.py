# SPDX-License-Identifier: Apache-2.0
"""A few bytes to the device and back; prints a line of JSON: how, and every warning.

Its argument, if there is one, is its exit code.
"""

import json
import sys
import warnings

import numpy as np

import flyt as cudart
from flyt.frontend.current import current

source = np.arange(300_007, dtype=np.uint8)
back = np.zeros_like(source)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    err, device = cudart.cudaMalloc(source.nbytes)
    H2D = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
    D2H = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
    if err == 0:
        (err,) = cudart.cudaMemcpy(device, source, source.nbytes, H2D)
    if err == 0:
        (err,) = cudart.cudaMemcpy(back, device, source.nbytes, D2H)
report = {
    "error": int(err),
    "why": cudart.last_failure(),
    "right": bool((back == source).all()),
    "warnings": [str(warning.message) for warning in caught],
}
if not err:
    report["counts"] = cudart.statistics()
    report["region"] = current().memory is not None
print(json.dumps(report))
sys.exit(int(sys.argv[1]) if sys.argv[1:] else 0)
