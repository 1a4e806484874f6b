# SPDX-License-Identifier: Apache-2.0
"""ERNIE 4.5, with experts and without."""

from __future__ import annotations

import dataclasses
from typing import Any

from anyaccel.inference.families.common import (
    LLAMA,
    LLAMA_DEFAULTS,
    MOST_EXPERTS,
    attention,
    decoder,
    gated,
    llama_like,
    mixture,
    pre_norm,
    rms,
)
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import (
    GGUF_EXPERTS,
    GGUF_LLAMA,
    GGUF_MODULES,
    GGUF_SHARED_EXPERTS,
    Architecture,
    Metadata,
    biases,
    gguf_mixture,
)
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.qwen import QWEN_MOE
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec
from anyaccel.inference.spec.mapping import Unsupported


def ernie(config: Config) -> DecoderSpec:
    bias = config.get_bool("use_bias")
    spec = llama_like(config, mlp=gated(config, bias), bias=bias)
    return dataclasses.replace(spec, ropes=(rope(config, config.head_dim, interleaved=True),))


def ernie_moe(config: Config) -> DecoderSpec:
    """A softmax over all experts, and a bias that takes part in the choice only."""
    if config.number("moe_norm_min", minimum=0.0) > 1e-6:  # below which the sum of the chosen scores never is
        raise Unsupported(f"moe_norm_min={config.number('moe_norm_min')}")
    bias = config.get_bool("use_bias")
    expert = gated(config, features="moe_intermediate_size")
    shared = config.integer("moe_num_shared_experts", minimum=0, maximum=MOST_EXPERTS)
    moe = mixture(
        config,
        "moe_num_experts",
        expert,
        choice_bias=True,
        shared=dataclasses.replace(expert, features=shared * expert.features, bias=bias, out_bias=bias)
        if shared
        else None,
    )
    first, interval = config.integer("moe_layer_start_index", minimum=0), config.integer("moe_layer_interval")
    last = config.integer("moe_layer_end_index", minimum=-1)
    last = config.layers - 1 if last == -1 else last
    norm = rms(config)
    heads = attention(config, bias=bias)
    layers = [
        pre_norm(norm, heads, moe if (index + 1) % interval == 0 and first <= index <= last else gated(config, bias))
        for index in range(config.layers)
    ]
    return decoder(config, layers, norm, (rope(config, config.head_dim, interleaved=True),), head_bias=bias)


ERNIE_MOE = QWEN_MOE.but(
    router__choice_bias=["=mlp.moe_statics.e_score_correction_bias", "=mlp.gate.moe_statics.e_score_correction_bias"],
    shared__gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared__down="mlp.shared_experts.down_proj",
)


FAMILIES = {
    "ernie4_5": Family(
        "ERNIE 4.5",
        ernie,
        LLAMA,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 103424,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 18,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
    ),
    "ernie4_5_moe": Family(
        "ERNIE 4.5 MoE",
        ernie_moe,
        ERNIE_MOE,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 103424,
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "num_hidden_layers": 28,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "moe_norm_min": 1e-12,
        },
        {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    ),
}


def _gguf_ernie(values: Metadata, config: dict[str, Any]) -> None:
    config["use_bias"] = config["attention_bias"]


def _gguf_ernie_moe(values: Metadata, config: dict[str, Any]) -> None:
    gguf_mixture(values, config, "moe_num_experts")
    config["moe_k"] = config.pop("num_experts_per_tok")
    config["moe_intermediate_size"] = values.features("expert_feed_forward_length")
    config["moe_num_shared_experts"] = values.count("expert_shared_count", 0)
    config["moe_layer_start_index"] = values.count("leading_dense_block_count", 0)
    config["moe_layer_interval"] = values.count("interleave_moe_layer_step", 1, 1)


ARCHITECTURES = {
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        GGUF_MODULES,
        {
            **GGUF_LLAMA,
            **GGUF_EXPERTS,
            **GGUF_SHARED_EXPERTS,
            "=mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
        },
        extra=(biases, _gguf_ernie, _gguf_ernie_moe),
    ),
    "ernie4_5": Architecture("ernie4_5", GGUF_MODULES, GGUF_LLAMA, extra=(biases, _gguf_ernie)),
}
