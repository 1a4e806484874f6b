# SPDX-License-Identifier: Apache-2.0
"""OLMo 1 to 3 and OLMoE."""

from __future__ import annotations

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
    GGUF_EXPERTS,
    GGUF_LLAMA,
    GGUF_MODULES,
    GGUF_POST_NORMS,
    GGUF_QK_NORM,
    Architecture,
    Metadata,
    biases,
    gguf_mixture,
    sliding_layers,
)
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.qwen import QWEN_MOE
from anyaccel.inference.families.rope import rope, rope_parameters_of
from anyaccel.inference.spec.decoder import DecoderSpec, Layer, Mlp, Moe, Norm, QkNorm, Rope


def olmo(config: Config) -> DecoderSpec:
    """Norms without weights; values clamped after the projections."""
    norm = Norm("layer", 1e-5, weight=False)
    clip = config.number("clip_qkv", 0.0, minimum=0.0)
    return llama_like(config, norm=norm, bias=config.get_bool("attention_bias"), clip=clip)


def _olmo2(
    config: Config, each_window: list[int], ropes: tuple[Rope, ...], mlp: Mlp | Moe | None = None
) -> DecoderSpec:
    """Norms after attention and MLP only; queries and keys are normed over all heads."""
    norm = rms(config)
    bias = config.get_bool("attention_bias")
    layers = [
        Layer(
            attention(config, rope=min(window, len(ropes) - 1), window=window, bias=bias, qk_norm=QkNorm(norm, True)),
            mlp or gated(config),
            attn_post_norm=norm,
            mlp_post_norm=norm,
        )
        for window in each_window
    ]
    return decoder(config, layers, norm, ropes)


def olmo2(config: Config) -> DecoderSpec:
    return _olmo2(config, [0] * config.layers, (rope(config, config.head_dim),))


def olmo3(config: Config) -> DecoderSpec:
    each_window = windows(config, config.layer_types(lambda index: (index + 1) % 4 != 0))
    full = rope_parameters_of(config, "full_attention", config.number("rope_theta", 5e5), scaled=True)
    sliding = rope_parameters_of(config, "sliding_attention", 5e5, scaled=False)
    ropes = tuple(rope(config, config.head_dim, parameters=each) for each in (full, sliding))
    return _olmo2(config, each_window, ropes)


def olmoe(config: Config) -> DecoderSpec:
    config.refuse("clip_qkv")  # after the norms here
    norm = rms(config)
    heads = attention(config, bias=config.get_bool("attention_bias"), qk_norm=QkNorm(norm, across=True))
    moe = mixture(config, "num_experts", gated(config), normalise=config.get_bool("norm_topk_prob"))
    layers = [pre_norm(norm, heads, moe)] * config.layers
    return decoder(config, layers, norm, (rope(config, config.head_dim),))


def flex_olmo(config: Config) -> DecoderSpec:
    moe = mixture(config, "num_experts", gated(config), normalise=config.get_bool("norm_topk_prob"))
    return _olmo2(config, [0] * config.layers, (rope(config, config.head_dim),), moe)


FLEX_OLMO = QWEN_MOE.but(attn_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")


OLMO2 = LLAMA.but(attn_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")


OLMO_DEFAULTS = {**LLAMA_DEFAULTS, "vocab_size": 50304}


FAMILIES = {
    "olmo": Family("OLMo 1", olmo, LLAMA, OLMO_DEFAULTS),
    "olmo2": Family("OLMo 2", olmo2, OLMO2, {**OLMO_DEFAULTS, "rms_norm_eps": 1e-5}),
    "olmo3": Family("OLMo 3", olmo3, OLMO2, {**OLMO_DEFAULTS, "rms_norm_eps": 1e-5, "sliding_window": 4096}),
    "olmoe": Family(
        "OLMoE",
        olmoe,
        QWEN_MOE,
        {
            **OLMO_DEFAULTS,
            "hidden_size": 2048,
            "intermediate_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        {"num_local_experts": "num_experts"},
    ),
    "flex_olmo": Family(
        "FlexOlmo",
        flex_olmo,
        FLEX_OLMO,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 100352,
            "max_position_embeddings": 4096,
            "rope_theta": 500000.0,
            "num_experts_per_tok": 5,
            "num_experts": 7,
        },
        {"num_local_experts": "num_experts"},
    ),
}


def _gguf_olmo(values: Metadata, config: dict[str, Any]) -> None:
    config["clip_qkv"] = values.number("attention.clamp_kqv", 0.0)


def _gguf_olmo2(values: Metadata, config: dict[str, Any]) -> None:
    """OLMo 3 has windows, and scales positions in the other layers only."""
    if not values.has("attention.sliding_window"):
        return
    config["model_type"] = "olmo3"
    config["sliding_window"] = values.count("attention.sliding_window")
    config["layer_types"] = sliding_layers(values, 4)
    theta = config.pop("rope_theta")
    sliding = values.number("rope.freq_base_swa", theta, above=0.0)
    config["rope_parameters"] = {
        "full_attention": {"rope_type": "default", **config.pop("rope_scaling", {}), "rope_theta": theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": sliding},
    }


ARCHITECTURES = {
    "olmo": Architecture("olmo", GGUF_MODULES, GGUF_LLAMA, permuted=True, extra=(biases, _gguf_olmo)),
    "olmo2": Architecture("olmo2", GGUF_MODULES, GGUF_POST_NORMS, extra=(biases, _gguf_olmo2), others=("olmo3",)),
    "olmoe": Architecture(
        "olmoe", GGUF_MODULES, {**GGUF_ATTENTION, **GGUF_QK_NORM, **GGUF_EXPERTS}, extra=(biases, gguf_mixture)
    ),
}
