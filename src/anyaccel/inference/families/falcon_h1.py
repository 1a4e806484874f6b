# SPDX-License-Identifier: Apache-2.0
"""Falcon-H1: attention and Mamba-2 side by side in each layer, with factors on what their weights give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.families.common import LLAMA, attention, check_convolution, decoder, gated, pre_norm, rms
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import GGUF_ATTENTION, GGUF_MODULES, Architecture, Metadata, gguf_state_space
from anyaccel.inference.families.mamba import gguf_sizes, state_space, state_space_names, step_limits
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.qwen_next import MOST_TAPS
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec
from anyaccel.inference.spec.mapping import At, Part, Rule, Unsupported
from anyaccel.validation import check_number

# The order of a layer's weight_factors.
_FACTORS = ("q", "k", "v", "o", "gate", "down", "z", "x", "b", "c", "step", "out")


def _numbers(config: Config, name: str, count: int) -> list[float]:
    given = config.items(name) or [1.0] * count
    if len(given) != count:
        raise ModelError(f"config: {len(given)} {name}, not {count}")
    return [check_number(each, f"config: {name}[{index}]") for index, each in enumerate(given)]


def _factors(config: Config) -> tuple[float, ...]:
    """What the weights are multiplied by; none where all of them are 1."""
    inner, gate = config.number("attention_in_multiplier"), _numbers(config, "mlp_multipliers", 2)
    of_input = config.number("ssm_in_multiplier")
    of_rows = [of_input * each for each in _numbers(config, "ssm_multipliers", 5)]
    found = (
        inner,
        inner * config.number("key_multiplier"),
        inner,
        config.number("attention_out_multiplier"),
        *gate,
        *of_rows,
        config.number("ssm_out_multiplier"),
    )
    if all(each == 1 for each in found):
        return ()
    for bias in ("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"):
        if config.get_bool(bias):
            raise Unsupported(f"{bias} with factors of weights")
    return found


def falcon_h1(config: Config) -> DecoderSpec:
    heads = config.size("mamba_n_heads")
    wide = config.hidden * config.size("mamba_expand") if not config.has("mamba_d_ssm") else config.size("mamba_d_ssm")
    head_dim = wide // heads if config.known().get("mamba_d_head") in ("auto", None) else config.size("mamba_d_head")
    if heads * head_dim != wide:
        raise ModelError(f"config: {heads} mamba_n_heads of {head_dim} are not mamba_d_ssm={wide}")
    check_convolution(config)
    norm, bias = rms(config), config.get_bool("mamba_proj_bias")
    normed = config.get_bool("mamba_rms_norm")
    if normed and config.get_bool("mamba_norm_before_gate"):
        raise Unsupported("mamba_norm_before_gate")
    mixer = state_space(
        heads,
        head_dim,
        config.size("mamba_n_groups"),
        config.size("mamba_d_state"),
        config.integer("mamba_d_conv", maximum=MOST_TAPS),
        norm,
        conv_bias=config.get_bool("mamba_conv_bias"),
        in_bias=bias,
        out_bias=config.get_bool("projectors_bias"),
        **step_limits(config),
    )
    layer = pre_norm(
        norm,
        attention(config, bias=config.get_bool("attention_bias")),
        gated(config, config.get_bool("mlp_bias")),
        recurrent=mixer if normed else replace(mixer, norm=None, norm_width=0),
        weight_factors=_factors(config),
    )
    return decoder(
        config,
        [layer] * config.layers,
        norm,
        (rope(config, config.head_dim),),
        embedding_scale=config.number("embedding_multiplier"),
        logits_scale=config.number("lm_head_multiplier"),
    )


def _times(rule: Rule, *factors: str) -> Callable[[At], Sequence[Part]]:
    """The parts of a rule, each with the factor of that name."""

    def parts(at: At) -> Sequence[Part]:
        found = [Part(at.name(rule))] if isinstance(rule, str) else rule(at)
        given = at.of_layer.weight_factors
        if not given or at.suffix != "weight":
            return found
        return [replace(part, times=given[_FACTORS.index(name)]) for part, name in zip(found, factors, strict=True)]

    return parts


_MIXER = state_space_names("mamba")
_NAMES = LLAMA.but(
    **_MIXER,
    final_norm="final_layernorm",
    mlp_norm="pre_ff_layernorm",
    qkv=tuple(_times(f"self_attn.{name}_proj", name) for name in "qkv"),
    o=_times("self_attn.o_proj", "o"),
    mlp__gate_up=(_times("feed_forward.gate_proj", "gate"), "feed_forward.up_proj"),
    mlp__down=_times("feed_forward.down_proj", "down"),
).but(
    mixer__in=_times(_MIXER["mixer__in"], "c", "b", "x", "z"),
    mixer__steps=_times(_MIXER["mixer__steps"], "step"),
    mixer__out=_times(_MIXER["mixer__out"], "out"),
)


FAMILIES = {
    "falcon_h1": Family(
        "Falcon-H1",
        falcon_h1,
        _NAMES,
        {
            "vocab_size": 128000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "mamba_d_ssm": 1024,
            "mamba_n_heads": 128,
            "mamba_d_head": "auto",
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_norm_before_gate": True,
            "mamba_rms_norm": False,
            **dict.fromkeys(
                (
                    *("lm_head_multiplier", "embedding_multiplier", "key_multiplier", "attention_out_multiplier"),
                    *("attention_in_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
                ),
                1.0,
            ),
        },
    ),
}


def _gguf_falcon_h1(values: Metadata, config: dict[str, Any]) -> None:
    """The converter has multiplied the weights by their factors."""
    heads, head_dim = gguf_sizes(values)
    config["mamba_n_heads"], config["mamba_d_head"], config["mamba_d_ssm"] = heads, head_dim, heads * head_dim
    config["mamba_n_groups"] = values.features("ssm.group_count")
    config["mamba_d_state"] = values.features("ssm.state_size")
    config["mamba_d_conv"] = values.count("ssm.conv_kernel", minimum=1)
    config["mamba_conv_bias"] = values.has_in_a_layer("ssm_conv1d.bias")
    config["mamba_proj_bias"] = values.has_in_a_layer("ssm_in.bias")
    config["projectors_bias"] = values.has_in_a_layer("ssm_out.bias")
    config["mamba_rms_norm"] = values.has_in_a_layer("ssm_norm.weight")
    config["mamba_norm_before_gate"] = False
    config["attention_bias"] = values.has_in_a_layer("attn_q.bias")
    config["mlp_bias"] = values.has_in_a_layer("ffn_up.bias")
    config["num_key_value_heads"] = values.kv_heads
    config["intermediate_size"] = values.features("feed_forward_length")


ARCHITECTURES = {
    "falcon-h1": Architecture(
        "falcon_h1",
        {**GGUF_MODULES, "model.final_layernorm": "output_norm"},
        {
            **GGUF_ATTENTION,
            **gguf_state_space("mamba"),
            "pre_ff_layernorm": "ffn_norm",
            "=pre_ff_layernorm.weight": "ffn_norm",  # as llama.cpp's converter calls it
            "feed_forward.gate_proj": "ffn_gate",
            "feed_forward.up_proj": "ffn_up",
            "feed_forward.down_proj": "ffn_down",
        },
        by_layer=True,
        extra=(_gguf_falcon_h1,),
    ),
}
