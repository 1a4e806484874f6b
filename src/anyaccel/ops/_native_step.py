# SPDX-License-Identifier: Apache-2.0
"""Calls of the native optimizers, with lists of tensors in the form of csrc/optim/work.h."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

import torch

from anyaccel import env
from anyaccel.errors import UsageError
from anyaccel.ops._dense import why_no_memory

# The numbers are those of DType in csrc/optim/types.h.
_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
STATE_DTYPES = (torch.float32, torch.bfloat16)
# Dtype of a parameter -> dtypes of gradients that kernels support.
_GRADS = {
    torch.float32: (torch.float32, torch.bfloat16, torch.float16),
    torch.bfloat16: (torch.bfloat16, torch.float32),
    torch.float16: (torch.float16, torch.float32),
}
# Dtype of a parameter -> dtypes of second buffers, as for Loop::write in csrc/optim/loop.h.
COPIES = {
    torch.float32: (torch.bfloat16, torch.float16),
    torch.bfloat16: (torch.bfloat16,),
    torch.float16: (torch.float16,),
}
_CODES = {
    (param, grad, state, copy): _NUMBERS[param]
    | _NUMBERS[grad] << 2
    | _NUMBERS[state] << 4
    | (0 if copy is None else _NUMBERS[copy]) << 6
    for param, grads in _GRADS.items()
    for grad in grads
    for state in STATE_DTYPES
    for copy in (None, *COPIES[param])
}

_dtype_of = attrgetter("dtype")
_is_cpu = attrgetter("is_cpu")
_is_contiguous = torch.Tensor.is_contiguous
_is_neg = torch.Tensor.is_neg  # a view such as z.conj().imag, whose memory has the values with the other sign


class _Tensors(ctypes.Structure):
    """The struct AnyaccelTensors of csrc/optim/work.h."""

    _fields_ = (
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("sizes", "params", "grads", "states1", "states2", "copies", "steps")),
        ("dtypes", ctypes.c_void_p),
        ("threads", ctypes.c_int32),
        ("isa", ctypes.c_int32),
    )


class TensorBatch:
    """The checked tensors of a native step, and their addresses. A batch is reused while the tensors stay the same."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        moments: Sequence[Sequence[torch.Tensor]],
        steps: Sequence[torch.Tensor],
        copies: Sequence[torch.Tensor | None] | None,
    ) -> None:
        copied = [] if copies is None else [copy for copy in copies if copy is not None]
        self._fixed = [*params, *chain.from_iterable(moments), *steps, *copied]
        self._users = [*params, *copied]  # tensors whose strides the user may change: param.data = param.data.t()
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []
        everything = [*grads, *self._fixed]
        self._plain = True
        plain = all(map(_is_cpu, everything)) and all(map(_is_contiguous, everything))
        if not plain or any(map(_is_neg, everything)):
            self._plain = False
            for tensor in everything:
                check_dense(tensor)
            params, grads, moments, copies, self._written = _make_contiguous(params, grads, moments, copies)
        self._sizes = _numbers(torch.Tensor.numel, params)
        for others in (grads, *moments, *([] if copies is None else [_copies_or_params(copies, params)])):
            _check_sizes(params, others)
        for others in moments[1:]:
            _check_same_dtypes(moments[0], others)
        _check_steps(steps, len(params))
        for tensors in (params, grads, *moments, steps, copied):
            _check_memory(tensors)
        self._codes = _codes(params, grads, moments[0], copies)
        self._grad_dtypes = list(map(_dtype_of, grads))
        self._kept_alive = None if self._plain else grads  # keeps copies alive, but not the user's own gradients
        count = len(params)
        self._seen_addresses = _numbers(torch.Tensor.data_ptr, [*self._fixed, *grads])
        self._addresses = _numbers(torch.Tensor.data_ptr, [*params, *chain.from_iterable(moments), *steps])
        self._copy_addresses = array("q", (0 if copy is None else copy.data_ptr() for copy in copies or ()))
        at = [self._addresses.buffer_info()[0] + 8 * count * row for row in range(2 + len(moments))]
        self.native = _Tensors(
            count=count,
            sizes=self._sizes.buffer_info()[0],
            params=at[0],
            states1=at[1],
            states2=at[2] if len(moments) == 2 else None,
            copies=self._copy_addresses.buffer_info()[0] if self._copy_addresses else None,
            steps=at[-1],
            grads=self._seen_addresses.buffer_info()[0] + 8 * len(self._fixed),
            dtypes=self._codes.buffer_info()[0],
            isa=-1,
        )
        self.address = ctypes.addressof(self.native)

    def refresh(self, grads: Sequence[torch.Tensor]) -> bool:
        """Use these gradients; False if a new batch is needed, as a tensor has changed or moved."""
        if not self._plain:
            return False
        at = _numbers(torch.Tensor.data_ptr, [*self._fixed, *grads])
        fixed = len(self._fixed)
        # An address of 0 is that of a gradient without memory, or of an empty one.
        if 0 in at or at[:fixed] != self._seen_addresses[:fixed] or _numbers(torch.Tensor.numel, grads) != self._sizes:
            return False
        if list(map(_dtype_of, grads)) != self._grad_dtypes or any(map(_is_neg, grads)):
            return False
        if not all(map(_is_contiguous, chain(grads, self._users))):
            return False
        self._seen_addresses = at
        self.native.grads = at.buffer_info()[0] + 8 * fixed
        return True

    def finish(self) -> None:
        """Copy results back to tensors that are not contiguous."""
        if self._plain:
            return
        self._kept_alive = None
        with torch.no_grad():
            for target, source in self._written:
                target.copy_(source)
        self._written = []


class NativeStep:
    """One of the functions ``anyaccel_<optimizer>_step`` of a library."""

    def __init__(self, library: ctypes.CDLL, name: str, hyper: Sequence[type[Any]]) -> None:
        """Args: hyper: C types of the function's arguments after the tensors."""
        self._function = getattr(library, name)
        self._function.argtypes = (ctypes.c_void_p, *hyper)
        self._function.restype = ctypes.c_int

    def run(self, batch: TensorBatch, *hyper: float) -> None:
        """Increment the steps of all parameters of a batch and update the parameters, in one native call.

        Raises:
            UsageError: ANYACCEL_ISA has a value that it cannot have.
        """
        batch.native.threads = torch.get_num_threads()
        status = self._function(batch.address, *hyper)
        if status:
            env.ANYACCEL_ISA.get()  # raises an error if its value is wrong
            raise MemoryError(f"the native optimizer step could not set up its list of tensors (status {status})")
        batch.finish()


def _codes(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor],
    copies: Sequence[torch.Tensor | None] | None,
) -> array[int]:
    copy_dtypes = repeat(None) if copies is None else (None if copy is None else copy.dtype for copy in copies)
    keys = zip(map(_dtype_of, params), map(_dtype_of, grads), map(_dtype_of, states), copy_dtypes, strict=False)
    try:
        return array("i", map(_CODES.__getitem__, keys))
    except KeyError as missing:
        param, grad, state, copy = missing.args[0]
        copied = "" if copy is None else f" and a copy in {copy}"
        raise UsageError(
            f"there is no kernel for a parameter in {param} with a gradient in {grad}, state in {state}{copied}; "
            "parameters and gradients may be float32, bfloat16 or float16, state float32 or bfloat16"
        ) from None


def _numbers(number_of: Callable[[torch.Tensor], int], tensors: Iterable[torch.Tensor]) -> array[int]:
    return array("q", map(number_of, tensors))


def check_dense(tensor: torch.Tensor) -> None:
    """Raise UsageError for a tensor that is sparse or not in host memory."""
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"gradients must be dense, and one is {tensor.layout}: use torch.optim.SparseAdam, or an Embedding with "
            "sparse=False"
        )
    if not tensor.is_cpu:
        raise UsageError(f"a tensor is on {tensor.device}; this optimizer works on tensors in host memory")


def _copies_or_params(copies: Sequence[torch.Tensor | None], params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [param if copy is None else copy for copy, param in zip(copies, params, strict=True)]


def _check_sizes(params: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    if len(others) != len(params):
        raise UsageError(f"there are {len(params)} parameters, and {len(others)} gradients or states for them")
    for param, other in zip(params, others, strict=True):
        if param.numel() != other.numel():
            raise UsageError(
                f"a parameter of shape {tuple(param.shape)} and its gradient, optimizer state or copy of shape "
                f"{tuple(other.shape)} have different numbers of elements"
            )


def _check_same_dtypes(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> None:
    for one, other in zip(first, second, strict=True):
        if one.dtype != other.dtype:
            raise UsageError(f"both moments of a parameter have one dtype, and one has {one.dtype} and {other.dtype}")


def _check_steps(steps: Sequence[torch.Tensor], count: int) -> None:
    if len(steps) != count:
        raise UsageError(f"there are {count} parameters, and {len(steps)} steps")
    for step in steps:
        if step.dtype != torch.float32 or step.numel() != 1:
            raise UsageError(f"a step is one number in float32, and one is {step.dtype} of shape {tuple(step.shape)}")


def _check_memory(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        kind = why_no_memory(tensor)
        if kind:
            raise UsageError(f"a tensor of shape {tuple(tensor.shape)} has no memory of its own: it is {kind}")


def _make_contiguous(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    states: Sequence[Sequence[torch.Tensor]],
    copies: Sequence[torch.Tensor | None] | None,
) -> tuple[Any, ...]:
    """The lists with contiguous tensors, and pairs of (tensor, copy) for the copies that have to be written back.

    Dimensions are permuted into the order of the parameter's strides, so that channels_last needs no copy.
    """
    written: list[tuple[torch.Tensor, torch.Tensor]] = []
    new: list[list[torch.Tensor | None]] = [[] for _ in range(3 + len(states))]
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        strides = param.stride()
        order = sorted(range(param.dim()), key=strides.__getitem__, reverse=True)
        row = (param, grad, None if copies is None else copies[index], *(state[index] for state in states))
        for place, tensor in enumerate(row):
            if tensor is None:
                new[place].append(None)
                continue
            view = tensor.detach().permute(order) if tensor.shape == param.shape else tensor
            dense = view.resolve_neg().contiguous()
            if dense is not view and dense.data_ptr() != view.data_ptr() and place != 1:
                written.append((view, dense))
            new[place].append(dense)
    return new[0], new[1], new[3:], None if copies is None else new[2], written
