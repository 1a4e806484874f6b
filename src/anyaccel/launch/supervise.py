# SPDX-License-Identifier: Apache-2.0
"""The launcher's side of supervision: forks the guardian, forwards signals, says at the end what happened.

Two processes watch each other, so that either may be killed with SIGKILL: the guardian ends everything when
the launcher is gone, and the launcher, a subreaper too, ends everything when the guardian is gone.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Sequence

from anyaccel import _native
from anyaccel.launch import processes
from anyaccel.launch.guardian import DELIVERED, KILL_TIMEOUT, REPORT_BYTES, SAME_MOMENT, Failure, Report, guard
from anyaccel.launch.output import Output
from anyaccel.launch.worker import STOP_SIGNALS, Worker

_SI_KERNEL = 0x80  # si_code of what the terminal sends, to the whole foreground group


def supervise(workers: Sequence[Worker], grace_period: float) -> int:
    """Start the workers, wait for their end, and return the exit code of the job; see `launch_local`."""
    _open_standard_descriptors()
    control_read, control_write = os.pipe()
    report = mmap.mmap(-1, REPORT_BYTES)  # shared with what is forked
    output = Output()
    stop_signals = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    # An ignored SIGCHLD, which a parent may hand down, would make the kernel forget exit codes.
    old_handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [*stop_signals, signal.SIGCHLD])
    before = processes.children()
    try:
        _native.set_child_subreaper(True)
        group = os.getpgrp()
        guardian = os.fork()
        if guardian == 0:
            os.close(control_write)
            guard(workers, grace_period, control_read, report, group)
        os.close(control_read)
        os.set_blocking(control_write, False)
        launcher = _Launcher(guardian, control_write, group, len(workers), grace_period, output)
        status = launcher.watch(stop_signals)
        code = launcher.conclude(status, _read(report[:]), before)
    finally:
        os.close(control_write)  # the end of the guardian, should it still be there
        report.close()
        _native.set_child_subreaper(False)
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if old_handler is None else old_handler)
    # Signals have their usual effect again: whoever waits here for a reader that does not read can be ended.
    output.close(1.0 if launcher.stopped else None)
    return code


def _open_standard_descriptors() -> None:
    """Fill a closed standard descriptor, which a pipe of ours would get otherwise."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            os.set_inheritable(number, True)


def _read(report: bytes) -> Report | None:
    """What the guardian reported; None when it did not come to it."""
    try:
        return Report.decode(report)
    except (EOFError, ValueError, TypeError):
        return None


class _Launcher:
    def __init__(
        self, guardian: int, control: int, group: int, workers: int, grace_period: float, output: Output
    ) -> None:
        self._guardian = guardian
        self._control = control
        self._group = group
        self._workers = f"{workers} worker{'' if workers == 1 else 's'}"
        self._grace = grace_period
        self._output = output
        self._stop: tuple[int, float] | None = None  # the first signal, and when it came

    @property
    def stopped(self) -> bool:
        """Whether a signal ended the job."""
        return self._stop is not None

    def watch(self, stop_signals: Sequence[int]) -> int:
        """Forward signals until the guardian ends; returns its wait status."""
        awaited = {*stop_signals, signal.SIGCHLD}
        while True:
            pid, status = os.waitpid(self._guardian, os.WNOHANG)
            if pid:
                break
            if self._stop is None:
                info = signal.sigwaitinfo(awaited)
            else:
                patience = self._stop[1] + self._grace + KILL_TIMEOUT + 5 - time.monotonic()
                found = signal.sigtimedwait(awaited, max(0.0, patience))
                if found is None:
                    os.kill(self._guardian, signal.SIGKILL)
                    found = signal.sigwaitinfo([signal.SIGCHLD])
                info = found
            self._on_signal(info)
        # What killed the last worker may have been sent to us too, and not been looked at yet.
        while found := signal.sigtimedwait(awaited, 0):
            self._on_signal(found)
        return status

    def _on_signal(self, info: signal.struct_siginfo) -> None:
        number = info.si_signo
        if number == signal.SIGCHLD:
            return
        name = signal.Signals(number).name
        try:
            os.write(self._control, bytes([number | (DELIVERED if self._is_delivered(info) else 0)]))
        except OSError:
            what = f"{name} received"  # the guardian has ended, or does not listen and will be killed
        else:
            what = f"{name} received" + (" again" if self._stop else f", ending {self._workers}")
        if self._stop is None:
            self._stop = number, time.monotonic()
        self._output.line(what)

    def _is_delivered(self, info: signal.struct_siginfo) -> bool:
        """Whether the workers have this signal already."""
        # A terminal that goes away tells the leader of its session only; a group without a number cannot be joined.
        only_us = info.si_signo == signal.SIGHUP and os.getsid(0) == os.getpid()
        return info.si_code == _SI_KERNEL and self._group != 0 and not only_us

    def conclude(self, status: int, report: Report | None, before: set[int]) -> int:
        """Make sure that nothing is left, say what happened, and return the exit code of the job."""
        immortal = report.immortal if report else ""
        if report is None:
            immortal = processes.describe(processes.end_all(before, KILL_TIMEOUT))
        if immortal:
            self._output.line(f"error: these processes do not end, not even by SIGKILL: {immortal}")
        return self._explain(status, report)

    def _explain(self, status: int, report: Report | None) -> int:
        failure = report.failure if report else None
        if self._stop and (failure is None or self._is_cause(*self._stop, failure)):
            return 128 + self._stop[0]
        if report is None:
            self._output.line(f"error: the supervising process {_end(status)}; {self._workers} were ended")
            return _code(status)
        if report.problem:
            self._output.line(f"error: {report.problem}")
            return 1
        if failure:
            for line in _explanation(failure):
                self._output.line(line)
            return _code(failure.status)
        if report.signal:
            return 128 + report.signal
        return 0

    @staticmethod
    def _is_cause(number: int, at: float, failure: Failure) -> bool:
        """Whether the signal that we got ended the worker too: it may have been faster than we were."""
        killed_by_it = os.WIFSIGNALED(failure.status) and os.WTERMSIG(failure.status) == number
        return killed_by_it or at <= failure.time + SAME_MOMENT


def _code(status: int) -> int:
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _end(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"exited with code {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    try:
        return f"was killed by {signal.Signals(number).name}"
    except ValueError:
        return f"was killed by signal {number}"  # a real-time signal, these have no names


def _explanation(failure: Failure) -> list[str]:
    others = failure.others
    ended = "" if others == 0 else f"; {others} other worker{' was' if others == 1 else 's were'} ended"
    lines = [f"error: rank {failure.rank} (process {failure.pid}) {_end(failure.status)}{ended}"]
    if os.WIFSIGNALED(failure.status) and os.WTERMSIG(failure.status) == signal.SIGKILL:
        lines.append("the launcher did not send that; the kernel does when memory runs out, see dmesg")
    if failure.tail:
        lines.append(f"last lines of rank {failure.rank} on standard error:")
        lines += [f"  | {line}" for line in failure.tail]
    if any("--local_rank" in line and "rror" in line for line in failure.tail):
        lines.append("the script does not take --local_rank; start it with --no_local_rank")
    return lines
