# SPDX-License-Identifier: Apache-2.0
"""Process groups over several hosts: shared memory inside each host, a second backend between hosts.

A reduction first runs inside each host, to its lowest rank (the leader), then among the leaders; the result is
broadcast inside each host. So a host sends its data over the network once instead of once per rank. Operations that
gain nothing from this (all_to_all, gather, scatter, messages) go through the second backend directly.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ReduceOp

from anyaccel import env
from anyaccel.comm import call_signatures, shm
from anyaccel.comm.between_hosts import HostMessage, narrow, reduce_hosts, widen
from anyaccel.comm.dtypes import AVG, SUM, Lowered, lower
from anyaccel.comm.heartbeat import Heartbeat, connect
from anyaccel.comm.messages import Message
from anyaccel.comm.operations import MismatchError
from anyaccel.comm.process_group import PythonGroup
from anyaccel.comm.rendezvous import Rendezvous
from anyaccel.comm.tensors import as_bytes
from anyaccel.comm.torch_backend import SYNCHRONOUS
from anyaccel.errors import AnyAccelError, CommError, CommTimeoutError, UsageError

logger = logging.getLogger(__name__)


def create(store: Store, rank: int, size: int, timeout: timedelta, hosts: list[str]) -> HierarchicalGroup:
    """Create a group of ranks on several hosts; collective. `hosts` names the host of each rank.

    Raises:
        CommError: the ranks of a host cannot share memory, or the hosts cannot reach each other.
    """
    # Hosts in the order in which they first appear, which is the same on all ranks.
    members = {host: [peer for peer in range(size) if hosts[peer] == host] for host in dict.fromkeys(hosts)}
    own = members[hosts[rank]]
    number = list(members).index(hosts[rank])
    local = shm.create_local(PrefixStore(f"host{number}", store), own.index(rank), len(own), timeout)
    local.is_part = True
    seconds = timeout.total_seconds()
    heartbeat = connect(Rendezvous(PrefixStore("heartbeat", store), rank, size, timeout), rank, size, seconds)
    between = env.ANYACCEL_BETWEEN_HOSTS.get()
    flat = _second_backend(between, PrefixStore("flat", store), rank, size, timeout)
    leaders = None
    if rank == own[0]:
        leaders = _second_backend(between, PrefixStore("leaders", store), number, len(members), timeout)
    logger.info("%d ranks on %d hosts: shared memory inside, %s between them", size, len(members), between)
    return HierarchicalGroup(rank, timeout, list(members.values()), local, leaders, flat, heartbeat)


def _second_backend(name: str, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
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
    `leaders`: a group of the leaders; None on other ranks. `flat`: a group of all ranks. `heartbeat`: tells which ranks
    live.
    """

    NAME = "shm"

    def __init__(
        self,
        rank: int,
        timeout: timedelta,
        hosts: list[list[int]],
        local: Any,
        leaders: Any,
        flat: Any,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        super().__init__(rank, sum(map(len, hosts)), timeout)
        self.hosts, self.local, self.leaders, self.flat, self.heartbeat = hosts, local, leaders, flat, heartbeat
        self._host_ranks = next(members for members in hosts if rank in members)

    # Collectives ---------------------------------------------------------------------------------------------

    def start_all_reduce(self, tensor: torch.Tensor, op: int) -> None:
        low = lower(tensor, op)  # refuses an undefined reduction before anything is sent
        self._check_same_call("all_reduce", tensor.dtype, tensor.numel(), op)
        if tensor.numel():
            self._reduce_to_leaders(tensor, low, op)
            self._broadcast_on_host(tensor)

    def start_reduce(self, tensor: torch.Tensor, op: int, root: int) -> None:
        tensor = tensor if self._rank == root else tensor.clone()
        low = lower(tensor, op)
        self._check_same_call("reduce", tensor.dtype, tensor.numel(), op, root)
        if tensor.numel():
            self._reduce_to_leaders(tensor, low, op)
            if root in self._host_ranks:
                self._broadcast_on_host(tensor)

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self._check_same_call("broadcast", tensor.dtype, tensor.numel(), root=root)
        if tensor.numel():
            if root in self._host_ranks and root != self._host_ranks[0]:
                self._broadcast_on_host(tensor, self._host_ranks.index(root))
            if self.leaders is not None:
                source = next(number for number, members in enumerate(self.hosts) if root in members)
                options = dist.BroadcastOptions()
                options.rootRank = source
                self._wait_for(self.leaders.broadcast([as_bytes(tensor)], options))
            if root not in self._host_ranks or root == self._host_ranks[0]:
                self._broadcast_on_host(tensor)

    def start_all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> None:
        self._check_same_call("all_gather", tensor.dtype, sum(output.numel() for output in outputs))
        self._gather_all(outputs, tensor)

    def _gather_all(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> None:
        sizes = [output.numel() * output.element_size() for output in outputs]
        if not sum(sizes):
            return
        # All ranks gather inside their host. Between hosts the pieces are padded to one size, as gloo needs.
        here = [as_bytes(outputs[rank]) for rank in self._host_ranks]
        self._run_on_host(lambda: self.local.allgather([here], [as_bytes(tensor)], SYNCHRONOUS))
        totals = [sum(sizes[rank] for rank in members) for members in self.hosts]
        whole = torch.empty(len(self.hosts), max(totals), dtype=torch.uint8)
        if self.leaders is not None:
            piece = torch.zeros(max(totals), dtype=torch.uint8)
            torch.cat(here, out=piece[: sum(part.numel() for part in here)])
            self._wait_for(self.leaders.allgather([list(whole.unbind())], [piece]))
        self._broadcast_on_host(whole)
        for members, piece in zip(self.hosts, whole, strict=True):
            begin = 0
            for rank in members:
                if members is not self._host_ranks:
                    as_bytes(outputs[rank]).copy_(piece[begin : begin + sizes[rank]])
                begin += sizes[rank]

    def start_reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: int) -> None:
        counts = [tensor.numel() for tensor in inputs]
        # By bytes, since torch.cat lacks some dtypes.
        joined = torch.cat([as_bytes(tensor) for tensor in inputs]).view(output.dtype)
        low = lower(joined, op)
        self._check_same_call("reduce_scatter", output.dtype, sum(counts), op)
        if joined.numel():
            self._reduce_to_leaders(joined, low, op)
            self._broadcast_on_host(joined)
            begin = sum(counts[: self._rank])
            as_bytes(output).copy_(as_bytes(joined[begin : begin + output.numel()]))

    def start_all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        self._check_same_call("all_to_all", outputs[0].dtype)
        self._check_pairs([tensor.numel() for tensor in inputs], [tensor.numel() for tensor in outputs])
        given = torch.cat([as_bytes(tensor) for tensor in inputs])
        taken = torch.empty(sum(as_bytes(tensor).numel() for tensor in outputs), dtype=torch.uint8)
        counts = [[as_bytes(tensor).numel() for tensor in tensors] for tensors in (outputs, inputs)]
        self._wait_for(self.flat.alltoall_base(taken, given, *counts, dist.AllToAllOptions()))
        for output, part in zip(outputs, torch.split(taken, counts[0]), strict=True):
            as_bytes(output).copy_(part)

    def start_gather(self, outputs: list[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> None:
        self._check_same_call("gather", tensor.dtype, tensor.numel(), root=root)
        options = dist.GatherOptions()
        options.rootRank = root
        if tensor.numel():
            given = [[as_bytes(output) for output in outputs]] if outputs else []
            self._wait_for(self.flat.gather(given, [as_bytes(tensor)], options))

    def start_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor] | None, root: int) -> None:
        self._check_same_call("scatter", output.dtype, output.numel(), root=root)
        options = dist.ScatterOptions()
        options.rootRank = root
        if output.numel():
            given = [[as_bytes(tensor) for tensor in inputs]] if inputs else []
            self._wait_for(self.flat.scatter([as_bytes(output)], given, options))

    def start_send(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        self._check_peer(peer, "send to")
        return HostMessage(self.flat.send([as_bytes(tensor)], peer, tag), -1, partial(self._wait_for, ranks=[peer]))

    def start_recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        if peer is None:
            return HostMessage(self.flat.recv_anysource([as_bytes(tensor)], tag), None, self._wait_for)
        self._check_peer(peer, "receive from")
        work = self.flat.recv([as_bytes(tensor)], peer, tag)
        return HostMessage(work, peer, partial(self._wait_for, ranks=[peer]))

    def start_barrier(self) -> None:
        self._check_same_call("barrier")  # no rank has all signatures before all ranks have come

    def monitored_barrier(self, timeout: timedelta | None = None) -> None:
        """A barrier whose error names the ranks that did not come.

        Raises:
            UsageError: the backend between the hosts has none.
        """
        if not hasattr(self.flat, "monitored_barrier"):
            raise UsageError(f"a group of several hosts with {self.flat.name()} between them has no monitored_barrier")
        limit = timeout or self.timeout

        def start() -> None:
            try:
                self.flat.monitored_barrier(limit, wait_all_ranks=True)
            except RuntimeError as error:
                raise CommTimeoutError(
                    f"rank {self._rank} of {self._size}: not all ranks arrived within the timeout of "
                    f"{limit.total_seconds():g} s: {error}"
                ) from error

        self._run_operation("monitored_barrier", [], start, [], SYNCHRONOUS)

    # What the collectives are made of --------------------------------------------------------------------------

    def _wait_for(self, work: Any, timeout: timedelta | None = None, ranks: Sequence[int] | None = None) -> None:
        """Wait for an operation of the second backend. `ranks`: those without which it cannot end; default: all."""
        limit = timeout or self.timeout
        try:
            work.wait(limit)
        except AnyAccelError:
            raise
        except RuntimeError as error:
            doing = f"rank {self._rank} of {self._size}: between hosts"
            if self.heartbeat is not None and (cause := self.heartbeat.explain(doing, error, ranks)) is not None:
                raise cause from error
            late = "timed out" in str(error).lower()
            what = f"not done within the timeout of {limit.total_seconds():g} s: {error}" if late else error
            kind = CommTimeoutError if late else CommError
            raise kind(f"rank {self._rank} of {self._size}: between hosts: {what}") from error

    def _run_on_host(self, operation: Callable[[], Any]) -> None:
        """Run an operation of this host's group; errors then name ranks by their number in the whole group."""
        try:
            operation().wait()
        except CommError as error:
            text = re.sub(r"\brank (\d+)", lambda found: f"rank {self._host_ranks[int(found[1])]}", str(error))
            # The leader may wait for another host, and the others of this host for their leader.
            doing = f"rank {self._rank} of {self._size}"
            if self.heartbeat is not None and (cause := self.heartbeat.explain(doing, error, notice_s=0)) is not None:
                raise cause from error
            raise type(error)(text) from error

    def failed(self) -> None:
        """Abort the group, so that no peer waits for a rank on which an operation has failed."""
        self.abort()

    def _check_same_call(
        self,
        operation: str,
        dtype: torch.dtype | None = None,
        count: int = 0,
        op: Any = None,
        root: int | None = None,
    ) -> None:
        """Check that all ranks call the same operation. If not, every rank raises, and the group stays usable.

        Raises:
            Disagreement: they call different ones.
        """
        own = torch.tensor(
            call_signatures.signature(operation, dtype, count, op, root), dtype=torch.int64, device="cpu"
        )
        signatures = torch.empty(self._size, call_signatures.LENGTH, dtype=torch.int64, device="cpu")
        self._gather_all(list(signatures.unbind()), own)
        call_signatures.check_equal(self._rank, signatures.tolist())

    def _check_pairs(self, given: list[int], taken: list[int]) -> None:
        """Check that each rank sends as many elements as its peer expects. If one does not, every rank raises."""
        own = torch.tensor([given, taken], dtype=torch.int64, device="cpu")
        signatures = [torch.empty_like(own) for _ in range(self._size)]
        self._gather_all(signatures, own)
        sent = torch.stack([signature[0] for signature in signatures])
        expected = torch.stack([signature[1] for signature in signatures]).T
        for sender, receiver in (sent != expected).nonzero().tolist()[:1]:
            raise MismatchError(
                f"ranks disagree: in all_to_all, rank {sender} sends {int(sent[sender, receiver])} elements to rank "
                f"{receiver}, which expects {int(expected[sender, receiver])}"
            )

    def _check_peer(self, peer: int, doing: str) -> None:
        if peer == self._rank or not 0 <= peer < self._size:
            raise UsageError(f"{doing} rank {peer} by rank {self._rank} of {self._size}")

    def _reduce_to_leaders(self, tensor: torch.Tensor, low: Lowered, op: int) -> None:
        """Reduce in place: each host's leader gets the reduction over all ranks; other ranks' tensors may change.

        Sums are rounded once, for an average after the division; the sum for an average of integers cannot overflow.
        """
        if low.op is None:
            parts = [torch.empty_like(low.tensor) for _ in range(self._size)]
            self._gather_all(parts, low.tensor)
            assert low.combine is not None
            tensor.copy_(reduce(low.combine, parts))
            return
        given = low.tensor
        kind = SUM if op == AVG else low.op
        wide = widen(given, op)
        if len(self._host_ranks) > 1:
            options = dist.ReduceOptions()
            options.reduceOp, options.rootRank, options.asyncOp = ReduceOp(ReduceOp.RedOpType(kind)), 0, False
            self._run_on_host(lambda: self.local.reduce([wide], options))
        if self.leaders is None:
            return
        wide = reduce_hosts(self.leaders, len(self.hosts), wide, kind, self._wait_for)
        wide = narrow(wide, given.dtype, op, self._size)
        if low.restore is not None:
            tensor.copy_(low.restore(wide))
        else:
            given.copy_(wide)  # shares the tensor's memory

    def _broadcast_on_host(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Broadcast from one rank of this host to the other ranks of this host."""
        if len(self._host_ranks) > 1:
            options = dist.BroadcastOptions()
            options.rootRank, options.asyncOp = source, False
            self._run_on_host(lambda: self.local.broadcast([tensor], options))

    # The group itself ----------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long the next operations may wait for other ranks."""
        super().set_timeout(timeout)
        for group in (self.local, self.leaders, self.flat):
            if group is not None:
                group._set_default_timeout(timeout)

    def abort(self) -> None:
        """Make the operations under way fail, here and on the peers."""
        for group in (self.local, self.leaders, self.flat):
            if group is not None:
                with suppress(RuntimeError, AttributeError):  # not every backend of torch has abort()
                    group.abort()

    def shutdown(self) -> None:
        """Leave the group."""
        super().shutdown()
        for group in (self.local, self.leaders, self.flat):
            if group is not None:
                group.shutdown()
        self.heartbeat = None  # other groups may have it too
