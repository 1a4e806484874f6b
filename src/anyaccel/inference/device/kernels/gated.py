# SPDX-License-Identifier: Apache-2.0
"""The features of a gated MLP, activation(gate) * up, of rows that have both. `activations.py` is the same in torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "swiglu_oai")
_BLOCK = 1024


@triton.jit
def _gated(both, out, row_stride, features, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < features
    gate = tl.load(both + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * row_stride + features + at, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        y = gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu":
        y = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(z)) / 2 is the logistic function of 2 z
        y = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    elif ACTIVATION == "gelu_quick":
        y = gate * tl.sigmoid(1.702 * gate) * up
    elif ACTIVATION == "relu":
        y = tl.maximum(gate, 0.0) * up
    elif ACTIVATION == "relu2":
        positive = tl.maximum(gate, 0.0)
        y = positive * positive * up
    else:  # swiglu_oai
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
        y = gate * tl.sigmoid(1.702 * gate) * up
    tl.store(out + row * features + at, y.to(out.dtype.element_ty), mask=inside)


def gated(activation: str, gate_up: torch.Tensor) -> torch.Tensor:
    """[tokens, features] of [tokens, gates and ups], whose values are neighbours in memory."""
    features = gate_up.shape[-1] // 2
    out = gate_up.new_empty(len(gate_up), features)
    if len(out):
        _gated[(len(out), triton.cdiv(features, _BLOCK))](
            gate_up, out, gate_up.stride(0), features, ACTIVATION=activation, BLOCK=_BLOCK
        )
    return out
