# SPDX-License-Identifier: Apache-2.0
"""Mistral and Ministral: Llama with windows; Mixtral with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
from anyaccel.inference.families.deepseek import (
    DEEPSEEK,
    DEEPSEEK_ALIASES,
    after_dense,
    choice_by_bias,
    latent_attention,
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
from anyaccel.inference.spec.mapping import Unsupported, stacked
from anyaccel.validation import Fields, short_repr


def mistral(config: Config) -> DecoderSpec:
    return llama_like(config, [config.window()] * config.layers)


def ministral(config: Config) -> DecoderSpec:
    return llama_like(config, windows(config, config.layer_types(lambda index: True)))


def _growth(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Attention: queries grow beyond the context of the pretraining."""
    given = Fields(parameters, "config: rope_parameters: ")
    growth = given.number("llama_4_scaling_beta", 0.0)
    if not growth:
        return {}
    return {"growth": growth, "growth_from": given.get_int("original_max_position_embeddings", minimum=1)}


def ministral3(config: Config) -> DecoderSpec:
    return llama_like(config, [config.window()] * config.layers, **_growth(rope_parameters(config)))


def mistral4(config: Config) -> DecoderSpec:
    """DeepSeek-V3's layers, with a softmax over all experts and queries that grow."""
    parameters = rope_parameters(config)
    rotated = config.size("qk_rope_head_dim")
    whole = config.size("qk_nope_head_dim") + rotated
    factor = Fields(parameters, "config: rope_parameters: ").number("partial_rotary_factor")
    if factor != 1.0 and int(whole * factor) != rotated:
        raise Unsupported(f"partial_rotary_factor={short_repr(factor)} for {rotated} of {whole} values")
    parameters["partial_rotary_factor"] = 1.0
    moe = replace(choice_by_bias(config), scoring="softmax", choice_bias=False)
    heads = replace(latent_attention(config), **_growth(parameters))
    turned = rope(
        config,
        rotated,
        interleaved=config.get_bool("rope_interleave"),
        first=config.size("qk_nope_head_dim"),
        parameters=parameters,
    )
    return decoder(config, after_dense(config, heads, gated(config), moe), rms(config), (turned,))


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
    "mistral4": Family(
        "Mistral 4",
        mistral4,
        DEEPSEEK,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 131072,
            "intermediate_size": 12288,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 36,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "qk_nope_head_dim": 64,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 0,
            "norm_topk_prob": True,
            "max_position_embeddings": 1048576,
            "rope_interleave": True,
            "rope_parameters": {
                "type": "yarn",
                "rope_theta": 10000.0,
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        DEEPSEEK_ALIASES,
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
