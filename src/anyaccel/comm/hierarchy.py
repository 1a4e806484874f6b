# SPDX-License-Identifier: Apache-2.0
"""Process groups over several hosts: shared memory inside each host, a second backend between hosts.

A reduction is done inside each host first (to its lowest rank, the leader), then among the leaders, and the result is
broadcast inside each host: a host sends its data over the network once, not once a rank. What has nothing to gain from
it (all_to_all, gather, scatter, messages) goes through the second backend as it is.
"""

from __future__ import annotations

import logging
import re
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
from anyaccel.comm import agreement, shm
from anyaccel.comm.between_hosts import OPS, HostMessage, as_bytes, narrowed, reduce_hosts, widened
from anyaccel.comm.dtypes import AVG, SUM, Lowered, lower, op_code
from anyaccel.comm.python_group import PythonGroup
from anyaccel.comm.python_messages import Message
from anyaccel.comm.python_operations import Disagreement, Wait
from anyaccel.comm.tensors import same_dtype
from anyaccel.errors import AnyAccelError, CommError, CommTimeoutError, UsageError

logger = logging.getLogger(__name__)


def create(store: Store, rank: int, size: int, timeout: timedelta, hosts: list[str]) -> HierarchicalGroup:
    """A group of ranks on several hosts; `hosts` has each rank's host, as the ranks have told each other. Collective.

    Raises:
        CommError: the ranks of a host cannot share memory, or the hosts cannot reach each other.
    """
    # In the order in which hosts first appear; the same on all ranks.
    members = {host: [peer for peer in range(size) if hosts[peer] == host] for host in dict.fromkeys(hosts)}
    own = members[hosts[rank]]
    number = list(members).index(hosts[rank])
    local = shm.create_local(PrefixStore(f"host{number}", store), own.index(rank), len(own), timeout)
    local.is_part = True
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
        low = lower(tensor, op_code(op))  # refuses what there is not, before anything is sent
        self._agree("all_reduce", tensor.dtype, tensor.numel(), op)
        if tensor.numel():
            self._reduce_to_leaders(tensor, low, op_code(op))
            self._broadcast_here(tensor)
        return _done

    def start_reduce(self, tensor: torch.Tensor, op: ReduceOp.RedOpType, root: int) -> Wait:
        low = lower(tensor, op_code(op))
        self._agree("reduce", tensor.dtype, tensor.numel(), op, root)
        if tensor.numel():
            self._reduce_to_leaders(tensor, low, op_code(op))
            if root in self._here:
                self._broadcast_here(tensor)
        return _done

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Wait:
        self._agree("broadcast", tensor.dtype, tensor.numel(), root=root)
        if tensor.numel():
            if root in self._here and root != self._here[0]:
                self._broadcast_here(tensor, self._here.index(root))
            if self.leaders is not None:
                source = next(number for number, members in enumerate(self.hosts) if root in members)
                options = dist.BroadcastOptions()
                options.rootRank = source
                self._finish(self.leaders.broadcast([as_bytes(tensor)], options))
            if root not in self._here or root == self._here[0]:
                self._broadcast_here(tensor)
        return _done

    def start_all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Wait:
        same_dtype([tensor, *outputs], "all_gather")
        if outputs[self._rank].numel() != tensor.numel():
            raise UsageError(
                f"all_gather of {tensor.numel()} elements with {outputs[self._rank].numel()} in output {self._rank}"
            )
        self._agree("all_gather", tensor.dtype, sum(output.numel() for output in outputs))
        self._gather_all(outputs, tensor)
        return _done

    def _gather_all(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> None:
        sizes = [output.numel() * output.element_size() for output in outputs]
        if not sum(sizes):
            return
        # Inside the host, by everyone; between hosts, pieces of one size, since gloo takes no others.
        here = [as_bytes(outputs[rank]) for rank in self._here]
        self._within(lambda: self.local.allgather([here], [as_bytes(tensor)], _AT_ONCE))
        totals = [sum(sizes[rank] for rank in members) for members in self.hosts]
        whole = torch.empty(len(self.hosts), max(totals), dtype=torch.uint8)
        if self.leaders is not None:
            piece = torch.zeros(max(totals), dtype=torch.uint8)
            torch.cat(here, out=piece[: sum(part.numel() for part in here)])
            self._finish(self.leaders.allgather([list(whole.unbind())], [piece]))
        self._broadcast_here(whole)
        for members, piece in zip(self.hosts, whole, strict=True):
            begin = 0
            for rank in members:
                if members is not self._here:
                    as_bytes(outputs[rank]).copy_(piece[begin : begin + sizes[rank]])
                begin += sizes[rank]

    def start_reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: ReduceOp.RedOpType) -> Wait:
        counts = [tensor.numel() for tensor in inputs]
        if counts[self._rank] != output.numel():
            raise UsageError(
                f"reduce_scatter of {counts} elements for {self._size} ranks, {output.numel()} for this one"
            )
        joined = _joined([*inputs, output])[: sum(counts)]
        low = lower(joined, op_code(op))
        self._agree("reduce_scatter", output.dtype, sum(counts), op)
        if joined.numel():
            self._reduce_to_leaders(joined, low, op_code(op))
            self._broadcast_here(joined)
            begin = sum(counts[: self._rank])
            as_bytes(output).copy_(as_bytes(joined[begin : begin + output.numel()]))
        return _done

    def start_all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Wait:
        same_dtype([*outputs, *inputs], "all_to_all")
        self._agree("all_to_all", outputs[0].dtype)
        self._agree_on_pairs([tensor.numel() for tensor in inputs], [tensor.numel() for tensor in outputs])
        given = torch.cat([as_bytes(tensor) for tensor in inputs])
        taken = torch.empty(sum(as_bytes(tensor).numel() for tensor in outputs), dtype=torch.uint8)
        counts = [[as_bytes(tensor).numel() for tensor in tensors] for tensors in (outputs, inputs)]
        self._finish(self.flat.alltoall_base(taken, given, *counts, dist.AllToAllOptions()))
        for output, part in zip(outputs, torch.split(taken, counts[0]), strict=True):
            as_bytes(output).copy_(part)
        return _done

    def start_gather(self, outputs: list[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> Wait:
        _check_alike("gather", [tensor, *(outputs or [])])
        self._agree("gather", tensor.dtype, tensor.numel(), root=root)
        options = dist.GatherOptions()
        options.rootRank = root
        if tensor.numel():
            given = [[as_bytes(output) for output in outputs]] if outputs else []
            self._finish(self.flat.gather(given, [as_bytes(tensor)], options))
        return _done

    def start_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor] | None, root: int) -> Wait:
        _check_alike("scatter", [output, *(inputs or [])])
        self._agree("scatter", output.dtype, output.numel(), root=root)
        options = dist.ScatterOptions()
        options.rootRank = root
        if output.numel():
            given = [[as_bytes(tensor) for tensor in inputs]] if inputs else []
            self._finish(self.flat.scatter([as_bytes(output)], given, options))
        return _done

    def start_send(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        self._check_peer(peer, "send to")
        return HostMessage(self.flat.send([as_bytes(tensor)], peer, tag), -1, self._finish)

    def start_recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        if peer is None:
            return HostMessage(self.flat.recv_anysource([as_bytes(tensor)], tag), None, self._finish)
        self._check_peer(peer, "receive from")
        return HostMessage(self.flat.recv([as_bytes(tensor)], peer, tag), peer, self._finish)

    def start_barrier(self) -> Wait:
        self._agree("barrier")  # nobody has everybody's form before everybody has come
        return _done

    def monitored_barrier(self, timeout: timedelta | None = None) -> None:
        """A barrier whose error names the ranks that did not come.

        Raises:
            UsageError: what is between the hosts has none.
        """
        if not hasattr(self.flat, "monitored_barrier"):
            raise UsageError(f"a group of several hosts with {self.flat.name()} between them has no monitored_barrier")
        limit = timeout or self.timeout

        def start() -> Wait:
            try:
                self.flat.monitored_barrier(limit, wait_all_ranks=True)
            except RuntimeError as error:
                raise CommTimeoutError(
                    f"rank {self._rank} of {self._size}: not all ranks came within the timeout of "
                    f"{limit.total_seconds():g} s: {error}"
                ) from error
            return _done

        self._do("monitored_barrier", [], start, [], [], _AT_ONCE)

    # What the collectives are made of --------------------------------------------------------------------------

    def _finish(self, work: Any, timeout: timedelta | None = None) -> None:
        """Wait for an operation of the second backend."""
        limit = timeout or self.timeout
        try:
            work.wait(limit)
        except AnyAccelError:
            raise
        except RuntimeError as error:
            late = "timed out" in str(error).lower()
            what = f"not done within the timeout of {limit.total_seconds():g} s: {error}" if late else error
            kind = CommTimeoutError if late else CommError
            raise kind(f"rank {self._rank} of {self._size}: between hosts: {what}") from error

    def _within(self, operation: Callable[[], Any]) -> None:
        """Run an operation of this host's group; errors then name ranks by their number in the whole group."""
        try:
            operation().wait()
        except CommError as error:
            text = re.sub(r"\brank (\d+)", lambda found: f"rank {self._here[int(found[1])]}", str(error))
            raise type(error)(text) from error

    def failed(self) -> None:
        """Abort the group, so that no peer waits for a rank on which an operation has failed."""
        self.abort()

    def _agree(
        self,
        operation: str,
        dtype: torch.dtype | None = None,
        count: int = 0,
        op: Any = None,
        root: int | None = None,
    ) -> None:
        """Check that all ranks call the same operation; else every rank raises, and the group stays usable.

        Raises:
            Disagreement: they do not.
        """
        own = torch.tensor(agreement.form(operation, dtype, count, op, root), dtype=torch.int64, device="cpu")
        forms = torch.empty(self._size, agreement.LENGTH, dtype=torch.int64, device="cpu")
        self._gather_all(list(forms.unbind()), own)
        agreement.compare(self._rank, forms.tolist())

    def _agree_on_pairs(self, given: list[int], taken: list[int]) -> None:
        """Check that each rank sends as many elements as its peer expects. Where one does not, every rank raises."""
        own = torch.tensor([given, taken], dtype=torch.int64, device="cpu")
        forms = [torch.empty_like(own) for _ in range(self._size)]
        self._gather_all(forms, own)
        sent = torch.stack([form[0] for form in forms])
        expected = torch.stack([form[1] for form in forms]).T
        for sender, receiver in (sent != expected).nonzero().tolist()[:1]:
            raise Disagreement(
                f"ranks disagree: in all_to_all, rank {sender} sends {int(sent[sender, receiver])} elements to rank "
                f"{receiver}, which expects {int(expected[sender, receiver])}"
            )

    def _check_peer(self, peer: int, doing: str) -> None:
        if peer == self._rank or not 0 <= peer < self._size:
            raise UsageError(f"{doing} rank {peer} by rank {self._rank} of {self._size}")

    def _reduce_to_leaders(self, tensor: torch.Tensor, low: Lowered, op: int) -> None:
        """Reduce in place: the first rank of each host gets the reduction over all ranks, the others keep theirs.

        Sums are rounded once, after the division of an average; the sum that an average of integers is made of is the
        true one.
        """
        if low.op is None:
            parts = [torch.empty_like(low.tensor) for _ in range(self._size)]
            self._gather_all(parts, low.tensor)
            assert low.combine is not None
            tensor.copy_(reduce(low.combine, parts))
            return
        given = low.tensor
        kind = SUM if op == AVG else low.op
        wide = widened(given, op)
        if len(self._here) > 1:
            options = dist.ReduceOptions()
            options.reduceOp, options.rootRank, options.asyncOp = ReduceOp(OPS[kind]), 0, False
            self._within(lambda: self.local.reduce([wide], options))
        if self.leaders is None:
            return
        wide = reduce_hosts(self.leaders, len(self.hosts), wide, kind, self._finish)
        wide = narrowed(wide, given.dtype, op, self._size)
        if low.raised is not None:
            tensor.copy_(low.raised(wide))
        else:
            given.copy_(wide)  # shares the tensor's memory

    def _broadcast_here(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Broadcast from one rank of this host to the other ranks of this host."""
        if len(self._here) > 1:
            options = dist.BroadcastOptions()
            options.rootRank, options.asyncOp = source, False
            self._within(lambda: self.local.broadcast([tensor], options))

    # The group itself ----------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """How long an operation may wait for others, from the next one on."""
        super().set_timeout(timeout)
        for group in (self.local, self.leaders, self.flat):
            if group is not None:
                group._set_default_timeout(timeout)

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
    """What waits for an operation that was finished by the time it was started: nothing is left to wait for."""


def _check_alike(what: str, tensors: list[torch.Tensor]) -> None:
    """Raise UsageError unless all tensors have the same dtype and number of elements."""
    same_dtype(tensors, what)
    if len(sizes := {tensor.numel() for tensor in tensors}) > 1:
        raise UsageError(f"{what} needs tensors of one size; got {', '.join(map(str, sorted(sizes)))} elements")


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The concatenation of dense tensors of one dtype; by bytes, since torch.cat lacks some dtypes."""
    same_dtype(tensors, "reduce_scatter")
    return torch.cat([as_bytes(tensor) for tensor in tensors]).view(tensors[0].dtype)
