# SPDX-License-Identifier: Apache-2.0
"""The processes of a command: a launcher as its child, the ranks below it, and a socket to each rank."""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from anyaccel import _native, env
from anyaccel.errors import AnyAccelError
from anyaccel.inference.ranks.channel import Channel
from anyaccel.terminal import marked

if TYPE_CHECKING:
    from anyaccel.launch import LaunchPlan

# Seconds that a rank has between SIGTERM and SIGKILL, and the launcher to end all ranks.
GRACE = 2.0
_END = 30.0


class Processes:
    """A launcher below this process, which starts the ranks.

    Args:
        start: the launcher's main function; returns its exit code.
        kept: sockets that the launcher keeps open.

    Attributes:
        channels: channels to the ranks, in their order.
        names: names of the ranks for errors.
    """

    def __init__(self, start: Callable[[], int], kept: Sequence[int] = ()) -> None:
        self.channels: list[Channel] = []
        self.names: list[str] = []
        self._code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # the launcher's exit code would be lost
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        own = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _be_launcher(own, start, kept)

    def code(self) -> int | None:
        """Exit code of the launcher; None as long as it runs."""
        if self._code is None:
            try:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
            except ChildProcessError:  # a signal handler calls this between waitpid() and the assignment below
                return None
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, seconds: float) -> int | None:
        """Wait at most so many seconds for the launcher to end; returns its exit code, or None."""
        deadline = time.monotonic() + seconds
        while self.code() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        return self._code

    def end(self, timeout: float) -> None:
        """End all ranks: they end when their sockets are closed, and the launcher ends those that do not."""
        for channel in self.channels:
            channel.close()
        if self.wait(timeout) is None:
            os.kill(self._pid, signal.SIGTERM)
            if self.wait(_END) is None:
                os.kill(self._pid, signal.SIGKILL)  # the guardian of the launcher then ends what it has started
                self.wait(_END)


class RankProcesses(Processes):
    """The ranks of a plan for this machine, each with a socket pair.

    Args:
        module: the module that a rank runs; see `rank.main`.
    """

    def __init__(self, plan: LaunchPlan, module: str = "anyaccel.inference.ranks.rank") -> None:
        timeout = env.ANYACCEL_COMM_TIMEOUT.get()
        pairs = [socket.socketpair() for _ in plan.ranks]
        near, far = ([end.detach() for end in ends] for ends in zip(*pairs, strict=True))

        def start() -> int:
            for descriptor in far:
                os.set_inheritable(descriptor, True)
            from anyaccel import launch
            from anyaccel.launch.output import OutputOptions

            def argv(binding: Any) -> list[str]:
                return [sys.executable, "-m", module, *map(str, (far[binding.rank], *far))]

            return launch.launch_local(plan, argv, grace_period=GRACE, output=OutputOptions(log_level="error"))

        super().__init__(start, far)
        for descriptor in far:
            os.close(descriptor)
        self.channels = [Channel(descriptor, timeout) for descriptor in near]
        self.names = [f"rank {rank}" for rank in range(len(near))]


def _close_sockets_but(kept: Sequence[int]) -> None:
    """Close the sockets that were inherited from the command, except for its standard streams and `kept`.

    Otherwise the ranks would not notice the end of the command, and connections of a server would stay open for their
    clients. Pipes stay open, as they may belong to a library that uses them after a fork (libuv).
    """
    for link in list(Path("/proc/self/fd").iterdir()):
        descriptor = int(link.name)
        with suppress(OSError):  # for the descriptor of the listing itself
            if descriptor > 2 and descriptor not in kept and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.close(descriptor)


def _be_launcher(command: int, start: Callable[[], int], kept: Sequence[int]) -> NoReturn:
    """Run the launcher in the forked process: start the ranks and wait for their end. Never returns."""
    code = 70  # EX_SOFTWARE, with a traceback
    try:
        _native.set_parent_death_signal(signal.SIGTERM)
        if os.getppid() != command:
            os._exit(128 + signal.SIGTERM)
        os.setsid()  # signals of the terminal are for the command only
        signal.set_wakeup_fd(-1)  # it may belong to an asyncio loop of the command
        _close_sockets_but(kept)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        code = start()
    except AnyAccelError as error:
        sys.stderr.write(f"anyaccel: {marked(f'error: {error}', sys.stderr)}\n")
        sys.stderr.flush()
        code = error.exit_code
    finally:
        if code == 70:
            sys.excepthook(*sys.exc_info())
        os._exit(code)  # the stack below this frame is a copy of the command's, and must not be unwound
