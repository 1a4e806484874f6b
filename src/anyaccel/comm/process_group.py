# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="override, assignment, call-arg"
# torch's stubs have overloads for calls that reach no subclass, and know one constructor.
"""The base class of process groups written in Python: reduces torch's calls to a few operations on dense tensors.

A subclass implements the operations of operations.py. `torch.distributed` calls the methods here from Python,
and some from C++ through its trampoline.

What a call gives is checked when it is called; memory is taken and filled when the operation runs, since an earlier one
may still write to the same tensors.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from anyaccel.comm import events, log, sparse
from anyaccel.comm.dtypes import SUM, op_code
from anyaccel.comm.executor import Executor
from anyaccel.comm.messages import MessageWork
from anyaccel.comm.operations import MismatchError, Operations, Wait
from anyaccel.comm.tensors import InPlaceTarget, Target, is_sparse, same_dtype, unwrap_each, values
from anyaccel.comm.work import DoneWork, JoinedWork, register
from anyaccel.errors import AnyAccelError, UsageError

Start = Callable[[], Wait | None]


class PythonGroup(Operations):
    """A process group of CPU tensors. A synchronous operation runs in the calling thread if no other is pending; all
    others run in order on a thread of the group.

    Attributes:
        STARTS_AT_ONCE: whether an operation may start while earlier ones are under way; otherwise it starts when the
            one before it is complete.
        is_part: whether it is a part of a `HierarchicalGroup`, which logs and records the operations itself.
    """

    STARTS_AT_ONCE = False
    is_part = False

    def __init__(self, rank: int, size: int, timeout: timedelta, executor: Executor | None = None) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self.timeout = timeout
        self._executor = executor or self._own_executor()
        self._coalescing: list[Work] | None = None
        self._done = DoneWork()

    def _own_executor(self) -> Executor:
        own = weakref.ref(self)

        def abort() -> None:
            if (group := own()) is not None:
                group.failed()

        def seconds() -> float:
            group = own()
            return math.inf if group is None else group.timeout.total_seconds()

        return Executor(f"anyaccel-{self.NAME}-{self._rank}", abort=abort, timeout=seconds)

    # How operations run ----------------------------------------------------------------------------------------

    def _run_operation(
        self, name: str, given: Sequence[torch.Tensor], start: Start, outputs: Any, options: Any = None
    ) -> Work:
        """Run an operation now, or on the group's thread after earlier operations.

        Args:
            given: the inputs of this rank, for the log and profilers.
            outputs: the value of the work's future.
        """
        self._sequence += 1
        since = time.perf_counter()
        started = (start(),) if self.STARTS_AT_ONCE else None

        def run() -> None:
            begin = since if started else time.perf_counter()
            try:
                wait = started[0] if started else start()
                if wait is not None:
                    wait()
            except (UsageError, MismatchError):
                raise  # nothing is left half sent, so the group stays usable
            except (RuntimeError, AnyAccelError):
                self.failed()
                raise
            if log.active() and not self.is_part:
                size = sum(tensor.numel() * tensor.element_size() for tensor in given)
                log.record(name, size, time.perf_counter() - begin, self)

        call = run if self.is_part else events.recorded(self.NAME, name, given, run)
        asynchronous = getattr(options, "asyncOp", True) or self._coalescing is not None
        if asynchronous or self._executor.pending:
            work = self._executor.submit(call, outputs)
            register(work, outputs)
            if self._coalescing is not None:
                self._coalescing.append(work)
            if not asynchronous:
                work.wait()
            return work
        call()
        return self._done

    def _check_one_per_rank(self, tensors: Any, what: str) -> list[torch.Tensor]:
        if len(tensors) != self._size:
            raise UsageError(f"{what} needs one tensor a rank: {self._size}; got {len(tensors)}")
        return list(tensors)

    def _root(self, options: Any, what: str) -> int:
        """The rank in torch's options object, in place of which callers may pass the rank itself."""
        rank = int(getattr(options, "rootRank", options or 0))
        if not 0 <= rank < self._size:
            raise UsageError(f"{what} with rank {rank} in a group of {self._size} ranks")
        return rank

    # torch.distributed's names -------------------------------------------------------------------------------

    @events.counted("allreduce_")
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        return self._all_reduce(tensors, opts)

    @events.counted("allreduce_coalesced_")
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        return self._all_reduce(tensors, opts)

    def _all_reduce(self, tensors: Any, opts: Any) -> Work:
        tensors, op = unwrap_each([tensors] if isinstance(tensors, torch.Tensor) else tensors), _reduction(opts)
        starts = [
            (self._sparse_all_reduce if is_sparse(each) else self._dense_all_reduce)(each, op) for each in tensors
        ]
        given = [each._values().detach() if is_sparse(each) else each for each in tensors]
        return self._run_operation("all_reduce", given, _in_turn(starts), tensors, opts)

    def _dense_all_reduce(self, tensor: torch.Tensor, op: int) -> Start:
        def start() -> Wait:
            target = InPlaceTarget(tensor)
            return _stored(self.start_all_reduce(target.memory, op), target)

        return start

    def _sparse_all_reduce(self, tensor: torch.Tensor, op: int) -> Start:
        sparse.check(tensor, op)

        def gather(parts: list[torch.Tensor], own: torch.Tensor) -> None:
            if (wait := self.start_all_gather(parts, own)) is not None:
                wait()

        # All of it here, as its parts must run in the same order on all ranks.
        def start() -> None:
            sparse.all_reduce(tensor, op, self._size, gather)

        return start

    @events.counted("reduce_")
    def reduce(self, tensors: Any, opts: Any) -> Work:
        tensor, op, root = _single(tensors), _reduction(opts), self._root(opts, "reduce")

        def start() -> Wait | None:
            target = InPlaceTarget(tensor)
            wait = self.start_reduce(target.memory, op, root)
            return _stored(wait, target) if self._rank == root else wait

        return self._run_operation("reduce", [tensor], start, [tensor], opts)

    @events.counted("broadcast_")
    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        tensor, root = _single(tensors), self._root(opts, "broadcast")

        def start() -> Wait | None:
            target = InPlaceTarget(tensor)
            return _stored(self.start_broadcast(target.memory, root), target)

        return self._run_operation("broadcast", [tensor], start, [tensor], opts)

    @events.counted("allgather_")
    def allgather(self, output_lists: Any, tensors: Any, opts: Any = None) -> Work:
        return self._all_gather(output_lists, tensors, opts)

    @events.counted("allgather_coalesced_")
    def allgather_coalesced(self, output_lists: Any, tensors: Any, opts: Any = None) -> Work:
        """output_lists[rank][i] gets a rank's input i."""
        by_input = [[outputs[index] for outputs in output_lists] for index in range(len(tensors))]
        return self._all_gather(by_input, tensors, opts)

    def _all_gather(self, output_lists: Any, tensors: Any, opts: Any) -> Work:
        output_lists, tensors = unwrap_each(output_lists), unwrap_each(tensors)
        starts = [self._gather_into(outputs, each) for outputs, each in zip(output_lists, tensors, strict=True)]
        return self._run_operation("all_gather", tensors, _in_turn(starts), output_lists, opts)

    def _gather_into(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Start:
        self._check_one_per_rank(outputs, "all_gather")
        same_dtype([tensor, *outputs], "all_gather")
        if (room := outputs[self._rank].numel()) != tensor.numel():
            raise UsageError(f"all_gather of {tensor.numel()} elements with room for {room} in output {self._rank}")

        def start() -> Wait:
            targets = [Target(output) for output in outputs]
            return _stored(self.start_all_gather([each.memory for each in targets], values(tensor)), *targets)

        return start

    @events.counted("_allgather_base_")
    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    _allgather_base = all_gather_single

    @events.counted("allgather_into_tensor_coalesced_")
    def all_gather_single_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> Work:
        outputs, tensors = unwrap_each(outputs), unwrap_each(tensors)
        starts = [self._gather_into_one(output, each) for output, each in zip(outputs, tensors, strict=True)]
        return self._run_operation("all_gather", tensors, _in_turn(starts), outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_into_one(self, output: torch.Tensor, tensor: torch.Tensor) -> Start:
        same_dtype([output, tensor], "all_gather")
        if output.numel() != self._size * tensor.numel():
            raise UsageError(
                f"all_gather of {tensor.numel()} elements a rank into {output.numel()}: must be {self._size} times as "
                "many"
            )

        def start() -> Wait:
            target = Target(output)
            return _stored(self.start_all_gather_single(target.memory, values(tensor)), target)

        return start

    def start_all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> Wait | None:
        """All-gather of tensors of one size into one, in rank order."""
        parts = _rows(output, self._size)
        return self.start_all_gather(parts, tensor) if parts else None

    @events.counted("reduce_scatter_")
    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> Work:
        output, op = _single(outputs), _reduction(opts)
        inputs = unwrap_each(self._check_one_per_rank(input_lists[0], "reduce_scatter"))
        same_dtype([output, *inputs], "reduce_scatter")
        if (given := inputs[self._rank].numel()) != output.numel():
            raise UsageError(f"reduce_scatter to {output.numel()} elements with {given} in input {self._rank}")

        def start() -> Wait | None:
            target = Target(output)
            return _stored(self.start_reduce_scatter(target.memory, list(map(values, inputs)), op), target)

        return self._run_operation("reduce_scatter", inputs, start, [output], opts)

    @events.counted("_reduce_scatter_base_")
    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    _reduce_scatter_base = reduce_scatter_single

    @events.counted("reduce_scatter_tensor_coalesced_")
    def reduce_scatter_single_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> Work:
        outputs, tensors, op = unwrap_each(outputs), unwrap_each(tensors), _reduction(opts)
        starts = [self._scatter_one(output, each, op) for output, each in zip(outputs, tensors, strict=True)]
        return self._run_operation("reduce_scatter", tensors, _in_turn(starts), outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scatter_one(self, output: torch.Tensor, tensor: torch.Tensor, op: int) -> Start:
        same_dtype([output, tensor], "reduce_scatter")
        if tensor.numel() != self._size * output.numel():
            raise UsageError(
                f"reduce_scatter of {tensor.numel()} elements to {output.numel()} a rank: must be {self._size} times "
                "as many"
            )

        def start() -> Wait | None:
            target = Target(output)
            parts = _rows(values(tensor), self._size)
            return _stored(self.start_reduce_scatter(target.memory.view(-1), parts, op), target) if parts else None

        return start

    @events.counted("alltoall_base_")
    def all_to_all_single(
        self, output: Any, tensor: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Work:
        output, tensor = unwrap_each(output), unwrap_each(tensor)
        same_dtype([output, tensor], "all_to_all")
        rows, given = self._rows_of(output, output_splits, "output"), self._rows_of(tensor, input_splits, "input")

        def start() -> Wait | None:
            target = Target(output)
            parts = [
                list(memory.split_with_sizes(count))
                for memory, count in ((target.memory, rows), (values(tensor), given))
            ]
            return _stored(self.start_all_to_all(*parts), target)

        return self._run_operation("all_to_all", [tensor], start, output, opts)

    alltoall_base = all_to_all_single

    def _rows_of(self, tensor: torch.Tensor, splits: Sequence[int], which: str) -> list[int]:
        """How many rows of a tensor are of each rank; all have as many where there are no splits."""
        rows = tensor.size(0)
        if not splits and rows % self._size == 0:
            return [rows // self._size] * self._size
        if not splits:
            raise UsageError(f"all_to_all: {rows} rows of the {which} cannot be split evenly for {self._size} ranks")
        if len(splits) != self._size or sum(splits) != rows or min(splits) < 0:
            raise UsageError(f"all_to_all: {which} splits {list(splits)} for {self._size} ranks and {rows} rows")
        return list(splits)

    @events.counted("alltoall_")
    def alltoall(self, outputs: Any, tensors: Any, opts: Any = None) -> Work:
        outputs = unwrap_each(self._check_one_per_rank(outputs, "all_to_all"))
        inputs = unwrap_each(self._check_one_per_rank(tensors, "all_to_all"))
        same_dtype([*outputs, *inputs], "all_to_all")

        def start() -> Wait | None:
            targets = [Target(output) for output in outputs]
            wait = self.start_all_to_all([each.memory for each in targets], list(map(values, inputs)))
            return _stored(wait, *targets)

        return self._run_operation("all_to_all", inputs, start, outputs, opts)

    @events.counted("gather_")
    def gather(self, output_lists: Any, tensors: Any, opts: Any) -> Work:
        root, tensor, outputs = self._root(opts, "gather"), _single(tensors), None
        if self._rank == root:
            outputs = unwrap_each(self._check_one_per_rank(output_lists[0] if output_lists else [], "gather"))
            _check_alike("gather", [tensor, *outputs])

        def start() -> Wait | None:
            targets = [Target(output) for output in outputs or ()]
            memory = [each.memory for each in targets] if outputs else None
            return _stored(self.start_gather(memory, values(tensor), root), *targets)

        return self._run_operation("gather", [tensor], start, [outputs or []], opts)

    @events.counted("scatter_")
    def scatter(self, outputs: Any, input_lists: Any, opts: Any) -> Work:
        root, output, inputs = self._root(opts, "scatter"), _single(outputs), None
        if self._rank == root:
            inputs = unwrap_each(self._check_one_per_rank(input_lists[0] if input_lists else [], "scatter"))
            _check_alike("scatter", [output, *inputs])

        def start() -> Wait | None:
            target = Target(output)
            given = None if inputs is None else list(map(values, inputs))
            return _stored(self.start_scatter(target.memory, given, root), target)

        return self._run_operation("scatter", [output], start, [output], opts)

    # Messages start at once, outside the order of collectives, as either side may come first.

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Work:
        tensor = _single(tensors)
        return MessageWork(self.start_send(values(tensor), peer, tag), None, [tensor])

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Work:
        return self._recv(tensors, peer, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        return self._recv(tensors, None, tag)

    def _recv(self, tensors: Any, peer: int | None, tag: int) -> Work:
        tensor = _single(tensors)
        target = Target(tensor)
        return MessageWork(self.start_recv(target.memory, peer, tag), target, [tensor])

    def barrier(self, opts: Any = None) -> Work:
        return self._run_operation("barrier", [], self.start_barrier, [], opts)

    # The group itself ----------------------------------------------------------------------------------------

    def _start_coalescing(self, device: Any) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: Any) -> Work:
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


def _in_turn(starts: Sequence[Start]) -> Start:
    """Operations that are one for torch."""
    if len(starts) == 1:
        return starts[0]

    def start() -> Wait:
        waits = [start() for start in starts]

        def finish() -> None:
            for wait in waits:
                if wait is not None:
                    wait()

        return finish

    return start


def _stored(wait: Wait | None, *targets: Target) -> Wait:
    """What waits for an operation, and then stores what it has written."""

    def finish() -> None:
        if wait is not None:
            wait()
        for target in targets:
            target.store()

    return finish


def _rows(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """A dense tensor as `count` parts of one size; none where it is empty."""
    return list(tensor.view(count, -1).unbind()) if tensor.numel() else []


def _single(tensors: Any) -> torch.Tensor:
    """The tensor itself, or the only one of a list, as `bare_each` leaves it."""
    tensors = unwrap_each(tensors)
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise UsageError(f"one tensor a rank is taken, not {len(tensors)}")
    tensor: torch.Tensor = tensors[0]
    return tensor


def _reduction(options: Any) -> int:
    """The reduction in torch's options object, in place of which callers may pass the reduction itself."""
    return SUM if options is None else op_code(getattr(options, "reduceOp", options))


def _check_alike(what: str, tensors: list[torch.Tensor]) -> None:
    """Raise UsageError unless all tensors have the same dtype and number of elements."""
    same_dtype(tensors, what)
    if len(sizes := {tensor.numel() for tensor in tensors}) > 1:
        raise UsageError(f"{what} needs tensors of one size; got {', '.join(map(str, sorted(sizes)))} elements")
