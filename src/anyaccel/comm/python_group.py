# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="override, assignment, call-arg"
# torch's stubs have overloads for calls that reach no subclass, and know one constructor.
"""The base class of process groups written in Python: reduces torch's calls to a few operations on dense tensors.

A subclass implements the operations of python_operations.py. `torch.distributed` calls the methods here from Python,
and some from C++ through its trampoline.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, Work

from anyaccel.comm import events, log, sparse
from anyaccel.comm.dtypes import OP_NAMES, op_code
from anyaccel.comm.executor import Executor
from anyaccel.comm.python_messages import MessageWork
from anyaccel.comm.python_operations import Disagreement, Operations, Wait, done
from anyaccel.comm.tensors import Target, Values, is_sparse, values
from anyaccel.comm.work import JoinedWork, ShmWork, register
from anyaccel.errors import AnyAccelError, UsageError

Start = Callable[[], Wait]


class PythonGroup(Operations):
    """A process group of CPU tensors.

    Attributes:
        STARTS_AT_ONCE: whether an operation may start while earlier ones are under way; otherwise it starts when the
            one before it is complete.
    """

    STARTS_AT_ONCE = False

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self.timeout = timeout
        own = weakref.ref(self)

        def abort() -> None:
            if (group := own()) is not None:
                group.failed()

        def patience() -> float:
            group = own()
            return math.inf if group is None else group.timeout.total_seconds()

        self._executor = Executor(f"anyaccel-{self.NAME}-{rank}", abort=abort, timeout=patience)
        self._coalescing: list[Work] | None = None

    # How operations run ----------------------------------------------------------------------------------------

    def _run_operation(
        self,
        name: str,
        given: Sequence[torch.Tensor],
        start: Start,
        targets: Sequence[Target],
        outputs: Any,
        options: Any = None,
    ) -> ShmWork:
        """Run an operation in this thread, or, if it is asynchronous, on the group's thread after earlier operations.

        Args:
            given: the inputs of this rank, for the log and profilers.
            targets: what the operation writes.
            outputs: the value of the work's future.
        """
        self._sequence += 1
        asynchronous = getattr(options, "asyncOp", True) or self._coalescing is not None
        since = time.perf_counter()
        wait = start() if self.STARTS_AT_ONCE else None

        def run() -> None:
            begin = since if wait else time.perf_counter()
            try:
                (wait or start())()
            except (UsageError, Disagreement):
                raise  # nothing is left half sent, so the group stays usable
            except (RuntimeError, AnyAccelError):
                self.failed()
                raise
            for target in targets:
                target.store()
            if log.active():
                size = sum(tensor.numel() * tensor.element_size() for tensor in given)
                log.record(name, size, time.perf_counter() - begin, self)

        run = events.recorded(self.NAME, name, given, run)
        if asynchronous or self._executor.pending:
            work = self._executor.submit(run, outputs)
            register(work, outputs)
            if self._coalescing is not None:
                self._coalescing.append(work)
            if not asynchronous:
                work.wait()
            return work
        run()
        return ShmWork(outputs, done=True)

    def _check_one_per_rank(self, tensors: Sequence[torch.Tensor], what: str) -> list[torch.Tensor]:
        if len(tensors) != self._size:
            raise UsageError(f"{what} needs one tensor a rank: {self._size}; got {len(tensors)}")
        return list(tensors)

    def _check_rank(self, rank: int, what: str) -> None:
        if not 0 <= rank < self._size:
            raise UsageError(f"{what} with rank {rank} in a group of {self._size} ranks")

    # torch.distributed's names -------------------------------------------------------------------------------

    @events.counted("allreduce_")
    def allreduce(self, tensors: Any, opts: Any = None) -> ShmWork:
        opts = opts or dist.AllreduceOptions()
        tensor = _single(tensors)
        op = _reduction(opts.reduceOp)
        if is_sparse(tensor):
            return self._sparse_all_reduce(tensor, op, opts)
        target = Values(tensor)
        return self._run_operation(
            "all_reduce", [tensor], lambda: self.start_all_reduce(target.memory, op), [target], [tensor], opts
        )

    def _sparse_all_reduce(self, tensor: torch.Tensor, op: ReduceOp.RedOpType, opts: Any) -> ShmWork:
        sparse.check(tensor, op_code(op))

        def start() -> Wait:
            # Run it here, as its parts must run in the same order on all ranks.
            sparse.all_reduce(tensor, op_code(op), self._size, lambda parts, own: self.start_all_gather(parts, own)())
            return done

        given = [tensor._values().detach()]
        return self._run_operation("all_reduce", given, start, [], [tensor], opts)

    @events.counted("allreduce_coalesced_")
    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> JoinedWork:
        each = dist.AllreduceOptions()
        each.reduceOp = (opts or dist.AllreduceCoalescedOptions()).reduceOp
        return JoinedWork([self.allreduce([tensor], each) for tensor in tensors])

    @events.counted("reduce_")
    def reduce(self, tensors: Any, opts: Any) -> ShmWork:
        tensor = _single(tensors)
        op, root = _reduction(opts.reduceOp), opts.rootRank
        self._check_rank(root, "reduce")
        target = Values(tensor)
        # Other ranks than the root reduce a copy, as their tensor must not change.
        space = target.memory if self._rank == root else values(tensor).clone()
        targets = [target] if self._rank == root else []
        return self._run_operation(
            "reduce", [tensor], lambda: self.start_reduce(space, op, root), targets, [tensor], opts
        )

    @events.counted("broadcast_")
    def broadcast(self, tensors: Any, opts: Any = None) -> ShmWork:
        opts = opts or dist.BroadcastOptions()
        self._check_rank(opts.rootRank, "broadcast")
        tensor = _single(tensors)
        target = Values(tensor)
        return self._run_operation(
            "broadcast", [tensor], lambda: self.start_broadcast(target.memory, opts.rootRank), [target], [tensor], opts
        )

    @events.counted("allgather_")
    def allgather(self, output_lists: Any, tensors: Any, opts: Any = None) -> ShmWork:
        outputs = self._check_one_per_rank(output_lists[0], "all_gather")
        targets = [Target(output) for output in outputs]
        dense = values(_single(tensors))
        memory = [target.memory for target in targets]
        return self._run_operation(
            "all_gather", [dense], lambda: self.start_all_gather(memory, dense), targets, [outputs], opts
        )

    @events.counted("allgather_coalesced_")
    def allgather_coalesced(self, output_lists: Any, tensors: list[torch.Tensor], opts: Any = None) -> JoinedWork:
        return JoinedWork(
            [
                self.allgather([[outputs[index] for outputs in output_lists]], [tensor])
                for index, tensor in enumerate(tensors)
            ]
        )

    @events.counted("_allgather_base_")
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> ShmWork:
        if output.numel() != self._size * tensor.numel():
            raise UsageError(
                f"all_gather_into_tensor: {self._size} ranks give {tensor.numel()} elements each, the output has "
                f"{output.numel()}"
            )
        target, dense = Target(output), values(tensor)
        parts = list(target.memory.reshape(self._size, -1).unbind()) if output.numel() else []
        start = (lambda: self.start_all_gather(parts, dense.reshape(-1))) if parts else _nothing
        return self._run_operation("all_gather", [tensor], start, [target], output, opts)

    _allgather_base = all_gather_single

    @events.counted("allgather_into_tensor_coalesced_")
    def all_gather_single_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> JoinedWork:
        return JoinedWork([self.all_gather_single(o, t) for o, t in zip(outputs, tensors, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @events.counted("reduce_scatter_")
    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> ShmWork:
        opts = opts or dist.ReduceScatterOptions()
        output = _single(outputs)
        given = self._check_one_per_rank(input_lists[0], "reduce_scatter")
        target, inputs, op = Target(output), [values(tensor) for tensor in given], _reduction(opts.reduceOp)
        return self._run_operation(
            "reduce_scatter",
            inputs,
            lambda: self.start_reduce_scatter(target.memory, inputs, op),
            [target],
            [output],
            opts,
        )

    @events.counted("_reduce_scatter_base_")
    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> ShmWork:
        opts = opts or dist.ReduceScatterOptions()
        if tensor.numel() != self._size * output.numel():
            raise UsageError(
                f"reduce_scatter_tensor: {self._size} ranks get {output.numel()} elements each, the input has "
                f"{tensor.numel()}"
            )
        target, op = Target(output), _reduction(opts.reduceOp)
        parts = list(values(tensor).reshape(self._size, -1).unbind()) if output.numel() else []
        start = (lambda: self.start_reduce_scatter(target.memory.reshape(-1), parts, op)) if parts else _nothing
        return self._run_operation("reduce_scatter", [tensor], start, [target], output, opts)

    _reduce_scatter_base = reduce_scatter_single

    @events.counted("reduce_scatter_tensor_coalesced_")
    def reduce_scatter_single_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> JoinedWork:
        opts = opts or dist.ReduceScatterOptions()
        return JoinedWork([self.reduce_scatter_single(o, t, opts) for o, t in zip(outputs, tensors, strict=True)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @events.counted("alltoall_base_")
    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> ShmWork:
        target, dense = Target(output), values(tensor)
        outputs, inputs = self._split(target.memory, output_splits), self._split(dense, input_splits)
        return self._run_operation(
            "all_to_all", [tensor], lambda: self.start_all_to_all(outputs, inputs), [target], output, opts
        )

    alltoall_base = all_to_all_single

    def _split(self, tensor: torch.Tensor, rows: Sequence[int]) -> list[torch.Tensor]:
        """Split a tensor by rows, evenly if `rows` is empty."""
        if rows:
            if len(rows) != self._size or sum(rows) != tensor.size(0):
                raise UsageError(
                    f"all_to_all_single: splits {list(rows)} for {self._size} ranks, {tensor.size(0)} rows"
                )
            return list(torch.split(tensor, list(rows)))
        if tensor.size(0) % self._size:
            raise UsageError(f"all_to_all_single: {tensor.size(0)} rows cannot be split among {self._size} ranks")
        return list(torch.split(tensor, tensor.size(0) // self._size)) if tensor.size(0) else [tensor] * self._size

    @events.counted("alltoall_")
    def alltoall(self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any = None) -> ShmWork:
        targets = [Target(output) for output in self._check_one_per_rank(outputs, "all_to_all")]
        inputs = [values(tensor) for tensor in self._check_one_per_rank(tensors, "all_to_all")]
        memory = [target.memory for target in targets]
        return self._run_operation(
            "all_to_all", inputs, lambda: self.start_all_to_all(memory, inputs), targets, list(outputs), opts
        )

    @events.counted("gather_")
    def gather(self, output_lists: Any, tensors: Any, opts: Any) -> ShmWork:
        self._check_rank(opts.rootRank, "gather")
        outputs = (
            self._check_one_per_rank(output_lists[0], "gather")
            if output_lists and self._rank == opts.rootRank
            else None
        )
        targets = [Target(output) for output in outputs or []]
        dense, memory = values(_single(tensors)), [target.memory for target in targets] if outputs else None
        return self._run_operation(
            "gather", [dense], lambda: self.start_gather(memory, dense, opts.rootRank), targets, [outputs or []], opts
        )

    @events.counted("scatter_")
    def scatter(self, outputs: Any, input_lists: Any, opts: Any) -> ShmWork:
        self._check_rank(opts.rootRank, "scatter")
        output = _single(outputs)
        target = Target(output)
        mine = self._rank == opts.rootRank
        inputs = [values(tensor) for tensor in self._check_one_per_rank(input_lists[0], "scatter")] if mine else None
        return self._run_operation(
            "scatter",
            [output],
            lambda: self.start_scatter(target.memory, inputs, opts.rootRank),
            [target],
            [output],
            opts,
        )

    # Messages start at once, outside the order of collectives, as either side may come first.

    def send(self, tensors: Any, peer: int, tag: int = 0) -> MessageWork:
        tensor = _single(tensors)
        return MessageWork(self.start_send(values(tensor), peer, tag), None, [tensor])

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> MessageWork:
        return self._recv(tensors, peer, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> MessageWork:
        return self._recv(tensors, None, tag)

    def _recv(self, tensors: Any, peer: int | None, tag: int) -> MessageWork:
        tensor = _single(tensors)
        target = Target(tensor)
        return MessageWork(self.start_recv(target.memory, peer, tag), target, [tensor])

    def barrier(self, opts: Any = None) -> ShmWork:
        return self._run_operation("barrier", [], self.start_barrier, [], [], opts)

    # The group itself ----------------------------------------------------------------------------------------

    def _start_coalescing(self, device: Any) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: Any) -> JoinedWork:
        works, self._coalescing = self._coalescing or [], None
        return JoinedWork(works)

    def getBackendName(self) -> str:
        return self.NAME

    name = getBackendName

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def _get_timeout(self) -> timedelta:
        return self.timeout

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def shutdown(self) -> None:
        self._executor.close(None)  # each operation has a deadline


def divide_by(total: torch.Tensor, count: int) -> None:
    """Divide a sum by `count` in place; integers are rounded towards zero."""
    if total.dtype.is_complex:
        total = torch.view_as_real(total)  # torch's complex division may differ by one bit in the last elements
    total.div_(count, rounding_mode=None if total.dtype.is_floating_point else "trunc")


def _nothing() -> Wait:
    return done


def _single(tensors: Any) -> torch.Tensor:
    """The tensor itself, or the only one of a list."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise UsageError(f"one tensor a rank is taken, not {len(tensors)}")
    tensor: torch.Tensor = tensors[0]
    return tensor


# torch's reductions by their numbers.
OPS = tuple(ReduceOp.RedOpType(number) for number in range(len(OP_NAMES)))


def _reduction(op: Any) -> ReduceOp.RedOpType:
    return OPS[op_code(op)]
