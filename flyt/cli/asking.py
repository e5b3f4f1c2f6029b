# SPDX-License-Identifier: Apache-2.0
"""One question to a backend's main endpoint, as its own user asks it."""

from __future__ import annotations

from flyt.errors import FlytError
from flyt.frontend.greeting import ask
from flyt.frontend.settings import Settings
from flyt.rpc.endpoints import Endpoint
from flyt.rpc.greetings import Answer, Question, Refused
from flyt.rpc.patience import Deadline
from flyt.rpc.sockets import open_context


def ask_backend(settings: Settings, question: Question, seconds: float) -> Answer:
    """Its answer.

    Raises
    ------
    FlytError
        Nobody listens there, there was no answer in time, or it was a refusal.
    """
    endpoint = Endpoint.parse(settings.endpoint)
    keys = settings.keys() if endpoint.scheme == "tcp" else None
    context = open_context()
    try:
        answer = ask(context, endpoint, question, Deadline.after(seconds), keys)
    finally:
        context.term()
    if isinstance(answer, Refused):
        raise FlytError(f"{endpoint}: {answer.text}")
    return answer
