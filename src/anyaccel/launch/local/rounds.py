# SPDX-License-Identifier: Apache-2.0
"""Between two rounds of an elastic job: ends processes of the earlier round, then executes the worker.

    python -m anyaccel.launch.local.rounds COMMAND ...

torch ends the workers of a round before it starts those of the next one, but not the processes that they have
started, which hold ports, files and devices that the new workers need. When its parent ends, such a process becomes a
child of the guardian, the parent of torch's launcher (see `anyaccel.launch.local.guardian`). So a process that is
below the guardian, but not below torch's launcher, and older than all workers of this round belongs to an earlier
round.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Sequence

from anyaccel.launch import processes
from anyaccel.launch.local.protocol import GUARDIAN_NAME, KILL_TIMEOUT, LEFTOVER_GRACE
from anyaccel.launch.output import WARNING, Output

# The variable that torch's launcher sets for its workers only.
_WORKER_VARIABLE = b"TORCHELASTIC_RUN_ID="


def left_behind(launcher: int) -> list[int]:
    """Processes of earlier rounds.

    Args:
        launcher: process id of torch's launcher, the parent of this process.
    """
    guardian = processes.parent(launcher)
    if guardian is None or processes.name(guardian) != GUARDIAN_NAME:
        return []  # not started by our guardian, so it is unknown to whom other processes belong
    workers = workers_of(launcher)
    if not workers:
        return []
    found = processes.descendants(root=guardian, exclude=[launcher])
    ages = {pid: processes.started(pid) for pid, state in found.items() if state != "Z"}
    return [pid for pid, at in ages.items() if at is not None and at < min(workers.values())]


def workers_of(launcher: int) -> dict[int, int]:
    """The workers of the round under way below torch's launcher, by process id, and when each was started."""
    found = [pid for pid in processes.descendants(root=launcher) if processes.parent(pid) == launcher]
    return {pid: at for pid in found if _is_worker(pid) and (at := processes.started(pid)) is not None}


def _is_worker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return any(variable.startswith(_WORKER_VARIABLE) for variable in file.read().split(b"\0"))
    except OSError:
        return False


def end_earlier_rounds(launcher: int, console: Output) -> None:
    """End all processes of earlier rounds. All workers of this round do so at the same time."""
    if not processes.proc_is_ours():
        console.line("warning: without a /proc of this PID namespace what earlier rounds have left behind is not found")
        return
    for number, seconds in ((signal.SIGTERM, LEFTOVER_GRACE), (signal.SIGKILL, KILL_TIMEOUT)):
        deadline = time.monotonic() + seconds
        while left := left_behind(launcher):
            if number == signal.SIGTERM:
                console.line(f"ending what an earlier round left behind: {processes.describe(left)}", WARNING)
            processes.send(left, number)
            _wait_for(left, deadline)
            if number == signal.SIGTERM or time.monotonic() >= deadline:
                break  # processes that have started meanwhile are killed
    if left := left_behind(launcher):
        console.line(f"warning: these processes of an earlier round do not end: {processes.describe(left)}", WARNING)


def _wait_for(pids: Sequence[int], deadline: float) -> None:
    """Wait until all of them have ended, or until the deadline."""
    descriptors = []
    for pid in pids:
        try:
            descriptors.append(os.pidfd_open(pid))
        except OSError:
            continue  # gone
    try:
        for descriptor in descriptors:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def main(command: Sequence[str]) -> int:
    """End earlier rounds, then execute the command; returns only if that fails."""
    end_earlier_rounds(os.getppid(), Output())
    try:
        os.execvp(command[0], tuple(command))
    except OSError as error:
        Output().line(f"error: {command[0]!r} cannot be started: {error.strerror}")
        return 127 if isinstance(error, FileNotFoundError) else 126


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
