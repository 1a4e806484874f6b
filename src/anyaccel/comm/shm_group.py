# SPDX-License-Identifier: Apache-2.0
"""The process group of the `shm` backend."""

# torch's declarations have an overload for each form of a call; the methods here take them all.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

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
from anyaccel.comm.dtypes import Lowered, dtype_code, lower
from anyaccel.comm.executor import Executor
from anyaccel.comm.process_group import PythonGroup
from anyaccel.comm.shm_messages import ANY, Mailbox, ShmMessageWork
from anyaccel.comm.tensors import unwrap_each
from anyaccel.comm.torch_backend import SYNCHRONOUS
from anyaccel.comm.work import JoinedWork


def _stop(native: _native.ShmGroup, executor: Executor, mail: Mailbox) -> None:
    native.leave()
    try:
        executor.close()
    finally:  # also after a Ctrl-C during the wait
        mail.close()


class ShmProcessGroup(PythonGroup):
    """A process group of the ranks of one host."""

    NAME = "shm"

    def __init__(self, store: Store, native: _native.ShmGroup, rank: int, size: int) -> None:
        self._store = store
        self.native = native
        self.collectives = Collectives(native, rank, size)
        executor = Executor("anyaccel-shm", native.add_waiting, native.abort, lambda: native.timeout)
        super().__init__(rank, size, timedelta(seconds=native.timeout), executor)
        self._mail = Mailbox(native)
        log.active()  # if the log is on, this turns off the native fast path, which would bypass it
        self._finalizer = weakref.finalize(self, _stop, native, executor, self._mail)
        # Not at exit: the executor and the mail have handlers of their own there.
        self._finalizer.atexit = False

    @property
    def timeout(self) -> timedelta:
        """How long an operation may wait for a peer."""
        return timedelta(seconds=self.native.timeout)

    @timeout.setter
    def timeout(self, timeout: timedelta) -> None:
        self.native.timeout = timeout.total_seconds()

    def run(self, name: str, tensors: Sequence[torch.Tensor], run: Callable[[], None]) -> None:
        """Call `run` after all operations that were started before, and wait for it."""
        self._run_operation(name, tensors, run, None, SYNCHRONOUS).wait()

    def _start_coalescing(self, device: torch.device) -> None:
        if self._coalescing is None:
            self.native.add_waiting(1)  # turns off the native fast path until the end of the batch
        super()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Work:
        if self._coalescing is not None:
            self.native.add_waiting(-1)
        return super()._end_coalescing(device)

    # --- collectives

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """All-reduce in place; `opts` may be an operation."""
        if _native.all_reduce_call(self.native, tensors, opts):  # the fast path: a synchronous call, a plain tensor
            self._sequence += 1
            return self._done
        return super().allreduce(tensors, opts)

    def start_all_reduce(self, tensor: torch.Tensor, op: int) -> None:
        self.collectives.all_reduce_dense(tensor, op)

    def start_reduce(self, tensor: torch.Tensor, op: int, root: int) -> None:
        low = lower(tensor, op)
        if low.op is None:
            result = self.collectives.gather_and_reduce(low)
        else:
            address = low.tensor.data_ptr()
            self.native.reduce(address, address, low.tensor.numel(), low.code, low.op, root, low.original_code)
            result = low.tensor if low.restore is None else low.restore(low.tensor)
        if self._rank == root and (low.op is None or low.restore is not None):
            tensor.copy_(result)

    def start_reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: int) -> None:
        if any(tensor.numel() != output.numel() for tensor in inputs):
            self._reduce_scatter_uneven(output, inputs, op)
            return
        lows = [lower(tensor, op) for tensor in inputs]
        first = lows[0]
        if first.op is None:
            everything = torch.stack([low.tensor.reshape(-1) for low in lows])
            whole = Lowered(everything, first.code, None, combine=first.combine)
            output.copy_(self.collectives.gather_and_reduce(whole)[self._rank].view(output.shape))
            return
        into = output if first.restore is None else torch.empty_like(first.tensor)
        self.native.reduce_scatter(
            [low.tensor.data_ptr() for low in lows],
            into.data_ptr(),
            first.tensor.numel(),
            first.code,
            first.op,
            first.original_code,
        )
        if first.restore is not None:
            output.copy_(first.restore(into).view(output.shape))

    def _reduce_scatter_uneven(self, output: torch.Tensor, inputs: list[torch.Tensor], op: int) -> None:
        """A reduce-scatter of pieces of different sizes, as one reduction for each rank that receives a piece."""
        for root, tensor in enumerate(inputs):
            given = tensor.clone()  # an input must not change
            self.start_reduce(given, op, root)
            if root == self._rank:
                output.copy_(given.view(output.shape))

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self.native.broadcast(tensor.data_ptr(), tensor.numel(), dtype_code(tensor.dtype), root)

    def start_all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> None:
        counts = [output.numel() for output in outputs]
        self.native.all_gather(tensor.data_ptr(), _addresses(outputs), counts, dtype_code(tensor.dtype))

    def start_all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        # No tensors are made for the parts: this is called for each layer by those who shard weights.
        count, first = tensor.numel(), output.data_ptr()
        addresses = [first + rank * count * tensor.element_size() for rank in range(self._size)]
        self.native.all_gather(tensor.data_ptr(), addresses, [count] * self._size, dtype_code(tensor.dtype))

    def start_gather(self, outputs: list[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> None:
        code = dtype_code(tensor.dtype)
        self.native.gather(tensor.data_ptr(), _addresses(outputs or []), tensor.numel(), code, root)

    def start_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor] | None, root: int) -> None:
        code = dtype_code(output.dtype)
        self.native.scatter(_addresses(inputs or []), output.data_ptr(), output.numel(), code, root)

    def start_all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        self.native.all_to_all(
            _addresses(inputs),
            [tensor.numel() for tensor in inputs],
            _addresses(outputs),
            [tensor.numel() for tensor in outputs],
            dtype_code(outputs[0].dtype),
        )

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

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Work:
        """Send one tensor."""
        return self._post("send", tensors, lambda tensor: self._mail.send(tensor, peer, tag))

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Work:
        """Receive one tensor."""
        name = "recvAnySource" if peer == ANY else "recv"
        return self._post(name, tensors, lambda tensor: self._mail.receive(tensor, peer, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receive one tensor of whoever sends it."""
        return self.recv(tensors, ANY, tag)

    def _post(self, name: str, tensors: Any, post: Callable[[torch.Tensor], ShmMessageWork]) -> Work:
        works: list[Work] = []
        for tensor in unwrap_each(tensors):
            end = events.begin("shm", name, [tensor])
            work = post(tensor)
            if end is not None:
                work.when_done(end)
            works.append(work)
        if self._coalescing is not None:
            self._coalescing.extend(works)
        return works[0] if len(works) == 1 else JoinedWork(works)

    # --- what torch asks a group

    def _get_backend_name(self) -> str:
        return self.NAME

    def get_group_store(self) -> Store:
        """The store through which the ranks have met."""
        return self._store

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether torch could ask for tensors in this backend's memory; it is `comm.symm_empty` here."""
        return False

    def abort(self) -> None:
        """Make the operations under way fail, here and on the peers."""
        self.native.abort()

    def shutdown(self) -> None:
        """Leave the group after all submitted operations; peers that still wait for this rank get an error."""
        super().shutdown()
        self._finalizer()


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]
