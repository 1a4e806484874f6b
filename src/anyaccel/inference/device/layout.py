# SPDX-License-Identifier: Apache-2.0
"""How weights lie in a device's memory, where that differs from what the native runtime names: for fewer operators."""

from __future__ import annotations

import torch

from anyaccel.inference.device.rotary import neighbours
from anyaccel.inference.spec.decoder import Attention, DecoderSpec, Rope


def row_orders(spec: DecoderSpec) -> dict[str, torch.Tensor]:
    """Weight -> where each of its rows goes, for those whose order is another: pairs that turn become neighbours."""
    found: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(spec.layers):
        a = layer.attention
        if a.rope < 0 or spec.ropes[a.rope].interleaved:
            continue
        for name, order in _turned(a, spec.ropes[a.rope]).items():
            found[f"layers.{index}.{name}"] = order
    return found


def _turned(a: Attention, rope: Rope) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor | None] = {}
    if a.mla is not None:
        found["q_b"] = neighbours(rope, a.head_dim, a.heads, rope.first)
        found["kv_a"] = neighbours(rope, a.mla.kv_rank + a.mla.rope_dim, 1, a.mla.kv_rank)
        found["kv_a.bias"] = found["kv_a"]
    else:
        found["qkv"] = found["qkv.bias"] = neighbours(rope, a.head_dim, a.heads + a.kv_heads, rope.first)
    if a.qk_norm is not None:
        each = a.qk_norm.across or a.qk_norm.own_weights
        for name, heads in (("q_norm", a.heads), ("k_norm", a.kv_heads)):
            order = neighbours(rope, a.head_dim, heads if each else 1, rope.first)
            found |= {f"{name}.weight": order, f"{name}.bias": order}
    return {name: order for name, order in found.items() if order is not None}
