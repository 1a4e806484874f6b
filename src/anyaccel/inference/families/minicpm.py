# SPDX-License-Identifier: Apache-2.0
"""MiniCPM 3."""

from __future__ import annotations

import math
from typing import Any

from anyaccel.inference.families.common import LLAMA_DEFAULTS, decoder, gated, own_head_dim, pre_norm, rms
from anyaccel.inference.families.deepseek import (
    DEEPSEEK,
    GGUF_LATENT,
    gguf_latent,
    latent_attention,
    latent_rope,
)
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import GGUF_GATED, GGUF_MODULES, Architecture, Metadata
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.phi import gguf_phi3
from anyaccel.inference.spec.decoder import DecoderSpec


def minicpm3(config: Config) -> DecoderSpec:
    """DeepSeek-V2's attention, with factors on embedding, residuals and logits."""
    norm = rms(config)
    heads = latent_attention(config, config.size("v_head_dim", own_head_dim(config)))
    depth = config.number("scale_depth", math.sqrt(config.layers))
    mlp = gated(config, config.get_bool("mlp_bias"))
    layer = pre_norm(norm, heads, mlp, residual_scale=depth / math.sqrt(config.layers))
    return decoder(
        config,
        [layer] * config.layers,
        norm,
        (latent_rope(config, interleaved=False),),
        embedding_scale=config.number("scale_emb"),
        logits_scale=config.number("dim_model_base", config.hidden, above=0.0) / config.hidden,
    )


def _gguf_minicpm3(values: Metadata, config: dict[str, Any]) -> None:
    """The factors and the size of values are llama.cpp's: the file says neither."""
    config["v_head_dim"] = config["hidden_size"] // values.heads
    config["scale_emb"], config["scale_depth"], config["dim_model_base"] = 12, 1.4, 256
    gguf_phi3(values, config)


FAMILIES = {
    "minicpm3": Family(
        "MiniCPM 3",
        minicpm3,
        DEEPSEEK,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 73448,
            "hidden_size": 2560,
            "intermediate_size": 6400,
            "num_hidden_layers": 62,
            "num_attention_heads": 40,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "kv_lora_rank": 256,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
    ),
}
ARCHITECTURES = {
    "minicpm3": Architecture(
        "minicpm3",
        GGUF_MODULES,
        {**GGUF_LATENT, **GGUF_GATED},
        latent=True,
        extra=(gguf_latent, _gguf_minicpm3),
    ),
}
