# SPDX-License-Identifier: Apache-2.0
"""Granite 3, with experts and without."""

from __future__ import annotations

from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.families.common import (
    LLAMA,
    LLAMA_DEFAULTS,
    attention,
    decoder,
    gated,
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
    Architecture,
    Metadata,
    biases,
    gguf_mixture,
    sliding_layers,
)
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope, rope_parameters
from anyaccel.inference.spec.decoder import DecoderSpec, Layer, Mlp, Moe, Norm, Rope
from anyaccel.inference.spec.mapping import stacked
from anyaccel.validation import check_bool, check_number


def _granite(config: Config, layers: list[Layer], ropes: tuple[Rope, ...], logits_scale: float) -> DecoderSpec:
    """Llama with factors on embedding, residuals, scores and logits."""
    embedding_scale = config.number("embedding_multiplier")
    return decoder(config, layers, rms(config), ropes, embedding_scale=embedding_scale, logits_scale=logits_scale)


def _layer(config: Config, mlp: Mlp | Moe, scale: float, post: Norm | None = None, **more: Any) -> Layer:
    scores = attention(config, bias=config.get_bool("attention_bias"), scale=scale, **more)
    factor = config.number("residual_multiplier")
    return pre_norm(rms(config), scores, mlp, attn_post_norm=post, mlp_post_norm=post, residual_scale=factor)


def _logits_scale(config: Config) -> float:
    return 1.0 / config.number("logits_scaling", above=0.0)


def granite(config: Config, mlp: Mlp | Moe | None = None) -> DecoderSpec:
    layer = _layer(config, mlp or _dense(config), config.number("attention_multiplier"))
    return _granite(config, [layer] * config.layers, (rope(config, config.head_dim),), _logits_scale(config))


def _dense(config: Config) -> Mlp:
    return gated(config, config.get_bool("mlp_bias"))


def granite_moe(config: Config, shared: bool = False) -> Moe:
    features = config.integer("shared_intermediate_size", minimum=0) if shared else 0
    return mixture(
        config,
        "num_local_experts",
        gated(config),
        scoring="none",
        normalise=False,
        softmax_after=True,
        shared=gated(config, features="shared_intermediate_size") if features else None,
    )


def granitemoe(config: Config) -> DecoderSpec:
    return granite(config, granite_moe(config))


def granitemoeshared(config: Config) -> DecoderSpec:
    return granite(config, granite_moe(config, shared=True))


def granite_swa(config: Config, mlp: Mlp | Moe | None = None) -> DecoderSpec:
    """Windows, sinks, and rotary positions of each layer's own, of which some have none."""
    mlp = mlp or _dense(config)
    parameters = rope_parameters(config)
    thetas = config.items("layer_rope_theta") or [parameters["rope_theta"]] * config.layers
    if len(thetas) < config.layers:
        raise ModelError(f"config: layer_rope_theta of {len(thetas)} layers for {config.layers} layers")
    known: dict[float, int] = {}
    ropes: list[Rope] = []
    layers = []
    each_window = windows(config, config.layer_types(lambda index: index % 4 != 0))
    for index, window in enumerate(each_window):
        place = -1
        if thetas[index]:
            theta = check_number(thetas[index], f"config: layer_rope_theta[{index}]", above=0.0)
            if theta not in known:
                known[theta] = len(ropes)
                ropes.append(rope(config, config.head_dim, parameters=parameters | {"rope_theta": theta}))
            place = known[theta]
        scale = config.number("attention_multiplier")
        layers.append(_layer(config, mlp, scale, rope=place, window=window, sinks=True))
    return _granite(config, layers, tuple(ropes), _logits_scale(config))


def granitemoe_swa(config: Config) -> DecoderSpec:
    return granite_swa(config, granite_moe(config, shared=True))


def hyperclovax(config: Config) -> DecoderSpec:
    """Norms after attention and MLP too; logits are multiplied by their factor."""
    scale = config.number("attention_multiplier", config.head_dim**-0.5)
    post = rms(config) if config.get_bool("use_post_norm") else None
    layer = _layer(config, _dense(config), scale, post)
    ropes = (rope(config, config.head_dim),)
    return _granite(config, [layer] * config.layers, ropes, config.number("logits_scaling"))


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


GRANITE_MOE_SHARED = GRANITE_MOE.but(
    sinks="=self_attn.sinks",
    shared__gate_up=["shared_mlp.input_linear", ("shared_mlp.gate_proj", "shared_mlp.up_proj")],
    shared__down="shared_mlp.output_linear",
)
GRANITE_SWA = LLAMA.but(sinks="=self_attn.sinks")
HYPERCLOVAX = LLAMA.but(attn_post_norm="post_norm1", mlp_post_norm="post_norm2")


GRANITE_DEFAULTS = {
    **LLAMA_DEFAULTS,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}


GRANITE_MOE_DEFAULTS = {
    **GRANITE_DEFAULTS,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 0,
}


def gguf_granite(values: Metadata, config: dict[str, Any]) -> None:
    config["embedding_multiplier"] = values.number("embedding_scale", 1.0)
    config["residual_multiplier"] = values.number("residual_scale", 1.0)
    config["attention_multiplier"] = values.number("attention.scale", values.head_dim**-0.5)
    config["logits_scaling"] = values.number("logit_scale", 1.0)


def _gguf_granite_moe(values: Metadata, config: dict[str, Any]) -> None:
    gguf_mixture(values, config, "num_local_experts")
    if values.has_tensor("blk.0.ffn_gate_shexp.weight"):
        config["model_type"] = "granitemoeshared"
        config["shared_intermediate_size"] = values.shape("blk.0.ffn_gate_shexp.weight")[0]


def _gguf_granite_swa(values: Metadata, config: dict[str, Any]) -> None:
    config["sliding_window"] = values.count("attention.sliding_window", minimum=1)
    config["layer_types"] = sliding_layers(values, 4)
    name = "attention.rope_pattern"
    if values.is_list(name):
        given = [check_bool(each, values.where + name) for each in values.items(name)]
        config["layer_rope_theta"] = [config["rope_theta"] if each else 0.0 for each in given]


FAMILIES = {
    "granite": Family("Granite 3", granite, LLAMA, GRANITE_DEFAULTS),
    "granitemoe": Family(
        "Granite 3 MoE",
        granitemoe,
        GRANITE_MOE,
        GRANITE_MOE_DEFAULTS,
    ),
    "granitemoeshared": Family(
        "Granite 3 MoE with a shared MLP", granitemoeshared, GRANITE_MOE_SHARED, GRANITE_MOE_DEFAULTS
    ),
    "granite_swa": Family(
        "Granite with windows",
        granite_swa,
        GRANITE_SWA,
        {
            **GRANITE_DEFAULTS,
            "vocab_size": 100352,
            "hidden_size": 2560,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "sliding_window": 128,
        },
    ),
    "granitemoe_swa": Family(
        "Granite MoE with windows", granitemoe_swa, GRANITE_MOE_SHARED, {**GRANITE_MOE_DEFAULTS, "sliding_window": 128}
    ),
    "hyperclovax": Family(
        "HyperCLOVA X",
        hyperclovax,
        HYPERCLOVAX,
        {**GRANITE_DEFAULTS, "attention_multiplier": None, "use_post_norm": True},
    ),
}
GGUF_GRANITE_SHARED = {
    "shared_mlp.gate_proj": "ffn_gate_shexp",
    "shared_mlp.up_proj": "ffn_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}
ARCHITECTURES = {
    "granite": Architecture("granite", GGUF_MODULES, GGUF_LLAMA, permuted=True, extra=(biases, gguf_granite)),
    "granitemoe": Architecture(
        "granitemoe",
        GGUF_MODULES,
        {**GGUF_ATTENTION, **GGUF_EXPERTS, "block_sparse_moe.router.layer": "ffn_gate_inp", **GGUF_GRANITE_SHARED},
        permuted=True,
        extra=(biases, gguf_granite, _gguf_granite_moe),
        others=("granitemoeshared",),
    ),
    "granite_swa": Architecture(
        "granite_swa",
        GGUF_MODULES,
        {**GGUF_LLAMA, "=self_attn.sinks": "attn_sinks.weight"},
        permuted=True,
        extra=(biases, gguf_granite, _gguf_granite_swa),
    ),
}
