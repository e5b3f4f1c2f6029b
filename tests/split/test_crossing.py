# SPDX-License-Identifier: Apache-2.0
"""Threads, errno, signals and callbacks across the halves."""

from __future__ import annotations

import errno
import signal

CALLS = 1_000_000


def test_four_threads_call_both_halves_a_million_times(run, bench):
    done = run(bench.program("threads.c"), str(CALLS))
    assert done.stdout.splitlines()[:2] == ["wrong 0", "wrong_brief 0"]
    assert (done.returncode, done.stderr) == (0, "")


def test_signals(run, bench):
    done = run(bench.program("signals.c"))
    facts = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    # SIGALRM came while a lower half ran: the handler saw the upper half's TLS and errno, could
    # allocate and call the other half; the lower half's errno stayed apart.
    assert facts["handled"] == ("1 mine 5 errno_in_handler 1 errno_after 9 lower_errno 77 two 42")
    assert facts["same_action"] == "1 full_mask 1"
    assert facts["blocked_works"] == "1 usr1_was_blocked 1 sigsys_was_blocked 0"
    assert facts["suspended_works"] == "1"
    assert facts["written_mask"] == "1"  # by a handler, into its context
    assert facts["after_jump"] == "mine 5 two 2"  # siglongjmp out of a lower half's call
    assert facts["sent_on"] == "early 0 handled 1 mine 5"
    assert facts["bad_addresses"] == "14 22 14 14 14"  # EFAULT, EINVAL
    assert facts["faults"] == "1 1 mine 5"  # each half's own handler took its own fault
    assert facts["child_that_calls"] == "exit 126"
    assert "a forked child called a lower half" in done.stderr
    assert facts["child_that_does_not"] == "exit 5"
    assert facts["child_that_faults"] == "signal 11"
    assert facts["still"] == "3"
    assert done.returncode == 0


SPAWNED = {
    "spawn": 3,
    "handled": -signal.SIGUSR1,  # the parent's handler is none of the new program's
    "ignored": 4,
    "default": -signal.SIGPIPE,
    "blocked": 5,
    "system": 6,
    "lower": 2,
    "vfork": 7,
    "popen": 0,
    "fork": 8,
    "clone3": errno.ENOSYS,  # which every libc answers with a clone that keeps the handlers
}
"""How each child ends: its exit code, or minus a signal's number."""


def test_children_run_and_leave_the_parent_s_signals_alone(run, bench):
    done = run(bench.program("spawn.c"))
    expected = [f"{name} {outcome} own 1" for name, outcome in SPAWNED.items()]
    assert done.stdout.splitlines()[: len(expected) + 1] == [*expected, "still 3"], done.stderr
    assert (done.returncode, done.stderr) == (0, "")


def test_callbacks_cross_back_and_into_the_other_half(run, bench):
    done = run(bench.program("callbacks.c"))
    lines = done.stdout.splitlines()
    # 100, 101, ... through six levels, alternately through two, one, two, ...
    assert lines[:2] == ["deep 105 mine 7", "plain 15 16"]
    assert (done.returncode, done.stderr) == (0, "")


def test_a_callback_on_a_thread_of_the_lower_half_s_own_is_refused(run, bench):
    done = run(bench.program("callbacks.c"), "stray")
    assert done.returncode == 126
    assert "a callback came on a thread of a lower half's own" in done.stderr
