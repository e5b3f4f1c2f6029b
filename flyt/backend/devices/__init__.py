# SPDX-License-Identifier: Apache-2.0
"""The devices a worker can drive, by the name given to ``--device``."""

from __future__ import annotations

from collections.abc import Sequence

from flyt.backend.devices import cupy, emulated, emulated_options
from flyt.backend.devices.base import Device
from flyt.backend.devices.emulated_context import Context
from flyt.errors import ConfigurationError

__all__ = ["KINDS", "open_devices", "versions"]

KINDS = ("auto", "cupy", "emulated")


def open_devices(kind: str, options: str = "") -> list[Device]:
    """Opens all devices of a kind; their index is their ordinal. The caller closes each.

    Parameters
    ----------
    kind : {"auto", "cupy", "emulated"}
        ``"auto"`` is ``"cupy"``; nothing is emulated in silence.
    options : str
        For the emulated device: see `flyt.backend.devices.emulated_options.parse`.

    Raises
    ------
    ConfigurationError
        The kind or an option is unknown, or there is no GPU, no driver or no CuPy.
    """
    if kind not in KINDS:
        raise ConfigurationError(f"no device kind {kind!r}; there are {', '.join(KINDS)}")
    if kind == "emulated":
        return _open_emulated(emulated_options.parse(options))
    if options:
        raise ConfigurationError(
            f"device {kind!r} takes no options, but got {options!r}; only 'emulated' does"
        )
    devices = cupy.open_cupy()
    # Imported here: a machine without a GPU has no use for the driver's bindings.
    from flyt.backend.devices.cuda_kernels import CudaKernels

    for device in devices:
        if isinstance(device, cupy.CupyDevice):
            device.kernels = CudaKernels(device.runtime, device.ordinal)
    return devices


def versions(devices: Sequence[Device]) -> tuple[int, int]:
    """Versions of the CUDA runtime and the driver under open devices, such as 13000 for 13.0."""
    if devices and devices[0].snapshot().kind == "cupy":
        return cupy.runtime_version(), cupy.driver_version()
    return emulated.RUNTIME_VERSION, emulated.DRIVER_VERSION


def _open_emulated(options: emulated_options.EmulatedOptions) -> list[Device]:
    """All emulated devices of one context; the caller closes each."""
    context = Context(options)
    devices: list[Device] = []
    try:
        for ordinal in range(options.devices):
            devices.append(emulated.EmulatedDevice(context, ordinal))
    except BaseException:
        for device in devices:
            device.close()
        raise
    return devices
