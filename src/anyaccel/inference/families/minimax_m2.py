# SPDX-License-Identifier: Apache-2.0
"""MiniMax-M2."""

from __future__ import annotations

from typing import Any

from anyaccel.inference.families.common import LLAMA_DEFAULTS, attention, decoder, gated, mixture, pre_norm, rms
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import (
    GGUF_ATTENTION,
    GGUF_MODULES,
    GGUF_QK_NORM,
    Architecture,
    Metadata,
    gguf_mixture,
    partial,
)
from anyaccel.inference.families.mistral import MIXTRAL
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope, rope_parameters
from anyaccel.inference.spec.decoder import DecoderSpec, QkNorm


def minimax_m2(config: Config) -> DecoderSpec:
    """Queries and keys are normed over all heads; a bias takes part in the choice of experts only."""
    norm = rms(config)
    heads = attention(config, qk_norm=QkNorm(norm, across=True))
    moe = mixture(config, "num_local_experts", gated(config), scoring="sigmoid", choice_bias=True)
    parameters = rope_parameters(config)
    if config.has("rotary_dim") and not config.has("partial_rotary_factor"):
        parameters["partial_rotary_factor"] = config.integer("rotary_dim") / config.head_dim
    layers = [pre_norm(norm, heads, moe)] * config.layers
    return decoder(config, layers, norm, (rope(config, config.head_dim, partial=True, parameters=parameters),))


MINIMAX_M2 = MIXTRAL.but(
    router__choice_bias=["=block_sparse_moe.e_score_correction_bias", "=mlp.e_score_correction_bias"]
)


def _gguf_minimax_m2(values: Metadata, config: dict[str, Any]) -> None:
    gguf_mixture(values, config, "num_local_experts")
    config["intermediate_size"] = values.features("expert_feed_forward_length")


ARCHITECTURES = {
    "minimax-m2": Architecture(
        "minimax_m2",
        GGUF_MODULES,
        {
            **GGUF_ATTENTION,
            **GGUF_QK_NORM,
            "block_sparse_moe.gate": "ffn_gate_inp",
            "block_sparse_moe.experts.{expert}.w1": "ffn_gate_exps",
            "block_sparse_moe.experts.{expert}.w2": "ffn_down_exps",
            "block_sparse_moe.experts.{expert}.w3": "ffn_up_exps",
            "=block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
        },
        extra=(partial, _gguf_minimax_m2),
    ),
}


FAMILIES = {
    "minimax_m2": Family(
        "MiniMax-M2",
        minimax_m2,
        MINIMAX_M2,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 200064,
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_hidden_layers": 62,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "rope_theta": 5000000.0,
            "num_experts_per_tok": 8,
            "num_local_experts": 256,
        },
        {"num_experts": "num_local_experts"},
    ),
}
