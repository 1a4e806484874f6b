# SPDX-License-Identifier: Apache-2.0
"""mpirun, srun or pdsh as a child: it only starts the agents, which talk to us by themselves."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from anyaccel import _native
from anyaccel.launch.failure import describe_end
from anyaccel.launch.processes import children, end_all

# Seconds for it to end after SIGKILL.
_KILL = 5.0


class LauncherProcess:
    """The launcher of the agents.

    Attributes:
        may_wait: it may wait for hours until hosts are free, so that no deadline holds before the first agent calls.
        problem: why not all agents were started.
        how: how it ended, in words; "" until then.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, may_wait: bool) -> None:
        self.name = os.path.basename(command[0])  # noqa: PTH119
        self.may_wait = may_wait
        self.problem = ""
        self.how = ""
        self._signals = [signal.SIGTERM, signal.SIGKILL]
        own = os.getpid()
        self._others = children()
        _native.set_child_subreaper(True)  # what it leaves behind comes to us

        def tie() -> None:
            _native.set_parent_death_signal(signal.SIGTERM)
            if os.getppid() != own:
                os._exit(128 + signal.SIGTERM)

        # A session of its own: what the terminal sends goes through us to the agents, once and in order.
        self._process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=tie
        )

    @property
    def running(self) -> bool:
        """Whether it is there."""
        return self._process.returncode is None

    def reap(self) -> bool:
        """Whether it has just ended."""
        if not self.running or self._process.poll() is None:
            return False
        code = self._process.returncode
        status = -code if code < 0 else code << 8
        self.how = f"{self.name} {describe_end(status)}"
        return True

    def end(self) -> None:
        """Ask it to end; the second time, kill it."""
        if self.running:
            self._process.send_signal(self._signals[0])
            self._signals = self._signals[-1:]

    def kill(self) -> None:
        """Leave nothing of it behind: mpirun's ssh may wait for a host that is gone."""
        if self.running:
            self._process.kill()
            try:
                self._process.wait(_KILL)
            except subprocess.TimeoutExpired:
                self.problem = f"{self.name} does not end, not even by SIGKILL"
        end_all(self._others, _KILL)
        _native.set_child_subreaper(False)
