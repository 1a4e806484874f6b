# SPDX-License-Identifier: Apache-2.0
"""Process groups over several hosts: shared memory inside each host, a second backend between hosts.

A reduction is done inside each host first (to its lowest rank, the leader), then among the leaders, and the result is
broadcast inside each host: a host sends its data over the network once, not once a rank. What has nothing to gain from
it (all_to_all, gather, scatter, messages) goes through the second backend as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ReduceOp

from anyaccel import env
from anyaccel.comm.python_group import Message, PythonGroup, Wait, divide_by
from anyaccel.errors import AnyAccelError, CommError

logger = logging.getLogger(__name__)

# What gloo adds up itself; the rest is gathered and reduced by torch.
_GLOO_TYPES = (torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
_FUNCTIONS: dict[ReduceOp.RedOpType, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def create(store: Store, rank: int, size: int, timeout: timedelta, hosts: list[str]) -> HierarchicalGroup:
    """A group of ranks on several hosts; `hosts` has each rank's host, as the ranks have told each other. Collective.

    Raises:
        CommError: the ranks of a host cannot share memory, or the hosts cannot reach each other.
    """
    from anyaccel.comm import shm

    # In the order in which hosts first appear; the same on all ranks.
    members = {host: [peer for peer in range(size) if hosts[peer] == host] for host in dict.fromkeys(hosts)}
    own = members[hosts[rank]]
    number = list(members).index(hosts[rank])
    local = shm.create_local(PrefixStore(f"host{number}", store), own.index(rank), len(own), timeout)
    between = env.ANYACCEL_BETWEEN_HOSTS.get()
    flat = _second(between, PrefixStore("flat", store), rank, size, timeout)
    leaders = None
    if rank == own[0]:
        leaders = _second(between, PrefixStore("leaders", store), number, len(members), timeout)
    logger.info("%d ranks on %d hosts: shared memory inside, %s between them", size, len(members), between)
    return HierarchicalGroup(rank, timeout, list(members.values()), local, leaders, flat)


def _second(name: str, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    if name == "ccl":
        from anyaccel.comm import ccl_group

        return ccl_group.create(store, rank, size, timeout)
    try:
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    except RuntimeError as error:
        raise CommError(f"gloo cannot connect the hosts of a group: {error}") from error


class HierarchicalGroup(PythonGroup):
    """Ranks of several hosts.

    `hosts`: the ranks of each host in order, whose first is its leader. `local`: shared memory of this rank's host.
    `leaders`: a group of the leaders; None on other ranks. `flat`: a group of all ranks.
    """

    NAME = "shm"

    def __init__(
        self, rank: int, timeout: timedelta, hosts: list[list[int]], local: Any, leaders: Any, flat: Any
    ) -> None:
        super().__init__(rank, sum(map(len, hosts)), timeout)
        self.hosts, self.local, self.leaders, self.flat = hosts, local, leaders, flat
        self._here = next(members for members in hosts if rank in members)

    # Collectives ---------------------------------------------------------------------------------------------

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp.RedOpType) -> Wait:
        if tensor.numel():
            self._reduce_to_leaders(tensor, op)
            self._tell(tensor)
        return _done

    def start_reduce(self, tensor: torch.Tensor, op: ReduceOp.RedOpType, root: int) -> Wait:
        if tensor.numel():
            self._reduce_to_leaders(tensor, op)
            if root in self._here:
                self._tell(tensor)
        return _done

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Wait:
        if tensor.numel():
            if root in self._here and root != self._here[0]:
                self._tell(tensor, self._here.index(root))
            if self.leaders is not None:
                source = next(number for number, members in enumerate(self.hosts) if root in members)
                options = dist.BroadcastOptions()
                options.rootRank = source
                self._finish(self.leaders.broadcast([_bytes(tensor)], options))
            if root not in self._here or root == self._here[0]:
                self._tell(tensor)
        return _done

    def start_all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Wait:
        sizes = [output.numel() * output.element_size() for output in outputs]
        if not sum(sizes):
            return _done
        # Inside the host, by everyone; between hosts, pieces of one size, since gloo takes no others.
        here = [_bytes(outputs[rank]) for rank in self._here]
        self.local.allgather([here], [_bytes(tensor)], _AT_ONCE).wait()
        totals = [sum(sizes[rank] for rank in members) for members in self.hosts]
        whole = torch.empty(len(self.hosts), max(totals), dtype=torch.uint8)
        if self.leaders is not None:
            piece = torch.zeros(max(totals), dtype=torch.uint8)
            torch.cat(here, out=piece[: sum(part.numel() for part in here)])
            self._finish(self.leaders.allgather([list(whole.unbind())], [piece]))
        self._tell(whole)
        for members, piece in zip(self.hosts, whole, strict=True):
            begin = 0
            for rank in members:
                if members is not self._here:
                    _bytes(outputs[rank]).copy_(piece[begin : begin + sizes[rank]])
                begin += sizes[rank]
        return _done

    def start_reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: ReduceOp.RedOpType) -> Wait:
        if output.numel():
            joined = torch.cat([tensor.reshape(-1) for tensor in inputs])
            self._reduce_to_leaders(joined, op)
            self._tell(joined)
            output.copy_(joined.view(self._size, -1)[self._rank].view_as(output))
        return _done

    def start_all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Wait:
        given = torch.cat([_bytes(tensor) for tensor in inputs])
        taken = torch.empty(sum(_bytes(tensor).numel() for tensor in outputs), dtype=torch.uint8)
        counts = [[_bytes(tensor).numel() for tensor in tensors] for tensors in (outputs, inputs)]
        self._finish(self.flat.alltoall_base(taken, given, *counts, dist.AllToAllOptions()))
        for output, part in zip(outputs, torch.split(taken, counts[0]), strict=True):
            _bytes(output).copy_(part)
        return _done

    def start_gather(self, outputs: list[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> Wait:
        options = dist.GatherOptions()
        options.rootRank = root
        if tensor.numel():
            given = [[_bytes(output) for output in outputs]] if outputs else []
            self._finish(self.flat.gather(given, [_bytes(tensor)], options))
        return _done

    def start_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor] | None, root: int) -> Wait:
        options = dist.ScatterOptions()
        options.rootRank = root
        if output.numel():
            given = [[_bytes(tensor) for tensor in inputs]] if inputs else []
            self._finish(self.flat.scatter([_bytes(output)], given, options))
        return _done

    def start_send(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        return _GlooMessage(self.flat.send([_bytes(tensor)], peer, tag), -1, self.timeout)

    def start_recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        if peer is None:
            return _GlooMessage(self.flat.recv_anysource([_bytes(tensor)], tag), None, self.timeout)
        return _GlooMessage(self.flat.recv([_bytes(tensor)], peer, tag), peer, self.timeout)

    def start_barrier(self) -> Wait:
        token = torch.ones(1)
        self._reduce_to_leaders(token, ReduceOp.SUM)
        self._tell(token)
        return _done

    # Their parts ---------------------------------------------------------------------------------------------

    def _finish(self, work: Any) -> None:
        """Wait for an operation of the second backend."""
        try:
            work.wait(self.timeout)
        except AnyAccelError:
            raise
        except RuntimeError as error:
            raise CommError(f"rank {self._rank} of {self._size}: between hosts: {error}") from error

    def failed(self) -> None:
        """What went wrong here must not leave the others waiting."""
        self.abort()

    def _reduce_to_leaders(self, tensor: torch.Tensor, op: ReduceOp.RedOpType) -> None:
        """In place: leaders have the reduction over all ranks, the others something."""
        kind = ReduceOp.SUM if op == ReduceOp.AVG else op
        if len(self._here) > 1:
            options = dist.ReduceOptions()
            options.reduceOp, options.rootRank, options.asyncOp = ReduceOp(kind), 0, False
            self.local.reduce([tensor], options).wait()
        if self.leaders is None:
            return
        self._reduce_leaders(tensor, kind)
        if op == ReduceOp.AVG:
            divide_by(tensor, self._size)

    def _reduce_leaders(self, tensor: torch.Tensor, op: ReduceOp.RedOpType) -> None:
        half = tensor.dtype in (torch.bfloat16, torch.float16)
        wide = tensor.float() if half else tensor
        if wide.dtype in _GLOO_TYPES:
            options = dist.AllreduceOptions()
            options.reduceOp = ReduceOp(op)
            self._finish(self.leaders.allreduce([wide], options))
        else:
            parts = [torch.empty_like(wide) for _ in self.hosts]
            self._finish(self.leaders.allgather([[_bytes(part) for part in parts]], [_bytes(wide)]))
            wide = _reduced(parts, op)
        if wide is not tensor:
            tensor.copy_(wide)

    def _tell(self, tensor: torch.Tensor, source: int = 0) -> None:
        """From one rank of this host to the others."""
        if len(self._here) > 1:
            options = dist.BroadcastOptions()
            options.rootRank, options.asyncOp = source, False
            self.local.broadcast([tensor], options).wait()

    # The group itself ----------------------------------------------------------------------------------------

    def abort(self) -> None:
        """End what is under way, here and on the peers, with an error."""
        for group in (self.local, self.leaders, self.flat):
            if group is not None:
                with suppress(RuntimeError, AttributeError):  # not every backend of torch can
                    group.abort()

    def shutdown(self) -> None:
        """Leave the group."""
        super().shutdown()
        for group in (self.local, self.leaders, self.flat):
            if group is not None:
                group.shutdown()


class _AtOnce:
    asyncOp = False


_AT_ONCE = _AtOnce()


def _done() -> None:
    """What has ended when it was started."""


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor."""
    return tensor.reshape(-1).view(torch.uint8)


def _reduced(parts: list[torch.Tensor], op: ReduceOp.RedOpType) -> torch.Tensor:
    """What gloo does not add up: small integers, truth values, complex numbers."""
    dtype = parts[0].dtype
    if dtype == torch.bool:
        if op in (ReduceOp.SUM, ReduceOp.MAX):
            op = ReduceOp.BOR
        elif op in (ReduceOp.PRODUCT, ReduceOp.MIN):
            op = ReduceOp.BAND
    return reduce(_FUNCTIONS[op], parts)


class _GlooMessage:
    """A message of the second backend."""

    def __init__(self, work: Any, source: int | None, timeout: timedelta) -> None:
        self._work, self._source, self._timeout = work, source, timeout

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for its end."""
        self._work.wait(timeout or self._timeout)

    def is_done(self) -> bool:
        """Whether it has ended."""
        return bool(self._work.is_completed())

    def source(self) -> int:
        """Who sent it."""
        return self._work._source_rank() if self._source is None else self._source
