# SPDX-License-Identifier: Apache-2.0
"""Layers on packed native matrices, which take the places of torch's in a Hugging Face module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from anyaccel import _llm
from anyaccel.errors import UsageError
from anyaccel.inference.modules.adapters import MERGE
from anyaccel.inference.modules.stand_in import StandIn, stand_in

TYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def _eagerly(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Run native code as it is where torch compiles what is around it: nothing there is torch's to compile."""

    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(forward)(self, *args)  # type: ignore[no-untyped-call,no-any-return]
        return forward(self, *args)

    return run


class _WithoutWeights(nn.Module):
    """Has no weights to read or to write any more.

    Attributes:
        name: of the module, for messages.
    """

    name: str

    def _save_to_state_dict(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise UsageError(f"state_dict(): {_told(self.name)}")

    def _load_from_state_dict(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise UsageError(f"load_state_dict(): {_told(self.name)}")


def _told(name: str) -> str:
    return (
        f"{name}: its values are packed, and can be neither read nor changed; load the model with runtime='plain', "
        "or do it before init_inference"
    )


class _Packed(_WithoutWeights):
    """Has a `weight`, and perhaps a `bias`, that say shape, dtype and device to code that asks; values are an error."""

    weight: nn.Parameter

    def _stand_in(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu", of: str = "weight"
    ) -> None:
        self._parameters[of] = stand_in(shape, dtype, device, _told(f"{self.name}.{of}"))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", "bias") and "weight" in vars(self).get("_parameters", {}):
            raise UsageError(_told(f"{self.name}.{name}"))
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        kept: dict[str, Any] = {name: each for name, each in self._parameters.items() if isinstance(each, StandIn)}
        for name in kept:
            del self._parameters[name]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, each in kept.items():
            like = fn(torch.empty(0, dtype=each.dtype, device=each.device))
            self._stand_in(tuple(each.shape), like.dtype, like.device, name)
        return self


class PackedLinear(_Packed):
    """A linear on a packed native matrix; `group`: ranks that hold the other input features and add up.

    The values are packed; `weight` and `bias` have none.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        packed: _llm.Linear,
        shape: tuple[int, int],
        bias_O: torch.Tensor | None,
        dtype: torch.dtype,
        reduce: Callable[[torch.Tensor], object] | None = None,
        name: str = "a packed linear",
    ) -> None:
        super().__init__()
        self.name = name
        self.out_features, self.in_features = shape
        self._stand_in(shape, dtype)
        self.register_parameter("bias", None)
        if bias_O is not None:
            self._stand_in(tuple(bias_O.shape), bias_O.dtype, of="bias")
        self.packed = packed
        self.reduce = reduce
        # In float32, on its own; added natively with the product, unless the sum over ranks comes between.
        self._values = None if bias_O is None else bias_O.to(torch.float32, copy=True).contiguous()
        self.bias_address = 0 if self._values is None or reduce is not None else self._values.data_ptr()

    @_eagerly
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        kind = TYPES.get(x.dtype)
        if kind is None or x.shape[-1] != self.in_features:
            raise ValueError(f"a packed linear of {self.in_features} inputs cannot take {x.dtype} {tuple(x.shape)}")
        dense = x.contiguous()
        y = torch.empty(*x.shape[:-1], self.out_features, dtype=x.dtype)
        tokens = dense.numel() // self.in_features
        if tokens:
            self.packed.multiply(dense.data_ptr(), y.data_ptr(), tokens, kind, self.bias_address)
        if self.reduce is not None:
            self.reduce(y)
            if self._values is not None:
                y.add_(self._values)
        return y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def __str__(self) -> str:
        """As PEFT's error shows a layer that it cannot give an adapter."""
        return f"{self!r} ({MERGE})"


class PackedRMSNorm(_Packed):
    """An RMS norm in one native pass, rounded once. `weight`: as PackedLinear's."""

    def __init__(
        self, weight_H: torch.Tensor, factor_H: torch.Tensor, eps: float, name: str = "a packed RMS norm"
    ) -> None:
        super().__init__()
        self.name = name
        self.eps = self.variance_epsilon = eps
        self._factor = factor_H.to(torch.float32, copy=True).contiguous()
        self._stand_in(tuple(weight_H.shape), weight_H.dtype)

    @_eagerly
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        kind = TYPES.get(x.dtype)
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


class PackedEmbedding(_Packed):
    """An embedding on a packed native matrix, which may be the head's too; `scale` multiplies what it gives.

    `weight`: as PackedLinear's.
    """

    def __init__(
        self,
        packed: _llm.Linear,
        shape: tuple[int, int],
        dtype: torch.dtype,
        padding_idx: int | None,
        scale: float = 1,
        name: str = "a packed embedding",
    ) -> None:
        super().__init__()
        self.name = name
        self.num_embeddings, self.embedding_dim = shape
        self.packed = packed
        self.padding_idx = padding_idx
        self.scale = scale
        self._stand_in(shape, dtype)

    @_eagerly
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[...] -> [..., embedding_dim]. Raises UsageError for a token out of the vocabulary, or of no whole type."""
        if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
            raise UsageError(f"input_ids of dtype {input_ids.dtype}: must be whole numbers; convert them with .long()")
        ids = input_ids.to(torch.int64).contiguous()
        y = torch.empty(*ids.shape, self.embedding_dim, dtype=self.weight.dtype)
        self.packed.copy_rows(ids.data_ptr(), ids.numel(), y.data_ptr(), TYPES[y.dtype])
        return y if self.scale == 1 else y.mul_(self.scale)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


class PackedExperts(_WithoutWeights):
    """The stacked experts of a mixture: two packed matrices an expert; `own`: the module that they are of.

    Its contract is that of transformers' `use_experts_implementation`.
    """

    def __init__(
        self, own: Any, up: list[PackedLinear], down: list[PackedLinear], name: str = "packed experts"
    ) -> None:
        super().__init__()
        self.name = name
        self.own = own  # without its matrices: it has the activation
        self.num_experts = len(up)
        self.up, self.down = up, down  # no submodules: there may be thousands

    @_eagerly
    def forward(self, x_TH: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Each token through its experts, and the sum of what they say by their weights.

        Args:
            x_TH: tokens; top_k_index [T, K]: their experts, one past the last for none; top_k_weights [T, K].
        """
        tokens, each = top_k_index.shape
        flat_S = top_k_index.reshape(-1)
        order_S = flat_S.argsort(stable=True)
        counts = torch.bincount(flat_S, minlength=self.num_experts).tolist()[: self.num_experts]
        sorted_SH = x_TH[order_S // each] if tokens > 1 else x_TH.expand(each, -1).contiguous()
        up_SI = _by_expert(self.up, sorted_SH, counts)
        mid_SI = self.own._apply_gate(up_SI) if self.own.has_gate else self.own.act_fn(up_SI)
        down_SH = _by_expert(self.down, mid_SI.contiguous(), counts)
        down_SH = down_SH * top_k_weights.reshape(-1)[order_S, None]
        y_SH = torch.empty_like(down_SH)
        y_SH[order_S] = down_SH
        return y_SH.view(tokens, each, -1).sum(1).to(x_TH.dtype)


class PackedParallelExperts(_WithoutWeights):
    """Stacked linears, each for its part of the rows (JetMoE's and Granite's ParallelExperts)."""

    def __init__(self, linears: list[PackedLinear], name: str = "packed experts") -> None:
        super().__init__()
        self.name = name
        self.linears = linears  # no submodules
        self.num_experts = len(linears)

    @_eagerly
    def forward(self, x_SH: torch.Tensor, expert_size: Any) -> torch.Tensor:
        """Rows sorted by expert, of which each has `expert_size` -> [rows, out]."""
        counts = [int(count) for count in expert_size]
        return _by_expert(self.linears, x_SH.contiguous(), counts)


def _by_expert(linears: list[PackedLinear], x_SH: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Rows that are sorted by expert, each through its own; those beyond the counts give 0."""
    known = sum(counts)
    width = linears[0].out_features
    make = torch.empty if known == len(x_SH) else torch.zeros
    y_SI = make(len(x_SH), width, dtype=x_SH.dtype)
    kind = TYPES[x_SH.dtype]
    source, target = x_SH.data_ptr(), y_SI.data_ptr()
    source_row, target_row = x_SH.stride(0) * x_SH.element_size(), width * y_SI.element_size()
    for linear, count in zip(linears, counts, strict=True):
        if count:
            linear.packed.multiply(source, target, count, kind, linear.bias_address)
            source += count * source_row
            target += count * target_row
    return y_SI
