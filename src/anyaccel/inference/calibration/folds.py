# SPDX-License-Identifier: Apache-2.0
"""Where the columns of matrices can be scaled and what is before them divided by it, which changes no result.

Lin et al. 2023, "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration",
https://arxiv.org/abs/2306.00978, section 3.2: a column that counts more is multiplied before it is rounded, so that its
errors are smaller after it is divided again. What there is follows from the DecoderSpec: norms before the matrices that
read them, rows of a matrix whose products go on element by element.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyaccel.inference.spec.decoder import DecoderSpec, Mlp, Norm
from anyaccel.inference.spec.mapping import Names, Part


@dataclass(frozen=True)
class Fold:
    """One place where scales can go.

    Attributes:
        readers: the matrices whose columns are multiplied: all that read what is divided.
        norm: the vector that is divided, `plus` added to it before; or
        rows: the matrix whose rows are; of these `shared` times `length` columns of the readers are from the same
            `length` rows (values of a head that several query heads share); length 0: columns and rows are the same.
    """

    readers: tuple[str, ...]
    norm: str = ""
    plus: float = 0.0
    rows: str = ""
    shared: int = 1
    length: int = 0

    def alike(self, scale: Tensor) -> Tensor:
        """Scales of columns [cols] that are the same where columns are from the same row."""
        if self.shared == 1:
            return scale
        heads = scale.log().view(-1, self.shared, self.length)
        return heads.mean(1, keepdim=True).expand_as(heads).exp().flatten()

    def of_rows(self, scale: Tensor) -> Tensor:
        """The scale of each row, of those of columns."""
        return scale if self.shared == 1 else scale.view(-1, self.shared, self.length)[:, 0].flatten()


def folds_of(spec: DecoderSpec, names: Names, source: Any) -> dict[str, Fold]:
    """The folds of a model by the first of their readers, under the checkpoint's names.

    Args:
        source: the checkpoint's tensors.
    """

    def parts(name: str) -> list[Part]:
        """Whole tensors that a native weight consists of; none where it is made in another way."""
        chosen = next((each for each in names.parts(spec, name) if all(p.tensor in source for p in each)), [])
        whole = all(p.first == 0 and p.count == -1 and p.order is None and p.index is None for p in chosen)
        return chosen if whole and not any(p.transposed for p in chosen) else []

    found = (fold for number in range(len(spec.layers)) for fold in _of_layer(spec, number, parts))
    return {fold.readers[0]: fold for fold in found}


def _of_layer(spec: DecoderSpec, number: int, parts: Any) -> Iterator[Fold]:
    layer, at = spec.layers[number], f"layers.{number}."
    attention, mlp = layer.attention, layer.mlp
    if layer.residual_from_norm or layer.parallel:
        return
    if attention is not None and layer.recurrent is None and not attention.gated:
        qkv = parts(f"{at}qkv") if attention.mla is None else []
        if _divisible(layer.attn_norm) and qkv:
            yield from _of_norm(parts(f"{at}attn_norm.weight"), qkv)
        others = (each.attention for each in spec.layers if each.attention is not None)
        alone = (
            attention.value_norm is None
            and attention.out_norm is None
            and not any(each.kv_layer == number for each in others)
        )
        if len(qkv) == 3 and alone and not (attention.qkv_bias or attention.clip):
            out = parts(f"{at}o")
            if len(out) == 1:
                shared = attention.heads // attention.kv_heads
                yield Fold((out[0].tensor,), rows=qkv[2].tensor, shared=shared, length=attention.value_dim)
    if not isinstance(mlp, Mlp):
        return
    up = parts(f"{at}mlp.gate_up")
    if _divisible(layer.mlp_norm) and up:
        yield from _of_norm(parts(f"{at}mlp_norm.weight"), up)
    down = parts(f"{at}mlp.down")
    by_rows = mlp.norm is None and mlp.activation != "swiglu_oai"
    if mlp.gated and not mlp.bias and by_rows and len(up) == 2 and len(down) == 1:
        yield Fold((down[0].tensor,), rows=up[1].tensor)


def _divisible(norm: Norm | None) -> bool:
    return norm is not None and norm.weight and not norm.bias


def _of_norm(norm: list[Part], readers: list[Part]) -> Iterator[Fold]:
    if len(norm) == 1:
        yield Fold(tuple(part.tensor for part in readers), norm=norm[0].tensor, plus=norm[0].plus)


def storable(scale: Tensor, norm: Tensor) -> Tensor:
    """The scales next to these by which a norm's values can be divided without a loss when bfloat16 holds them."""
    divided = (norm / scale).bfloat16().float()
    usable = (divided != 0) & torch.isfinite(divided) & (norm != 0)
    return torch.where(usable, norm / torch.where(usable, divided, torch.ones_like(divided)), torch.ones_like(scale))
