# SPDX-License-Identifier: Apache-2.0
"""Llama, and those that differ from it in a few lines."""

from __future__ import annotations

import dataclasses
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.families.common import (
    LLAMA,
    LLAMA_DEFAULTS,
    attention,
    decoder,
    gated,
    layer_norm,
    llama_like,
    plain,
    pre_norm,
    rms,
    windows,
)
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import (
    GGUF_ATTENTION,
    GGUF_LATER_NORM,
    GGUF_LLAMA,
    GGUF_MODULES,
    Architecture,
    Metadata,
    biases,
    partial,
)
from anyaccel.inference.families.mistral import GGUF_MIXTRAL
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec
from anyaccel.inference.spec.mapping import plus_one
from anyaccel.validation import check_bool


def llama(config: Config) -> DecoderSpec:
    return llama_like(config, mlp=gated(config, config.get_bool("mlp_bias")), bias=config.get_bool("attention_bias"))


def cwm(config: Config) -> DecoderSpec:
    each_window = windows(config, config.layer_types(lambda index: index % 4 != 0))
    return llama_like(config, each_window, gated(config, config.get_bool("mlp_bias")))


def seed_oss(config: Config) -> DecoderSpec:
    mlp = gated(config, config.get_bool("mlp_bias"))
    return llama_like(
        config, mlp=mlp, bias=config.get_bool("attention_bias"), out_bias=config.get_bool("attention_out_bias")
    )


def arcee(config: Config) -> DecoderSpec:
    mlp = plain(config, config.size("intermediate_size"), "hidden_act", config.get_bool("mlp_bias"))
    return llama_like(config, mlp=mlp, bias=config.get_bool("attention_bias"))


def helium(config: Config) -> DecoderSpec:
    mlp = gated(config, config.get_bool("mlp_bias"))
    spec = llama_like(config, mlp=mlp, bias=config.get_bool("attention_bias"), out_bias=False)
    return dataclasses.replace(spec, ropes=(rope(config, config.head_dim, interleaved=True),))


def smollm3(config: Config) -> DecoderSpec:
    """Llama, some of whose layers have no positions."""
    rotate = [
        check_bool(each, f"config: no_rope_layers[{at}]") for at, each in enumerate(config.items("no_rope_layers"))
    ]
    if rotate and len(rotate) < config.layers:
        raise ModelError(f"config: {len(rotate)} no_rope_layers for {config.layers} layers")
    if not rotate:
        interval = config.integer("no_rope_layer_interval")
        rotate = [(index + 1) % interval != 0 for index in range(config.layers)]
    each_window = [0] * config.layers
    if config.get_bool("use_sliding_window"):
        each_window = windows(config, config.layer_types(lambda index: not rotate[index]))
    norm = rms(config)
    bias = config.get_bool("attention_bias")
    mlp = gated(config, config.get_bool("mlp_bias"))
    layers = [
        pre_norm(norm, attention(config, rope=0 if rotate[index] else -1, window=each_window[index], bias=bias), mlp)
        for index in range(config.layers)
    ]
    return decoder(config, layers, norm, (rope(config, config.head_dim),))


def nemotron(config: Config) -> DecoderSpec:
    norm = layer_norm(config, "norm_eps")
    layer = pre_norm(
        norm,
        attention(config, bias=config.get_bool("attention_bias")),
        plain(config, config.size("intermediate_size"), "hidden_act", config.get_bool("mlp_bias")),
    )
    return decoder(config, [layer] * config.layers, norm, (rope(config, config.head_dim, partial=True),))


def jais2(config: Config) -> DecoderSpec:
    """Llama with LayerNorms and an MLP without a gate."""
    norm = layer_norm(config, "layer_norm_eps")
    mlp = plain(config, config.size("intermediate_size"), "hidden_act", config.get_bool("mlp_bias"))
    return llama_like(config, mlp=mlp, norm=norm, bias=config.get_bool("attention_bias"))


ARCEE = LLAMA.but(mlp__gate_up="mlp.up_proj")


NEMOTRON = ARCEE.but(
    attn_norm=plus_one("input_layernorm"), mlp_norm=plus_one("post_attention_layernorm"), final_norm=plus_one("norm")
)


FAMILIES = {
    "llama": Family("Llama 1/2/3, SmolLM2, Yi", llama, LLAMA, LLAMA_DEFAULTS),
    "internlm3": Family(
        "InternLM 3",
        llama,
        LLAMA,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 128512,
            "intermediate_size": 10240,
            "num_hidden_layers": 48,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
        },
        {"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    ),
    "iquestcoder": Family(
        "IQuest-Coder",
        llama,
        LLAMA,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 76800,
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "num_hidden_layers": 80,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
        },
    ),
    "cwm": Family(
        "CWM",
        cwm,
        LLAMA,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 128256,
            "hidden_size": 6144,
            "intermediate_size": 21504,
            "num_hidden_layers": 64,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "sliding_window": 8192,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "jais2": Family(
        "Jais 2",
        jais2,
        ARCEE,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 150272,
            "hidden_size": 3328,
            "intermediate_size": 26624,
            "num_attention_heads": 26,
            "hidden_act": "relu2",
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "smollm3": Family(
        "SmolLM3",
        smollm3,
        LLAMA,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "no_rope_layer_interval": 4,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
        },
    ),
    "seed_oss": Family(
        "Seed-OSS",
        seed_oss,
        LLAMA,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 155136,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
        },
    ),
    "arcee": Family(
        "AFM (Arcee)",
        arcee,
        ARCEE,
        {
            **LLAMA_DEFAULTS,
            "hidden_size": 2560,
            "intermediate_size": 18432,
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
    ),
    "nemotron": Family(
        "Nemotron 4, Minitron",
        nemotron,
        NEMOTRON,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 256000,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_attention_heads": 48,
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
    ),
    "helium": Family(
        "Helium",
        helium,
        LLAMA,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 48000,
            "hidden_size": 2560,
            "intermediate_size": 7040,
            "num_hidden_layers": 24,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-8,
            "rope_theta": 100000.0,
        },
    ),
}


def _llama_or_mixtral(values: Metadata) -> Architecture:
    return GGUF_MIXTRAL if values.get_int("expert_count", 0) else GGUF_LLAMA_DENSE


def _gguf_smollm3(values: Metadata, config: dict[str, Any]) -> None:
    config["no_rope_layer_interval"] = 4  # not in the file


def _gguf_arcee(values: Metadata, config: dict[str, Any]) -> None:
    config["hidden_act"] = "relu2"


def _gguf_seed_oss(values: Metadata, config: dict[str, Any]) -> None:
    config["attention_out_bias"] = values.has_tensor("blk.0.attn_output.bias")


GGUF_UNGATED = {**GGUF_ATTENTION, "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
GGUF_LLAMA_DENSE = Architecture("llama", GGUF_MODULES, GGUF_LLAMA, permuted=True, extra=(biases,))
ARCHITECTURES = {
    "llama": dataclasses.replace(GGUF_LLAMA_DENSE, variant=_llama_or_mixtral, others=("mixtral",)),
    "smollm3": Architecture("smollm3", GGUF_MODULES, GGUF_LLAMA, permuted=True, extra=(biases, _gguf_smollm3)),
    "seed_oss": Architecture(
        "seed_oss", GGUF_MODULES, {**GGUF_LLAMA, **GGUF_LATER_NORM}, extra=(biases, _gguf_seed_oss)
    ),
    "arcee": Architecture("arcee", GGUF_MODULES, GGUF_UNGATED, permuted=True, extra=(biases, _gguf_arcee)),
    "nemotron": Architecture(
        "nemotron",
        GGUF_MODULES,
        GGUF_UNGATED,
        norms_less_one=True,
        norm_eps="norm_eps",
        extra=(partial, biases, _gguf_arcee),
    ),
    "jais2": Architecture("jais2", GGUF_MODULES, GGUF_UNGATED, norm_eps="layer_norm_eps", extra=(biases, _gguf_arcee)),
}
