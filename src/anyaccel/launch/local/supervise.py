# SPDX-License-Identifier: Apache-2.0
"""The launcher's side of supervision: forks the guardian, forwards signals, and reports how the job has ended.

Two processes watch each other, so that either may be killed with SIGKILL: the guardian ends everything when the
launcher is gone, and the launcher, a subreaper too, ends everything when the guardian is gone.
"""

from __future__ import annotations

import marshal
import mmap
import os
import select
import signal
import time
from collections.abc import Sequence

from anyaccel import _native
from anyaccel.launch import processes
from anyaccel.launch.failure import Failure, Report, describe_end, exit_code, explain
from anyaccel.launch.local.guardian import guard
from anyaccel.launch.local.protocol import DELIVERED, DUE, KILL_TIMEOUT, REPORT_BYTES, SAME_MOMENT, Link
from anyaccel.launch.local.worker import PASSED_ON, STOP_SIGNALS, Worker
from anyaccel.launch.output import ERROR, LEVELS, Output, OutputOptions

# Seconds that a launcher on another host has to read the final report.
_REPORT_S = 2.0
# Seconds between two checks of the workers while the guardian is stopped.
_POLL_S = 1.0
_SI_KERNEL = 0x80  # si_code of signals from the terminal, which go to the whole foreground process group


def supervise(
    workers: Sequence[Worker],
    grace_period: float,
    *,
    options: OutputOptions | None = None,
    link: Link | None = None,
    console: Output | None = None,
    host: str = "",
) -> int:
    """Start the workers, wait for their end, and return the exit code of the job; see `launch_local`.

    Args:
        options: where output goes; default: `OutputOptions()`.
        link: the launcher on another host, which gets the report.
        console: standard error; default: `Output()` with the level of the options.
        host: name of this host for messages, in a job on several.
    """
    _open_standard_descriptors()
    options = options or OutputOptions()
    control_read, control_write = os.pipe()
    report = mmap.mmap(-1, REPORT_BYTES + DUE.size)  # shared with what is forked
    output = console or Output(2, LEVELS[options.log_level])
    handled = [number for number in (*STOP_SIGNALS, *PASSED_ON) if signal.getsignal(number) is not signal.SIG_IGN]
    # With an ignored SIGCHLD, which may be inherited, the kernel would discard exit codes.
    old_handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [*handled, signal.SIGCHLD])
    before = processes.children()
    try:
        _native.set_child_subreaper(True)
        group = os.getpgrp()
        guardian = os.fork()
        if guardian == 0:
            os.close(control_write)
            guard(workers, grace_period, control_read, report, group, output, options, link)
        os.close(control_read)
        os.set_blocking(control_write, False)
        launcher = _Launcher(guardian, control_write, report, group, len(workers), grace_period, output, link)
        status = launcher.watch(handled)
        found = launcher.conclude(status, _read(report[:REPORT_BYTES]), before)
        code = launcher.result(found)
        if link:
            link.output.write(link.conclude(found))
        else:
            launcher.explain(found, host)
    finally:
        os.close(control_write)  # makes the guardian end, if it has not
        report.close()
        _native.set_child_subreaper(False)
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if old_handler is None else old_handler)
    if link and link.output is not output:
        link.output.close(_REPORT_S)
    # Signals have their usual effect again, so that a wait for a slow reader can be ended.
    output.close(1.0 if launcher.stopped else None)
    return code


def _open_standard_descriptors() -> None:
    """Open /dev/null for each closed standard descriptor, which a pipe of ours would get otherwise."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            os.set_inheritable(number, True)


def _read(report: bytes) -> Report | None:
    """The guardian's report; None if it has ended without one."""
    try:
        return Report.decode(marshal.loads(report))
    except (EOFError, ValueError, TypeError):
        return None


def _has_hung_up(descriptor: int) -> bool:
    """Whether the other end of a pipe or connection is closed, even if there is data left to read."""
    poller = select.poll()
    poller.register(descriptor, select.POLLRDHUP)
    return bool(poller.poll(0))


class _Launcher:
    def __init__(
        self,
        guardian: int,
        control: int,
        shared: mmap.mmap,
        group: int,
        workers: int,
        grace_period: float,
        output: Output,
        link: Link | None,
    ) -> None:
        self._guardian = guardian
        self._control = control
        self._shared = shared
        self._group = group
        self._workers = f"{workers} worker{'' if workers == 1 else 's'}"
        self._were = "was" if workers == 1 else "were"
        self._grace = grace_period
        self._output = output
        self._link = link
        self._guardian_is_stopped = False
        self._stop: tuple[int, float] | None = None  # the first signal, and when it came

    @property
    def stopped(self) -> bool:
        """Whether a signal ended the job."""
        return self._stop is not None

    def watch(self, handled: Sequence[int]) -> int:
        """Forward signals until the guardian ends; returns its wait status."""
        awaited = {*handled, signal.SIGCHLD}
        while True:
            status = self._poll_guardian()
            if status is not None:
                break
            if self._stop is not None:
                left = self._stop[1] + self._grace + KILL_TIMEOUT + 5 - time.monotonic()
                found = signal.sigtimedwait(awaited, max(0.0, left))
                if found is None:
                    os.kill(self._guardian, signal.SIGKILL)
                    found = signal.sigwaitinfo([signal.SIGCHLD])
            elif self._guardian_is_stopped:
                found = signal.sigtimedwait(awaited, _POLL_S)
            else:
                found = signal.sigwaitinfo(awaited)
            if found:
                self._on_signal(found)
        # The signal that has killed the last worker may be pending here too.
        while found := signal.sigtimedwait(awaited, 0):
            self._on_signal(found)
        return status

    def _poll_guardian(self) -> int | None:
        """The guardian's wait status if it has ended. A stopped guardian is woken up if it has something to do."""
        while True:
            pid, status = os.waitpid(self._guardian, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid and (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
                return status
            if not pid:
                break
            self._guardian_is_stopped = os.WIFSTOPPED(status)
        if self._guardian_is_stopped and (self._stop or self._guardian_is_missed()):
            os.kill(self._guardian, signal.SIGCONT)
        return None

    def _guardian_is_missed(self) -> bool:
        """Whether a stopped guardian has something to do: a worker or the link has ended, or a deadline has passed."""
        if self._link and _has_hung_up(self._link.descriptor):
            return True
        (due,) = DUE.unpack_from(self._shared, REPORT_BYTES)
        if 0 < due <= time.monotonic() or not processes.proc_is_ours():
            return True  # unknown without /proc
        states = processes.states_of_children(self._guardian).values()
        return not states or "Z" in states

    def _on_signal(self, info: signal.struct_siginfo) -> None:
        number = info.si_signo
        if number == signal.SIGCHLD:
            return
        name = signal.Signals(number).name
        ends = number not in PASSED_ON
        try:
            os.write(self._control, bytes([number | (DELIVERED if self._is_delivered(info) else 0)]))
        except OSError:
            what = f"{name} received"  # the guardian has ended, or does not read and will be killed
        else:
            if not ends:
                what = f"{name} received, for {self._workers}"
            else:
                what = f"{name} received" + (" again" if self._stop else f", ending {self._workers}")
        if ends and self._stop is None:
            self._stop = number, time.monotonic()
        self._output.line(what)

    def _is_delivered(self, info: signal.struct_siginfo) -> bool:
        """Whether the kernel has sent this signal to the workers too."""
        # SIGHUP of a terminal goes to the session leader only; with group 0 the workers are not in our process group.
        only_us = info.si_signo == signal.SIGHUP and os.getsid(0) == os.getpid()
        return info.si_code == _SI_KERNEL and self._group != 0 and not only_us

    def conclude(self, status: int, report: Report | None, before: set[int]) -> Report:
        """End what is left if the guardian has failed; returns the final report."""
        if report is None:
            unkillable = processes.describe(processes.end_all(before, KILL_TIMEOUT))
            problem = f"the supervising process {describe_end(status)}; {self._workers} {self._were} ended"
            report = Report(unkillable=unkillable, problem=problem, code=exit_code(status) or 1)
        if self._stop and (report.failure is None or self._is_cause(*self._stop, report.failure)):
            report.failure, report.problem = None, ""
            report.signal = self._stop[0]
        return report

    def result(self, report: Report) -> int:
        """The exit code of the job."""
        if report.failure:
            return exit_code(report.failure.status)
        if report.problem:
            return report.code
        return 128 + report.signal if report.signal else int(bool(report.loss))

    def explain(self, report: Report, host: str) -> None:
        """Print how the job has ended."""
        if report.unkillable:
            self._output.line(f"error: these processes do not end, not even by SIGKILL: {report.unkillable}", ERROR)
        if report.problem:
            self._output.line(f"error: {report.problem}", ERROR)
        elif report.failure:
            failure = report.failure
            who = f"rank {failure.rank}{f' on host {host}' if host else ''}"
            for line in explain(failure, who, failure.others):
                self._output.line(line, ERROR)

    @staticmethod
    def _is_cause(number: int, at: float, failure: Failure) -> bool:
        """Whether the signal that we got has also ended the worker, which may have got it first."""
        killed_by_it = os.WIFSIGNALED(failure.status) and os.WTERMSIG(failure.status) == number
        return killed_by_it or at <= failure.time + SAME_MOMENT
