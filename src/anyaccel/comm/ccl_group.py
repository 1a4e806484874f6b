# SPDX-License-Identifier: Apache-2.0
"""The process group of backend `ccl`."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from anyaccel.comm import ccl
from anyaccel.comm.dtypes import AVG, BOOL_OPS, MAX, MIN, OP_NAMES, PRODUCT, SUM
from anyaccel.comm.messages import Message
from anyaccel.comm.operations import Wait
from anyaccel.comm.process_group import PythonGroup, divide_by
from anyaccel.comm.rendezvous import Rendezvous
from anyaccel.comm.tensors import as_bytes
from anyaccel.errors import CommError, CommTimeoutError, UsageError

# Codes of oneapi/ccl/types.hpp.
_DATATYPES = {
    getattr(torch, name): code
    for code, name in enumerate(
        ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
         "bfloat16")
    )
}  # fmt: skip
_BYTES = _DATATYPES[torch.uint8]
_REDUCTIONS = {SUM: 0, PRODUCT: 1, MIN: 2, MAX: 3}


def create(store: Any, rank: int, size: int, timeout: timedelta) -> CclGroup:
    """A group of oneCCL: what `torch.distributed` calls. Collective.

    The ranks meet through `store` before oneCCL's own store is used, so that missing ranks are named and nobody waits
    longer than `timeout`.

    Raises:
        CommError: oneCCL is not installed, or cannot work here.
        CommTimeoutError: ranks are missing.
    """
    _prepare_environment(store, rank, size, timeout)
    native = ccl.native()
    if size == 1:
        return CclGroup(native, rank, size, timeout, 0, 0)
    kvs, address = native.new_kvs() if rank == 0 else (0, b"")
    # A `Rendezvous`, as the store may still have the address of an earlier group.
    rendezvous = Rendezvous(PrefixStore("ccl", store), rank, size, timeout)
    try:
        address = bytes.fromhex(rendezvous(address.hex())[0])
    except CommTimeoutError as error:
        raise CommTimeoutError(f"backend ccl: {error}") from error
    if rank != 0:
        kvs = native.join_kvs(address)
    communicator = _with_timeout(timeout, lambda: native.new_communicator(kvs, size, rank), f"{size} ranks connecting")
    return CclGroup(native, rank, size, timeout, communicator, kvs)


_prepared = False


def _prepare_environment(store: Any, rank: int, size: int, timeout: timedelta) -> None:
    """Set oneCCL's environment variables, once, before it starts. The first group is that of all ranks."""
    global _prepared
    if not _prepared:
        wanted = ccl.environment(ccl.find(), rank, size, _master(store), timeout.total_seconds())
        os.environ.update(wanted)
        _prepared = True


def _master(store: Any) -> str:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", "") or os.environ.get("MASTER_ADDR", "") or "127.0.0.1")


def _with_timeout(timeout: timedelta, call: Any, what: str) -> int:
    """The result of a blocking call. If it does not return in time, its thread is abandoned inside the call."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # noqa: BLE001 (raised again below)
            outcome.append(error)

    thread = threading.Thread(target=run, name="anyaccel-ccl-connect", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    if not outcome:
        raise CommTimeoutError(f"backend ccl: {what} did not finish within {timeout.total_seconds():g} s")
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return int(outcome[0])


class _Operation:
    """An operation of oneCCL that is under way; it keeps its tensors alive."""

    def __init__(self, group: CclGroup, handle: int, what: str, tensors: Any) -> None:
        self._group, self._handle, self._what, self._tensors = group, handle, what, tensors
        self._since = time.monotonic()
        self._done = False
        group._open += 1

    def wait(self, timeout: timedelta | None = None) -> None:
        """Make progress until the operation is complete; if it fails or times out, the group is broken."""
        group = self._group
        limit = (timeout or group.timeout).total_seconds()
        try:
            while not self.is_done():
                if time.monotonic() - self._since > limit:
                    raise CommTimeoutError(
                        f"backend ccl: rank {group._rank} of {group._size}: {self._what} did not finish within "
                        f"{limit:g} s: a rank has ended, or called something else"
                    )
                group._check()
        except BaseException as error:
            group._broken = group._broken or str(error) or type(error).__name__
            raise

    def is_done(self) -> bool:
        """Whether the operation is complete, after making some progress on it."""
        if not self._done and self._group._native.wait(self._handle):
            self._done = True
            self._group._open -= 1
            self._group._native.end(self._handle)
        return self._done

    def source(self) -> int:
        """Not used: oneCCL cannot receive from any source, so the receiver has named the sender."""
        return -1


class _EmptyMessage:
    """A message without elements, which is complete at once."""

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return at once."""

    def is_done(self) -> bool:
        """True from the start."""
        return True

    def source(self) -> int:
        """Not used: see `_Operation.source`."""
        return -1


class CclGroup(PythonGroup):
    """A process group on oneCCL, whose all-reduce rounds half types at each addition."""

    NAME = "ccl"
    STARTS_AT_ONCE = True

    def __init__(
        self, native: ccl.Native, rank: int, size: int, timeout: timedelta, communicator: int, kvs: int
    ) -> None:
        super().__init__(rank, size, timeout)
        self._native, self._communicator, self._kvs = native, communicator, kvs
        self._broken = ""
        self._open = 0  # the number of operations under way

    # One operation -------------------------------------------------------------------------------------------

    def _start(
        self, what: str, operation: int, send: torch.Tensor | None, recv: torch.Tensor | None, **more: Any
    ) -> Wait:
        return self._launch(what, operation, send, recv, **more).wait

    def _launch(
        self, what: str, operation: int, send: torch.Tensor | None, recv: torch.Tensor | None, **more: Any
    ) -> _Operation:
        self._check()
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (send, recv)]
        try:
            handle = self._native.start(self._communicator, operation, *addresses, **more)
        except CommError as error:
            self._broken = str(error)
            raise
        return _Operation(self, handle, what, (send, recv))

    def _check(self) -> None:
        if self._broken:
            raise CommError(f"backend ccl: the group is broken by an earlier error: {self._broken}")

    def _reduction(self, tensor: torch.Tensor, op: int, what: str) -> tuple[torch.Tensor, int, int]:
        """The tensor in a form that oneCCL can reduce, with oneCCL's datatype and reduction."""
        kind = SUM if op == AVG else op
        dense = tensor
        if tensor.dtype == torch.bool and op in BOOL_OPS:
            dense, kind = tensor.view(torch.uint8), BOOL_OPS[op]
        if tensor.dtype.is_complex and op in (SUM, AVG):
            dense = torch.view_as_real(tensor)
        if kind not in _REDUCTIONS or dense.dtype not in _DATATYPES:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise UsageError(
                f"backend ccl has no {what} of {dtype} with {OP_NAMES[op]}; use a group of backend shm or gloo for it"
            )
        return dense, _DATATYPES[dense.dtype], _REDUCTIONS[kind]

    def _then_divide(self, wait: Wait, tensor: torch.Tensor, op: int) -> Wait:
        if op != AVG:
            return wait

        def divide() -> None:
            wait()
            divide_by(tensor, self._size)

        return divide

    # Collectives ---------------------------------------------------------------------------------------------

    def start_all_reduce(self, tensor: torch.Tensor, op: int) -> Wait | None:
        dense, datatype, reduction = self._reduction(tensor, op, "all_reduce")
        if self._size == 1 or tensor.numel() == 0:
            return None
        wait = self._start(
            "all_reduce", ccl.ALL_REDUCE, dense, dense, count=dense.numel(), datatype=datatype, reduction=reduction
        )
        return self._then_divide(wait, tensor, op)

    def start_reduce(self, tensor: torch.Tensor, op: int, root: int) -> Wait | None:
        tensor = tensor if self._rank == root else tensor.clone()
        dense, datatype, reduction = self._reduction(tensor, op, "reduce")
        if self._size == 1 or tensor.numel() == 0:
            return None
        wait = self._start(
            "reduce", ccl.REDUCE, dense, dense, count=dense.numel(), datatype=datatype, reduction=reduction, peer=root
        )
        return self._then_divide(wait, tensor, op)

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Wait | None:
        if self._size == 1 or tensor.numel() == 0:
            return None
        return self._start("broadcast", ccl.BROADCAST, None, tensor, count=_bytes(tensor), datatype=_BYTES, peer=root)

    def start_all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Wait | None:
        counts = [_bytes(output) for output in outputs]
        if not sum(counts):
            return None
        flat, scattered = _joined(outputs)
        if self._size == 1:
            return lambda: _copy_out(flat, scattered, [as_bytes(tensor)])
        wait = self._start(
            "all_gather",
            ccl.ALL_GATHER,
            tensor.clone() if _overlap(tensor, flat) else tensor,
            flat,
            count=_bytes(tensor),
            datatype=_BYTES,
            recv_counts=counts,
        )
        return _then(wait, lambda: _copy_out(flat, scattered))

    def start_reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: int) -> Wait | None:
        if len({tensor.numel() for tensor in inputs}) > 1:
            raise UsageError("backend ccl: reduce_scatter wants tensors of one size")
        dense, datatype, reduction = self._reduction(output, op, "reduce_scatter")
        if output.numel() == 0:
            return None
        if self._size == 1:
            output.copy_(inputs[0].view_as(output))
            return None
        joined = torch.cat([tensor.reshape(-1) for tensor in inputs])
        space = torch.empty_like(dense)
        given, _, _ = self._reduction(joined, op, "reduce_scatter")
        wait = self._start(
            "reduce_scatter",
            ccl.REDUCE_SCATTER,
            given,
            space,
            count=dense.numel(),
            datatype=datatype,
            reduction=reduction,
        )
        return self._then_divide(_then(wait, lambda: dense.copy_(space)), output, op)

    def start_all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Wait:
        return self._exchange("all_to_all", outputs, inputs)

    def _exchange(self, what: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Wait:
        flat, scattered = _joined(outputs, fresh=True)
        given = torch.cat([as_bytes(tensor) for tensor in inputs])
        if self._size == 1:
            return lambda: _copy_out(flat, scattered, [given])
        wait = self._start(
            what,
            ccl.ALL_TO_ALL,
            _not_empty(given),
            _not_empty(flat),
            count=0,
            datatype=_BYTES,
            send_counts=[_bytes(tensor) for tensor in inputs],
            recv_counts=[_bytes(tensor) for tensor in outputs],
        )
        return _then(wait, lambda: _copy_out(flat, scattered))

    def start_gather(self, outputs: list[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> Wait:
        nothing = torch.empty(0, dtype=torch.uint8)
        given = [tensor if rank == root else nothing for rank in range(self._size)]
        return self._exchange("gather", outputs or [nothing] * self._size, given)

    def start_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor] | None, root: int) -> Wait:
        nothing = torch.empty(0, dtype=torch.uint8)
        taken = [output if rank == root else nothing for rank in range(self._size)]
        return self._exchange("scatter", taken, inputs or [nothing] * self._size)

    def start_send(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        self._check_message("send", peer, tag)
        return self._message(f"send to rank {peer}", ccl.SEND, tensor, None, peer)

    def start_recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        if peer is None:
            raise self._lacks("recv from any rank")
        self._check_message("recv", peer, tag)
        return self._message(f"recv from rank {peer}", ccl.RECV, None, tensor, peer)

    def _message(
        self, what: str, operation: int, send: torch.Tensor | None, recv: torch.Tensor | None, peer: int
    ) -> Message:
        count = sum(_bytes(tensor) for tensor in (send, recv) if tensor is not None)
        return (
            self._launch(what, operation, send, recv, count=count, datatype=_BYTES, peer=peer)
            if count
            else _EmptyMessage()
        )

    def _check_message(self, what: str, peer: int, tag: int) -> None:
        if tag:
            raise UsageError(f"backend ccl has no tags: {what}(tag={tag}); messages of a pair arrive in order")
        if peer == self._rank or not 0 <= peer < self._size:
            raise UsageError(f"backend ccl: {what} with rank {peer} in a group of {self._size}, from rank {self._rank}")

    def start_barrier(self) -> Wait | None:
        if self._size == 1:
            return None
        return self._start("barrier", ccl.BARRIER, None, None, count=0, datatype=_BYTES)

    def shutdown(self) -> None:
        """End the group; oneCCL's side is left where operations are still under way, since ending it would hang."""
        super().shutdown()
        communicator, self._communicator = self._communicator, 0
        if communicator and not self._broken and not self._open:
            self._native.free(communicator, self._kvs)
        self._broken = self._broken or "it has been shut down"

    def abort(self) -> None:
        """End the group; operations that wait in this process raise an error."""
        self._broken = self._broken or "it was aborted"
        self._executor.close()


def _then(wait: Wait, after: Any) -> Wait:
    def both() -> None:
        wait()
        after()

    return both


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _not_empty(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; in place of an empty one, which has no address, a tensor of one element."""
    return tensor if tensor.numel() else torch.empty(1, dtype=torch.uint8)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + _bytes(other) and second < first + _bytes(one)


def _joined(tensors: list[torch.Tensor], fresh: bool = False) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A buffer that holds all tensors one after the other, and the tensors that have to be copied from it afterwards.

    Tensors that are already contiguous with each other are the buffer, unless `fresh` asks for a new one.
    """
    flats = [as_bytes(tensor) for tensor in tensors]
    end = flats[0].data_ptr()
    for flat in flats:
        if flat.data_ptr() != end or flat.untyped_storage().data_ptr() != flats[0].untyped_storage().data_ptr():
            break
        end += flat.numel()
    else:
        if not fresh:
            total = end - flats[0].data_ptr()
            return flats[0].as_strided((total,), (1,)), []
    return torch.empty(sum(flat.numel() for flat in flats), dtype=torch.uint8), flats


def _copy_out(flat: torch.Tensor, scattered: list[torch.Tensor], given: list[torch.Tensor] | None = None) -> None:
    """Copy the parts of the buffer to the scattered tensors; `given`: tensors that fill the buffer first."""
    if given is not None:
        flat.copy_(torch.cat(given))
    begin = 0
    for tensor in scattered:
        tensor.copy_(flat[begin : begin + tensor.numel()])
        begin += tensor.numel()
