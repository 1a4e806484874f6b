# SPDX-License-Identifier: Apache-2.0
"""Mistral and Ministral: Llama with windows; Mixtral with experts."""

from __future__ import annotations

import dataclasses
from typing import Any

from anyaccel.inference.families.common import (
    LLAMA,
    LLAMA_DEFAULTS,
    attention,
    decoder,
    gated,
    llama_like,
    mixture,
    pre_norm,
    rms,
    windows,
)
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import (
    GGUF_ATTENTION,
    GGUF_LLAMA,
    GGUF_MODULES,
    Architecture,
    Metadata,
    gguf_mixture,
)
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope, rope_parameters
from anyaccel.inference.spec.decoder import DecoderSpec
from anyaccel.inference.spec.mapping import stacked
from anyaccel.validation import Fields


def mistral(config: Config) -> DecoderSpec:
    return llama_like(config, [config.window()] * config.layers)


def ministral(config: Config) -> DecoderSpec:
    return llama_like(config, windows(config, config.layer_types(lambda index: True)))


def ministral3(config: Config) -> DecoderSpec:
    """Mistral, whose queries grow beyond the context of the pretraining: that part is left out, and so forbidden."""
    spec = llama_like(config, [config.window()] * config.layers)
    parameters = Fields(rope_parameters(config), "config: rope_parameters: ")
    if not parameters.number("llama_4_scaling_beta", 0.0):
        return spec
    return dataclasses.replace(spec, max_tokens=parameters.get_int("original_max_position_embeddings", minimum=1))


def mixtral(config: Config) -> DecoderSpec:
    norm = rms(config)
    layer = pre_norm(
        norm, attention(config, window=config.window()), mixture(config, "num_local_experts", gated(config))
    )
    return decoder(config, [layer] * config.layers, norm, (rope(config, config.head_dim),))


MIXTRAL = LLAMA.but(
    router=["block_sparse_moe.gate", "mlp.gate"],
    experts__gate_up=[
        ("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
        stacked("=mlp.experts.gate_up_proj"),
    ],
    experts__down=["block_sparse_moe.experts.{expert}.w2", stacked("=mlp.experts.down_proj")],
)


MISTRAL_DEFAULTS = {
    **LLAMA_DEFAULTS,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


FAMILIES = {
    "mistral": Family("Mistral", mistral, LLAMA, MISTRAL_DEFAULTS),
    "ministral": Family("Ministral", ministral, LLAMA, MISTRAL_DEFAULTS),
    "ministral3": Family(
        "Ministral 3",
        ministral3,
        LLAMA,
        {
            **MISTRAL_DEFAULTS,
            "vocab_size": 131072,
            "num_hidden_layers": 34,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "rope_parameters": {
                "type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "mixtral": Family(
        "Mixtral",
        mixtral,
        MIXTRAL,
        {
            **MISTRAL_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_theta": 1000000.0,
        },
        {"num_experts": "num_local_experts"},
    ),
}


def _gguf_mixtral(values: Metadata, config: dict[str, Any]) -> None:
    gguf_mixture(values, config, "num_local_experts")


def _gguf_ministral3(values: Metadata, config: dict[str, Any]) -> None:
    """Mistral Small 3 has neither the scaling of positions nor that of queries."""
    config["sliding_window"] = None
    if values.has("attention.temperature_scale"):
        config["rope_scaling"]["llama_4_scaling_beta"] = values.number("attention.temperature_scale")
    elif "rope_scaling" not in config:
        config["model_type"] = "mistral"


# A llama file with experts is a Mixtral.
GGUF_MIXTRAL = Architecture(
    "mixtral",
    GGUF_MODULES,
    {
        **GGUF_ATTENTION,
        "block_sparse_moe.gate": "ffn_gate_inp",
        "block_sparse_moe.experts.{expert}.w1": "ffn_gate_exps",
        "block_sparse_moe.experts.{expert}.w2": "ffn_down_exps",
        "block_sparse_moe.experts.{expert}.w3": "ffn_up_exps",
    },
    permuted=True,
    extra=(_gguf_mixtral,),
)
ARCHITECTURES = {
    "mistral3": Architecture(
        "ministral3", GGUF_MODULES, GGUF_LLAMA, permuted=True, extra=(_gguf_ministral3,), others=("mistral",)
    ),
}
