# SPDX-License-Identifier: Apache-2.0
"""Llama 4."""

from __future__ import annotations

from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.families.common import LLAMA, LLAMA_DEFAULTS, attention, decoder, gated, mixture, pre_norm, rms
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import GGUF_ATTENTION, GGUF_MODULES, Architecture, Metadata, biases, gguf_mixture
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec, Norm, QkNorm
from anyaccel.inference.spec.mapping import Unsupported, stacked
from anyaccel.validation import check_integer


def llama4(config: Config) -> DecoderSpec:
    """Most layers see a chunk of the context and rotate; the others have no positions, and queries that grow."""
    rotate = [bool(check_integer(each, "config: no_rope_layers")) for each in config.items("no_rope_layers")]
    if not rotate:
        interval = config.integer("no_rope_layer_interval")
        rotate = [(index + 1) % interval != 0 for index in range(config.layers)]
    if len(rotate) < config.layers:
        raise ModelError(f"config: {len(rotate)} no_rope_layers for {config.layers} layers")
    step = config.integer("interleave_moe_layer_step")
    of_experts = set(range(step - 1, config.layers, step))
    if config.has("moe_layers"):
        of_experts = {check_integer(each, "config: moe_layers") for each in config.items("moe_layers")}
    expert = gated(config)
    moe = mixture(
        config,
        "num_local_experts",
        expert,
        scoring="sigmoid",
        normalise=False,
        scale_input=True,
        shared=expert,
    )
    dense = gated(config, features="intermediate_size_mlp")
    norm, bias = rms(config), config.get_bool("attention_bias")
    length = Norm("rms", norm.eps, weight=False)
    turned: dict[str, Any] = {"rope": 0}
    if config.get_bool("use_qk_norm"):
        turned["qk_norm"] = QkNorm(length, after_rope=True)
    still: dict[str, Any] = {"rope": -1}
    if config.known().get("attn_temperature_tuning"):  # a number in the first configs
        still |= {
            "growth": config.number("attn_scale"),
            "growth_from": config.integer("floor_scale"),
            "growth_first": 1,
        }
    chunk = config.integer_or("attention_chunk_size", 0)
    kinds = config.layer_types(lambda index: rotate[index], "chunked_attention")
    if not chunk and "chunked_attention" in kinds:
        raise Unsupported("attention_chunk_size=None with layers of chunked_attention")
    layers = []
    for index, kind in enumerate(kinds):
        heads = attention(
            config,
            bias=bias,
            chunk=0 if kind == "full_attention" else chunk,
            **(turned if rotate[index] else still),
        )
        layers.append(pre_norm(norm, heads, moe if index in of_experts else dense))
    return decoder(config, layers, norm, (rope(config, config.head_dim, interleaved=True),))


LLAMA4 = LLAMA.but(
    router="feed_forward.router",
    mlp__gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    mlp__down="feed_forward.down_proj",
    experts__gate_up=[
        stacked("=feed_forward.experts.gate_up_proj", transposed=True),
        ("feed_forward.experts.{expert}.gate_proj", "feed_forward.experts.{expert}.up_proj"),
    ],
    experts__down=[
        stacked("=feed_forward.experts.down_proj", transposed=True),
        "feed_forward.experts.{expert}.down_proj",
    ],
    shared__gate_up=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
    shared__down="feed_forward.shared_expert.down_proj",
)


LLAMA4_DEFAULTS = {
    **LLAMA_DEFAULTS,
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}


def _gguf_llama4(values: Metadata, config: dict[str, Any]) -> None:
    """What the file does not say is as in Meta's models: llama.cpp knows them by the number of experts, too."""
    gguf_mixture(values, config, "num_local_experts")
    config["intermediate_size_mlp"] = config["intermediate_size"]
    config["intermediate_size"] = values.features("expert_feed_forward_length")
    config["interleave_moe_layer_step"] = values.count("interleave_moe_layer_step", 1, 1)
    config["use_qk_norm"] = config["num_local_experts"] != 128
    if values.has("attention.sliding_window") and values.count("attention.sliding_window") == 0:
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]


ARCHITECTURES = {
    "llama4": Architecture(
        "llama4_text",
        GGUF_MODULES,
        {
            **GGUF_ATTENTION,
            "feed_forward.gate_proj": "ffn_gate",
            "feed_forward.up_proj": "ffn_up",
            "feed_forward.down_proj": "ffn_down",
            "feed_forward.router": "ffn_gate_inp",
            "feed_forward.experts.{expert}.gate_proj": "ffn_gate_exps",
            "feed_forward.experts.{expert}.up_proj": "ffn_up_exps",
            "feed_forward.experts.{expert}.down_proj": "ffn_down_exps",
            "feed_forward.shared_expert.gate_proj": "ffn_gate_shexp",
            "feed_forward.shared_expert.up_proj": "ffn_up_shexp",
            "feed_forward.shared_expert.down_proj": "ffn_down_shexp",
        },
        extra=(biases, _gguf_llama4),
        others=("llama4",),
    ),
}


FAMILIES = {
    "llama4_text": Family("Llama 4 (text)", llama4, LLAMA4, LLAMA4_DEFAULTS),
    "llama4": Family("Llama 4 (text part)", llama4, LLAMA4, LLAMA4_DEFAULTS, text="text_config"),
}
