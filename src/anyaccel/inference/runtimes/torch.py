# SPDX-License-Identifier: Apache-2.0
"""The generic path: a Hugging Face module whose linears and RMS norms are packed native ones.

Attention, caches and whatever else the module does stay its own, so every architecture gets the faster products.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from anyaccel import _llm, comm
from anyaccel.inference.tp.layers import RowParallelLinear

logger = logging.getLogger(__name__)

_TYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_FORMATS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}
# nn.Linear's own forward under another name.
_PLAIN_SUBCLASSES = frozenset({"FalconLinear"})
_NOT_MODELS = ("torch.", "transformers.modeling_", "transformers.generation", "transformers.integrations")
# Asking a weight for its dtype and the like is no reason to keep it.
_WEIGHT_READ = re.compile(r"self\.(\w+)\.(?:weight|bias)\b(?!\.(?:dtype|device|shape)\b)")


@dataclass
class Packed:
    """What `pack` has done.

    Attributes:
        linears, norms: how many were replaced.
        kept: name of a linear that stays torch's -> why.
        bytes: of the packed matrices.
    """

    linears: int = 0
    norms: int = 0
    kept: dict[str, str] = field(default_factory=dict)
    bytes: int = 0


class PackedLinear(nn.Module):
    """A linear on a packed native matrix; `group`: ranks that hold the other input features and add up.

    `weight` says shape, dtype and device to code that asks for them; its values are NaN, the real ones are packed.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        packed: _llm.Linear,
        shape: tuple[int, int],
        bias_O: torch.Tensor | None,
        dtype: torch.dtype,
        reduce: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.packed = packed
        self.reduce = reduce
        self.register_buffer("weight", torch.full((1, 1), float("nan"), dtype=dtype).expand(shape), persistent=False)
        self.register_buffer("bias", bias_O, persistent=False)
        # Added natively with the product, unless the sum over ranks comes between.
        self._native_bias = None if bias_O is None or reduce is not None else bias_O.float().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        kind = _TYPES.get(x.dtype)
        if kind is None or x.shape[-1] != self.in_features:
            raise ValueError(f"a packed linear of {self.in_features} inputs cannot take {x.dtype} {tuple(x.shape)}")
        dense = x.contiguous()
        y = torch.empty(*x.shape[:-1], self.out_features, dtype=x.dtype)
        tokens = dense.numel() // self.in_features
        if tokens:
            bias = self._native_bias
            self.packed.multiply(dense.data_ptr(), y.data_ptr(), tokens, kind, 0 if bias is None else bias.data_ptr())
        if self.reduce is not None:
            self.reduce(y)
            if self.bias is not None:
                y.add_(self.bias)
        return y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class PackedRMSNorm(nn.Module):
    """An RMS norm in one native pass, rounded once."""

    def __init__(self, weight_H: torch.Tensor, factor_H: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_H, requires_grad=False)
        self.eps = self.variance_epsilon = eps
        self._factor = factor_H.float().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        kind = _TYPES.get(x.dtype)
        width = self._factor.numel()
        if kind is None or x.shape[-1] != width:
            raise ValueError(f"an RMS norm of {width} values cannot take {x.dtype} {tuple(x.shape)}")
        dense = x.contiguous()
        y = torch.empty_like(dense)
        if dense.numel():
            _llm.rms_norm(
                dense.data_ptr(), y.data_ptr(), dense.numel() // width, width, kind, self._factor.data_ptr(), self.eps
            )
        return y


def pack(module: nn.Module, precision: str, group_size: int, threads: int = 0) -> Packed:
    """Replace the linears and RMS norms of `module`, in place; each weight is let go of once it is packed.

    Args:
        precision: fp32, bf16, fp16, int8 or int4.
        group_size: of int4.
    """
    done = Packed()
    read = _weights_read_elsewhere(module)
    shared = _shared(module)
    packed: dict[int, PackedLinear] = {}
    for name, parent, short, child in list(_children(module)):
        if isinstance(child, RowParallelLinear) or _is_linear(child):
            if short in read.get(type(parent), ()):
                done.kept[name] = f"{type(parent).__name__} reads its weight"
                continue
            if id(child) not in packed:
                packed[id(child)] = _pack_linear(child, precision, group_size)
                done.linears += 1
                done.bytes += packed[id(child)].packed.bytes
                if id(child.weight) not in shared:
                    child.weight = nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)
            setattr(parent, short, packed[id(child)])
        elif (norm := _rms_norm(child)) is not None:
            setattr(parent, short, norm)
            done.norms += 1
    for name, why in done.kept.items():
        logger.info("%s stays torch's: %s", name, why)
    return done


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    for prefix, parent in module.named_modules():
        for short, child in parent.named_children():
            yield f"{prefix}.{short}" if prefix else short, parent, short, child


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or weight.dtype not in _TYPES or weight.is_meta:
        return False
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or {n for n, _ in module.named_parameters()}
        - {
            "weight",
            "bias",
        }
    ):
        return False
    if type(module).__name__ == "Conv1D":
        return True
    plain = type(module) is nn.Linear or type(module).__name__ in _PLAIN_SUBCLASSES
    return plain and "forward" not in vars(module)


def _shared(module: nn.Module) -> set[int]:
    """Parameters in several modules: a tied head's is the embedding's too and must stay."""
    seen: set[int] = set()
    twice: set[int] = set()
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                (twice if id(parameter) in seen else seen).add(id(parameter))
    return twice


def _weights_read_elsewhere(module: nn.Module) -> dict[type, set[str]]:
    """Class of a parent -> children whose weight its code computes with itself; those have to stay."""
    found: dict[type, set[str]] = {}
    for kind in {type(part) for part in module.modules()}:
        # It hands the weight to a function of torch's.
        names = {"out_proj"} if issubclass(kind, nn.MultiheadAttention) else set()
        for base in kind.__mro__:
            if not base.__module__.startswith(_NOT_MODELS) and base is not object:
                for text in _method_sources(base):
                    names |= set(_WEIGHT_READ.findall(text))
        found[kind] = names
    return found


@functools.cache
def _method_sources(kind: type) -> tuple[str, ...]:
    """Source of a class's methods but those that initialise it."""
    texts = []
    for name, method in vars(kind).items():
        if inspect.isfunction(method) and name not in ("__init__", "_init_weights", "reset_parameters", "tie_weights"):
            with contextlib.suppress(OSError, TypeError):
                texts.append(inspect.getsource(method))
    return tuple(texts)


def format_for(precision: str, group_size: int, columns: int) -> tuple[str, int, bool]:
    """(format, group, minimum) of a packed matrix: int4 needs whole groups, else it is int8."""
    if precision == "int4":
        fits = [size for size in (group_size, 64, 32) if size <= group_size and columns % size == 0]
        if fits:
            return "i4", fits[0], True  # a minimum beside the scale: far more accurate
        return "i8", 0, False
    if precision == "int8":
        return "i8", 0, False
    return _FORMATS[precision], 0, False


def _pack_linear(module: nn.Module, precision: str, group_size: int) -> PackedLinear:
    assert isinstance(module.weight, torch.Tensor)
    weight = module.weight.detach()
    weight_OI = weight.t() if type(module).__name__ == "Conv1D" else weight
    rows, columns = weight_OI.shape
    name, group, minimum = format_for(precision, group_size, columns)
    native = _llm.Linear(rows, columns, name, group, minimum)
    size = weight_OI.element_size()
    native.set_rows(
        0,
        rows,
        weight_OI.data_ptr(),
        _TYPES[weight_OI.dtype],
        weight_OI.stride(0) * size,
        weight_OI.stride(1) * size,
    )
    bias = getattr(module, "bias", None)
    reduce = None
    if isinstance(module, RowParallelLinear):
        reduce = _summed(module._group)
    return PackedLinear(native, (rows, columns), None if bias is None else bias.detach(), weight.dtype, reduce)


def _summed(group: dist.ProcessGroup | None) -> Callable[[torch.Tensor], object]:
    return lambda tensor: comm.inference_all_reduce(tensor, group=group)


def _rms_norm(module: nn.Module) -> PackedRMSNorm | None:
    """A native norm that computes what `module` does, found out by trying; None when it is no plain RMS norm."""
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return None
    if {n for n, _ in module.named_parameters()} != {"weight"} or weight.is_meta or weight.dtype not in _TYPES:
        return None
    takes_one = len(inspect.signature(type(module).forward).parameters) == 2
    if module._forward_hooks or module._forward_pre_hooks or not takes_one:
        return None
    eps = next((getattr(module, n) for n in ("variance_epsilon", "eps") if hasattr(module, n)), None)
    if not isinstance(eps, float):
        return None
    compute: Any = module
    generator = torch.Generator().manual_seed(0)
    width = weight.numel()
    # Small values too, where eps counts.
    x_TH = torch.randn(4, width, generator=generator) * torch.tensor([[1.0], [3.0], [1e-3], [1e-2]])
    with torch.no_grad():
        try:
            got_TH: torch.Tensor = compute(x_TH).float()
        except (TypeError, ValueError, RuntimeError):
            return None
        normed_TH = x_TH * torch.rsqrt(x_TH.square().mean(-1, keepdim=True) + eps)
        for factor_H in (weight.detach().float(), 1 + weight.detach().float()):
            if got_TH.shape == x_TH.shape and torch.allclose(
                got_TH, normed_TH * factor_H, rtol=1e-2 if weight.dtype != torch.float32 else 1e-4, atol=1e-5
            ):
                return PackedRMSNorm(weight.detach(), factor_H, eps)
    return None
