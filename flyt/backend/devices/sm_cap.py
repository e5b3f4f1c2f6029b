# SPDX-License-Identifier: Apache-2.0
"""A cap on the SMs of a process's kernels: a green context of the driver, and streams in it.

Only what runs on the SMs is capped: copies have engines of their own, and memory, events and
registrations stay the primary context's. Written by the driver's documentation (12.4 or newer); it
has not been run yet.
"""

from __future__ import annotations

from typing import Any

from flyt.errors import ConfigurationError, DeviceError

_NON_BLOCKING = 1
"""The only kind of stream that a green context has; sessions use no other."""


class SmCap:
    """Of one GPU.

    Parameters
    ----------
    ordinal : int
        Of the device; CUDA is initialised.
    count : int
        How many SMs kernels may have.

    Raises
    ------
    ConfigurationError
        The driver has no green contexts, or this GPU can't be split so.
    """

    def __init__(self, ordinal: int, count: int) -> None:
        # Imported here: a machine without a GPU has no use for it, and no driver to load.
        from cuda.bindings import driver

        self._driver = driver
        try:
            self._context = self._split(ordinal, count)
        except (DeviceError, RuntimeError) as exc:  # the latter: the driver lacks the function
            raise ConfigurationError(
                f"--sm-limit {count}: GPU {ordinal} and its driver can't do that ({exc})"
            ) from exc

    def _split(self, ordinal: int, count: int) -> Any:
        driver = self._driver
        device = _checked(driver.cuDeviceGet(ordinal))
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = _checked(driver.cuDeviceGetDevResource(device, kind))
        if count > whole.sm.smCount:
            raise DeviceError(1, f"it has {whole.sm.smCount} SMs")
        groups = _checked(driver.cuDevSmResourceSplitByCount(1, whole, 0, count))
        if not groups or groups[0].sm.smCount != count:
            wanted = groups[0].sm.smCount if groups else "none"
            raise DeviceError(1, f"it splits its SMs in larger steps: the next is {wanted}")
        description = _checked(driver.cuDevResourceGenerateDesc(groups[:1], 1))
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        return _checked(driver.cuGreenCtxCreate(description, device, int(flags)))

    def create_stream(self, priority: int) -> int:
        """A non-blocking stream whose kernels are capped."""
        create = self._driver.cuGreenCtxStreamCreate
        return int(_checked(create(self._context, _NON_BLOCKING, priority)))


def _checked(answer: tuple[Any, ...]) -> Any:
    code, *values = answer
    if code:
        raise DeviceError(int(code), f"{code.name}")
    return values[0]
