# SPDX-License-Identifier: Apache-2.0
"""What went wrong in a job, as data and in words."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


@dataclass(frozen=True)
class Failure:
    """The first worker that failed.

    Attributes:
        status: its wait status.
        time: when it was noticed, in seconds of CLOCK_MONOTONIC on its machine.
        others: number of workers that were alive at that time.
        tail: its last lines on standard error.
    """

    rank: int
    pid: int
    status: int
    time: float
    others: int
    tail: tuple[str, ...] = ()


@dataclass
class Report:
    """The guardian's final report to the launcher.

    Attributes:
        failure: the first failure; None if no worker failed before the job was ended.
        signal: the first signal that asked to end the job.
        unkillable: a description of the processes that could not be killed.
        problem: why not all workers could be started.
        code: the exit code for that problem.
        loss: which output of the workers was lost, and why.
    """

    failure: Failure | None = None
    signal: int | None = None
    unkillable: str = ""
    problem: str = ""
    code: int = 1
    loss: str = ""

    def encode(self) -> Any:
        """Plain values, for marshal and JSON."""
        failure = tuple(vars(self.failure).values()) if self.failure else None
        return (failure, self.signal, self.unkillable[:10_000], self.problem, self.code, self.loss)

    @classmethod
    def decode(cls, values: Any) -> Report:
        """The opposite of `encode`.

        Raises:
            ValueError, TypeError: the values are others.
        """
        failure, number, unkillable, problem, code, loss = values
        return cls(failure and decode_failure(failure), number, unkillable, problem, code, loss)


def decode_failure(values: Any) -> Failure:
    """A Failure from the values of its fields, in which JSON has made lists of tuples."""
    rank, pid, status, time, others, tail = values
    return Failure(rank, pid, status, time, others, tuple(tail))


def exit_code(status: int) -> int:
    """The exit code that a shell gives for a wait status."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def describe_end(status: int) -> str:
    """How a process ended: "exited with code 3", "was killed by SIGKILL"."""
    if not os.WIFSIGNALED(status):
        return f"exited with code {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    try:
        return f"was killed by {signal.Signals(number).name}"
    except ValueError:
        return f"was killed by signal {number}"  # a real-time signal: signal.Signals has no names for them


def explain(failure: Failure, who: str, others: int) -> list[str]:
    """The lines that tell a person about a failure.

    Args:
        who: the worker: "rank 3", "rank 3 on host n2".
        others: number of workers that were alive and were ended.
    """
    ended = "" if others == 0 else f"; {others} other worker{' was' if others == 1 else 's were'} ended"
    lines = [f"error: {who} (process {failure.pid}) {describe_end(failure.status)}{ended}"]
    if os.WIFSIGNALED(failure.status) and os.WTERMSIG(failure.status) == signal.SIGKILL:
        lines.append("the launcher did not send that; the kernel does when memory runs out, see dmesg")
    if failure.tail:
        lines.append(f"last lines of {who} on standard error:")
        lines += [f"  | {line}" for line in failure.tail]
    if any("--local_rank" in line and "rror" in line for line in failure.tail):
        lines.append("the script does not take --local_rank; start it with --no_local_rank")
    return lines
