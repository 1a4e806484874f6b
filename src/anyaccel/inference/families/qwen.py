# SPDX-License-Identifier: Apache-2.0
"""Qwen 1.5 to 3, with experts and without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anyaccel.inference.families.common import (
    LLAMA,
    LLAMA_DEFAULTS,
    attention,
    decoder,
    each_mlp,
    gated,
    llama_like,
    mixture,
    pre_norm,
    rms,
    windows,
)
from anyaccel.inference.families.family import DraftHead, Family
from anyaccel.inference.families.gguf import (
    GGUF_ATTENTION,
    GGUF_EXPERTS,
    GGUF_LLAMA,
    GGUF_MODULES,
    GGUF_QK_NORM,
    Architecture,
    Metadata,
    biases,
    gguf_mixture,
    sliding_layers,
)
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import check_whole, rope, rope_parameters_of
from anyaccel.inference.spec.decoder import DecoderSpec, Mlp, Moe, QkNorm
from anyaccel.inference.spec.mapping import stacked
from anyaccel.validation import check_integer


def _qwen_windows(config: Config) -> list[int]:
    first = config.integer("max_window_layers", minimum=0)
    types = config.layer_types(lambda index: index >= first)
    return windows(config, types) if config.get_bool("use_sliding_window") else [0] * config.layers


def qwen2(config: Config) -> DecoderSpec:
    return llama_like(config, _qwen_windows(config), bias=True, out_bias=False)


def qwen3(config: Config) -> DecoderSpec:
    bias = config.get_bool("attention_bias")
    return llama_like(config, _qwen_windows(config), bias=bias, qk_norm=QkNorm(rms(config)))


def sparse(config: Config, moe: Moe, dense: Mlp, otherwise: Sequence[int] = ()) -> list[Mlp | Moe]:
    """Qwen's choice of the layers with experts.

    Args:
        otherwise: those without, where the config lists none.
    """
    step = config.integer("decoder_sparse_step")
    given = config.items("mlp_only_layers") if config.has("mlp_only_layers") else otherwise
    only = [check_integer(each, "config: mlp_only_layers") for each in given]
    return [moe if index not in only and (index + 1) % step == 0 else dense for index in range(config.layers)]


def qwen2_moe(config: Config) -> DecoderSpec:
    moe = mixture(
        config,
        "num_experts",
        gated(config, features="moe_intermediate_size"),
        normalise=config.get_bool("norm_topk_prob"),
        shared=gated(config, features="shared_expert_intermediate_size"),
        shared_gate=True,
    )
    each_window = [0] * config.layers
    if config.get_bool("use_sliding_window"):
        last = config.integer("max_window_layers", minimum=0)
        each_window = windows(config, config.layer_types(lambda index: index % 2 == 0 and index < last))
    norm = rms(config)
    layers = [
        pre_norm(norm, attention(config, window=window, bias=config.get_bool("qkv_bias"), out_bias=False), mlp)
        for window, mlp in zip(each_window, sparse(config, moe, gated(config)), strict=True)
    ]
    return decoder(config, layers, norm, (rope(config, config.head_dim),))


def qwen3_moe(config: Config) -> DecoderSpec:
    expert = gated(config, features="moe_intermediate_size")
    moe = mixture(config, "num_experts", expert, normalise=config.get_bool("norm_topk_prob"))
    norm = rms(config)
    heads = attention(
        config,
        window=config.window() if config.get_bool("use_sliding_window") else 0,
        bias=config.get_bool("attention_bias"),
        qk_norm=QkNorm(norm),
    )
    layers = [pre_norm(norm, heads, mlp) for mlp in sparse(config, moe, gated(config))]
    return decoder(config, layers, norm, (rope(config, config.head_dim),))


def mellum(config: Config) -> DecoderSpec:
    """Qwen 3's layers with experts, windows, and rotary positions of two kinds."""
    moe = mixture(
        config,
        "num_experts",
        gated(config, features="moe_intermediate_size"),
        normalise=config.get_bool("norm_topk_prob"),
    )
    norm = rms(config)
    parameters = [
        rope_parameters_of(config, kind, theta, scaled=False)
        for kind, theta in (("full_attention", 5e5), ("sliding_attention", 1e4))
    ]
    for each in parameters:
        check_whole(each)
    each_window = windows(config, config.layer_types())
    layers = [
        pre_norm(
            norm,
            attention(
                config,
                rope=int(window > 0),
                window=window,
                bias=config.get_bool("attention_bias"),
                qk_norm=QkNorm(norm),
            ),
            mlp,
        )
        for window, mlp in zip(each_window, each_mlp(config, moe, gated(config), 0), strict=True)
    ]
    ropes = tuple(rope(config, config.head_dim, parameters=each) for each in parameters)
    return decoder(config, layers, norm, ropes)


# Mixtures of experts: checkpoints have a tensor for each expert's matrix; transformers 5's modules stack them.
_GATE_UP = ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj")


QWEN_MOE = LLAMA.but(
    router="mlp.gate",
    experts__gate_up=[_GATE_UP, stacked("=mlp.experts.gate_up_proj")],
    experts__down=["mlp.experts.{expert}.down_proj", stacked("=mlp.experts.down_proj")],
    shared__gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared__down="mlp.shared_expert.down_proj",
    shared_gate="mlp.shared_expert_gate",
)


QWEN_DEFAULTS = {
    **LLAMA_DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


QWEN_MOE_DEFAULTS = {
    **QWEN_DEFAULTS,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "decoder_sparse_step": 1,
}


def gguf_qwen_moe(values: Metadata, config: dict[str, Any]) -> None:
    gguf_mixture(values, config)
    config["moe_intermediate_size"] = values.features("expert_feed_forward_length")
    config["decoder_sparse_step"] = 1
    config["norm_topk_prob"] = config["model_type"] == "qwen3_moe"  # llama.cpp normalises there too
    if config["model_type"] == "qwen2_moe":
        config["shared_expert_intermediate_size"] = values.features("expert_shared_feed_forward_length")


GGUF_QWEN2_MOE = {
    **GGUF_ATTENTION,
    **GGUF_EXPERTS,
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}


# MiMo is a Qwen2 with this layer, which reads what the model's layers give, before the last norm.
_MIMO = DraftHead(
    {
        "fuse": "mtp_layers.0.input_proj",
        "fuse_embed_norm": "mtp_layers.0.token_layernorm",
        "fuse_hidden_norm": "mtp_layers.0.hidden_layernorm",
        "final_norm": "mtp_layers.0.final_layernorm",
    },
    layer="mtp_layers.0.",
    taps=(None,),
    hidden_first=True,
)


def gguf_mellum(values: Metadata, config: dict[str, Any]) -> None:
    gguf_mixture(values, config)
    config["moe_intermediate_size"] = values.features("expert_feed_forward_length")
    config["sliding_window"] = values.count("attention.sliding_window", minimum=1)
    config["layer_types"] = sliding_layers(values, 4)
    full = {"rope_type": "default", **config.pop("rope_scaling", {}), "rope_theta": config.pop("rope_theta")}
    local = {"rope_type": "default", "rope_theta": values.number("rope.freq_base_swa", 1e4, above=0.0)}
    config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}


FAMILIES = {
    "qwen2": Family("Qwen1.5, Qwen2, Qwen2.5", qwen2, LLAMA, QWEN_DEFAULTS, draft_head=_MIMO),
    "qwen3": Family("Qwen3", qwen3, LLAMA, {**QWEN_DEFAULTS, "head_dim": 128}),
    "qwen2_moe": Family(
        "Qwen1.5-MoE, Qwen2-MoE",
        qwen2_moe,
        QWEN_MOE,
        {
            **QWEN_MOE_DEFAULTS,
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "qkv_bias": True,
        },
    ),
    "qwen3_moe": Family(
        "Qwen3-MoE",
        qwen3_moe,
        QWEN_MOE,
        {
            **QWEN_MOE_DEFAULTS,
            "intermediate_size": 6144,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
        },
        {"num_local_experts": "num_experts"},
    ),
    "mellum": Family(
        "Mellum 2",
        mellum,
        QWEN_MOE,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 98304,
            "hidden_size": 2304,
            "intermediate_size": 7168,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "sliding_window": 1024,
            "moe_intermediate_size": 896,
            "num_experts_per_tok": 8,
            "num_experts": 64,
            "norm_topk_prob": True,
        },
        {"num_local_experts": "num_experts"},
    ),
}
ARCHITECTURES = {
    "qwen2": Architecture("qwen2", GGUF_MODULES, GGUF_LLAMA),
    "qwen3": Architecture("qwen3", GGUF_MODULES, {**GGUF_LLAMA, **GGUF_QK_NORM}, extra=(biases,)),
    "qwen2moe": Architecture("qwen2_moe", GGUF_MODULES, GGUF_QWEN2_MOE, extra=(gguf_qwen_moe,)),
    "qwen3moe": Architecture(
        "qwen3_moe", GGUF_MODULES, {**GGUF_ATTENTION, **GGUF_QK_NORM, **GGUF_EXPERTS}, extra=(biases, gguf_qwen_moe)
    ),
    # The language models of Qwen-VL: without images, their three positions of a token are one.
    "qwen2vl": Architecture("qwen2", GGUF_MODULES, GGUF_LLAMA),
    "qwen3vl": Architecture("qwen3", GGUF_MODULES, {**GGUF_LLAMA, **GGUF_QK_NORM}, extra=(biases,)),
    "qwen3vlmoe": Architecture(
        "qwen3_moe", GGUF_MODULES, {**GGUF_ATTENTION, **GGUF_QK_NORM, **GGUF_EXPERTS}, extra=(biases, gguf_qwen_moe)
    ),
    "mellum": Architecture(
        "mellum", GGUF_MODULES, {**GGUF_ATTENTION, **GGUF_QK_NORM, **GGUF_EXPERTS}, extra=(biases, gguf_mellum)
    ),
}
