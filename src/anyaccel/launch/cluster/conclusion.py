# SPDX-License-Identifier: Apache-2.0
"""Reports how a job on several hosts has ended, and chooses its exit code."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from anyaccel.launch.cluster.agents import Agent
from anyaccel.launch.cluster.launcher_process import LauncherProcess
from anyaccel.launch.failure import exit_code, explain
from anyaccel.launch.local.protocol import SAME_MOMENT
from anyaccel.launch.output import ERROR, Output

# Seconds within which failures on several hosts count as one event, whose cause is a worker that was killed.
_ONE_EVENT = 0.5


def conclude(
    agents: Sequence[Agent],
    console: Output,
    *,
    launcher: LauncherProcess | None,
    stop: tuple[int, float] | None,
    cut: bool,
    lost: bool,
) -> int:
    """Report what happened; returns the exit code of the job.

    Args:
        agents: all agents, with their reports.
        launcher: mpirun, srun or pdsh; None for ssh.
        stop: the first signal that we got, and when.
        cut: whether our own standard output or error could not be written.
        lost: whether output of the workers was lost by that.
    """
    for agent in agents:
        report = agent.report
        if report and report.unkillable:
            _error(console, f"host {agent.host}: these processes do not end, not even by SIGKILL: {report.unkillable}")
        if report and report.problem:
            agent.problem, agent.code = agent.problem or report.problem, report.code
    failed = _cause(agents)
    killed = launcher.killed if launcher else None
    if launcher and killed and not stop and (failed is None or failed.failed_at >= killed[1] - _ONE_EVENT):
        # The launcher, or its daemons, ended workers and cut connections, perhaps by SIGKILL.
        size = sum(agent.size for agent in agents)
        ended = f"{launcher.how}; {size} worker{' was' if size == 1 else 's were'} ended"
        _error(console, launcher.problem or ended)
        return 128 + killed[0]
    problems = {f"host {agent.host}: {agent.problem}": agent.code for agent in agents if agent.problem}
    if launcher and launcher.problem:
        problems[launcher.problem] = 1
    for problem in problems:
        _error(console, problem)
    if stop and (failed is None or stop[1] <= failed.failed_at + SAME_MOMENT):
        return 128 + stop[0]
    if failed and failed.failure:
        failure = failed.failure
        others = failure.others + sum(
            agent.size
            for agent in agents
            if agent is not failed and (agent.report is None or agent.reported_at >= failed.failed_at)
        )
        for line in explain(failure, f"rank {failure.rank} on host {failed.host}", others):
            console.line(line, ERROR)
        return exit_code(failure.status)
    reports = [(agent.host, agent.report) for agent in agents if agent.report]
    losses = [] if cut else [f"host {host}: {report.loss}" for host, report in reports if report.loss]
    for loss in losses:  # none if our own output was cut: that makes theirs fail, and has been reported
        _error(console, f"{loss}; output of its workers is lost")
    if problems or losses or lost:
        return max(problems.values(), default=1)
    return next((128 + report.signal for _, report in reports if report.signal), 0)


def _error(console: Output, text: str) -> None:
    console.line(f"error: {text}", ERROR)


def _cause(agents: Sequence[Agent]) -> Agent | None:
    """The agent whose worker failed first; of those that failed at once, one whose worker was killed."""
    for agent in agents:
        # The frame of the failure may have been lost among messages of ssh; the report has the failure too.
        if agent.failure is None and agent.report and agent.report.failure:
            agent.failure, agent.failed_at = agent.report.failure, time.monotonic()
    failed = [(agent, agent.failure) for agent in agents if agent.failure]
    if not failed:
        return None
    first = min(agent.failed_at for agent, _ in failed)
    event = [pair for pair in failed if pair[0].failed_at <= first + _ONE_EVENT]
    return min(event, key=lambda pair: (not os.WIFSIGNALED(pair[1].status), pair[0].failed_at))[0]
