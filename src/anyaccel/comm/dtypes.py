# SPDX-License-Identifier: Apache-2.0
"""The dtypes and reductions of the native code, and how other ones are mapped to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ReduceOp

from anyaccel.errors import UsageError

# In the order of csrc/comm/reduce_dispatch.cpp; dtypes that the installed torch lacks are left out of CODES.
_NAMES = (
    *("float32", "bfloat16", "float16", "float64", "int8", "int16", "int32", "int64", "uint8"),
    *("bool", "complex32", "complex64", "complex128", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
CODES: dict[torch.dtype, int] = {getattr(torch, name): code for code, name in enumerate(_NAMES) if hasattr(torch, name)}
_KERNEL_DTYPES = 9  # native kernels reduce the first nine of _NAMES

SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR = range(8)
OP_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_PREMUL_SUM = 8
_BITWISE = (BAND, BOR, BXOR)
# The reduction of bytes 0 and 1 that is the same as the reduction of booleans.
BOOL_OPS = {SUM: MAX, PRODUCT: MIN, MIN: MIN, MAX: MAX, BAND: BAND, BOR: BOR, BXOR: BXOR}
_SIGNED = {
    getattr(torch, name): signed
    for name, signed in (("uint16", torch.int16), ("uint32", torch.int32), ("uint64", torch.int64))
    if hasattr(torch, name)
}
_SMALLEST = -(2**63)


def dtype_code(dtype: torch.dtype) -> int:
    """The native code's number of a dtype.

    Raises:
        UsageError: the dtype is not known, as a newer torch has added it.
    """
    try:
        return CODES[dtype]
    except KeyError:
        raise UsageError(f"backend shm does not know {dtype}; view it as an integer type of its size") from None


def op_code(op: ReduceOp | ReduceOp.RedOpType) -> int:
    """The native code's number of a reduction, which is torch's own.

    A PREMUL_SUM with the factor 1, which FSDP2 asks for where gradients are not to be divided, is a SUM.

    Raises:
        UsageError: it is another PREMUL_SUM, or a newer torch has added it.
    """
    given: Any = op
    kind: Any = getattr(given, "op", given)  # isinstance() cannot tell the two types apart
    number = int(kind)
    if number == _PREMUL_SUM and kind is not given and float(given.__getstate__()[1]) == 1:
        return SUM
    if not 0 <= number < len(OP_NAMES):
        raise UsageError(f"backend shm has no {kind}; it has {', '.join(OP_NAMES)}")
    return number


@dataclass(frozen=True)
class Lowered:
    """A dense tensor in a dtype that a kernel can reduce.

    Attributes:
        tensor: the values; it shares memory with the original if `restore` is None.
        code, op: dtype and reduction for native code. If `op` is None there is no kernel, and `combine` reduces two
            tensors.
        restore: converts the result back to the original dtype.
        original_code: the code of the original dtype if it differs, which must be the same on all ranks; else 0.
    """

    tensor: torch.Tensor
    code: int
    op: int | None
    restore: Callable[[torch.Tensor], torch.Tensor] | None = None
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    original_code: int = 0


def _no_such(op: int, dtype: torch.dtype) -> UsageError:
    return UsageError(f"there is no reduction {OP_NAMES[op]} of {str(dtype).removeprefix('torch.')}")


def lower(dense: torch.Tensor, op: int) -> Lowered:
    """Map a reduction of `dense` to one that there is a kernel for.

    float8 is summed in fp32 and rounded once; booleans are reduced by "or" (SUM, MAX) and "and" (PRODUCT, MIN).

    Raises:
        UsageError: the reduction is not defined for the dtype.
    """
    dtype = dense.dtype
    code = dtype_code(dtype)
    if code < _KERNEL_DTYPES:
        if op in _BITWISE and dtype.is_floating_point:
            raise _no_such(op, dtype)
        return Lowered(dense, code, op)
    if dtype == torch.bool:
        if op not in BOOL_OPS:
            raise _no_such(op, dtype)
        return Lowered(dense.view(torch.uint8), CODES[torch.uint8], BOOL_OPS[op], original_code=code)
    if dtype.is_complex:
        if op in (SUM, AVG):
            real = torch.view_as_real(dense)
            return Lowered(real, CODES[real.dtype], op, original_code=code)
        if op == PRODUCT:
            return Lowered(dense, code, None, combine=torch.mul)
        raise _no_such(op, dtype)
    if dtype in _SIGNED:
        if op in (SUM, PRODUCT, *_BITWISE):
            signed = dense.view(_SIGNED[dtype])
            return Lowered(signed, CODES[signed.dtype], op, original_code=code)
        if dtype == torch.uint64:
            if op == AVG:
                raise _no_such(op, dtype)
            # Flipping the top bit maps unsigned numbers to signed ones in the same order.
            flipped = dense.view(torch.int64) ^ _SMALLEST
            return Lowered(
                flipped, CODES[torch.int64], op, lambda t: (t ^ _SMALLEST).view(torch.uint64), original_code=code
            )
        return Lowered(dense.to(torch.int64), CODES[torch.int64], op, lambda t: t.to(dtype), original_code=code)
    if dtype.is_floating_point and dtype.itemsize == 1 and op not in _BITWISE:
        return Lowered(dense.float(), CODES[torch.float32], op, lambda t: t.to(dtype), original_code=code)
    raise _no_such(op, dtype)
