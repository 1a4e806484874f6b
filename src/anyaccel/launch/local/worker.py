# SPDX-License-Identifier: Apache-2.0
"""What a worker does between fork and exec: it ties its life to its parent's, and binds itself."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from anyaccel import _native
from anyaccel.launch.local.apply import bind_worker
from anyaccel.launch.plan.plan import RankBinding

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

# Signals that end the launcher; those that its own parent ignores (nohup, a background shell) stay ignored.
STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
# Signals for the workers alone: batch systems announce with them that a job will end, so that it writes a checkpoint.
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)

# Exit codes of a shell for a program that is not there, and for one that cannot be run.
_NOT_FOUND = 127
_NOT_RUNNABLE = 126
_OUR_ERROR = 70  # EX_SOFTWARE, with a traceback


@dataclass(frozen=True)
class Worker:
    """One worker to start: its place in the plan, its argument vector and its whole environment."""

    binding: RankBinding
    command: tuple[str, ...]
    env: Mapping[str, str]


def become_worker(worker: Worker, parent: int, group: int, stdout: int | None, stderr: int) -> NoReturn:
    """Turn this freshly forked process, whose signals are blocked, into the worker. Never returns.

    Args:
        parent: process id of the guardian, whose death ends the worker.
        group: process group to join, that of the launcher, so that a terminal reaches the worker; 0 for none.
        stdout: descriptor that becomes its standard output; None for the one that is there.
        stderr: descriptor that becomes its standard error.
    """
    code = _OUR_ERROR
    try:
        os.dup2(stderr, 2)
        if stdout is not None:
            os.dup2(stdout, 1)
        _tie_to_parent(parent, group)
        bind_worker(worker.binding, _say)
        _reset_signals()
        os.execvpe(worker.command[0], worker.command, worker.env)
    except FileNotFoundError:
        code = _NOT_FOUND
        _say(
            f"rank {worker.binding.rank}: {worker.command[0]!r} was not found; check the name, "
            "or the interpreter in its first line"
        )
    except (OSError, ValueError) as error:
        code = _NOT_RUNNABLE
        _say(f"rank {worker.binding.rank}: {worker.command[0]!r} cannot be started: {error}")
    finally:
        # The stack below this frame is a copy of the guardian's, and must not be unwound here.
        if code == _OUR_ERROR:
            sys.excepthook(*sys.exc_info())
        os._exit(code)


def _tie_to_parent(parent: int, group: int) -> None:
    _native.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)  # the guardian died before the parent-death signal was set
    if group:
        os.setpgid(0, group)


def _reset_signals() -> None:
    for number in (*STOP_SIGNALS, *PASSED_ON):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    # Python ignores these two signals; programs expect the default.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _say(text: str) -> None:
    os.write(2, f"anyaccel: {text}\n".encode(errors="backslashreplace"))
