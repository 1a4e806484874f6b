# SPDX-License-Identifier: Apache-2.0
"""A DecoderSpec from what `dataclasses.asdict` and JSON made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from anyaccel.inference.spec.decoder import Attention, DecoderSpec, Layer, Mla, Mlp, Moe, Norm, QkNorm, Rope


def _optional(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else make(value)


def _norm(value: Mapping[str, Any]) -> Norm:
    return Norm(**value)


def _qk_norm(value: Mapping[str, Any]) -> QkNorm:
    return QkNorm(**_with(value, norm=_norm))


def _mla(value: Mapping[str, Any]) -> Mla:
    return Mla(**_with(value, q_norm=_optional(_norm), kv_norm=_norm))


def _attention(value: Mapping[str, Any]) -> Attention:
    return Attention(**_with(value, alibi=tuple, qk_norm=_optional(_qk_norm), mla=_optional(_mla)))


def _mlp(value: Mapping[str, Any]) -> Mlp | Moe:
    if "experts" not in value:
        return Mlp(**value)
    return Moe(**_with(value, expert=_mlp, shared=_optional(_mlp)))


def _layer(value: Mapping[str, Any]) -> Layer:
    norms = dict.fromkeys(("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm"), _optional(_norm))
    return Layer(**_with(value, attention=_attention, mlp=_mlp, **norms))


def _rope(value: Mapping[str, Any]) -> Rope:
    return Rope(**_with(value, inv_freq=tuple, long_inv_freq=tuple))


def _with(value: Mapping[str, Any], **makers: Callable[[Any], Any]) -> dict[str, Any]:
    return {**value, **{name: make(value[name]) for name, make in makers.items()}}


def spec_from_dict(value: Mapping[str, Any]) -> DecoderSpec:
    """The opposite of `dataclasses.asdict(spec)`, lists for tuples or not."""
    return DecoderSpec(
        **_with(
            value,
            layers=lambda layers: tuple(map(_layer, layers)),
            ropes=lambda ropes: tuple(map(_rope, ropes)),
            final_norm=_optional(_norm),
            embedding_norm=_optional(_norm),
        )
    )
