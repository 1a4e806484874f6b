# SPDX-License-Identifier: Apache-2.0
"""A DecoderSpec from what `dataclasses.asdict` and JSON made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyaccel.inference.spec.decoder import (
    Attention,
    DecoderSpec,
    Distances,
    GatedLru,
    HiddenInputs,
    Indexer,
    InputGate,
    Laurel,
    Layer,
    LayerInputs,
    LinearAttention,
    Mla,
    Mlp,
    Moe,
    Norm,
    QkNorm,
    RelativeBias,
    Rope,
    SelectiveScan,
    ShortConv,
    SideBlock,
    Streams,
)

# What a field of this name is made of; those of other names are norms.
_KINDS: dict[str, type] = {
    "layers": Layer,
    "ropes": Rope,
    "attention": Attention,
    "qk_norm": QkNorm,
    "mla": Mla,
    "indexer": Indexer,
    "mlp": Mlp,
    "expert": Mlp,
    "shared": Mlp,
    "layer_inputs": LayerInputs,
    "input_gate": InputGate,
    "laurel": Laurel,
    "side_block": SideBlock,
    "streams": Streams,  # of a layer; the decoder's is a number
    "relative_bias": RelativeBias,
    "distances": Distances,
    "hidden_inputs": HiddenInputs,
}


def with_specs(saved: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What was stored of a model, with the decoder of this rank and the whole one as specs; None for None."""
    if saved is None:
        return None
    return {**saved, **{name: spec_from_dict(saved[name]) for name in ("spec", "whole_spec")}}


def spec_from_dict(value: Mapping[str, Any]) -> DecoderSpec:
    """The opposite of `dataclasses.asdict(spec)`, lists for tuples or not."""
    return DecoderSpec(**{name: _made(name, each) for name, each in value.items()})


def _made(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_made(name, each) for each in value) if name in _KINDS else tuple(value)
    if not isinstance(value, dict):
        return value
    kind = _KINDS.get(name, Norm)
    if name == "mlp" and "experts" in value:
        kind = Moe
    if name == "recurrent":
        marks = {"step_rank": SelectiveScan, "activation": GatedLru, "channels": ShortConv}
        kind = next((kind for mark, kind in marks.items() if mark in value), LinearAttention)
    return kind(**{field: _made(field, each) for field, each in value.items()})
