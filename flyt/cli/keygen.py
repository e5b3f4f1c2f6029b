# SPDX-License-Identifier: Apache-2.0
"""``flyt keygen``: makes the CURVE keys of a server or a client, and says what to do with them."""

from __future__ import annotations

import os
import sys

import click

from flyt.errors import FlytError
from flyt.rpc.keys import make

AUTHORIZED = "authorized"
"""Folder beside a server's key, for the public keys of its clients."""


def default_folder() -> str:
    """``$XDG_CONFIG_HOME/flyt``, else ``~/.config/flyt``."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(home, "flyt")


def _server(folder: str, public: str, secret: str) -> str:
    authorized = os.path.join(folder, AUTHORIZED)
    os.makedirs(authorized, mode=0o700, exist_ok=True)
    return (
        f"Start the backend with\n"
        f"  flyt-backend --listen tcp://0.0.0.0:5555 --server-key {secret} \\\n"
        f"      --authorized-keys {authorized}\n"
        f"Give {public} to every client, in a way in which nobody can exchange it.\n"
        f"Copy each client's public file into {authorized}: it may connect from then on."
    )


def _client(_: str, public: str, secret: str) -> str:
    return (
        f"Copy {public} into the folder that the backend has as --authorized-keys.\n"
        f"Get the backend's public file from there, and set here\n"
        f"  export FLYT_KEY={secret}\n"
        f"  export FLYT_SERVER_KEY=/path/of/server.key"
    )


NEXT = {"server": _server, "client": _client}


@click.command()
@click.argument("who", type=click.Choice(tuple(NEXT)))
@click.option("--name", help="Of the files. Default: server or client.")
@click.option("--folder", help="Where they go; made with mode 0700. Default: ~/.config/flyt.")
def keygen(who: str, name: str | None, folder: str | None) -> None:
    """Make a CURVE key pair for TCP connections: for the SERVER, or for one CLIENT.

    The secret key is written to NAME.key_secret and shown nowhere; NAME.key is the public one.
    """
    folder = os.path.abspath(folder or default_folder())
    try:
        public, secret, key = make(folder, name or who)
        text = NEXT[who](folder, public, secret)
    except FlytError as exc:
        click.echo(f"flyt keygen: {exc}", err=True)
        sys.exit(1)
    click.echo(f"public key {key.decode('ascii')}: {public}")
    click.echo(f"secret key: {secret} (never copy it to another machine)")
    click.echo(text)
