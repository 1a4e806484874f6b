# SPDX-License-Identifier: Apache-2.0
"""The launcher of several hosts: an event loop that watches the agents, which start the workers on their hosts.

Workers are started only when every agent is ready: an unreachable host, a missing folder or too few cores end the job
before it begins. The first failure anywhere ends the workers everywhere. Agents notice when this process is gone:
their connection ends, or heartbeats stop.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from anyaccel.errors import UsageError
from anyaccel.launch.cluster import channel
from anyaccel.launch.cluster.address import rank0_address
from anyaccel.launch.cluster.agents import Agent
from anyaccel.launch.cluster.conclusion import conclude
from anyaccel.launch.cluster.launcher_process import LauncherProcess
from anyaccel.launch.cluster.machines import same_machines
from anyaccel.launch.cluster.task import Task
from anyaccel.launch.failure import Report
from anyaccel.launch.limits import many_descriptors
from anyaccel.launch.local.command import OUR_ERROR
from anyaccel.launch.local.protocol import HOST_LOST, STDERR_CLOSED
from anyaccel.launch.local.signals import stop_signals, without_stopping
from anyaccel.launch.local.streams import BACKLOG
from anyaccel.launch.local.worker import PASSED_ON
from anyaccel.launch.output import DEBUG, ERROR, LEVELS, WARNING, Output, cannot_write
from anyaccel.topology.model import format_cpu_list

if TYPE_CHECKING:
    from anyaccel.launch.cluster.callback import AgentListener

# Seconds until all agents started by ssh must be ready; with another launcher, until the first one must be.
_START_S = 60.0
# Seconds until the next agent must be ready with another launcher, which does not name unreachable hosts.
_NEXT_READY_S = 12.0
# Seconds that a launcher has to end after its last agent; after as many again it is killed.
_LAUNCHER_END_S = 1.0
# Seconds that agents have to end beyond the grace period, and then after their input was closed.
_SLACK_S = 1.5
_FORCED_END_S = 2.0


class Coordinator:
    """Watches the agents of a job and ends it when one fails.

    Args:
        least: number of agents without which the job ends; None for all. An elastic job goes on without the others.
    """

    def __init__(self, task: Task, least: int | None = None) -> None:
        level = LEVELS[task.options.log_level]
        self.console = Output(2, level)
        self.output = Output(1, level)
        self.agents: list[Agent] = []
        self.listener: AgentListener | None = None  # for agents that call back
        self.launcher: LauncherProcess | None = None  # which has started these agents
        self._task = task
        self._least = least
        self._replanning: set[Agent] = set()  # agents that were asked to plan again
        self._has_replanned = False
        self._started = False
        self._stop: tuple[int, float] | None = None
        self._ending_at: float | None = None
        self._broken: list[Output] = []  # outputs that cannot be written to any more
        self._end_stage = 0  # of ending: 0 signals sent, 1 input closed, 2 connection closed
        self._next_beat = 0.0
        self._deadline = 0.0
        self._launcher_at: float | None = None  # when to end the launcher, or to kill it

    def run(self, wakeup: int) -> int:
        """Watch the job until its end; returns its exit code: 0, that of the first failed worker, or 128 + signal.

        Args:
            wakeup: the descriptor that `stop_signals` yielded before the agents or their launcher were started.
        """
        patient = self.launcher is not None and self.launcher.may_wait
        self._deadline = time.monotonic() + (float("inf") if patient else _START_S)
        try:
            with without_stopping():
                for agent in self.agents:
                    self._send_task(agent)
                while any(not agent.ended for agent in self.agents) or (self.launcher and self.launcher.running):
                    self._wait(wakeup)
                    self._reap()
                    self._advance()
                code = conclude(
                    self.agents,
                    self.console,
                    launcher=self.launcher,
                    stop=self._stop,
                    cut=bool(self._broken),
                    lost=self.output.lost or self.console.lost,
                )
        finally:
            self.abandon()
        self.output.close(1.0 if self._stop else None)
        self._close_broken_outputs()
        self.console.close(1.0 if self._stop else None)
        return code or int(self.output.lost or self.console.lost)

    # starting

    def _send_task(self, agent: Agent) -> None:
        """Send an agent its task."""
        number = self.agents.index(agent)
        first = {"number": number, "task": self._task.encode()}
        if self.listener is None:
            first["secret"] = self._task.secret
        agent.send(channel.encode_line(first))

    def on_call(self, agent: Agent) -> None:
        """Handle an agent that has called back."""
        self._send_task(agent)
        if self._deadline == float("inf"):
            self._deadline = time.monotonic() + _START_S

    def on_frame(self, agent: Agent, kind: str, data: Any) -> None:
        """Handle a frame of an agent."""
        if kind == channel.READY:
            agent.ready = data
            if self.launcher:
                self._deadline = time.monotonic() + _NEXT_READY_S
            self._replanning.discard(agent)
            if all(other.ready for other in self.agents) and not self._replanning and self._ending_at is None:
                self._replan_shared_machines()
        elif kind == channel.REFUSED:
            agent.problem, agent.code = data["message"], data["code"]
            self.end(signal.SIGTERM)
        elif kind == channel.FAILED:
            agent.failure, agent.failed_at = Report.decode(data).failure, time.monotonic()
            self.end(signal.SIGTERM, failed=agent)
        elif kind == channel.FINISHED:
            report = agent.report = Report.decode(data)
            agent.reported_at = time.monotonic()
            if report.failure and agent.failure is None:
                agent.failure, agent.failed_at = report.failure, agent.reported_at
            if report.failure or report.problem or report.unkillable or report.signal:
                self.end(report.signal or signal.SIGTERM)

    def _replan_shared_machines(self) -> None:
        """Make agents on the same machine divide its cores among the workers of all of them; then start the workers."""
        nodes = {host.name: number for number, host in enumerate(self._task.hosts)}
        found = {nodes[agent.host]: agent.ready or {} for agent in self.agents}
        try:
            groups = [] if self._has_replanned else same_machines(self._task, found)
        except UsageError as error:
            self.agents[0].problem, self.agents[0].code = str(error), error.exit_code
            self.end(signal.SIGTERM)
            return
        self._has_replanned = True
        for group in groups:
            names = ", ".join(self._task.hosts[node].name for node in group)
            self.console.line(f"hosts {names} are one machine: its cores are divided among all of their workers", DEBUG)
            for agent in self.agents:
                if nodes[agent.host] in group:
                    self._replanning.add(agent)
                    agent.send(channel.encode_line({"together": group}))
        if not groups:
            self._start_workers()

    def _start_workers(self) -> None:
        """Send all agents the address of rank 0, whereupon they start their workers."""
        options = self._task.options
        try:
            connections = [str((agent.ready or {}).get("connection") or "") for agent in self.agents]
            address = options.master_addr or rank0_address(connections)
        except UsageError as error:
            self.agents[0].problem, self.agents[0].code = str(error), error.exit_code
            self.end(signal.SIGTERM)
            return
        master = {"address": address, "port": options.master_port or (self.agents[0].ready or {})["port"]}
        self.console.line(f"rank 0 is at {address}:{master['port']}", DEBUG)
        self._started = True
        if self.listener:
            self.listener.close()
        for agent in self.agents:
            if plan := str((agent.ready or {}).get("plan", "")):
                self.console.line(f"{agent.host}: {plan}", DEBUG)
            agent.send(channel.encode_line(master))

    def _on_start_timeout(self) -> None:
        if self.launcher:
            silent = [agent for agent in self.agents if agent.ready is None]
            hosts = ", ".join(dict.fromkeys(agent.host for agent in silent))
            count = f"{len(silent)} of {len(self.agents)} processes"
            self.launcher.problem = f"{count} did not get ready in time, on host {hosts}; can it be reached?"
        for agent in self.agents:
            if self.launcher is None and agent.ready is None and not agent.ended and not agent.problem:
                agent.problem = f"did not answer within {_START_S:g} s"
        self.end(signal.SIGTERM)

    # watching

    def _wait(self, wakeup: int) -> None:
        now = time.monotonic()
        times = [now + 5.0, self._next_beat]
        if not self._started and self._ending_at is None:
            times.append(self._deadline)
        times += [at for at in (self._ending_at, self._launcher_at) if at is not None]
        poller = select.poll()
        poller.register(wakeup, select.POLLIN)
        outputs = (self.console, self.output)
        readers = {}
        events: dict[int, int] = {}
        may_read = all(output.pending < BACKLOG for output in outputs)
        for agent in self.agents:
            if may_read:
                for descriptor in agent.to_read():
                    readers[descriptor] = agent.read
                    events[descriptor] = select.POLLIN
            if (unwritten := agent.to_write()) is not None:
                events[unwritten] = events.get(unwritten, 0) | select.POLLOUT
        if may_read and self.launcher:
            for descriptor in self.launcher.to_read():
                readers[descriptor] = self.launcher.read
                events[descriptor] = select.POLLIN
        for descriptor, event in events.items():
            poller.register(descriptor, event)
        unauthenticated = self.listener.to_read() if self.listener else []
        for descriptor in unauthenticated:
            poller.register(descriptor, select.POLLIN)
        for output in outputs:
            if output.pending:
                poller.register(output.descriptor, select.POLLOUT)
        for descriptor, event in poller.poll(max(0.0, min(times) - now) * 1000 + 1):
            if descriptor == wakeup:
                for number in os.read(wakeup, 4096):
                    self._on_signal(number)
            elif descriptor in readers and event & ~select.POLLOUT:
                readers[descriptor](descriptor)
            elif descriptor in unauthenticated and self.listener:
                self.listener.read(descriptor)
        for agent in self.agents:
            if agent.to_write() is not None:
                agent.send(b"")
        for output in outputs:
            output.flush()
        self._close_broken_outputs()

    def _close_broken_outputs(self) -> None:
        """Make the workers' next write to a broken output fail, and report the output once."""
        for output in (self.output, self.console):
            if not output.problem or output in self._broken:
                continue
            self._broken.append(output)
            if output.lost:
                # The agents report whether the log files on their hosts can be written.
                said = cannot_write(output, logged=self._task.options.log_dir is not None, every_log=False)
                self.console.line(f"error: {said}", ERROR)
            if self.launcher:
                self.end(signal.SIGTERM)  # the workers' pipes lead to that launcher, and cannot be closed from here
            for agent in self.agents:
                if output is self.output:
                    agent.close_output()
                elif self._started and agent.running:
                    agent.send(bytes([STDERR_CLOSED]))

    def _reap(self) -> None:
        for agent in self.agents:
            if agent.ended or (how := agent.reap()) is None:
                continue
            agent.ended = True
            if agent.report is None and not agent.problem and self._end_stage < 2:
                self._on_lost_agent(agent, how)
        if self.launcher and self.launcher.reap():
            missing = [agent for agent in self.agents if not agent.ended and agent.ready is None]
            for agent in missing:
                agent.ended = True
            if missing and self._ending_at is None:
                hosts = ", ".join(dict.fromkeys(agent.host for agent in missing))
                self.launcher.problem = f"{self.launcher.how} before workers were started on host {hosts}"
            if self.launcher.problem or self.launcher.killed:
                self.end(signal.SIGTERM)  # without the launcher nobody passes on the output of the workers

    def _on_lost_agent(self, agent: Agent, how: str) -> None:
        """Handle an agent that ended without a final report."""
        if not self._started and self._ending_at is not None:
            if agent.ready is None and agent.said:
                agent.problem = f"cannot be reached: {how}"  # it has not ended because we asked it to
            return
        if agent.ready is not None:
            agent.problem = f"the connection{self._to_ranks_of(agent.host)} was lost ({how})"
        elif agent.said.startswith(OUR_ERROR):
            agent.problem = agent.said.removeprefix(OUR_ERROR)
        else:
            agent.problem = f"cannot be reached: {how}"
        alive = sum(other.running for other in self.agents)
        # The first agent's host has the rendezvous store, so an elastic job cannot go on without it.
        may_go = self._least is not None and alive >= self._least and agent is not self.agents[0]
        if self._started and self._ending_at is None and may_go:
            rest = f"{agent.problem}; {alive} host{' goes' if alive == 1 else 's go'} on"
            self.console.line(f"warning: host {agent.host}: {rest}", WARNING)
            agent.problem = ""
            for other in self.agents:
                if other.running:
                    other.send(bytes([HOST_LOST]))
        else:
            self.end(signal.SIGTERM)

    def _to_ranks_of(self, host: str) -> str:
        """Which ranks a host has, for a message: " to rank 3". Those of an elastic job are numbered by torch."""
        if not self._started or self._least is not None:
            return ""
        ranks = [
            rank
            for rank, name in enumerate(each.host for each in self.agents for _ in range(each.size))
            if name == host
        ]
        return f" to rank{'s' if len(ranks) > 1 else ''} {format_cpu_list(ranks)}"

    # ending

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return
        if number in PASSED_ON:
            self.console.line(f"{signal.Signals(number).name} received{', passed on' if self._started else ''}")
            for agent in self.agents:
                if self._started and agent.running:
                    agent.send(bytes([number]))
        elif self._stop is None:
            self._stop = number, time.monotonic()
            hosts = len(self._task.hosts)
            workers = f"{self._task.world_size} workers on {hosts} host{'' if hosts == 1 else 's'}"
            self.console.line(f"{signal.Signals(number).name} received, ending {workers}")
            self.end(number)
        elif number == signal.SIGINT:
            self.console.line("SIGINT received again")
            self.end(number, again=True)

    def end(self, number: int, *, failed: Agent | None = None, again: bool = False) -> None:
        """Ask all agents to end their workers, except the one whose worker has failed, which does so by itself."""
        if self._ending_at is not None and not again:
            return
        if self._ending_at is None:
            self._ending_at = time.monotonic() + (self._task.options.grace_period if self._started else 0) + _SLACK_S
        for agent in self.agents:
            if not self._started:
                agent.hang_up()
            elif agent is not failed and agent.running:
                agent.send(bytes([number]))
        if not self._started and self.launcher:
            self.launcher.end()
        if not self._started and self.listener:
            self.listener.close()  # an agent that calls back now gets no task

    def _advance(self) -> None:
        """Send heartbeats, and act on deadlines that have passed."""
        now = time.monotonic()
        if self.listener:
            self.listener.drop_silent()
        if self._started and now >= self._next_beat:
            self._next_beat = now + channel.HEARTBEAT
            for agent in self.agents:
                if not agent.ended and not agent.behind:
                    agent.send(b"\0")
        elif not self._started and now >= self._next_beat:
            self._next_beat = now + channel.HEARTBEAT
            for agent in self.agents:
                if agent.ready and not agent.ended and not agent.behind:
                    agent.send(b" ")  # before the line that it waits for
        if not self._started and self._ending_at is None and now > self._deadline:
            self._on_start_timeout()
        if self.launcher and all(agent.ended for agent in self.agents):
            self._launcher_at = self._launcher_at or now + _LAUNCHER_END_S  # it should end by itself within that time
            if now >= self._launcher_at:
                self._launcher_at = now + _LAUNCHER_END_S
                self.launcher.end()
        if self._ending_at is None or now < self._ending_at:
            return
        self._end_stage += 1
        self._ending_at = now + _FORCED_END_S
        for agent in self.agents:
            if agent.ended:
                continue
            if self._end_stage == 1:
                agent.hang_up()
            else:
                if self._started and agent.report is None and not agent.problem:
                    agent.problem = "did not confirm that its workers have ended; they do when it misses us"
                agent.kill()
        if self.launcher and self._end_stage > 1:
            self.launcher.end()

    def abandon(self) -> None:
        """Kill all agents and the launcher, whatever has happened."""
        for agent in self.agents:
            if not agent.ended:
                agent.kill()
                agent.reap()
        if self.listener:
            self.listener.close()
        if self.launcher:
            self.launcher.kill()


def start_agents(task: Task, commands: Sequence[Sequence[str]], least: int | None = None) -> int:
    """Run a job with one agent a host, each started by a command; returns its exit code as `Coordinator.run` does.

    Args:
        commands: argument vector of each host's agent.
        least: see `Coordinator`.
    """
    from anyaccel.launch.cluster.agents import PipeAgent

    coordinator = Coordinator(task, least)
    with many_descriptors(3 * len(commands)), stop_signals() as wakeup:
        try:
            for host, command in zip(task.hosts, commands, strict=True):
                coordinator.console.line(f"{host.name}: {' '.join(command)}", DEBUG)
                size = len(host.slots)
                coordinator.agents.append(
                    PipeAgent(
                        host.name,
                        size,
                        command,
                        task.secret,
                        coordinator.on_frame,
                        coordinator.console,
                        coordinator.output,
                    )
                )
        except BaseException:
            coordinator.abandon()
            raise
        return coordinator.run(wakeup)
