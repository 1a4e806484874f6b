# SPDX-License-Identifier: Apache-2.0
"""How weights lie in a device's memory, where that differs from what the native runtime names: for fewer operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from anyaccel.inference.device.rotary import neighbours
from anyaccel.inference.spec.decoder import Attention, DecoderSpec, Indexer, Layer, Mlp, Rope

# Features of an MLP that are always the same: one would do, but products want rows of whole 16 bytes.
CONSTANTS = 8
_FLOATS = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class LayerLayout:
    """What of a layer is stored otherwise than the native runtime names it.

    Attributes:
        joint: attention and MLP read the same values, and queries, keys, values and the MLP's first features come of
            one product, "joint".
        folded: they read two norms of the same residual, whose weights and biases are in that matrix and its bias.
        constant: the last product's bias is a column of its matrix: CONSTANTS features more, of which the first is
            always the same. So it needs no operator of its own where the product adds the residual already.
    """

    joint: bool = False
    folded: bool = False
    constant: bool = False


def layer_layout(layer: Layer, formats: Mapping[str, str]) -> LayerLayout:
    """The layout of a layer.

    Args:
        formats: of its matrices, by their names within the layer. Quantised ones cannot take in what changes values.
    """
    if not isinstance(layer.mlp, Mlp):
        return LayerLayout()
    floats = {name for name, kind in formats.items() if kind in _FLOATS}
    first, second = layer.attn_norm, layer.mlp_norm
    folded = first is not None and second is not None and (first.kind, first.eps) == (second.kind, second.eps)
    joint = layer.parallel and {"qkv", "mlp.gate_up"} <= floats and formats["qkv"] == formats["mlp.gate_up"]
    simple = layer.mlp.simple
    joint = joint and (folded or second is None) and simple and layer.softmax.out_norm is None
    constant = layer.mlp.out_bias and {"mlp.gate_up", "mlp.down"} <= floats and simple
    return LayerLayout(joint, joint and folded, constant)


def row_orders(spec: DecoderSpec) -> dict[str, torch.Tensor]:
    """Weight -> where each of its rows goes, for those whose order is another: pairs that turn become neighbours."""
    found: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(spec.layers):
        a = layer.attention
        if a is None:
            continue
        orders = {} if a.rope < 0 else _turned(a, spec.ropes[a.rope])
        if a.indexer is not None and a.indexer.own and a.indexer.rope >= 0:
            orders |= _turned_by_indexer(a.indexer, spec.ropes[a.indexer.rope])
        for name, order in orders.items():
            if order is not None:
                found[f"layers.{index}.{name}"] = order
    return found


def _turned_by_indexer(own: Indexer, rope: Rope) -> dict[str, torch.Tensor | None]:
    key = neighbours(rope, own.head_dim, 1, rope.first)
    norm = {f"index_norm.{kind}": key for kind in ("weight", "bias")}
    return {"index_q": neighbours(rope, own.head_dim, own.heads, rope.first), "index_k": key, **norm}


def _turned(a: Attention, rope: Rope) -> dict[str, torch.Tensor | None]:
    found: dict[str, torch.Tensor | None] = {}
    kv_heads = a.kv_heads if a.kv_layer < 0 else 0
    if a.mla is not None:
        found["q_b"] = neighbours(rope, a.head_dim, a.heads, rope.first)
        found["kv_a"] = neighbours(rope, a.mla.kv_rank + a.mla.rope_dim, 1, a.mla.kv_rank)
        found["kv_a.bias"] = found["kv_a"]
    else:
        found["qkv"] = found["qkv.bias"] = neighbours(rope, a.head_dim, a.heads + kv_heads, rope.first)
    if a.qk_norm is not None:
        each = a.qk_norm.across or a.qk_norm.own_weights
        for name, heads in (("q_norm", a.heads), ("k_norm", a.kv_heads))[: 2 if kv_heads else 1]:
            order = neighbours(rope, a.head_dim, heads if each else 1, rope.first)
            found |= {f"{name}.weight": order, f"{name}.bias": order}
    return found
