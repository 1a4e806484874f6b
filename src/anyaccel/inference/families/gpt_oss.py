# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anyaccel.inference.families.common import LLAMA, attention, decoder, mixture, pre_norm, rms, windows
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import (
    GGUF_ATTENTION,
    GGUF_EXPERTS,
    GGUF_LATER_NORM,
    GGUF_MODULES,
    Architecture,
    Metadata,
    biases,
    gguf_mixture,
    sliding_layers,
)
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec, Mlp, Moe
from anyaccel.inference.spec.mapping import At, Part, Unsupported


def gpt_oss(config: Config) -> DecoderSpec:
    for name, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if config.number(name) != value:
            raise Unsupported(f"{name}={config.number(name)}")
    expert = Mlp(config.size("intermediate_size"), "swiglu_oai", gated=True, bias=True, out_bias=True)
    moe = mixture(
        config,
        "num_local_experts",
        expert,
        scoring="none",
        normalise=False,
        softmax_after=True,
        router_bias=True,
    )
    norm = rms(config)
    bias = config.get_bool("attention_bias")
    layers = [
        pre_norm(norm, attention(config, window=window, bias=bias, sinks=True), moe)
        for window in windows(config, config.layer_types(lambda index: index % 2 == 0))
    ]
    return decoder(config, layers, norm, (rope(config, config.head_dim),))


def _gpt_oss_gate_up(at: At) -> Sequence[Part]:
    """[experts, hidden, 2 * features], in which gates and ups alternate."""
    mlp = at.of_layer.mlp
    features = mlp.expert.features if isinstance(mlp, Moe) else 0
    bias = at.suffix == "bias"
    name = at.name("=mlp.experts.gate_up_proj" + ("_bias" if bias else ""))
    return [
        Part(name, order=tuple(range(first, 2 * features, 2)), transposed=not bias, index=at.expert) for first in (0, 1)
    ]


def _gpt_oss_down(at: At) -> Sequence[Part]:
    bias = at.suffix == "bias"
    name = at.name("=mlp.experts.down_proj" + ("_bias" if bias else ""))
    return [Part(name, transposed=not bias, index=at.expert)]


GPT_OSS = LLAMA.but(
    router="mlp.router",
    sinks="=self_attn.sinks",
    experts__gate_up=[
        _gpt_oss_gate_up,
        ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
    ],
    experts__down=[_gpt_oss_down, "mlp.experts.{expert}.down_proj"],
)


FAMILIES = {
    "gpt_oss": Family(
        "GPT-OSS",
        gpt_oss,
        GPT_OSS,
        {
            "num_hidden_layers": 36,
            "num_local_experts": 128,
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "head_dim": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "attention_bias": True,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        {"num_experts": "num_local_experts"},
    ),
}


def _gguf_gpt_oss(values: Metadata, config: dict[str, Any]) -> None:
    gguf_mixture(values, config, "num_local_experts")
    config["intermediate_size"] = values.features("expert_feed_forward_length")
    config["sliding_window"] = values.count("attention.sliding_window", minimum=1)
    config["layer_types"] = sliding_layers(values, 2)
    if "rope_scaling" in config:
        config["rope_scaling"]["truncate"] = False  # not in the file


ARCHITECTURES = {
    "gpt-oss": Architecture(
        "gpt_oss",
        GGUF_MODULES,
        {
            **GGUF_ATTENTION,
            **GGUF_LATER_NORM,
            **GGUF_EXPERTS,
            "mlp.router": "ffn_gate_inp",
            "=self_attn.sinks": "attn_sinks.weight",
        },
        extra=(biases, _gguf_gpt_oss),
    ),
}
