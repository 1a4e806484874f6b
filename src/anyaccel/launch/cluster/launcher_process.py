# SPDX-License-Identifier: Apache-2.0
"""mpirun, srun or pdsh as a child process: it starts the agents, which call back."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from anyaccel import _native
from anyaccel.launch.failure import describe_end
from anyaccel.launch.local.signals import ignore_passed_on
from anyaccel.launch.local.streams import BACKLOG
from anyaccel.launch.output import Output
from anyaccel.launch.processes import children, end_all

# Seconds to wait for the launcher's end after SIGKILL.
_KILL = 5.0


class LauncherProcess:
    """The launcher of the agents.

    The workers' output comes through it, and is passed on to `output` and `console`. It does not write there itself,
    as some of these programs exit with 0 when a write fails (pdsh, Open MPI), and others crash.

    Attributes:
        may_wait: whether it may wait for hours until hosts are free, so that no deadline holds for the first agent.
        problem: why not all agents were started.
        how: how it has ended, as text; "" while it runs.
        killed: the signal that has killed it and when, if the signal was not ours; None otherwise.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], output: Output, console: Output, *, may_wait: bool
    ) -> None:
        self.name = Path(command[0]).name
        self.may_wait = may_wait
        self.problem = ""
        self.how = ""
        self.killed: tuple[int, float] | None = None
        self._signals = [signal.SIGTERM, signal.SIGKILL]
        own = os.getpid()
        self._others = children()
        _native.set_child_subreaper(True)  # processes that the launcher leaves behind become our children

        def tie() -> None:
            ignore_passed_on()
            _native.set_parent_death_signal(signal.SIGTERM)
            if os.getppid() != own:
                os._exit(128 + signal.SIGTERM)

        # A session of its own, so that signals of the terminal go to us only, and we forward them once and in order.
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=tie,
        )
        assert self._process.stdout and self._process.stderr
        self._files = {
            file.fileno(): (file, target)
            for file, target in ((self._process.stdout, output), (self._process.stderr, console))
        }
        for descriptor in self._files:
            os.set_blocking(descriptor, False)

    def to_read(self) -> Sequence[int]:
        """Descriptors to wait for."""
        return list(self._files)

    def read(self, descriptor: int) -> bool:
        """Pass on what came; False when there was nothing."""
        file, target = self._files[descriptor]
        try:
            data = os.read(descriptor, BACKLOG)
        except BlockingIOError:
            return False
        if data:
            target.write(data)
        else:
            del self._files[descriptor]
            file.close()
        return bool(data)

    def _read_last(self) -> None:
        """Pass on what is left in the pipes, but not to their end: a child may hold them open for ever."""
        for descriptor, (file, _) in list(self._files.items()):
            while descriptor in self._files and self.read(descriptor):
                continue
            file.close()
        self._files.clear()

    @property
    def running(self) -> bool:
        """Whether the launcher is running."""
        return self._process.returncode is None

    def reap(self) -> bool:
        """Whether the launcher has ended since the last call."""
        if not self.running or self._process.poll() is None:
            return False
        self._read_last()
        code = self._process.returncode
        status = -code if code < 0 else code << 8
        self.how = f"{self.name} {describe_end(status)}"
        if code < 0 and len(self._signals) > 1:
            self.killed = -code, time.monotonic()
        return True

    def end(self) -> None:
        """Ask the launcher to end; the second call kills it."""
        if self.running:
            self._process.send_signal(self._signals[0])
            self._signals = self._signals[-1:]

    def kill(self) -> None:
        """Kill the launcher and its descendants, as mpirun's ssh may wait for a host that is gone."""
        if self.running:
            self._signals = self._signals[-1:]
            self._process.kill()
            try:
                self._process.wait(_KILL)
            except subprocess.TimeoutExpired:
                self.problem = f"{self.name} does not end, not even by SIGKILL"
        self._read_last()
        end_all(self._others, _KILL)
        _native.set_child_subreaper(False)
