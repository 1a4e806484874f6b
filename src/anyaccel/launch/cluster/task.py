# SPDX-License-Identifier: Apache-2.0
"""The task that every host of a job gets, from which it makes its own plan and its workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from anyaccel._version import __version__
from anyaccel.errors import UsageError
from anyaccel.launch.job import Host
from anyaccel.launch.local.command import program, worker_command
from anyaccel.launch.local.launcher import check_script
from anyaccel.launch.local.streams import prepare_log_dir
from anyaccel.launch.local.worker import Worker
from anyaccel.launch.plan.ancestors import without_outer_openmp
from anyaccel.launch.plan.options import LaunchOptions
from anyaccel.launch.plan.plan import HostPlace, LaunchPlan, RankBinding
from anyaccel.launch.plan.planning import make_plan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


@dataclass(frozen=True)
class Task:
    """The job as its hosts see it.

    Attributes:
        options: the options, with the port and address of rank 0 once they are known.
        hosts: the hosts in the order of their ranks.
        environment: variables that are forwarded from the launcher.
        folder: working directory of the workers.
        secret: secret of the job, on the launcher's side; it is not a part of the encoded task.
        together: numbers of the hosts that are this machine, if the hostfile has several names for it.
        own_devices: whether each of these has been started with devices of its own.
    """

    options: LaunchOptions
    hosts: tuple[Host, ...]
    environment: Mapping[str, str]
    folder: str
    secret: str = ""
    together: tuple[int, ...] = ()
    own_devices: bool = False

    def encode(self) -> dict[str, Any]:
        """The task in types that JSON has."""
        return {
            "version": __version__,
            "options": asdict(self.options),
            "hosts": [[host.name, list(host.slots)] for host in self.hosts],
            "environment": dict(self.environment),
            "folder": self.folder,
        }

    @classmethod
    def decode(cls, data: Any) -> Task:
        """The opposite of `encode`, on another host.

        Raises:
            UsageError: another version of this package has encoded it.
        """
        if data["version"] != __version__:
            raise UsageError(
                f"this host has anyaccel {__version__} in {sys.prefix}, the launcher has {data['version']}; "
                "install the same version on all hosts"
            )
        lists = {name: tuple(value) for name, value in data["options"].items() if isinstance(value, list)}
        hosts = tuple(Host(name, tuple(slots)) for name, slots in data["hosts"])
        return cls(LaunchOptions(**{**data["options"], **lists}), hosts, data["environment"], data["folder"])

    def with_master(self, address: str | None, port: int | None) -> Task:
        """The task with the address of rank 0."""
        return replace(self, options=replace(self.options, master_addr=address, master_port=port))

    @property
    def world_size(self) -> int:
        """Number of workers on all hosts."""
        return sum(len(host.slots) for host in self.hosts)

    def place(self, node: int) -> HostPlace:
        """The position of a host's ranks in the job, and their devices."""
        first = sum(len(host.slots) for host in self.hosts[:node])
        ahead = sum(len(self.hosts[other].slots) for other in self.together if other < node)
        behind = sum(len(self.hosts[other].slots) for other in self.together if other > node)
        slots, everybodys = self._slots(node)
        # With slots 0, 1, 2 ... LOCAL_RANK selects the same devices without a visible-devices variable.
        chosen = None if slots == tuple(range(len(slots))) else slots
        return HostPlace(first, self.world_size, node, len(self.hosts), ahead, behind, chosen, everybodys)

    def node_of_rank(self, rank: int) -> int:
        """The number of the host that has this rank."""
        for node, host in enumerate(self.hosts):
            rank -= len(host.slots)
            if rank < 0:
                return node
        raise UsageError(f"there is no rank {rank} among {self.world_size}")

    def enter(self) -> None:
        """Change to the launcher's folder, and set the forwarded variables.

        Raises:
            UsageError: the folder or the script does not exist on this host.
        """
        os.environ.update(self.environment)
        try:
            os.chdir(self.folder)
        except OSError as error:
            raise UsageError(
                f"folder {self.folder!r} cannot be entered on this host: {error.strerror}; it must be there on "
                "every host (a shared file system, or a copy)"
            ) from None
        check_script(self.options, os.environ.get("PATH", os.defpath))
        prepare_log_dir(self.options)

    def plan(self, node: int) -> LaunchPlan:
        """The plan of one host, made on it.

        Raises:
            UsageError: what is asked for cannot be had there.
        """
        options = replace(self.options, num_accelerators=len(self.hosts[node].slots))
        return make_plan(options, place=self.place(node))

    def _slots(self, node: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """The slots of a host as device numbers, and those of all hosts that are the same machine.

        The slots of each name count from 0; if two names have a number in common, the devices of each name come after
        those of the names before it.
        """
        if not self.together or self.own_devices:
            return self.hosts[node].slots, None
        slots = {other: self.hosts[other].slots for other in self.together}
        numbers = [slot for found in slots.values() for slot in found]
        if len(set(numbers)) < len(numbers):
            first = 0
            for other, found in slots.items():
                slots[other] = tuple(first + slot for slot in found)
                first = slots[other][-1] + 1
        return slots[node], tuple(slot for found in slots.values() for slot in found)

    def workers(self, plan: LaunchPlan, node: int) -> list[Worker]:
        """The processes to start on this host: the workers, or torch's elastic launcher."""
        if self.options.is_elastic:
            return [self._elastic_launcher(plan, node)]
        extra = self._socket_interface(node)
        return [
            Worker(
                binding,
                tuple(worker_command(self.options, binding)),
                {**os.environ, **extra, **binding.env},
            )
            for binding in plan.ranks
        ]

    def _elastic_launcher(self, plan: LaunchPlan, node: int) -> Worker:
        """torch.distributed.run with the binder inside; it starts the workers of this host."""
        from anyaccel.launch.local import elastic

        options, hosts = self.options, len(self.hosts)
        nodes = options.elastic or (hosts, hosts)
        several = nodes[1] > 1
        users_threads = bool(without_outer_openmp(os.environ).get("OMP_NUM_THREADS"))
        argv = elastic.build_command(
            program(options),
            options.script_args,
            python=sys.executable,
            slots=len(plan.ranks),
            max_restarts=options.max_restarts or 0,
            nodes=nodes,
            endpoint=(plan.master_addr, plan.master_port) if several else None,
            first=node == 0,
            address=self._own_address(plan.master_addr, node) if several else None,
            binding=self._binding(plan) if options.bind_cores else None,
            local_rank_argument=options.local_rank_argument,
            threads=None if options.bind_cores else int(plan.ranks[0].env["OMP_NUM_THREADS"]),
            users_threads=users_threads,
        )
        binding = RankBinding(plan.ranks[0].rank, 0, (), "default", (), {})
        environ = {**os.environ, **self._socket_interface(node)}
        return Worker(binding, tuple(argv), {**environ, **elastic.launcher_environment(environ, options.grace_period)})

    def _binding(self, plan: LaunchPlan) -> list[str]:
        """Options of `anyaccel bind` on this host."""
        if not self.together:
            return self.options.arguments()
        # The binder below torch does not know the other names of this machine, so it gets the list of cores.
        cores = tuple(core for binding in plan.ranks for core in binding.cores)
        return replace(self.options, core_list=cores, smt=False, cores_reserved=0).arguments()

    def _own_address(self, master: str, node: int) -> str:
        from anyaccel.launch.cluster.address import own_addresses

        return master if node == 0 else own_addresses([master])[0]

    def _socket_interface(self, node: int) -> dict[str, str]:
        """GLOO_SOCKET_IFNAME, if this host's name, from which gloo takes its address, resolves to the loopback."""
        if len(self.hosts) < 2 or os.environ.get("GLOO_SOCKET_IFNAME") or not self.options.master_addr:
            return {}
        from anyaccel.launch.cluster.address import hostname_is_loopback, interface_towards

        if not hostname_is_loopback():
            return {}
        name = interface_towards(self.options.master_addr)
        return {"GLOO_SOCKET_IFNAME": name} if name else {}
