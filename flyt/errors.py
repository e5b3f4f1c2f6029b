# SPDX-License-Identifier: Apache-2.0
"""Every exception Flyt raises, in one place.

All of them pickle (each keeps its constructor's arguments in ``args``), so they survive
``multiprocessing`` pools. The message always says who broke the contract and how to mend it.
"""

from __future__ import annotations


class FlytError(Exception):
    """Base of all Flyt exceptions."""


class ConfigurationError(FlytError):
    """An option, environment variable or endpoint that the user gave is unusable."""


class ProtocolError(FlytError):
    """The peer sent something that the protocol does not allow."""


class HandshakeError(FlytError):
    """Both sides are sound, but they can't work together (version, feature, permission)."""


class RegionError(FlytError):
    """The shared-memory region is missing, damaged, or not the one the backend uses."""


class RegionFull(RegionError):
    """The region has too few free page frames for the request."""


class AddressTaken(RegionError):
    """An address range that was asked for is in use in this process."""


class SessionLost(FlytError):
    """The backend, its worker or the connection is gone; nothing of the session is left."""


class CommandTimeout(FlytError):
    """The backend is connected but has not answered within the bound."""


class SharingError(FlytError):
    """A piece of memory or an array can't be shared with another process, or not in this way."""


class PeerLost(FlytError):
    """The process at the other end of a sharing connection is gone, or has closed it."""


class PeerTimeout(FlytError):
    """The process at the other end of a sharing connection did not answer within the bound."""


class DeviceError(FlytError):
    """A device answered a CUDA error.

    Parameters
    ----------
    code : int
        The numeric value of the ``cudaError_t``.
    detail : str, optional
        What was asked of the device.
    """

    def __init__(self, code: int, detail: str = "") -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail

    def __str__(self) -> str:
        return (
            f"CUDA error {self.code}: {self.detail}" if self.detail else f"CUDA error {self.code}"
        )
