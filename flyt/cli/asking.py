# SPDX-License-Identifier: Apache-2.0
"""One question to a backend's main endpoint, as its own user asks it."""

from __future__ import annotations

from flyt.errors import FlytError, SessionLost
from flyt.frontend.greeting import ask
from flyt.frontend.settings import Settings
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.greetings import Answer, Question, Refused
from flyt.rpc.patience import Deadline
from flyt.rpc.sockets import open_context

ADD_IPC = "start it with one more --listen ipc:///path, and ask there (--backend ipc:///path)"


def ask_backend(settings: Settings, question: Question, seconds: float) -> Answer:
    """Its answer.

    Raises
    ------
    FlytError
        Nobody listens there, there was no answer in time, or it was a refusal. Or it is no ipc
        endpoint: over TCP nobody proves to be the daemon's own user, whatever key they have.
    """
    endpoint = Endpoint.parse(settings.endpoint)
    if endpoint.scheme != "ipc":
        raise FlytError(
            f"{endpoint}: a backend tells this to its own user alone, whom it knows on its host at "
            f"an ipc endpoint: {ADD_IPC}"
        )
    context = open_context()
    try:
        answer = ask(context, endpoint, question, Deadline.after(seconds))
    except SessionLost as exc:
        raise FlytError(f"{exc} If it listens on tcp alone, {ADD_IPC}") from exc
    finally:
        context.term()
    if isinstance(answer, Refused):
        raise FlytError(f"{endpoint}: {answer.text}")
    return answer
