# SPDX-License-Identifier: Apache-2.0
"""The ``flyt`` command: one group, one sub-command a module."""

from __future__ import annotations

import click

from flyt._version import __version__
from flyt.cli.bench import bench
from flyt.cli.demo import demo
from flyt.cli.doctor import doctor
from flyt.cli.ipc import ipc
from flyt.cli.keygen import keygen
from flyt.cli.split import split
from flyt.cli.status import status
from flyt.cli.suspend import resume, suspend
from flyt.cli.top import top


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flyt")
def main() -> None:
    """Use the host's GPU from a VM or a container through one shared-memory region."""


main.add_command(bench)
main.add_command(demo)
main.add_command(doctor)
main.add_command(ipc)
main.add_command(keygen)
main.add_command(resume)
main.add_command(split)
main.add_command(status)
main.add_command(suspend)
main.add_command(top)

if __name__ == "__main__":
    main()
