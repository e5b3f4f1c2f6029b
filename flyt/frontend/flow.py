# SPDX-License-Identifier: Apache-2.0
"""How many commands a session has sent, how many of them were taken, and when it was heard."""

from __future__ import annotations

import time


class Flow:
    """Credits and counts of one connection. Guarded by its lock.

    Parameters
    ----------
    credits : int
        Commands that may be sent and not yet taken.

    Attributes
    ----------
    credits : int
    sent, taken : int
        Commands so far.
    within : int
        Of these, those of calls within the one that is being sent: a handler's, or a finalizer's.
    calls, posts : int
        Commands by whether somebody waits for their answer.
    heard : float
        When the backend was heard last (`time.monotonic`).
    """

    __slots__ = ("calls", "credits", "heard", "posts", "sent", "taken", "within")

    def __init__(self, credits: int) -> None:  # noqa: A002 - what the protocol calls them
        self.credits = credits
        self.sent = self.taken = self.calls = self.posts = self.within = 0
        self.heard = time.monotonic()

    def count(self, posted: bool) -> None:
        """A command is on its way."""
        if posted:
            self.posts += 1
        else:
            self.calls += 1

    def has_credit(self, spare: int = 0) -> bool:
        """Whether a command may be sent now, be it on so many credits more than there are."""
        return self.sent - self.taken < self.credits + spare
