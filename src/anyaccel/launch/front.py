# SPDX-License-Identifier: Apache-2.0
"""The launcher of several hosts: watches the agents that start the workers there.

Nothing is started before every agent has said that it can: an unreachable host, a missing folder, too few cores end
the job before it begins. The first failure anywhere ends the workers everywhere. Agents notice by themselves when
this process is gone: their connection ends, or no sign of life comes.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from anyaccel.errors import UsageError
from anyaccel.launch import channel
from anyaccel.launch.address import address_of_first
from anyaccel.launch.agents import Agent
from anyaccel.launch.conclusion import conclude
from anyaccel.launch.contract import DEAF
from anyaccel.launch.failure import Report
from anyaccel.launch.launcher_process import LauncherProcess
from anyaccel.launch.limits import many_descriptors
from anyaccel.launch.machines import same_machines
from anyaccel.launch.output import DEBUG, ERROR, LEVELS, WARNING, Output, cannot_write
from anyaccel.launch.signals import stop_signals, without_stopping
from anyaccel.launch.streams import BACKLOG
from anyaccel.launch.task import Task

if TYPE_CHECKING:
    from anyaccel.launch.callback import Reception

# Seconds until all agents behind ssh have to be ready; behind another launcher, until the first one has to be.
_START = 60.0
# Seconds that may pass behind another launcher before the next agent is ready: it does not name unreachable hosts.
_NEXT_READY = 12.0
# Seconds that a launcher has to end after the last of its agents; as many again, then it is killed.
_LAST = 1.0
# Seconds beyond the grace period that agents have to end; then those they have after their input was closed.
_SLACK = 1.5
_HARD = 2.0


class Front:
    """Watches the agents of a job and ends it when one fails.

    Args:
        least: number of agents that must stay; None for all. An elastic job goes on without the others.
    """

    def __init__(self, task: Task, least: int | None = None) -> None:
        level = LEVELS[task.options.log_level]
        self.console = Output(2, level)
        self.output = Output(1, level)
        self.agents: list[Agent] = []
        self.reception: Reception | None = None  # of agents that call back
        self.launcher: LauncherProcess | None = None  # what starts these
        self._task = task
        self._least = least
        self._dividing: set[Agent] = set()  # those that make another plan
        self._divided = False
        self._started = False
        self._stop: tuple[int, float] | None = None
        self._ending_at: float | None = None
        self._cut: list[Output] = []  # those that nothing can be written to any more
        self._step = 0  # of ending: asked, input ended, connection cut
        self._next_beat = 0.0
        self._deadline = 0.0
        self._launcher_at: float | None = None  # when it is ended, or killed

    def run(self, wakeup: int) -> int:
        """Watch the job until its end; returns its exit code: 0, that of the first failed worker, or 128 + signal.

        Args:
            wakeup: what `stop_signals` yielded before the agents or their launcher were started.
        """
        patient = self.launcher is not None and self.launcher.may_wait
        self._deadline = time.monotonic() + (float("inf") if patient else _START)
        try:
            with without_stopping():
                for agent in self.agents:
                    self._introduce(agent)
                while any(not agent.ended for agent in self.agents) or (self.launcher and self.launcher.running):
                    self._wait(wakeup)
                    self._reap()
                    self._advance()
                code = conclude(
                    self.agents,
                    self.console,
                    launcher=self.launcher,
                    stop=self._stop,
                    cut=bool(self._cut),
                    lost=self.output.lost or self.console.lost,
                )
        finally:
            self.abandon()
        self.output.close(1.0 if self._stop else None)
        self._cut_off()
        self.console.close(1.0 if self._stop else None)
        return code or int(self.output.lost or self.console.lost)

    # starting

    def _introduce(self, agent: Agent) -> None:
        """Tell an agent what it is to do, as soon as it can hear that."""
        number = self.agents.index(agent)
        first = {"number": number, "task": self._task.encode()}
        if self.reception is None:
            first["word"] = self._task.word
        agent.send(channel.encode_line(first))

    def on_call(self, agent: Agent) -> None:
        """An agent has called back."""
        self._introduce(agent)
        if self._deadline == float("inf"):
            self._deadline = time.monotonic() + _START

    def on_frame(self, agent: Agent, kind: str, data: Any) -> None:
        """An agent has something to say."""
        if kind == channel.READY:
            agent.ready = data
            if self.launcher:
                self._deadline = time.monotonic() + _NEXT_READY
            self._dividing.discard(agent)
            if all(other.ready for other in self.agents) and not self._dividing and self._ending_at is None:
                self._divide()
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
            if report.failure or report.problem or report.immortal or report.signal:
                self.end(report.signal or signal.SIGTERM)

    def _divide(self) -> None:
        """When every agent is ready: make those on one machine divide its cores among the workers of all of them."""
        nodes = {host.name: number for number, host in enumerate(self._task.hosts)}
        found = {nodes[agent.host]: agent.ready or {} for agent in self.agents}
        try:
            groups = [] if self._divided else same_machines(self._task, found)
        except UsageError as error:
            self.agents[0].problem, self.agents[0].code = str(error), error.exit_code
            self.end(signal.SIGTERM)
            return
        self._divided = True
        for group in groups:
            names = ", ".join(self._task.hosts[node].name for node in group)
            self.console.line(f"hosts {names} are one machine: its cores are divided among all of their workers", DEBUG)
            for agent in self.agents:
                if nodes[agent.host] in group:
                    self._dividing.add(agent)
                    agent.send(channel.encode_line({"together": group}))
        if not groups:
            self._go()

    def _go(self) -> None:
        """When every agent is ready: tell all of them where rank 0 is, so that they start their workers."""
        options = self._task.options
        try:
            connections = [str((agent.ready or {}).get("connection") or "") for agent in self.agents]
            address = options.master_addr or address_of_first(connections)
        except UsageError as error:
            self.agents[0].problem, self.agents[0].code = str(error), error.exit_code
            self.end(signal.SIGTERM)
            return
        master = {"address": address, "port": options.master_port or (self.agents[0].ready or {})["port"]}
        self.console.line(f"rank 0 is at {address}:{master['port']}", DEBUG)
        self._started = True
        if self.reception:
            self.reception.close()
        for agent in self.agents:
            if plan := str((agent.ready or {}).get("plan", "")):
                self.console.line(f"{agent.host}: {plan}", DEBUG)
            agent.send(channel.encode_line(master))

    def _too_late(self) -> None:
        if self.launcher:
            silent = [agent for agent in self.agents if agent.ready is None]
            hosts = ", ".join(dict.fromkeys(agent.host for agent in silent))
            count = f"{len(silent)} of {len(self.agents)} processes"
            self.launcher.problem = f"{count} did not get ready in time, on host {hosts}; can it be reached?"
        for agent in self.agents:
            if self.launcher is None and agent.ready is None and not agent.ended and not agent.problem:
                agent.problem = f"did not answer within {_START:g} s"
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
            if (owed := agent.to_write()) is not None:
                events[owed] = events.get(owed, 0) | select.POLLOUT
        if may_read and self.launcher:
            for descriptor in self.launcher.to_read():
                readers[descriptor] = self.launcher.read
                events[descriptor] = select.POLLIN
        for descriptor, event in events.items():
            poller.register(descriptor, event)
        strangers = self.reception.to_read() if self.reception else []
        for descriptor in strangers:
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
            elif descriptor in strangers and self.reception:
                self.reception.read(descriptor)
        for agent in self.agents:
            if agent.to_write() is not None:
                agent.send(b"")
        for output in outputs:
            output.flush()
        self._cut_off()

    def _cut_off(self) -> None:
        """Make the workers' next write fail, since nobody reads what they write any more; says so once."""
        for output in (self.output, self.console):
            if not output.problem or output in self._cut:
                continue
            self._cut.append(output)
            if output.lost:
                # Whether those of other hosts can be written, these say.
                said = cannot_write(output, logged=self._task.options.log_dir is not None, every_log=False)
                self.console.line(f"error: {said}", ERROR)
            if self.launcher:
                self.end(signal.SIGTERM)  # there is no way through it to the pipes of the workers
            for agent in self.agents:
                if output is self.output:
                    agent.close_output()
                elif self._started and agent.running:
                    agent.send(bytes([DEAF]))

    def _reap(self) -> None:
        for agent in self.agents:
            if agent.ended or (how := agent.reap()) is None:
                continue
            agent.ended = True
            if agent.report is None and not agent.problem and self._step < 2:
                self._lost(agent, how)
        if self.launcher and self.launcher.reap():
            missing = [agent for agent in self.agents if not agent.ended and agent.ready is None]
            for agent in missing:
                agent.ended = True
            if missing and self._ending_at is None:
                hosts = ", ".join(dict.fromkeys(agent.host for agent in missing))
                self.launcher.problem = f"{self.launcher.how} before workers were started on host {hosts}"
            if self.launcher.problem or self.launcher.killed:
                self.end(signal.SIGTERM)  # with the agent, nobody passes on the output of its workers

    def _lost(self, agent: Agent, how: str) -> None:
        """Handle an agent that ended without a final report."""
        if not self._started and self._ending_at is not None:
            if agent.ready is None and agent.said:
                agent.problem = f"cannot be reached: {how}"  # it ended for a reason of its own
            return
        agent.problem = f"cannot be reached: {how}" if agent.ready is None else f"the connection was lost ({how})"
        alive = sum(other.running for other in self.agents)
        may_go = self._least is not None and alive >= self._least and agent is not self.agents[0]  # where ranks meet
        if self._started and self._ending_at is None and may_go:
            rest = f"{agent.problem}; {alive} host{' goes' if alive == 1 else 's go'} on"
            self.console.line(f"warning: host {agent.host}: {rest}", WARNING)
            agent.problem = ""
        else:
            self.end(signal.SIGTERM)

    # ending

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return
        if self._stop is None:
            self._stop = number, time.monotonic()
            hosts = len(self._task.hosts)
            workers = f"{self._task.world_size} workers on {hosts} host{'' if hosts == 1 else 's'}"
            self.console.line(f"{signal.Signals(number).name} received, ending {workers}")
            self.end(number)
        elif number == signal.SIGINT:
            self.console.line("SIGINT received again")
            self.end(number, again=True)

    def end(self, number: int, *, failed: Agent | None = None, again: bool = False) -> None:
        """Ask all agents to end their workers, but the one whose worker failed: it does so without being asked."""
        if self._ending_at is not None and not again:
            return
        if self._ending_at is None:
            self._ending_at = time.monotonic() + (self._task.options.grace_period if self._started else 0) + _SLACK
        for agent in self.agents:
            if not self._started:
                agent.hang_up()
            elif agent is not failed and agent.running:
                agent.send(bytes([number]))
        if not self._started and self.launcher:
            self.launcher.end()
        if not self._started and self.reception:
            self.reception.close()  # who calls now is not told what to do

    def _advance(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        if self.reception:
            self.reception.tidy()
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
            self._too_late()
        if self.launcher and all(agent.ended for agent in self.agents):
            self._launcher_at = self._launcher_at or now + _LAST  # it has nothing left to wait for
            if now >= self._launcher_at:
                self._launcher_at = now + _LAST
                self.launcher.end()
        if self._ending_at is None or now < self._ending_at:
            return
        self._step += 1
        self._ending_at = now + _HARD
        for agent in self.agents:
            if agent.ended:
                continue
            if self._step == 1:
                agent.hang_up()
            else:
                if self._started and agent.report is None and not agent.problem:
                    agent.problem = "did not confirm that its workers have ended; they do when it misses us"
                agent.kill()
        if self.launcher and self._step > 1:
            self.launcher.end()

    def abandon(self) -> None:
        """Leave no process of ours behind, whatever happened."""
        for agent in self.agents:
            if not agent.ended:
                agent.kill()
                agent.reap()
        if self.reception:
            self.reception.close()
        if self.launcher:
            self.launcher.kill()


def start_agents(task: Task, commands: Sequence[Sequence[str]], least: int | None = None) -> int:
    """Run a job with one agent a host, each started by a command; returns its exit code as `Front.run` does.

    Args:
        commands: argument vector of each host's agent.
        least: see `Front`.
    """
    from anyaccel.launch.agents import PipeAgent

    front = Front(task, least)
    with many_descriptors(3 * len(commands)), stop_signals() as wakeup:
        try:
            for host, command in zip(task.hosts, commands, strict=True):
                front.console.line(f"{host.name}: {' '.join(command)}", DEBUG)
                size = len(host.slots)
                front.agents.append(
                    PipeAgent(host.name, size, command, task.word, front.on_frame, front.console, front.output)
                )
        except BaseException:
            front.abandon()
            raise
        return front.run(wakeup)
