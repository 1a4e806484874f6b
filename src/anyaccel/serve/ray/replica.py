# SPDX-License-Identifier: Apache-2.0
"""A replica: a process with the whole model, bound to cores of its own. Torch-free."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import ray

from anyaccel.errors import AnyAccelError
from anyaccel.inference.text.tokenizer import load_text_tokenizer
from anyaccel.launch.local.leases import Lease, bind_to, lease_cores
from anyaccel.serve.engine.opening import open_engine
from anyaccel.serve.interface import Chunk, ModelFacts, Stats
from anyaccel.serve.ray.calls import ReplicaCall, portable
from anyaccel.serve.ray.options import ServeOptions
from anyaccel.topology import Machine, format_cpu_list, read_machine

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

logger = logging.getLogger("ray.serve")


class _Log:
    """Logs the messages of `open_engine`."""

    def line(self, text: str) -> None:
        logger.info(text)

    def progress(self, done: int, total: int) -> None:
        pass


def cores_for(num_cpus: int, cpus_of_node: float, machine: Machine) -> int:
    """Physical cores for a replica of so many of Ray's CPUs.

    Ray counts hardware threads unless it gets a number; the binder counts cores.

    Args:
        cpus_of_node: how many Ray has on this machine.
    """
    cores = len(machine.cores())
    return max(1, num_cpus if cpus_of_node <= cores else int(num_cpus * cores / cpus_of_node))


def _take_cores(num_cpus: int) -> Lease:
    """Bind this process to cores that no other replica has, whichever Ray node of this machine that one is of."""
    machine = read_machine()
    mine = ray.get_runtime_context().get_node_id()
    nodes: list[dict[str, Any]] = ray.nodes()
    cpus = next((node["Resources"].get("CPU", 0.0) for node in nodes if node["NodeID"] == mine), 0.0)
    lease = lease_cores(machine, cores_for(num_cpus, cpus, machine))
    for problem in bind_to(machine, lease.cores):
        logger.warning(problem)
    logger.info(f"bound to cores {format_cpu_list(lease.cores)} of: {machine.summary()}")
    return lease


class Replica:
    """The actor of a replica, whose methods `remote.RemoteEngine` calls through a handle."""

    def __init__(self, options: ServeOptions) -> None:
        self._closed = True  # until there is an engine
        self._lease = _take_cores(options.cpus)
        screen = _Log()
        tokenizer = load_text_tokenizer(options.path(), screen.line)
        self._engine = open_engine(
            options.path(), options.model_options(), screen, options.engine_settings(), tokenizer
        )
        self._closed = False
        for line in self._engine.facts.plan:
            logger.info(line)

    async def generate(self, call: ReplicaCall) -> AsyncIterator[Chunk | AnyAccelError]:
        """See `Engine.generate`; an error is the last item."""
        try:
            chunks: AsyncGenerator[Chunk, None] = self._engine.generate(call.request)  # type: ignore[assignment]
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
        except AnyAccelError as error:
            yield portable(error)

    async def embed(self, call: ReplicaCall) -> list[float] | AnyAccelError:
        """See `Engine.embed`; of one prompt."""
        prompt, pooling, key = call.request
        try:
            return (await self._engine.embed([prompt], pooling, key))[0]
        except AnyAccelError as error:
            return portable(error)

    async def facts(self) -> ModelFacts:
        """The facts about the model."""
        return self._engine.facts

    async def status(self) -> tuple[bool, Stats]:
        """Whether it is ready, and its counters."""
        return self._engine.ready(), self._engine.stats()

    def record_replica_metadata(self) -> dict[str, Any]:
        """Ray tells this to those that send requests here."""
        return {"cache_pages": getattr(self._engine, "cache_pages", 0)}

    async def check_health(self) -> None:
        """Ray's question whether this replica is to be replaced: after three times it is.

        Raises:
            RuntimeError: the engine has failed, and has not started again yet.
        """
        if not self._engine.alive():  # a step that is late may end yet, and ends its ranks if not
            raise RuntimeError("the engine has failed and is started again")

    def __del__(self) -> None:
        """The replica ends; Ray has waited for its open requests."""
        if not self._closed:
            self._closed = True
            self._engine.shut_down()  # type: ignore[union-attr]
            self._lease.close()
