# SPDX-License-Identifier: Apache-2.0
"""`Metrics`: the figures of ``flyt status`` for Prometheus (``--metrics HOST:PORT``).

`prometheus_client` answers HTTP on threads of its own; each scrape asks the daemon's event loop and
waits for its report, so nothing is counted twice and nothing is looked at while nobody scrapes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from flyt.backend.loop import EventLoop
from flyt.errors import ConfigurationError
from flyt.rpc.endpoints import Endpoint

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

SCRAPE_SECONDS = 5.0
"""How long a scrape waits for the event loop; Prometheus itself gives up after ten."""

LABELS = ("session", "pid", "client", "user")

OF_SESSIONS = {
    "device_bytes": "Device memory that the session holds.",
    "frames": "Page frames of the region that the session holds.",
    "in_flight": "Operations that the device has not finished.",
    "bytes_moved": "Bytes copied since the session began.",
    "errors": "Commands that the device refused or failed since the session began.",
    "suspended": "1 while the session is off the GPU (flyt suspend).",
}

OF_FRAMES = {
    "total": "Page frames of the region.",
    "granted": "Page frames that sessions hold.",
    "reclaiming": "Page frames being zeroed.",
}

Then = Callable[[dict[str, Any]], object]


class Metrics:
    """The HTTP endpoint.

    Parameters
    ----------
    loop : EventLoop
    survey : callable
        ``survey(then)`` calls ``then`` with a report, on the loop's thread.
    address : str
        ``HOST:PORT``; ``*`` takes any free port.

    Raises
    ------
    ConfigurationError
        `prometheus_client` is not installed, or the address can't be had.
    """

    def __init__(self, loop: EventLoop, survey: Callable[[Then], None], address: str) -> None:
        try:
            import prometheus_client
        except ImportError as exc:
            raise ConfigurationError(
                "--metrics needs prometheus_client: pip install '.[metrics]' in Flyt's checkout"
            ) from exc
        self._loop = loop
        self._survey = survey
        self._one = threading.Lock()
        self._answered = threading.Event()
        self._reports: list[dict[str, Any]] = []
        where = Endpoint.parse(f"tcp://{address}")
        registry = prometheus_client.CollectorRegistry()
        try:
            server, thread = prometheus_client.start_http_server(where.port, where.host, registry)
        except OSError as exc:
            raise ConfigurationError(f"--metrics {address}: {exc.strerror}") from exc
        self._server, self._thread = server, thread
        self.port = int(server.server_address[1])
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        loop.watch(self._wake, self._asked)
        registry.register(self)

    # --- on the loop's thread ---

    def _asked(self) -> None:
        os.eventfd_read(self._wake)
        self._survey(self._tell)

    def _tell(self, report: dict[str, Any]) -> None:
        self._reports.append(report)
        self._answered.set()

    def close(self) -> None:
        """End the server; may wait for a scrape under way, at most its time limit."""
        self._answered.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(SCRAPE_SECONDS)
        self._loop.unwatch(self._wake)
        os.close(self._wake)

    # --- on a scrape's thread ---

    def describe(self) -> list[Metric]:
        """Nothing: `prometheus_client` would collect at once to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics, as of now."""
        from prometheus_client.metrics_core import GaugeMetricFamily

        with self._one:
            self._answered.clear()
            self._reports.clear()
            os.eventfd_write(self._wake, 1)
            self._answered.wait(SCRAPE_SECONDS)
            report = self._reports[-1] if self._reports else None
        up = GaugeMetricFamily("flyt_up", "Whether the backend's event loop answers.")
        up.add_metric((), float(report is not None))
        yield up
        if report is None:
            return
        yield from _of_daemon(report)
        for name, text in OF_SESSIONS.items():
            family = GaugeMetricFamily(f"flyt_session_{name}", text, labels=LABELS)
            for one in report["sessions"]:
                if one[name] is not None:
                    family.add_metric(_labels(one), one[name])
            yield family


def _labels(one: dict[str, Any]) -> tuple[str, ...]:
    return f"{one['session']:016x}", str(one["pid"]), one["program"], one["principal"]


def _of_daemon(report: dict[str, Any]) -> Iterator[Metric]:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    for name, text in OF_FRAMES.items():
        yield GaugeMetricFamily(f"flyt_frames_{name}", text, value=report["frames"][name])
    yield GaugeMetricFamily("flyt_workers", "Worker processes.", value=len(report["workers"]))
    yield GaugeMetricFamily("flyt_sessions", "Sessions.", value=len(report["sessions"]))
    yield CounterMetricFamily(
        "flyt_garbage",
        "Messages at the main endpoints that were no HELLO.",
        value=report["garbage"],
    )
