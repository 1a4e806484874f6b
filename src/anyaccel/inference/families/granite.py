# SPDX-License-Identifier: Apache-2.0
"""Granite 3, with experts and without."""

from __future__ import annotations

from typing import Any

from anyaccel.inference.families.common import LLAMA, LLAMA_DEFAULTS, attention, decoder, gated, mixture, pre_norm, rms
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import (
    GGUF_ATTENTION,
    GGUF_EXPERTS,
    GGUF_LLAMA,
    GGUF_MODULES,
    Architecture,
    Metadata,
    biases,
    gguf_mixture,
)
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec, Mlp, Moe
from anyaccel.inference.spec.mapping import stacked


def granite(config: Config, mlp: Mlp | Moe | None = None) -> DecoderSpec:
    """Llama with factors on embedding, residuals, scores and logits."""
    norm = rms(config)
    scores = attention(config, bias=config.get_bool("attention_bias"), scale=config.number("attention_multiplier"))
    mlp = mlp or gated(config, config.get_bool("mlp_bias"))
    layer = pre_norm(norm, scores, mlp, residual_scale=config.number("residual_multiplier"))
    return decoder(
        config,
        [layer] * config.layers,
        norm,
        (rope(config, config.head_dim),),
        embedding_scale=config.number("embedding_multiplier"),
        logits_scale=1.0 / config.number("logits_scaling", above=0.0),
    )


def granitemoe(config: Config) -> DecoderSpec:
    moe = mixture(config, "num_local_experts", gated(config), scoring="none", normalise=False, softmax_after=True)
    return granite(config, moe)


GRANITE_MOE = LLAMA.but(
    router=["block_sparse_moe.router.layer", "block_sparse_moe.router"],
    experts__gate_up=[
        stacked("block_sparse_moe.input_linear"),
        stacked("=block_sparse_moe.experts.gate_up_proj"),
        ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
    ],
    experts__down=[
        stacked("block_sparse_moe.output_linear"),
        stacked("=block_sparse_moe.experts.down_proj"),
        "mlp.experts.{expert}.down_proj",
    ],
)


GRANITE_DEFAULTS = {
    **LLAMA_DEFAULTS,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}


def gguf_granite(values: Metadata, config: dict[str, Any]) -> None:
    config["embedding_multiplier"] = values.number("embedding_scale", 1.0)
    config["residual_multiplier"] = values.number("residual_scale", 1.0)
    config["attention_multiplier"] = values.number("attention.scale", values.head_dim**-0.5)
    config["logits_scaling"] = values.number("logit_scale", 1.0)


def _gguf_granite_moe(values: Metadata, config: dict[str, Any]) -> None:
    gguf_mixture(values, config, "num_local_experts")


FAMILIES = {
    "granite": Family("Granite 3", granite, LLAMA, GRANITE_DEFAULTS),
    "granitemoe": Family(
        "Granite 3 MoE",
        granitemoe,
        GRANITE_MOE,
        {**GRANITE_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
}
ARCHITECTURES = {
    "granite": Architecture("granite", GGUF_MODULES, GGUF_LLAMA, permuted=True, extra=(biases, gguf_granite)),
    "granitemoe": Architecture(
        "granitemoe",
        GGUF_MODULES,
        {**GGUF_ATTENTION, **GGUF_EXPERTS, "block_sparse_moe.router.layer": "ffn_gate_inp"},
        permuted=True,
        extra=(biases, gguf_granite, _gguf_granite_moe),
    ),
}
