# SPDX-License-Identifier: Apache-2.0
"""The process group of the `shm` backend."""

# torch's declarations have an overload for each form of a call; the methods here take them all.
# mypy: disable-error-code="override, assignment, call-arg"

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import Work

from anyaccel import _native
from anyaccel.comm import events, log
from anyaccel.comm.collectives import Collectives
from anyaccel.comm.dtypes import op_code
from anyaccel.comm.executor import Executor
from anyaccel.comm.messages import ANY, Mail, MessageWork
from anyaccel.comm.tensors import bare_each
from anyaccel.comm.torch_backend import SYNCHRONOUS, TorchGroup
from anyaccel.comm.work import DoneWork, JoinedWork, register


def _list(tensors: Any) -> Any:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _op(opts: Any) -> int:
    """The code of the reduction in torch's options object, in place of which callers may pass the reduction itself."""
    return 0 if opts is None else op_code(getattr(opts, "reduceOp", opts))


def _root(opts: Any) -> int:
    return int(getattr(opts, "rootRank", opts))


def _stop(native: _native.ShmGroup, executor: Executor, mail: Mail) -> None:
    native.leave()
    try:
        executor.close()
    finally:  # also after a Ctrl-C during the wait
        mail.close()


class ShmProcessGroup(TorchGroup):
    """A process group of the ranks of one host.

    Its methods have torch's signatures: tensors and an options object in, a Work out. A synchronous operation runs in
    the calling thread if no other is pending; all others run in order on a thread of the group. torch calls the methods
    from Python, and some from C++ through its trampoline.
    """

    is_part = False  # whether it is a part of a HierarchicalGroup, which logs and records the operations itself

    def __init__(self, store: Store, native: _native.ShmGroup, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._store = store
        self.native = native
        self.collectives = Collectives(native, rank, size)
        self._executor = Executor("anyaccel-shm", native.add_waiting, native.abort, lambda: native.timeout)
        self._mail = Mail(native)
        self._batch: list[Work] | None = None  # between _start_coalescing and _end_coalescing
        self._done = DoneWork()
        log.active()  # if the log is on, this turns off the native fast path, which would bypass it
        self._finalizer = weakref.finalize(self, _stop, native, self._executor, self._mail)
        # Not at exit: the executor and the mail have handlers of their own there.
        self._finalizer.atexit = False

    # --- how operations run

    def _run_operation(
        self, name: str, tensors: Sequence[torch.Tensor], run: Callable[[], None], outputs: Any, options: Any
    ) -> Work:
        """Run an operation, now or on the group's thread; all operations go through here."""
        if log.active() and not self.is_part:
            run = self._with_log(name, sum(t.numel() * t.element_size() for t in tensors), run)
        self._sequence += 1
        if events.wanted() and not self.is_part:
            run = events.recorded("shm", name, tensors, run)
        queued = self._batch is not None or self._executor.pending
        if getattr(options, "asyncOp", True) or queued:
            work = self._executor.submit(run, outputs)
            register(work, outputs)
            if self._batch is not None:
                self._batch.append(work)
            return work
        run()
        return self._done

    def run(self, name: str, tensors: Sequence[torch.Tensor], run: Callable[[], None]) -> None:
        """Call `run` after all operations that were started before, and wait for it."""
        self._run_operation(name, tensors, run, None, SYNCHRONOUS).wait()

    def _with_log(self, name: str, size: int, run: Callable[[], None]) -> Callable[[], None]:
        def timed() -> None:
            start = time.perf_counter()
            run()
            log.record(name, size, time.perf_counter() - start, self)

        return timed

    def _start_coalescing(self, device: torch.device) -> None:
        if self._batch is None:
            self.native.add_waiting(1)  # turns off the native fast path until the end of the batch
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Work:
        if self._batch is not None:
            self.native.add_waiting(-1)
        works, self._batch = self._batch or [], None
        return JoinedWork(works)

    # --- collectives

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """All-reduce in place; `opts` may be an operation."""
        if _native.all_reduce_call(self.native, tensors, opts):  # the fast path: a synchronous call, a plain tensor
            self._sequence += 1
            return self._done
        return self._allreduce(tensors, opts)

    @events.counted("allreduce_")
    def _allreduce(self, tensors: Any, opts: Any) -> Work:
        tensors, op = bare_each(_list(tensors)), _op(opts)

        def run() -> None:
            for tensor in tensors:
                if tensor.layout == torch.strided:  # `bare_each` has checked it
                    self.collectives.all_reduce_bare(tensor.detach(), op)
                else:
                    self.collectives.all_reduce(tensor, op)

        return self._run_operation("all_reduce", tensors, run, tensors, opts)

    @events.counted("allreduce_coalesced_")
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        """All-reduce of several tensors in place."""
        return self._allreduce(tensors, opts)

    @events.counted("reduce_")
    def reduce(self, tensors: Any, opts: Any) -> Work:
        """Reduce to one rank in place."""
        tensors = bare_each(tensors)
        op = op_code(opts.reduceOp)

        def run() -> None:
            for tensor in tensors:
                self.collectives.reduce(tensor, op, _root(opts))

        return self._run_operation("reduce", tensors, run, tensors, opts)

    @events.counted("reduce_scatter_")
    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> Work:
        """Reduce-scatter of a list of tensors for each output."""
        outputs, input_lists = bare_each(outputs), bare_each(input_lists)
        op = _op(opts)

        def run() -> None:
            for output, inputs in zip(outputs, input_lists, strict=True):
                self.collectives.reduce_scatter(output, inputs, op)

        return self._run_operation("reduce_scatter", [t for inputs in input_lists for t in inputs], run, outputs, opts)

    @events.counted("_reduce_scatter_base_")
    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        """Reduce-scatter of one tensor that has the ranks' inputs in order."""
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    _reduce_scatter_base = reduce_scatter_single

    @events.counted("reduce_scatter_tensor_coalesced_")
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Several operations like `reduce_scatter_single`."""
        outputs, inputs = bare_each(outputs), bare_each(inputs)
        op = _op(opts)

        def run() -> None:
            for output, source in zip(outputs, inputs, strict=True):
                self.collectives.reduce_scatter_single(output, source, op)

        return self._run_operation("reduce_scatter", inputs, run, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @events.counted("broadcast_")
    def broadcast(self, tensors: Any, opts: Any, timeout: timedelta | None = None) -> Work:
        """Broadcast in place; `opts` may be a rank."""
        tensors, root = bare_each(_list(tensors)), _root(opts)

        def run() -> None:
            for tensor in tensors:
                self.collectives.broadcast(tensor, root)

        return self._run_operation("broadcast", tensors, run, tensors, opts)

    @events.counted("allgather_")
    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None) -> Work:
        """All-gather into a list of tensors for each input."""
        output_lists, inputs = bare_each(output_lists), bare_each(inputs)

        def run() -> None:
            for outputs, source in zip(output_lists, inputs, strict=True):
                self.collectives.all_gather(outputs, source)

        return self._run_operation("all_gather", inputs, run, output_lists, opts)

    @events.counted("allgather_coalesced_")
    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> Work:
        """All-gather of several inputs; output_lists[rank][i] gets a rank's input i."""
        output_lists, inputs = bare_each(output_lists), bare_each(inputs)

        def run() -> None:
            for i, source in enumerate(inputs):
                self.collectives.all_gather([outputs[i] for outputs in output_lists], source)

        return self._run_operation("all_gather", inputs, run, output_lists, opts)

    @events.counted("_allgather_base_")
    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        """All-gather into one tensor."""
        return self.all_gather_single_coalesced([output], [source], opts)

    _allgather_base = all_gather_single

    @events.counted("allgather_into_tensor_coalesced_")
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Several operations like `all_gather_single`."""
        outputs, inputs = bare_each(outputs), bare_each(inputs)

        def run() -> None:
            for output, source in zip(outputs, inputs, strict=True):
                self.collectives.all_gather_single(output, source)

        return self._run_operation("all_gather", inputs, run, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @events.counted("gather_")
    def gather(self, output_lists: Any, inputs: Any, opts: Any) -> Work:
        """Gather to one rank."""
        output_lists, inputs = bare_each(output_lists), bare_each(inputs)

        def run() -> None:
            for i, source in enumerate(inputs):
                self.collectives.gather(output_lists[i] if output_lists else [], source, _root(opts))

        return self._run_operation("gather", inputs, run, output_lists, opts)

    @events.counted("scatter_")
    def scatter(self, outputs: Any, input_lists: Any, opts: Any) -> Work:
        """Scatter from one rank."""
        outputs, input_lists = bare_each(outputs), bare_each(input_lists)

        def run() -> None:
            for i, output in enumerate(outputs):
                self.collectives.scatter(output, input_lists[i] if input_lists else [], _root(opts))

        return self._run_operation("scatter", outputs, run, outputs, opts)

    @events.counted("alltoall_")
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """All-to-all of lists of tensors."""
        outputs, inputs = bare_each(outputs), bare_each(inputs)
        return self._run_operation(
            "all_to_all", inputs, lambda: self.collectives.all_to_all(outputs, inputs), outputs, opts
        )

    @events.counted("alltoall_base_")
    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Work:
        """All-to-all of slices of one tensor."""
        output, source = bare_each(output), bare_each(source)

        def run() -> None:
            self.collectives.all_to_all_single(output, source, output_splits or [], input_splits or [])

        return self._run_operation("all_to_all", [source], run, [output], opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        """Wait for all ranks."""
        seconds = opts.timeout.total_seconds() if opts is not None else 0.0
        return self._run_operation("barrier", [], lambda: self.native.barrier(max(seconds, 0.0)), [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names the ranks that did not come; `wait_all_ranks` is always so."""
        seconds = 0.0 if timeout is None else timeout.total_seconds()
        if self._executor.pending:
            self._executor.submit(lambda: self.native.barrier(max(seconds, 0.0)), []).wait()
        else:
            self.native.barrier(max(seconds, 0.0))

    # --- messages

    def send(self, tensors: Any, peer: int, tag: int) -> Work:
        """Send one tensor."""
        tensors = bare_each(tensors)
        return self._join(
            [self._post_recorded("send", tensor, lambda t: self._mail.send(t, peer, tag)) for tensor in tensors]
        )

    def recv(self, tensors: Any, peer: int, tag: int) -> Work:
        """Receive one tensor."""
        tensors = bare_each(tensors)
        name = "recvAnySource" if peer == ANY else "recv"
        return self._join([self._post_recorded(name, t, lambda t: self._mail.receive(t, peer, tag)) for t in tensors])

    def recv_anysource(self, tensors: Any, tag: int) -> Work:
        """Receive one tensor of whoever sends it."""
        return self.recv(tensors, ANY, tag)

    def _post_recorded(
        self, name: str, tensor: torch.Tensor, post: Callable[[torch.Tensor], MessageWork]
    ) -> MessageWork:
        end = events.begin("shm", name, [tensor])
        work = post(tensor)
        if end is not None:
            work.when_done(end)
        return work

    def _join(self, works: list[Work]) -> Work:
        if self._batch is not None:
            self._batch.extend(works)
        return works[0] if len(works) == 1 else JoinedWork(works)

    # --- what torch asks a group

    def getBackendName(self) -> str:
        """The name under which it is registered."""
        return "shm"

    name = getBackendName
    _get_backend_name = getBackendName

    def get_group_store(self) -> Store:
        """The store through which the ranks have met."""
        return self._store

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether torch could ask for tensors in this backend's memory; it is `comm.symm_empty` here."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long the next operations may wait for a peer."""
        self.native.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _get_timeout(self) -> timedelta:
        return timedelta(seconds=self.native.timeout)

    def abort(self) -> None:
        """Make the operations under way fail, here and on the peers."""
        self.native.abort()

    def shutdown(self) -> None:
        """Leave the group after all submitted operations; peers that still wait for this rank get an error."""
        self._executor.close(None)  # each operation has a deadline
        self._finalizer()
