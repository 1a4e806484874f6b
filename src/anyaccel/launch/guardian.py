# SPDX-License-Identifier: Apache-2.0
"""The guardian: the process between the launcher and the workers. It is the parent of every worker.

It exists so that a launcher that is killed with SIGKILL leaves nothing behind: the guardian sees the end of
a pipe that only the launcher holds open. It is a subreaper: what a worker started comes to it as a child when
its own parent dies, whatever session it moved to. As long as it has a child, something of the job is alive;
when it has none, nothing is.

It is in a process group of its own, so that what is sent to the launcher's whole group does not reach it.
"""

from __future__ import annotations

import errno
import marshal
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from anyaccel import _native
from anyaccel.launch import processes
from anyaccel.launch.output import Output
from anyaccel.launch.worker import STOP_SIGNALS, Worker, become_worker

TYPE_CHECKING = False  # importing typing for it takes 7 ms of each launch
if TYPE_CHECKING:
    import mmap
    from typing import NoReturn

# Added to a signal number on the control pipe: the workers have it already, it went to the whole group.
DELIVERED = 0x80
# Shared memory for the report: the tail of a worker takes at most 40 kB of it, immortal processes as much.
REPORT_BYTES = 1 << 17
# What counts as the same moment: a worker dies of Ctrl-C before the launcher has told us of it.
SAME_MOMENT = 0.1
# Seconds after SIGKILL until we stop waiting: much memory takes a while to free, a stuck disk takes for ever.
KILL_TIMEOUT = 30.0
# Seconds in which helpers of finished workers (a resource tracker) end by themselves; what stays is named.
_SETTLE = 0.2
# Seconds that left-over processes have between SIGTERM and SIGKILL.
_LEFTOVER_GRACE = 0.8
# Bytes waiting for a slow reader of standard error; above this workers wait, as they would without us.
_BACKLOG = 1 << 16
_TAIL_BYTES = 1 << 14
_TAIL_LINES = 20
# Reads per worker of what is still in its pipe when everything has ended; somebody may write for ever.
_LAST_READS = 64
# Descriptors that must be left when all workers run: two to be woken up, the rest to look through /proc.
_SPARE_DESCRIPTORS = 4

_ADVICE = {
    errno.EMFILE: "raise the limit on open files (ulimit -n), or start fewer workers",
    errno.EAGAIN: "raise the limit on processes (ulimit -u, or pids.max of the cgroup), or start fewer workers",
}


@dataclass(frozen=True)
class Failure:
    """The first worker that failed.

    Attributes:
        status: its wait status.
        time: when it was noticed, in seconds of CLOCK_MONOTONIC.
        others: number of workers that were alive then.
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
    """What the guardian tells the launcher at the end, through shared memory.

    Attributes:
        failure: the first failure; None when no worker failed before somebody ended the job.
        signal: the first signal that asked to end the job.
        immortal: processes that did not end, described.
        problem: why not all workers could be started.
    """

    failure: Failure | None = None
    signal: int | None = None
    immortal: str = ""
    problem: str = ""

    def encode(self) -> bytes:
        failure = tuple(vars(self.failure).values()) if self.failure else None
        return marshal.dumps((failure, self.signal, self.immortal[:10_000], self.problem))

    @classmethod
    def decode(cls, data: bytes) -> Report:
        """The opposite of `encode`, in the process that the guardian was forked from.

        Raises:
            EOFError, ValueError, TypeError: the guardian did not come to the end of it.
        """
        failure, number, immortal, problem = marshal.loads(data)
        return cls(failure and Failure(*failure), number, immortal, problem)


class _StartError(Exception):
    """The system does not give what another worker takes."""


class _Phase(Enum):
    RUNNING = "workers run"
    STOPPING = "workers were asked to end"
    LEFT_OVER = "workers have ended, what they started has not"
    KILLING = "everything was sent SIGKILL"


def guard(workers: Sequence[Worker], grace_period: float, control: int, report: mmap.mmap, group: int) -> NoReturn:
    """Be the guardian in this freshly forked process, whose signals are blocked. Never returns.

    Args:
        grace_period: seconds between asking workers to end and killing them.
        control: read end of the launcher's pipe: one byte a signal, end of file when the launcher is gone.
        report: shared memory that gets the encoded Report.
        group: process group of the launcher; 0 when its leader is outside our PID namespace.
    """
    code = 70  # EX_SOFTWARE, with a traceback
    try:
        try:
            result = _Guardian(workers, grace_period, control, group).run()
        except _StartError as error:
            result = Report(problem=str(error), immortal=_end_everything())
        report.write(result.encode())
        code = 0
    finally:
        # The stack below belongs to the launcher's copy: it must not be unwound here.
        if code:
            sys.excepthook(*sys.exc_info())
            _end_everything()
        os._exit(code)


def _end_everything() -> str:
    """The hard way, when the guardian itself cannot go on; describes what does not end."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # looking through /proc takes descriptors
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    return processes.describe(processes.end_all((), KILL_TIMEOUT))


class _Guardian:
    def __init__(self, workers: Sequence[Worker], grace_period: float, control: int, group: int) -> None:
        self._grace = grace_period
        self._control = control
        self._output = Output()
        self._running: dict[int, int] = {}  # process id -> rank
        self._pipes: dict[int, int] = {}  # read end of standard error -> rank
        self._tails = [bytearray() for _ in workers]
        self._phase = _Phase.RUNNING
        self._ask_at: float | None = None  # when SIGTERM follows a gentler signal
        self._act_at: float | None = None  # when the phase ends
        self._signalled_at = 0.0
        self._give_up_at = 0.0
        self._children = True
        self._finished_at: float | None = None
        self._launcher_gone = False
        self._result = Report()
        self._set_up()
        self._start(workers, group)
        self._wakeup = self._listen()

    def _set_up(self) -> None:
        os.setpgid(0, 0)
        _native.set_child_subreaper(True)
        os.set_blocking(self._control, False)
        try:
            with open("/proc/self/comm", "w") as file:
                file.write("anyaccel-guard")
        except OSError:
            return  # /proc may be read-only

    def _start(self, workers: Sequence[Worker], group: int) -> None:
        own = os.getpid()
        rank = 0
        try:
            spare = [os.dup(self._control) for _ in range(_SPARE_DESCRIPTORS)]
            for worker in workers:
                rank = worker.binding.rank
                read_end, write_end = os.pipe()
                pid = os.fork()
                if pid == 0:
                    become_worker(worker, own, group, write_end)
                os.close(write_end)
                os.set_blocking(read_end, False)
                self._running[pid] = rank
                self._pipes[read_end] = rank
        except OSError as error:
            advice = _ADVICE.get(error.errno or 0, "start fewer workers")
            raise _StartError(
                f"rank {rank} of {len(workers)} workers cannot be started: {error.strerror}; {advice}"
            ) from None
        for descriptor in spare:
            os.close(descriptor)

    def _listen(self) -> int:
        """Let signals wake the loop; returns the descriptor they can be read from."""
        read_end, write_end = os.pipe()
        for end in (read_end, write_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda _number, _frame: None)
        # We write to the terminal from a background group, and to readers that may have gone.
        for number in (signal.SIGTTOU, signal.SIGTTIN, signal.SIGTSTP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        return read_end

    def run(self) -> Report:
        while True:
            self._reap()
            self._advance(time.monotonic())
            if self._done(time.monotonic()):
                break
            self._wait()
        if failure := self._result.failure:
            self._result.failure = replace(failure, tail=self._tail(failure.rank))
        return self._result

    def _done(self, now: float) -> bool:
        if self._children:
            return False
        if self._finished_at is None:
            self._finished_at = now
            for pipe in list(self._pipes):
                for _ in range(_LAST_READS):
                    if not self._pump(pipe):
                        break
        # Who pages through the output may take an hour; who pressed Ctrl-C does not want to wait.
        impatient = self._launcher_gone or (self._result.signal is not None and now > self._finished_at + 1)
        return not self._output.pending or impatient

    def _wait(self) -> None:
        """Sleep until something happens or the next deadline comes."""
        now = time.monotonic()
        deadlines = [at for at in (self._ask_at, self._act_at) if at is not None] if self._children else []
        if self._finished_at is not None and self._result.signal is not None:
            deadlines.append(self._finished_at + 1)
        poller = select.poll()
        poller.register(self._wakeup, select.POLLIN)
        if not self._launcher_gone:
            poller.register(self._control, select.POLLIN)
        if self._output.pending:
            poller.register(self._output.descriptor, select.POLLOUT)
        if self._output.pending < _BACKLOG:
            for pipe in self._pipes:
                poller.register(pipe, select.POLLIN)
        timeout = max(0.0, min(deadlines) - now) * 1000 + 1 if deadlines else None
        for descriptor, _ in poller.poll(timeout):
            if descriptor == self._wakeup:
                self._on_signals()
            elif descriptor == self._control:
                self._on_control()
            elif descriptor in self._pipes:
                self._pump(descriptor)
        self._output.flush()

    def _on_signals(self) -> None:
        for number in os.read(self._wakeup, 4096):
            if number != signal.SIGCHLD:
                self._stop(number, delivered=False)

    def _on_control(self) -> None:
        message = os.read(self._control, 4096)
        if not message:
            self._launcher_gone = True
            self._kill()
        for byte in message:
            self._stop(byte & ~DELIVERED, delivered=bool(byte & DELIVERED))

    def _pump(self, pipe: int) -> bool:
        """Pass on what a worker wrote to standard error and keep its end; False if there was nothing."""
        rank = self._pipes[pipe]
        try:
            data = os.read(pipe, _BACKLOG)
        except BlockingIOError:
            return False
        if not data:
            del self._pipes[pipe]
            os.close(pipe)
            return False
        self._output.write(data)
        self._tails[rank] += data
        del self._tails[rank][:-_TAIL_BYTES]
        return True

    def _tail(self, rank: int) -> tuple[str, ...]:
        lines = self._tails[rank].decode(errors="replace").splitlines()
        return tuple([line[:500] for line in lines if line.strip()][-_TAIL_LINES:])

    def _reap(self) -> None:
        ended: list[tuple[int, int, int]] = []
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._children = False
                break
            if not pid:
                break
            if pid in self._running:
                ended.append((pid, self._running.pop(pid), status))
        failed = [entry for entry in ended if entry[2]]
        if failed and self._phase is _Phase.RUNNING:
            # Of those that ended at once, one that was killed is rather the cause than one that gave up.
            pid, rank, status = min(failed, key=lambda entry: not os.WIFSIGNALED(entry[2]))
            now = time.monotonic()
            self._result.failure = Failure(rank, pid, status, now, len(self._running))
            # SIGTERM follows in a moment, unless we are told by then that all of us were sent another signal.
            self._phase = _Phase.STOPPING
            self._ask_at, self._act_at = now + min(SAME_MOMENT, self._grace / 2), now + self._grace

    def _stop(self, number: int, *, delivered: bool) -> None:
        """Somebody wants the job to end."""
        now = time.monotonic()
        if self._result.signal is None:
            self._result.signal, self._signalled_at = number, now
            nobody_asked = self._phase is _Phase.STOPPING and self._ask_at is not None
            if self._phase is _Phase.RUNNING or nobody_asked:
                self._ask(number, now, delivered=delivered)
        elif number == signal.SIGINT and now > self._signalled_at + SAME_MOMENT:
            self._kill()

    def _ask(self, number: int, now: float, *, delivered: bool) -> None:
        self._phase = _Phase.STOPPING
        self._act_at = now + self._grace
        # A Python that was started in the background ignores SIGINT.
        self._ask_at = None if number == signal.SIGTERM else now + self._grace / 2
        if not delivered:
            processes.send(self._running, number)

    def _kill(self) -> None:
        now = time.monotonic()
        if self._phase is not _Phase.KILLING:
            self._phase = _Phase.KILLING
            self._give_up_at = now + KILL_TIMEOUT
        self._ask_at = None
        # Looked at again after each death, and now and then: a process may have forked while we looked.
        self._act_at = now + 0.5
        processes.send(processes.descendants(), signal.SIGKILL)

    def _advance(self, now: float) -> None:
        """Do what is due."""
        if not self._children:
            return
        if self._phase is _Phase.KILLING:
            if now > self._give_up_at:
                self._result.immortal = processes.describe(processes.descendants())
                self._children = False
            else:
                self._kill()
        elif not self._running and self._phase is not _Phase.LEFT_OVER:
            end = now + _SETTLE + _LEFTOVER_GRACE
            if self._phase is _Phase.STOPPING:
                end = max(end, self._act_at or 0.0)  # the grace period holds for what is below a worker too
            self._phase = _Phase.LEFT_OVER
            self._ask_at, self._act_at = now + _SETTLE, end
        elif self._ask_at is not None and now >= self._ask_at:
            self._ask_at = None
            if self._phase is _Phase.LEFT_OVER:
                left = [pid for pid, state in processes.descendants().items() if state != "Z"]
                if left:
                    self._output.line(f"ending what finished workers left behind: {processes.describe(left)}")
                    processes.send(left, signal.SIGTERM)
            else:
                processes.send(self._running, signal.SIGTERM)
        elif self._act_at is not None and now >= self._act_at:
            self._kill()
