# SPDX-License-Identifier: Apache-2.0
"""Prepares and runs a launch on several hosts: chooses hosts, launcher and environment. Imported only for that."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel.errors import UsageError
from anyaccel.launch.cluster.address import are_this_host, is_this_host
from anyaccel.launch.cluster.agents import SocketAgent
from anyaccel.launch.cluster.callback import VARIABLE, AgentListener
from anyaccel.launch.cluster.channel import FrameReader
from anyaccel.launch.cluster.coordinator import Coordinator, start_agents
from anyaccel.launch.cluster.environment import forwarded_environment
from anyaccel.launch.cluster.hostfile import read_hostfile, select_hosts
from anyaccel.launch.cluster.launcher_process import LauncherProcess
from anyaccel.launch.cluster.machines import names_of_this_machine
from anyaccel.launch.cluster.task import Task
from anyaccel.launch.counts import MOST_HOSTS, shorten
from anyaccel.launch.job import ClusterJob, Host
from anyaccel.launch.limits import many_descriptors
from anyaccel.launch.local.launcher import current_folder, say_warnings
from anyaccel.launch.local.signals import stop_signals
from anyaccel.launch.local.supervise import supervise
from anyaccel.launch.output import DEBUG, LEVELS, WARNING, Output
from anyaccel.launch.plan.ancestors import without_outer_openmp
from anyaccel.launch.plan.devices import count_devices, find_devices
from anyaccel.launch.plan.options import DEFAULT_HOSTFILE, LaunchOptions
from anyaccel.launch.plan.planning import free_port
from anyaccel.launch.runners import Runner, absolute_paths, find_runner, require_program, ssh
from anyaccel.topology import read_machine

if TYPE_CHECKING:
    import socket

# Port of rank 0 if its host cannot be asked for a free one; torchrun and deepspeed have the same.
_DEFAULT_PORT = 29500
# Variables that Python needs to start on another host. They go on the command line, all others in a message.
_AT_START = ("PYTHONPATH", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class ClusterOptions:
    """Options of a launch on several hosts.

    Attributes:
        hostfile: file with one ``host slots=N`` a line; None for DEFAULT_HOSTFILE, where there is one; /dev/null for
            no file, as scripts for `deepspeed` say it.
        include: hosts and slots that take part, such as ``n1:0,1@n2``; "" for all.
        exclude: hosts and slots that do not.
        num_nodes: take so many hosts, the first ones; None for all.
        node_rank: number of this host, with `no_ssh`.
        no_ssh: start the workers of this host only; somebody else does so on the others.
        force_multi: use the launcher of several hosts even where the only host is this one.
        launcher: name of a runner; None for ssh.
        launcher_args: more arguments for the launcher, as in a shell.
        ssh_port: TCP port of sshd on all hosts.
        exports: variables that travel, ``NAME`` or ``NAME=VALUE``.

    Raises:
        UsageError: options that contradict each other.
    """

    hostfile: str | None = None
    include: str = ""
    exclude: str = ""
    num_nodes: int | None = None
    node_rank: int | None = None
    no_ssh: bool = False
    force_multi: bool = False
    launcher: str | None = None
    launcher_args: str = ""
    ssh_port: int | None = None
    exports: tuple[str, ...] = ()

    @property
    def file(self) -> str | None:
        """The hostfile to read."""
        if self.hostfile is None and os.access(DEFAULT_HOSTFILE, os.F_OK):
            return DEFAULT_HOSTFILE
        return None if self.hostfile == os.devnull else self.hostfile

    def __post_init__(self) -> None:
        if self.num_nodes is not None and self.num_nodes < 1:
            raise UsageError(f"--num_nodes is {self.num_nodes}, it must be at least 1")
        if self.num_nodes is not None and self.num_nodes > MOST_HOSTS:
            raise UsageError(f"--num_nodes is {self.num_nodes}, a job has at most {MOST_HOSTS} hosts; ask for fewer")
        if self.launcher is not None:
            find_runner(self.launcher)  # a wrong name is reported before anything else
        if self.no_ssh and self.launcher:
            raise UsageError(f"--no_ssh starts nothing on other hosts, and --launcher {self.launcher} would")
        if self.no_ssh and self.node_rank is None:
            raise UsageError("--no_ssh needs the number of this host; add --node_rank N, 0 on the first host")
        if self.node_rank is not None and not self.no_ssh:
            raise UsageError(
                f"--node_rank {self.node_rank} is for --no_ssh, where you start this command on every host yourself; "
                "add --no_ssh, or leave it out"
            )
        try:
            shlex.split(self.launcher_args)
        except ValueError as error:
            raise UsageError(f"--launcher_args {self.launcher_args!r}: {error}; quote it as for a shell") from None
        if self.ssh_port is not None and not 1 <= self.ssh_port <= 65535:
            raise UsageError(f"--ssh_port is {self.ssh_port}, a TCP port is between 1 and 65535")


def find_hosts(options: LaunchOptions, cluster: ClusterOptions, environ: Mapping[str, str]) -> tuple[Host, ...]:
    """The hosts and slots that take part.

    Raises:
        UsageError: there is no such file, host or slot.
    """
    found: dict[str, int]
    if cluster.file is not None:
        found = read_hostfile(cluster.file)
    elif cluster.launcher == "slurm" and environ.get("SLURM_JOB_NODELIST"):
        found = _slurm_hosts(options, environ)
    elif cluster.no_ssh:
        found = _unnamed_hosts(options, cluster)
    elif (cluster.num_nodes or 1) > 1 or cluster.launcher:
        what = f"--launcher {cluster.launcher}" if cluster.launcher else f"--num_nodes {cluster.num_nodes}"
        raise UsageError(f"{what} needs to know the hosts; add --hostfile FILE with lines such as: node1 slots=2")
    else:
        found = {"localhost": options.num_accelerators or count_devices(read_machine(), environ)}
    hosts = select_hosts(found, cluster.include, cluster.exclude, cluster.num_nodes)
    wanted = options.num_accelerators
    if wanted is None:
        return hosts
    for host in hosts:
        if len(host.slots) < wanted:
            raise UsageError(
                f"--num_accelerators {wanted} is more than the {len(host.slots)} slots of host {host.name}; "
                "raise slots= in the hostfile, or ask for fewer"
            )
    return tuple(Host(host.name, host.slots[:wanted]) for host in hosts)


def _unnamed_hosts(options: LaunchOptions, cluster: ClusterOptions) -> dict[str, int]:
    """Hosts without names for --no_ssh, where only the numbers matter, which must be the same on all hosts."""
    if not cluster.num_nodes or not options.num_accelerators:
        raise UsageError(
            "--no_ssh needs the number of workers on every host: give --hostfile FILE, "
            "or --num_nodes N and --num_accelerators M where all have the same number"
        )
    return {f"node{number}": options.num_accelerators for number in range(cluster.num_nodes)}


def _slurm_hosts(options: LaunchOptions, environ: Mapping[str, str]) -> dict[str, int]:
    """The hosts of the allocation that this process runs in."""
    import subprocess

    nodes = environ["SLURM_JOB_NODELIST"]
    try:
        command = ["scontrol", "show", "hostnames", nodes]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"the hosts {nodes} of the Slurm allocation are not known: {error}; give --hostfile") from None
    from anyaccel.launch.plan.local_rank import slurm_tasks

    names = done.stdout.split()
    counts = [options.num_accelerators or 1] * len(names)
    if not options.num_accelerators and environ.get("SLURM_TASKS_PER_NODE"):
        try:
            counts = list(slurm_tasks(environ["SLURM_TASKS_PER_NODE"], len(names)))
        except ValueError:
            counts = []
    if len(counts) != len(names):
        raise UsageError(
            f"SLURM_TASKS_PER_NODE={shorten(environ['SLURM_TASKS_PER_NODE'])} does not say how many tasks each of "
            f"{len(names)} hosts has; add --num_accelerators N"
        )
    return dict(zip(names, counts, strict=True))


@dataclass(frozen=True)
class ClusterLaunch:
    """A job that is ready to be started.

    Attributes:
        runner: None if this host is the only one, or with --no_ssh.
        program: path of the runner's program.
        node: number of this host, if it starts its workers itself.
        commands: with ssh, the argument vector of each host's agent.
        warnings: printed before workers are started.
    """

    task: Task
    cluster: ClusterOptions
    runner: Runner | None = None
    program: str = ""
    node: int = 0
    commands: tuple[tuple[str, ...], ...] = ()
    warnings: tuple[str, ...] = ()

    def command(self, contact: str) -> tuple[tuple[str, ...], dict[str, str]]:
        """The argument vector of mpirun, srun or pdsh, and its environment on top of ours.

        Args:
            contact: where the agents call back.
        """
        assert self.runner
        options = self.task.options
        agent = (sys.executable, "-P", "-m", "anyaccel.launch.cluster.node")
        per_host = self.runner.per == "node"
        start = {name: value for name, value in self.task.environment.items() if name in _AT_START}
        job = ClusterJob(
            hosts=self.task.hosts,
            program=(*agent, "%n", contact) if per_host else agent,
            environment=start if per_host else {**start, VARIABLE: contact},
            launcher_args=tuple(shlex.split(self.cluster.launcher_args)),
            ssh_port=self.cluster.ssh_port,
            folder=self.task.folder,
            verbose=options.log_level == "debug",
        )
        command = self.runner.build_command(job)
        return (self.program, *command[1:]), self.runner.launcher_environment(job)


def prepare(options: LaunchOptions, cluster: ClusterOptions) -> ClusterLaunch:
    """Find the hosts and make the commands. Starts nothing and asks no other host.

    Raises:
        UsageError: what is asked for cannot be had.
    """
    hosts = find_hosts(options, cluster, os.environ)
    folder = current_folder()
    home = os.path.expanduser("~")  # noqa: PTH111 - stays as it is where nobody knows the home folder; pathlib would raise
    environment = forwarded_environment(without_outer_openmp(os.environ), cluster.exports, [folder, home])
    if options.elastic and options.elastic[1] > len(hosts):
        least, most = options.elastic
        raise UsageError(f"--elastic {least}:{most} wants up to {most} hosts, and there are {len(hosts)}; lower MAX")
    task = Task(options, hosts, environment, folder, secrets.token_hex(16))
    if cluster.no_ssh:
        return _prepare_without_launcher(task, cluster)
    alone = len(hosts) == 1 and is_this_host(hosts[0].name)
    if alone and not cluster.force_multi and cluster.launcher is None:
        task = task.with_master(options.master_addr or "127.0.0.1", free_port(options.master_port))
        return ClusterLaunch(task, cluster)
    runner = find_runner(cluster.launcher or "ssh")
    if options.is_elastic and runner.per == "rank":
        raise UsageError(
            f"--launcher {runner.name} starts the ranks itself, but torch.distributed.elastic has to start them; "
            "use --launcher ssh or pdsh with --max-restarts and --elastic"
        )
    program = require_program(runner, os.environ.get("PATH", os.defpath))
    if runner.name != "ssh":
        return ClusterLaunch(task, cluster, runner, program)
    # ssh starts in the home folder, so relative paths have to become absolute.
    start = absolute_paths({name: value for name, value in environment.items() if name in _AT_START}, folder)
    commands = [
        # An SSH_CONNECTION in this environment is that of the user's own login.
        ["env", "-u", "SSH_CONNECTION", *ssh.agent_command(sys.executable)]
        if here
        else ssh.build_command(
            host.name,
            python=sys.executable,
            environment=start,
            # It is sourced in the folder in which a login starts, so it has to be absolute.
            venv_script=options.venv_script and str(Path(folder, options.venv_script)),
            ssh_port=cluster.ssh_port,
            launcher_args=shlex.split(cluster.launcher_args),
        )
        for host, here in zip(hosts, are_this_host([host.name for host in hosts]), strict=True)
    ]
    return ClusterLaunch(task, cluster, runner, program, commands=tuple(map(tuple, commands)))


def _prepare_without_launcher(task: Task, cluster: ClusterOptions) -> ClusterLaunch:
    node, nodes = cluster.node_rank or 0, len(task.hosts)
    if not 0 <= node < nodes:
        raise UsageError(f"--node_rank is {node}, there are {nodes} hosts: it must be 0 to {nodes - 1}")
    if nodes > 1 and not task.options.master_addr:
        raise UsageError("--no_ssh needs --master_addr: the first host's address, the same on every host")
    port = task.options.master_port or _DEFAULT_PORT
    if node == 0:
        free_port(port)
    launch = ClusterLaunch(task.with_master(task.options.master_addr or "127.0.0.1", port), cluster, node=node)
    return _join_names_of_one_machine(launch) if nodes > 1 else launch


def _join_names_of_one_machine(launch: ClusterLaunch) -> ClusterLaunch:
    """The launch, with the cores divided among the workers of all hosts that are this machine under other names."""
    task, options = launch.task, launch.task.options
    names = [host.name if launch.cluster.file is not None else "" for host in task.hosts]
    try:
        together = names_of_this_machine(names, launch.node, options.master_addr or "")
    except UsageError:
        if options.bind_cores:
            raise
        together = []
    if len(together) < 2:
        return launch
    machine = read_machine()
    who = f"hosts {', '.join(task.hosts[number].name for number in together)} are one machine"
    if options.core_list is not None or len(machine.allowed_cpus) < len(machine.cpus):
        # Each run may have cores of its own, and does not know those of the others.
        text = f"{who}, and this run divides the cores that it was given among its own workers; give each run others"
        return replace(launch, warnings=(text,) if options.bind_cores else ())
    # Devices may have been divided in the same way.
    variable = find_devices(machine, os.environ).variable
    task = replace(task, together=tuple(together), own_devices=bool(variable and os.environ.get(variable)))
    return replace(launch, task=task)


def run_cluster(options: LaunchOptions, cluster: ClusterOptions) -> int:
    """Start the job and supervise it; returns its exit code as `launch_local` does.

    Raises:
        UsageError: what is asked for cannot be had; nothing was started.
    """
    launch = prepare(options, cluster)
    task = launch.task
    if launch.runner is None:
        return _run_here(launch)
    if launch.runner.name == "ssh":
        return start_agents(task, launch.commands, least=options.elastic[0] if options.elastic else None)
    return _run_by_launcher(launch)


def _run_here(launch: ClusterLaunch) -> int:
    task = launch.task
    task.enter()
    host = task.hosts[launch.node].name if len(task.hosts) > 1 else ""
    try:
        plan = task.plan(launch.node)
    except UsageError as error:
        if not task.together:
            raise
        names = ", ".join(task.hosts[other].name for other in task.together)
        raise UsageError(f"{error} (hosts {names} are one machine)") from None
    name = f"anyaccel on {host}" if host else "anyaccel"
    say_warnings(plan, task.options, name)
    console = Output(2, LEVELS[task.options.log_level], name)
    for warning in launch.warnings:
        console.line(f"warning: {warning}", WARNING)
    workers = task.workers(plan, launch.node)
    return supervise(workers, task.options.grace_period, options=task.options, console=console, host=host)


def _run_by_launcher(launch: ClusterLaunch) -> int:
    """Start the agents by the runner's launcher; they call back."""
    task, runner = launch.task, launch.runner
    assert runner
    coordinator = Coordinator(task, task.options.elastic[0] if task.options.elastic else None)
    if runner.per == "node":
        coordinator.agents = [SocketAgent(host.name, len(host.slots)) for host in task.hosts]
    else:
        coordinator.agents = [SocketAgent(host.name, 1) for host in task.hosts for _ in host.slots]

    def on_hello(connection: socket.socket, reader: FrameReader, data: Any) -> None:
        number = data["number"]
        agent = coordinator.agents[number] if number in range(len(coordinator.agents)) else None
        if not isinstance(agent, SocketAgent) or agent.connected:
            coordinator.console.line(f"warning: host {data['host']} called as number {number}, which nobody waits for")
            connection.close()
            return
        agent.attach(connection, reader, coordinator.on_frame)
        coordinator.on_call(agent)

    for text in runner.warnings(task.hosts, os.environ):
        coordinator.console.line(f"warning: {text}", WARNING)
    with many_descriptors(2 * len(coordinator.agents)), stop_signals() as wakeup:
        names = [host.name for host in task.hosts]
        coordinator.listener = AgentListener(task.secret, names, on_hello, agents=len(coordinator.agents))
        command, environment = launch.command(coordinator.listener.contact.encode())
        coordinator.console.line(shlex.join(command), DEBUG)
        coordinator.launcher = LauncherProcess(
            command,
            {**os.environ, **environment},
            coordinator.output,
            coordinator.console,
            may_wait=runner.name == "slurm",
        )
        return coordinator.run(wakeup)
