# SPDX-License-Identifier: Apache-2.0
"""The command ``flyt-backend``: options in, a `Supervisor` run, one line for each error out."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import click

from flyt._version import __version__
from flyt.backend.options import (
    DEVICES,
    IDLE_WORKER_SECONDS,
    ISOLATIONS,
    MAX_WORKERS,
    SESSIONS_PER_USER,
    Options,
)
from flyt.backend.supervisor import Supervisor
from flyt.environment import check
from flyt.errors import ConfigurationError, FlytError
from flyt.shm.runtime_dir import runtime_dir
from flyt.sizes import parse_size

SOCKET_NAME = "backend.sock"
"""In the runtime folder; where clients look without FLYT_BACKEND."""

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def _size(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    """Bytes, written as ``64K``, ``512M``, ``2G``; else a usage error that names the option."""
    try:
        return None if value is None else parse_size(value)
    except ConfigurationError as exc:
        raise click.BadParameter(str(exc), context, option) from exc


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--device", type=click.Choice(DEVICES), default="auto", help="auto means CuPy.")
@click.option("--device-options", default="", metavar="KEY=VALUE,…", help="Of the device.")
@click.option(
    "--region",
    default="flyt",
    help="Name in /dev/shm, path of any mappable file, or per-client: one for each client.",
)
@click.option("--no-region", is_flag=True, help="Share no memory: all payloads go inline.")
@click.option(
    "--size",
    callback=_size,
    help="Of the region. Default: as it is, or if it is new 1G or what fits; per-client 256M.",
)
@click.option(
    "--page-size", callback=_size, help="64K to 2M. Default: 2M, in regions under 1G 64K."
)
@click.option(
    "--listen",
    multiple=True,
    metavar="ENDPOINT",
    help="ipc:///path or tcp://host:port; may be repeated. "
    f"Default: {SOCKET_NAME} in the runtime folder.",
)
@click.option("--session-ports", default="*", metavar="A-B", help="TCP ports of sessions.")
@click.option(
    "--single-port",
    is_flag=True,
    help="Relay TCP sessions through the port of --listen, for NAT and guestfwd; slower.",
)
@click.option(
    "--doorbell",
    metavar="PATH",
    help="UNIX socket for QEMU's ivshmem-doorbell: a guest wakes this backend without the network.",
)
@click.option(
    "--isolation",
    type=click.Choice(ISOLATIONS),
    default="shared",
    help="shared: a worker process per user. process: one per session, a spare one kept ready.",
)
@click.option("--max-workers", default=MAX_WORKERS, help="Worker processes that serve at once.")
@click.option("--sessions-per-user", default=SESSIONS_PER_USER, help="Sessions of one user.")
@click.option(
    "--idle-worker",
    default=IDLE_WORKER_SECONDS,
    help="Seconds that the worker of a user without sessions is kept.",
)
@click.option(
    "--memory-limit", callback=_size, default="0", help="Device memory per session; 0: no limit."
)
@click.option(
    "--sm-limit",
    default=0,
    help="SMs that a session's kernels may have (--isolation process); 0: all.",
)
@click.option("--keep-region", is_flag=True, help="Leave the region there at the end.")
@click.option("--heartbeat", default=30.0, help="Seconds until a silent client is gone; 0: never.")
@click.option("--sweep-seconds", "sweep", default=5.0, help="Seconds between two sweeps.")
@click.option("--drain", default=5.0, help="Seconds for running copies at the end.")
@click.option("--insecure", is_flag=True, help="Allow TCP beyond this machine: no authentication.")
@click.option("--server-key", metavar="FILE", help="CURVE: this daemon's secret key, for TCP.")
@click.option("--authorized-keys", metavar="FOLDER", help="CURVE: the clients' public keys.")
@click.option("--metrics", metavar="HOST:PORT", help="Serve figures to Prometheus there.")
@click.option("--ready-fd", type=int, help="Gets one JSON line when the backend serves.")
@click.option("--with-parent-fd", "parent_fd", type=int, help="A pidfd; end when its process does.")
@click.option("--log-level", type=click.Choice(LEVELS, case_sensitive=False), default="INFO")
@click.version_option(__version__, prog_name="flyt-backend")
def main(
    no_region: bool, region: str, listen: tuple[str, ...], log_level: str, **rest: Any
) -> None:
    """Give processes without a GPU the GPU of this host."""
    logging.basicConfig(
        level=log_level, format="flyt-backend[%(process)d] %(levelname)s %(message)s"
    )
    try:
        check()
        options = Options(
            listen=listen or (f"ipc://{os.path.join(runtime_dir(), SOCKET_NAME)}",),
            region=None if no_region else region,
            **rest,
        )
        Supervisor(options, log_level).run()
    except FlytError as exc:
        click.echo(f"flyt-backend: {exc}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
