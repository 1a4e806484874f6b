# SPDX-License-Identifier: Apache-2.0
"""dots.llm1: Qwen 3's attention and DeepSeek-V3's experts."""

from __future__ import annotations

from typing import Any

from anyaccel.inference.families.common import LLAMA_DEFAULTS, attention, decoder, gated, pre_norm, rms, windows
from anyaccel.inference.families.deepseek import DEEPSEEK, GGUF_DEEPSEEK_EXPERTS, choice_by_bias, gguf_deepseek_experts
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import GGUF_LLAMA, GGUF_MODULES, GGUF_QK_NORM, Architecture, Metadata, biases
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec, QkNorm


def dots1(config: Config) -> DecoderSpec:
    first = config.integer("max_window_layers", minimum=0)
    sliding = config.has("sliding_window")
    each_window = windows(config, config.layer_types(lambda index: sliding and index >= first))
    norm = rms(config)
    moe, dense = choice_by_bias(config), gated(config)
    before = config.integer("first_k_dense_replace", minimum=0)
    bias = config.get_bool("attention_bias")
    layers = [
        pre_norm(
            norm,
            attention(config, window=window, bias=bias, qk_norm=QkNorm(norm)),
            dense if index < before else moe,
        )
        for index, window in enumerate(each_window)
    ]
    return decoder(config, layers, norm, (rope(config, config.head_dim),))


def _gguf_dots1(values: Metadata, config: dict[str, Any]) -> None:
    config["sliding_window"] = None


ARCHITECTURES = {
    "dots1": Architecture(
        "dots1",
        GGUF_MODULES,
        {**GGUF_LLAMA, **GGUF_QK_NORM, **GGUF_DEEPSEEK_EXPERTS},
        extra=(biases, gguf_deepseek_experts, _gguf_dots1),
    ),
}


FAMILIES = {
    "dots1": Family(
        "dots.llm1",
        dots1,
        DEEPSEEK,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 152064,
            "hidden_size": 4608,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 62,
            "num_key_value_heads": 32,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
        {"num_local_experts": "n_routed_experts"},
    ),
}
