# SPDX-License-Identifier: Apache-2.0
"""The guardian: the process between the launcher and the workers. It is the parent of every worker.

It exists so that a launcher that is killed with SIGKILL leaves nothing behind: the guardian notices the end of a pipe
that only the launcher holds open. It is a subreaper: processes that a worker has started become its children when
their own parent dies, whatever session they have moved to. So the job has ended exactly when it has no child left.

It is in a process group of its own, so that signals to the launcher's whole group do not reach it.
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
from dataclasses import replace
from enum import Enum

from anyaccel import _native
from anyaccel.launch import processes
from anyaccel.launch.failure import Failure, Report
from anyaccel.launch.local.protocol import (
    DELIVERED,
    DUE,
    GUARDIAN_NAME,
    HOST_LOST,
    HOST_LOST_GRACE,
    KILL_TIMEOUT,
    LEFTOVER_GRACE,
    REPORT_BYTES,
    SAME_MOMENT,
    SENT_TO_ALL,
    STDERR_CLOSED,
    Link,
)
from anyaccel.launch.local.streams import Streams
from anyaccel.launch.local.worker import PASSED_ON, STOP_SIGNALS, Worker, become_worker
from anyaccel.launch.output import ERROR, WARNING, Output, OutputOptions, cannot_write

TYPE_CHECKING = False
if TYPE_CHECKING:
    import mmap
    from typing import NoReturn

# Seconds that helpers of finished workers, such as a resource tracker, have to end, also on a busy machine; a warning
# names those that stay.
_HELPERS_S = 1.0
# A wakeup that is so many seconds late means that this process, or the machine, was stopped meanwhile.
_STOPPED_S = 2.0
_LONGEST_POLL = 86_400_000  # milliseconds
# Descriptors that must be free once all workers run: two for the wakeup pipe, the rest for reading /proc.
_SPARE_DESCRIPTORS = 4

_ADVICE = {
    errno.EMFILE: "raise the limit on open files (ulimit -n), or start fewer workers",
    errno.ENOSPC: "free some space, or give another folder for the logs",
    errno.EAGAIN: "raise the limit on processes (ulimit -u, or pids.max of the cgroup), or start fewer workers",
}


class _StartError(Exception):
    """The system refuses the memory, process or descriptors that another worker needs."""


class _Phase(Enum):
    RUNNING = "workers run"
    STOPPING = "workers were asked to end"
    LEFT_OVER = "workers have ended, what they started has not"
    KILLING = "everything was sent SIGKILL"


def guard(
    workers: Sequence[Worker],
    grace_period: float,
    control: int,
    report: mmap.mmap,
    group: int,
    console: Output,
    options: OutputOptions,
    link: Link | None,
) -> NoReturn:
    """Be the guardian in this freshly forked process, whose signals are blocked. Never returns.

    Args:
        grace_period: seconds between asking workers to end and killing them.
        control: read end of the launcher's pipe: one byte a signal, end of file when the launcher is gone.
        report: shared memory for the encoded Report and the next deadline.
        group: process group of the launcher; 0 when its leader is outside our PID namespace.
        console: standard error.
        options: where the workers' output goes.
        link: the launcher on another host; None when there is none.
    """
    code = 70  # EX_SOFTWARE, with a traceback
    try:
        try:
            streams = Streams(options, console)
            result = _Guardian(workers, grace_period, control, report, group, streams, console, link).run()
        except _StartError as error:
            result = Report(problem=str(error), unkillable=_end_everything())
        report.write(marshal.dumps(result.encode()))
        code = 0
    finally:
        # The stack below this frame is a copy of the launcher's, and must not be unwound here.
        if code:
            sys.excepthook(*sys.exc_info())
            _end_everything()
        os._exit(code)


def _end_everything() -> str:
    """Kill all descendants, as the guardian itself cannot go on; describes those that do not end."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # reading /proc needs free descriptors
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    return processes.describe(processes.end_all((), KILL_TIMEOUT))


class _Guardian:
    def __init__(
        self,
        workers: Sequence[Worker],
        grace_period: float,
        control: int,
        shared: mmap.mmap,
        group: int,
        streams: Streams,
        console: Output,
        link: Link | None,
    ) -> None:
        self._grace = grace_period
        self._control = control
        self._shared = shared
        self._link = link
        self._last_heard = time.monotonic()
        self._output = console
        self._streams = streams
        self._outputs = [*streams.outputs, *([link.output] if link and link.output is not console else [])]
        self._broken: list[Output] = []  # outputs that cannot be written to any more
        self._running: dict[int, int] = {}  # process id -> rank
        self._phase = _Phase.RUNNING
        self._sigterm_at: float | None = None  # when SIGTERM follows a gentler signal
        self._phase_ends_at: float | None = None  # when the phase ends
        self._signalled_at = 0.0
        self._pass_on_at: dict[int, float] = {}  # when a signal that is for the workers alone is passed on
        self._came_here: dict[int, float] = {}  # when this process got one
        self._kill_deadline = 0.0
        self._round: set[tuple[int, int]] = set()  # workers of torch when another host was lost
        self._round_ends_at: float | None = None
        self._children = True
        self._finished_at: float | None = None
        self._launcher_gone = False
        self._result = Report()
        self._set_up()
        # A parent id of 0 means that we are the first process of a PID namespace (`unshare --pid`): the launcher's
        # group is in another namespace, and cannot be joined.
        self._start(workers, group if os.getppid() else 0)
        self._wakeup = self._listen()

    def _set_up(self) -> None:
        os.setpgid(0, 0)
        _native.set_child_subreaper(True)
        os.set_blocking(self._control, False)
        try:
            with open("/proc/self/comm", "w") as file:
                file.write(GUARDIAN_NAME)
        except OSError:
            return  # /proc may be read-only

    def _start(self, workers: Sequence[Worker], group: int) -> None:
        own = os.getpid()
        rank = 0
        try:
            spare = [os.dup(self._control) for _ in range(_SPARE_DESCRIPTORS)]
            for worker in workers:
                rank = worker.binding.rank
                output, error = self._streams.open(rank)
                pid = os.fork()
                if pid == 0:
                    become_worker(worker, own, group, output, error)
                os.close(error)
                if output is not None:
                    os.close(output)
                self._running[pid] = rank
        except OSError as error:
            advice = _ADVICE.get(error.errno or 0, "start fewer workers")
            file = f" ({error.filename})" if error.filename else ""
            raise _StartError(
                f"rank {rank} of {len(workers)} workers cannot be started: {error.strerror}{file}; {advice}"
            ) from None
        for descriptor in spare:
            os.close(descriptor)

    def _listen(self) -> int:
        """Make signals wake up the event loop; returns the descriptor from which they can be read."""
        read_end, write_end = os.pipe()
        for end in (read_end, write_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, *PASSED_ON, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda _number, _frame: None)
        # We write to the terminal from a background process group, and to pipes whose readers may be gone.
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
        self._close_broken_outputs()  # for errors in writing the workers' last output
        if failure := self._result.failure:
            self._result.failure = replace(failure, tail=self._streams.tail(failure.rank))
        self._result.loss = "; ".join(filter(None, (output.loss for output in self._streams.outputs)))
        return self._result

    def _done(self, now: float) -> bool:
        if self._children:
            return False
        if self._finished_at is None:
            self._finished_at = now
            self._streams.finish()
        # A user who pages through the output may take an hour, but after Ctrl-C the job should end.
        impatient = self._launcher_gone or (self._result.signal is not None and now > self._finished_at + 1)
        return not any(output.pending for output in self._outputs) or impatient

    def _wait(self) -> None:
        """Sleep until something happens or the next deadline comes."""
        now = time.monotonic()
        times = (self._sigterm_at, self._phase_ends_at, self._round_ends_at, *self._pass_on_at.values())
        deadlines = [at for at in times if at is not None] if self._children else []
        if self._finished_at is not None and self._result.signal is not None:
            deadlines.append(self._finished_at + 1)
        poller = select.poll()
        poller.register(self._wakeup, select.POLLIN)
        if not self._launcher_gone:
            poller.register(self._control, select.POLLIN)
            if self._link:
                poller.register(self._link.descriptor, select.POLLIN)
                if not self._launcher_gone:
                    deadlines.append(self._last_heard + self._link.timeout_s)
        for output in self._outputs:
            if output.pending:
                events = select.POLLOUT
                if self._link and output.descriptor == self._link.descriptor and not self._launcher_gone:
                    events |= select.POLLIN
                poller.register(output.descriptor, events)
        for pipe in self._streams.readable():
            poller.register(pipe, select.POLLIN)
        # poll() takes at most 24 days; after that the deadline is looked at again.
        timeout = min(max(0.0, min(deadlines) - now) * 1000 + 1, _LONGEST_POLL) if deadlines else None
        DUE.pack_into(self._shared, REPORT_BYTES, min(deadlines, default=0.0))
        ready = poller.poll(timeout)
        if timeout is not None and time.monotonic() > now + timeout / 1000 + _STOPPED_S:
            self._last_heard = time.monotonic()  # heartbeats may have come while we were stopped
        for descriptor, event in ready:
            if descriptor == self._wakeup:
                self._on_signals()
            elif descriptor == self._control or (self._link and descriptor == self._link.descriptor):
                if event & ~select.POLLOUT:
                    self._on_control(descriptor)
            elif self._streams.owns(descriptor):
                self._streams.pump(descriptor)
        for output in self._outputs:
            output.flush()
        self._close_broken_outputs()

    def _close_broken_outputs(self) -> None:
        """Close the pipes that lead to broken outputs, so that the workers' next write fails."""
        for output in self._streams.outputs:
            if output.problem and output not in self._broken:
                self._broken.append(output)
                if output.lost and not self._link:  # with a link, the launcher reports it
                    text = cannot_write(output, logged=self._streams.logged, every_log=self._streams.every_log)
                    self._output.line(f"error: {text}", ERROR)
            if output.problem:
                self._streams.cut(output)

    def _on_signals(self) -> None:
        for number in os.read(self._wakeup, 4096):
            if number in PASSED_ON:
                # Nobody sends it to this process alone: it has been sent to all processes of the job.
                self._came_here[number] = time.monotonic()
                self._pass_on_at.pop(number, None)
            elif number != signal.SIGCHLD:
                self._stop(number, delivered=False)

    def _on_control(self, descriptor: int) -> None:
        try:
            message = os.read(descriptor, 4096)
        except OSError:
            message = b""  # the connection was reset
        if not message:
            self._lose_launcher()
        self._last_heard = time.monotonic()
        for byte in message.replace(b"\0", b""):
            if byte == STDERR_CLOSED:
                self._streams.cut(self._output)
                continue
            if byte == HOST_LOST:
                self._round_ends_at = time.monotonic() + HOST_LOST_GRACE
                self._round = self._workers_of_torch()
                continue
            number, now = byte & ~DELIVERED, time.monotonic()
            if number not in PASSED_ON:
                self._stop(number, delivered=bool(byte & DELIVERED))
            elif now > self._came_here.get(number, -SENT_TO_ALL) + SENT_TO_ALL:
                self._pass_on_at.setdefault(number, now + SENT_TO_ALL)

    def _workers_of_torch(self) -> set[tuple[int, int]]:
        from anyaccel.launch.local.rounds import workers_of

        return {worker for launcher in self._running for worker in workers_of(launcher).items()}

    def _end_round(self) -> None:
        """End what a lost host has left waiting for it; torch then starts the next round without that host."""
        self._round_ends_at = None
        waiting = [pid for pid, _ in self._round & self._workers_of_torch()]
        if waiting and self._phase is _Phase.RUNNING:
            self._output.line(f"ending workers that wait for a lost host: {processes.describe(waiting)}", WARNING)
            processes.send(waiting, signal.SIGKILL)

    def _lose_launcher(self) -> None:
        self._launcher_gone = True
        self._kill()

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
            # Of workers that ended at the same time, one that was killed is more likely the cause.
            pid, rank, status = min(failed, key=lambda entry: not os.WIFSIGNALED(entry[2]))
            now = time.monotonic()
            self._result.failure = Failure(rank, pid, status, now, len(self._running))
            # SIGTERM follows in a moment, unless the launcher reports a signal to the whole process group by then.
            self._phase = _Phase.STOPPING
            self._sigterm_at, self._phase_ends_at = now + min(SAME_MOMENT, self._grace / 2), now + self._grace
            if self._link:
                self._streams.drain(rank)
                failure = replace(self._result.failure, tail=self._streams.tail(rank))
                self._link.output.write(self._link.announce(failure))

    def _stop(self, number: int, *, delivered: bool) -> None:
        """Begin to end the job: a signal, a failed worker or the launcher asks for it."""
        now = time.monotonic()
        if self._result.signal is None:
            self._result.signal, self._signalled_at = number, now
            nobody_asked = self._phase is _Phase.STOPPING and self._sigterm_at is not None
            if self._phase is _Phase.RUNNING or nobody_asked:
                self._ask_to_end(number, now, delivered=delivered)
        elif number == signal.SIGINT and now > self._signalled_at + SAME_MOMENT:
            self._kill()

    def _ask_to_end(self, number: int, now: float, *, delivered: bool) -> None:
        self._phase = _Phase.STOPPING
        self._phase_ends_at = now + self._grace
        # A Python that was started in the background ignores SIGINT.
        self._sigterm_at = None if number == signal.SIGTERM else now + self._grace / 2
        if not delivered:
            processes.send(self._running, number)

    def _kill(self) -> None:
        now = time.monotonic()
        if self._phase is not _Phase.KILLING:
            self._phase = _Phase.KILLING
            self._kill_deadline = now + KILL_TIMEOUT
        self._sigterm_at = None
        # Repeated after each death and twice a second, as a process may have forked while we read /proc.
        self._phase_ends_at = now + 0.5
        processes.send(processes.descendants(), signal.SIGKILL)

    def _advance(self, now: float) -> None:
        """Act on deadlines that have passed: the launcher's heartbeat, and the next signal to the workers."""
        link = self._link
        if (
            link
            and not self._launcher_gone
            and now >= self._last_heard + link.timeout_s
            and not _readable(link.descriptor)
        ):
            self._output.line(f"error: no sign of life from the launcher for {link.timeout_s:g} s, ending all", ERROR)
            self._lose_launcher()
        if not self._children:
            return
        for number in [number for number, at in self._pass_on_at.items() if now >= at]:
            del self._pass_on_at[number]
            processes.send(self._running, number)
        if self._round_ends_at is not None and now >= self._round_ends_at:
            self._end_round()
        if self._phase is _Phase.KILLING:
            if now > self._kill_deadline:
                self._result.unkillable = processes.describe(processes.descendants())
                self._children = False
            else:
                self._kill()
        elif not self._running and self._phase is not _Phase.LEFT_OVER:
            end = now + _HELPERS_S + LEFTOVER_GRACE
            if self._phase is _Phase.STOPPING:
                end = max(end, self._phase_ends_at or 0.0)  # the grace period holds for descendants of workers too
            self._phase = _Phase.LEFT_OVER
            self._sigterm_at, self._phase_ends_at = now + _HELPERS_S, end
        elif self._sigterm_at is not None and now >= self._sigterm_at:
            self._sigterm_at = None
            if self._phase is _Phase.LEFT_OVER:
                left = [pid for pid, state in processes.descendants().items() if state != "Z"]
                if left:
                    self._output.line(f"ending what finished workers left behind: {processes.describe(left)}", WARNING)
                    processes.send(left, signal.SIGTERM)
            else:
                processes.send(self._running, signal.SIGTERM)
        elif self._phase_ends_at is not None and now >= self._phase_ends_at:
            self._kill()


def _readable(descriptor: int) -> bool:
    """Whether a descriptor has input that has not been read yet."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(0))
