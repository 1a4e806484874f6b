# SPDX-License-Identifier: Apache-2.0
"""AFMoE (Arcee's Trinity)."""

from __future__ import annotations

from typing import Any

from anyaccel.inference.families.common import LLAMA_DEFAULTS, attention, decoder, gated, mixture, pre_norm, rms
from anyaccel.inference.families.deepseek import DEEPSEEK, shared_expert
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import (
    GGUF_EXPERTS,
    GGUF_LLAMA,
    GGUF_MODULES,
    GGUF_QK_NORM,
    GGUF_SHARED_EXPERTS,
    Architecture,
    Metadata,
    gguf_mixture,
)
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import check_whole, rope, rope_parameters
from anyaccel.inference.spec.decoder import DecoderSpec, QkNorm
from anyaccel.inference.spec.mapping import Unsupported


def afmoe(config: Config) -> DecoderSpec:
    """Norms before and after both halves of a layer; positions in layers with a window only; a gate of attention."""
    config.refuse("attention_bias")
    check_whole(rope_parameters(config))
    norm = rms(config)
    every = config.integer("global_attn_every_n_layers")
    types = config.layer_types(lambda index: (index + 1) % every != 0)
    expert = gated(config, features="moe_intermediate_size")
    moe = mixture(
        config,
        "num_experts",
        expert,
        scoring="sigmoid",
        choice_bias=True,
        scale=config.number("route_scale"),
        shared=shared_expert(config, expert, "num_shared_experts"),
    )
    dense = config.integer("num_dense_layers", minimum=0)
    layers = []
    for index, kind in enumerate(types):
        local = kind == "sliding_attention"
        window = config.window() if local else 0
        heads = attention(config, rope=0 if local else -1, window=window, qk_norm=QkNorm(norm), gated=True)
        mlp = gated(config) if index < dense else moe
        layers.append(pre_norm(norm, heads, mlp, attn_post_norm=norm, mlp_post_norm=norm))
    scale = config.hidden**0.5 if config.get_bool("mup_enabled") else 1.0
    return decoder(config, layers, norm, (rope(config, config.head_dim),), embedding_scale=scale)


def gguf_afmoe(values: Metadata, config: dict[str, Any]) -> None:
    gguf_mixture(values, config)
    if not values.get_bool("expert_weights_norm", True):
        raise Unsupported(f"scores that are not divided by their sum ({values.where}expert_weights_norm)")
    config["moe_intermediate_size"] = values.features("expert_feed_forward_length")
    config["num_shared_experts"] = values.count("expert_shared_count", 0)
    config["num_dense_layers"] = values.count("leading_dense_block_count", 0)
    config["route_scale"] = values.number("expert_weights_scale", 1.0)
    config["sliding_window"] = values.count("attention.sliding_window", minimum=1)
    # Not in the file: llama.cpp takes both from the published models.
    config["mup_enabled"] = True
    config["global_attn_every_n_layers"] = 4


FAMILIES = {
    "afmoe": Family(
        "AFMoE (Trinity)",
        afmoe,
        DEEPSEEK.but(
            attn_post_norm="post_attention_layernorm",
            mlp_norm="pre_mlp_layernorm",
            mlp_post_norm="post_mlp_layernorm",
            qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.gate_proj"),
            router="mlp.router.gate",
            router__choice_bias="=mlp.expert_bias",
        ),
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 200192,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 1408,
            "num_dense_layers": 1,
            "num_attention_heads": 16,
            "head_dim": 128,
            "max_position_embeddings": 16384,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "num_shared_experts": 2,
            "route_scale": 1.0,
            "global_attn_every_n_layers": 4,
            "sliding_window": 1024,
        },
    ),
}
ARCHITECTURES = {
    "afmoe": Architecture(
        "afmoe",
        GGUF_MODULES,
        {
            **GGUF_LLAMA,
            **GGUF_QK_NORM,
            **GGUF_EXPERTS,
            **GGUF_SHARED_EXPERTS,
            "post_attention_layernorm": "post_attention_norm",
            "pre_mlp_layernorm": "ffn_norm",
            "post_mlp_layernorm": "post_ffw_norm",
            "self_attn.gate_proj": "attn_gate",
            "mlp.router.gate": "ffn_gate_inp",
            "=mlp.expert_bias": "exp_probs_b.bias",
        },
        extra=(gguf_afmoe,),
    ),
}
