# SPDX-License-Identifier: Apache-2.0
"""Command-R, Command-A and Aya."""

from __future__ import annotations

from typing import Any

from anyaccel.inference.families.common import (
    LLAMA,
    LLAMA_DEFAULTS,
    MOST_EXPERTS,
    attention,
    decoder,
    each_mlp,
    gated,
    layer_norm,
    mixture,
    rms,
    windows,
)
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
    biases,
    gguf_mixture,
    sliding_layers,
)
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec, Layer, QkNorm
from anyaccel.inference.spec.mapping import Unsupported


def _cohere(config: Config, each_window: list[int], rotate: list[bool], qk_norm: QkNorm | None) -> DecoderSpec:
    """Attention and MLP side by side after one norm; pairs of neighbours rotate."""
    norm = layer_norm(config, "layer_norm_eps", bias=False)
    bias = config.get_bool("attention_bias")
    layers = [
        Layer(
            attention(config, rope=0 if rotate[index] else -1, window=window, bias=bias, qk_norm=qk_norm),
            gated(config),
            attn_norm=norm,
            parallel=True,
        )
        for index, window in enumerate(each_window)
    ]
    ropes = (rope(config, config.head_dim, interleaved=True),)
    return decoder(config, layers, norm, ropes, logits_scale=config.number("logit_scale"))


def cohere(config: Config) -> DecoderSpec:
    norm = layer_norm(config, "layer_norm_eps", bias=False)
    qk_norm = QkNorm(norm, own_weights=True) if config.get_bool("use_qk_norm") else None
    return _cohere(config, [0] * config.layers, [True] * config.layers, qk_norm)


def cohere2(config: Config) -> DecoderSpec:
    """Layers that see everything have no positions."""
    pattern = config.integer("sliding_window_pattern")
    each_window = windows(config, config.layer_types(lambda index: (index + 1) % pattern != 0))
    return _cohere(config, each_window, [window > 0 for window in each_window], None)


def cohere2_moe(config: Config) -> DecoderSpec:
    """Layers without experts come first: they rotate, and have windows of a pattern of their own."""
    if config.has("rms_norm_eps"):
        norm = rms(config)
    else:
        norm = layer_norm(config, "layer_norm_eps", bias=False)
    selection = config.text("expert_selection_fn", known=("softmax", "sigmoid"))
    softmax = selection == "softmax"
    shared = config.integer("num_shared_experts", minimum=0, maximum=MOST_EXPERTS)
    strategy = config.text("shared_expert_combination_strategy", known=("sum", "average"))
    factor = 0.5 if shared and strategy == "average" else 1.0
    expert = gated(config)
    moe = mixture(
        config,
        "num_experts",
        expert,
        scoring="none" if softmax else "sigmoid",
        softmax_after=softmax,
        normalise=not softmax and config.get_bool("norm_topk_prob"),
        scale=factor,
        shared=shared_expert(config, expert, "num_shared_experts") if shared else None,
        shared_scale=factor,
    )
    given = "prefix_dense_intermediate_size"
    dense = gated(config, features=given if config.has(given) else "intermediate_size")
    first = config.integer_or("first_k_dense_replace", 0, minimum=0)
    of_dense = config.integer("prefix_dense_sliding_window_pattern")
    pattern = config.integer("sliding_window_pattern")
    types = config.layer_types(
        lambda index: bool((index + 1) % of_dense if index < first else (index - first + 1) % pattern)
    )
    layers = []
    for window, mlp in zip(windows(config, types), each_mlp(config, moe, dense, first), strict=True):
        turned = window > 0 or (mlp is dense and of_dense == 1)
        heads = attention(config, rope=0 if turned else -1, window=window, bias=config.get_bool("attention_bias"))
        layers.append(Layer(heads, mlp, attn_norm=norm, parallel=True))
    ropes = (rope(config, config.head_dim, interleaved=True),)
    return decoder(config, layers, norm, ropes, logits_scale=config.number("logit_scale"))


COHERE_DEFAULTS = {
    **LLAMA_DEFAULTS,
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "logit_scale": 0.0625,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def _gguf_cohere2(values: Metadata, config: dict[str, Any]) -> None:
    config["sliding_window"] = values.count("attention.sliding_window", minimum=1)
    config["layer_types"] = sliding_layers(values, 4)


def gguf_cohere(values: Metadata, config: dict[str, Any]) -> None:
    config["logit_scale"] = values.number("logit_scale", 1.0)
    config["use_qk_norm"] = values.has_tensor("blk.0.attn_q_norm.weight")


def _gguf_cohere2_moe(values: Metadata, config: dict[str, Any]) -> None:
    gguf_mixture(values, config)
    if values.has("attention.layer_norm_rms_epsilon"):
        config["rms_norm_eps"] = config.pop("layer_norm_eps")
    config["intermediate_size"] = values.features("expert_feed_forward_length")
    if values.has("feed_forward_length"):
        config["prefix_dense_intermediate_size"] = values.count_where_present("feed_forward_length")
    config["first_k_dense_replace"] = values.count("leading_dense_block_count", 0)
    config["num_shared_experts"] = values.count("expert_shared_count", 0)
    config["norm_topk_prob"] = values.get_bool("expert_weights_norm", False)
    softmax = values.count("expert_gating_func", 1) == 1
    config["expert_selection_fn"] = "softmax" if softmax else "sigmoid"
    if softmax and not config["norm_topk_prob"]:
        raise Unsupported(f"scores that are not divided by their sum ({values.where}expert_weights_norm)")


FAMILIES = {
    "cohere": Family("Command-R, Aya", cohere, LLAMA, {**COHERE_DEFAULTS, "rope_theta": 500000.0}),
    "cohere2": Family(
        "Command-R7B, Command-A",
        cohere2,
        LLAMA,
        {**COHERE_DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "cohere2_moe": Family(
        "Command-A MoE",
        cohere2_moe,
        DEEPSEEK,
        {
            **COHERE_DEFAULTS,
            "head_dim": 128,
            "rms_norm_eps": None,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "num_experts_per_tok": 2,
            "num_experts": 8,
            "num_shared_experts": 0,
            "shared_expert_combination_strategy": "average",
            "expert_selection_fn": "softmax",
            "prefix_dense_sliding_window_pattern": 1,
            "norm_topk_prob": True,
        },
    ),
}
ARCHITECTURES = {
    "command-r": Architecture(
        "cohere", GGUF_MODULES, {**GGUF_LLAMA, **GGUF_QK_NORM}, norm_eps="layer_norm_eps", extra=(biases, gguf_cohere)
    ),
    "cohere2": Architecture(
        "cohere2", GGUF_MODULES, GGUF_LLAMA, norm_eps="layer_norm_eps", extra=(biases, gguf_cohere, _gguf_cohere2)
    ),
    "cohere2moe": Architecture(
        "cohere2_moe",
        GGUF_MODULES,
        {**GGUF_LLAMA, **GGUF_EXPERTS, **GGUF_SHARED_EXPERTS},
        norm_eps="layer_norm_eps",
        extra=(biases, gguf_cohere, _gguf_cohere2, _gguf_cohere2_moe),
    ),
}
