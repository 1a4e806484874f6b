# SPDX-License-Identifier: Apache-2.0
"""EXAONE 4 and K-EXAONE."""

from __future__ import annotations

from typing import Any

from anyaccel.inference.families.common import (
    LLAMA_DEFAULTS,
    attention,
    decoder,
    each_mlp,
    gated,
    pre_norm,
    rms,
    windows,
)
from anyaccel.inference.families.deepseek import DEEPSEEK, choice_by_bias, gguf_deepseek_experts
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import (
    GGUF_EXPERTS,
    GGUF_LLAMA,
    GGUF_MODULES,
    GGUF_POST_NORMS,
    GGUF_QK_NORM,
    GGUF_SHARED_EXPERTS,
    Architecture,
    Metadata,
    sliding_layers,
)
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.olmo import OLMO2
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import Attention, DecoderSpec, Layer, Norm, QkNorm
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.validation import short_repr


def _heads(config: Config, norm: Norm) -> list[Attention]:
    """With windows, layers that see everything have no positions."""
    each_window = [0] * config.layers
    if config.has("sliding_window"):
        pattern = 0
        if not config.items("layer_types"):
            if isinstance(config.required("sliding_window_pattern"), str):  # "LLLG": the first models of this family
                raise Unsupported(f"sliding_window_pattern={short_repr(config.text('sliding_window_pattern'))}")
            pattern = config.integer("sliding_window_pattern")
        each_window = windows(config, config.layer_types(lambda index: (index + 1) % pattern != 0))
    rotate = [window > 0 or not config.has("sliding_window") for window in each_window]
    return [
        attention(config, rope=0 if rotate[index] else -1, window=window, qk_norm=QkNorm(norm))
        for index, window in enumerate(each_window)
    ]


def exaone4(config: Config) -> DecoderSpec:
    """Norms after attention and MLP only."""
    norm = rms(config)
    layers = [Layer(heads, gated(config), attn_post_norm=norm, mlp_post_norm=norm) for heads in _heads(config, norm)]
    return decoder(config, layers, norm, (rope(config, config.head_dim),))


def exaone_moe(config: Config) -> DecoderSpec:
    """EXAONE 4's attention behind a norm, and DeepSeek-V3's experts."""
    norm = rms(config)
    heads = _heads(config, norm)
    mlps = each_mlp(
        config,
        choice_by_bias(config, "num_experts", "num_shared_experts"),
        gated(config),
        config.integer("first_k_dense_replace", minimum=0),
    )
    layers = [pre_norm(norm, own, mlp) for own, mlp in zip(heads, mlps, strict=True)]
    return decoder(config, layers, norm, (rope(config, config.head_dim),))


EXAONE_MOE = DEEPSEEK.but(router__choice_bias=["=mlp.e_score_correction_bias", "=mlp.gate.e_score_correction_bias"])


FAMILIES = {
    "exaone4": Family(
        "EXAONE 4",
        exaone4,
        OLMO2,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 102400,
            "intermediate_size": 16384,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
    "exaone_moe": Family(
        "K-EXAONE",
        exaone_moe,
        EXAONE_MOE,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 102400,
            "intermediate_size": 16384,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}


def _gguf_exaone4(values: Metadata, config: dict[str, Any]) -> None:
    config["sliding_window"] = values.count("attention.sliding_window", 0) or None
    config["layer_types"] = sliding_layers(values, 4 if config["sliding_window"] else 1)


def _gguf_exaone_moe(values: Metadata, config: dict[str, Any]) -> None:
    gguf_deepseek_experts(values, config)
    config["num_experts"] = config.pop("n_routed_experts")
    config["num_shared_experts"] = config.pop("n_shared_experts")


ARCHITECTURES = {
    "exaone4": Architecture("exaone4", GGUF_MODULES, GGUF_POST_NORMS, extra=(_gguf_exaone4,)),
    "exaone-moe": Architecture(
        "exaone_moe",
        GGUF_MODULES,
        {
            **GGUF_LLAMA,
            **GGUF_QK_NORM,
            **GGUF_EXPERTS,
            **GGUF_SHARED_EXPERTS,
            "=mlp.e_score_correction_bias": "exp_probs_b.bias",
        },
        extra=(_gguf_exaone4, _gguf_exaone_moe),
    ),
}
