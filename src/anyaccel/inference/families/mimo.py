# SPDX-License-Identifier: Apache-2.0
"""MiMo-V2-Flash, by Xiaomi."""

from __future__ import annotations

from collections.abc import Sequence

from anyaccel.inference.families.common import (
    LLAMA_DEFAULTS,
    attention,
    decoder,
    each_mlp,
    gated,
    mixture,
    pre_norm,
    rms,
)
from anyaccel.inference.families.deepseek import DEEPSEEK
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope, rope_parameters_of
from anyaccel.inference.spec.decoder import DecoderSpec
from anyaccel.inference.spec.mapping import At, Part


def mimo_v2_flash(config: Config) -> DecoderSpec:
    """Layers with a window have twice the KV heads, sinks, and rotary positions of their own."""
    norm = rms(config)
    window = config.integer_or("sliding_window_size", config.window() - 1, minimum=0) + 1
    moe = mixture(
        config,
        "n_routed_experts",
        gated(config, features="moe_intermediate_size"),
        scoring="sigmoid",
        normalise=config.get_bool("norm_topk_prob"),
        scale=config.number("routed_scaling_factor", 1.0),
        groups=config.integer("n_group"),
        top_groups=config.integer("topk_group"),
        group_score="top2",
        choice_bias=True,
    )
    # Of the values; the last linear is multiplied by it instead, which has no bias.
    factors = (config.number("attention_value_scale", 1.0),)
    full, local = (
        attention(
            config,
            rope=int(local),
            kv_heads=config.kv_heads * (2 if local else 1),
            value_dim=config.size("v_head_dim"),
            window=window if local else 0,
            sinks=local,
            bias=config.get_bool("attention_bias"),
            out_bias=False,
        )
        for local in (False, True)
    )
    types = config.layer_types(lambda index: index > 0 and (index + 1) % 6 != 0)
    layers = [
        pre_norm(norm, local if kind == "sliding_attention" else full, mlp, weight_factors=factors)
        for kind, mlp in zip(types, each_mlp(config, moe, gated(config), 1), strict=True)
    ]
    ropes = tuple(
        rope(
            config,
            config.head_dim,
            partial=True,
            parameters=rope_parameters_of(config, kind, theta, scaled=False),
        )
        for kind, theta in (("full_attention", 5e6), ("sliding_attention", 1e4))
    )
    return decoder(config, layers, norm, ropes)


def _out(at: At) -> Sequence[Part]:
    return [Part(at.name("self_attn.o_proj"), times=at.of_layer.weight_factors[0])]


FAMILIES = {
    "mimo_v2_flash": Family(
        "MiMo-V2-Flash",
        mimo_v2_flash,
        DEEPSEEK.but(o=_out, sinks=["=self_attn.sinks", "=self_attn.attention_sink_bias"]),
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 152576,
            "intermediate_size": 16384,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.334,
            "sliding_window": 129,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "attention_value_scale": 0.707,
        },
        {"num_local_experts": "n_routed_experts"},
    ),
}
