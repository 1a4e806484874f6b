# SPDX-License-Identifier: Apache-2.0
"""The launcher's side of an agent: a connection through the pipes of ssh, or through TCP from below mpirun or srun."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from anyaccel.launch.cluster.channel import FrameReader
from anyaccel.launch.failure import Failure, Report
from anyaccel.launch.local.signals import ignore_passed_on
from anyaccel.launch.local.streams import BACKLOG
from anyaccel.launch.output import Output

# Bytes of ssh's output before the agent's first frame that are kept for an error message.
_STDERR_TAIL = 4096
# Milliseconds after which a TCP connection whose data is not acknowledged counts as lost.
_TCP_TIMEOUT_MS = 5000


class Agent:
    """One agent: of a host, or of a rank.

    Attributes:
        host: name of its host.
        size: number of its workers.
        ready: the data of its READY frame; None before that has come.
        failure: its first worker that has failed, and `failed_at`, when we were told.
        report: how its workers have ended, and `reported_at`, when we were told; None before that.
        problem: why it cannot take part, or was lost; `code` is the exit code for that.
        ended: whether its connection has ended.
    """

    def __init__(self, host: str, size: int) -> None:
        self.host = host
        self.size = size
        self.ready: dict[str, Any] | None = None
        self.failure: Failure | None = None
        self.failed_at = 0.0
        self.report: Report | None = None
        self.reported_at = 0.0
        self.problem = ""
        self.code = 1
        self.ended = False
        self._unsent = bytearray()

    @property
    def said(self) -> str:
        """The last line that came before the agent's first frame: an error message of ssh."""
        return ""

    @property
    def running(self) -> bool:
        """Whether workers of this agent may still be alive."""
        return not self.ended and self.report is None

    @property
    def behind(self) -> bool:
        """Whether too much is queued, as the agent does not read."""
        return len(self._unsent) > BACKLOG

    def send(self, data: bytes) -> None:
        """Queue bytes, and send as many as the connection takes without waiting."""
        descriptor = self._input()
        if descriptor is None:
            return
        self._unsent += data
        try:
            while self._unsent:
                del self._unsent[: os.write(descriptor, self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self.hang_up()  # the other end is gone, which the next read notices

    def to_write(self) -> int | None:
        """Descriptor to wait for until more can be sent; None when there is nothing to send."""
        return self._input() if self._unsent else None

    def to_read(self) -> Sequence[int]:
        """Descriptors to wait for."""
        raise NotImplementedError

    def read(self, descriptor: int) -> bool:
        """Read and handle what has arrived; False when there was nothing."""
        raise NotImplementedError

    def hang_up(self) -> None:
        """End the agent's input: it ends its workers at once."""
        raise NotImplementedError

    def close_output(self) -> None:
        """Close the pipes that its workers' standard output comes through, so that their next write fails."""

    def kill(self) -> None:
        """Cut the connection."""
        raise NotImplementedError

    def reap(self) -> str | None:
        """How the connection has ended; None while it is open."""
        raise NotImplementedError

    def _input(self) -> int | None:
        raise NotImplementedError


class PipeAgent(Agent):
    """An agent behind ssh, or of this host, behind nothing.

    Args:
        command: what starts it.
        secret: the secret of the job.
        on_frame: called with this agent, kind and data of each frame.
        console: gets what its workers write to standard error.
        output: gets what they write to standard output.

    Raises:
        OSError: the command cannot be started.
    """

    def __init__(
        self,
        host: str,
        size: int,
        command: Sequence[str],
        secret: str,
        on_frame: Callable[[Agent, str, Any], None],
        console: Output,
        output: Output,
    ) -> None:
        super().__init__(host, size)
        self._said = bytearray()
        self._console = console
        self._output = output
        self._name = command[0].rpartition("/")[2]
        self._reader = FrameReader(secret, lambda kind, data: on_frame(self, kind, data), self._on_text)
        # A session of its own, so that signals of the terminal go to us only, and we forward them in order.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=ignore_passed_on,
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin = self._process.stdin
        self._files = {file.fileno(): file for file in (self._process.stdout, self._process.stderr)}
        self._stdout = self._process.stdout.fileno()
        for file in (self._stdin, *self._files.values()):
            os.set_blocking(file.fileno(), False)

    @property
    def said(self) -> str:
        lines = [line.strip() for line in self._said.decode(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def _input(self) -> int | None:
        return None if self._stdin.closed else self._stdin.fileno()

    def to_read(self) -> Sequence[int]:
        return list(self._files)

    def read(self, descriptor: int) -> bool:
        try:
            data = os.read(descriptor, BACKLOG)
        except BlockingIOError:
            return False
        if not data:
            self._files.pop(descriptor).close()
        elif descriptor == self._stdout:
            self._output.write(data)
        else:
            self._reader.feed(data)
        return bool(data)

    def _on_text(self, text: bytes) -> None:
        if self.ready is not None:
            self._console.write(text)
            return
        self._said += text
        del self._said[:-_STDERR_TAIL]

    def hang_up(self) -> None:
        self._unsent.clear()
        if not self._stdin.closed:
            try:
                self._stdin.close()
            except OSError:
                return  # the descriptor is closed nevertheless

    def close_output(self) -> None:
        # ssh tells the other side (eow@openssh.com), which closes its end in turn.
        if self._stdout in self._files:
            self._files.pop(self._stdout).close()

    def kill(self) -> None:
        self.hang_up()
        self._process.kill()

    def reap(self) -> str | None:
        if self._process.poll() is None:
            return None
        for descriptor, file in list(self._files.items()):
            # Read what is left in the pipes, but not to their end: a child of ssh may hold them open for ever.
            while descriptor in self._files and self.read(descriptor):
                continue
            file.close()
        self._files.clear()
        self._reader.close()
        self.hang_up()
        return (
            self.said
            if self.ready is None and self.said
            else f"{self._name} ended with code {self._process.returncode}"
        )


class SocketAgent(Agent):
    """An agent that connects to the launcher through TCP."""

    def __init__(self, host: str, size: int) -> None:
        super().__init__(host, size)
        self._connection: socket.socket | None = None
        self._reader: FrameReader | None = None
        self._closed = ""
        self._hung_up = False

    @property
    def connected(self) -> bool:
        """Whether it has connected, even if the connection has ended since."""
        return self._reader is not None

    def attach(
        self, connection: socket.socket, reader: FrameReader, on_frame: Callable[[Agent, str, Any], None]
    ) -> None:
        """Take the connection that it came with; `on_frame` hears its frames from now on."""
        self._connection, self._reader = connection, reader
        reader.on_frame = lambda kind, data: on_frame(self, kind, data)
        reader.on_text = lambda _text: None
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_TIMEOUT_MS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _input(self) -> int | None:
        return self._connection.fileno() if self._connection and not self._hung_up else None

    def to_read(self) -> Sequence[int]:
        return [self._connection.fileno()] if self._connection else []

    def read(self, descriptor: int) -> bool:
        assert self._connection and self._reader
        try:
            data = self._connection.recv(BACKLOG)
        except BlockingIOError:
            return False
        except OSError as error:
            data, self._closed = b"", error.strerror or str(error)
        if data:
            self._reader.feed(data)
        else:
            self._closed = self._closed or "it ended"
            self.kill()
        return bool(data)

    def hang_up(self) -> None:
        self._unsent.clear()
        if self._connection and not self._hung_up:
            self._hung_up = True
            try:
                self._connection.shutdown(socket.SHUT_WR)  # its report can still be read
            except OSError:
                return  # gone already

    def kill(self) -> None:
        self._unsent.clear()
        self._closed = self._closed or "we cut it"
        if self._connection:
            self._connection.close()
            self._connection = None

    def reap(self) -> str | None:
        return self._closed or None
