# SPDX-License-Identifier: Apache-2.0
"""OLMo Hybrid: the gated delta rule, and OLMo 3's attention in every fourth layer."""

from __future__ import annotations

from anyaccel.errors import ModelError
from anyaccel.inference.families.common import (
    LLAMA,
    LLAMA_DEFAULTS,
    attention,
    check_convolution,
    decoder,
    gated,
    pre_norm,
    rms,
)
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.qwen_next import MOST_TAPS
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec, Layer, LinearAttention, Norm, QkNorm


def _gated_delta_net(config: Config) -> LinearAttention:
    heads = config.size("linear_num_value_heads", config.heads)
    key_heads = config.size("linear_num_key_heads", config.heads)
    if heads % key_heads:
        raise ModelError(f"config: {heads} linear_num_value_heads are not a multiple of {key_heads} key heads")
    check_convolution(config)
    key_dim = config.size("linear_key_head_dim", max(3 * config.hidden // (4 * key_heads), 1))
    value_dim = config.size("linear_value_head_dim", 2 * key_dim)
    return LinearAttention(
        heads,
        key_heads,
        key_dim,
        value_dim,
        scale=key_dim**-0.5,
        kernel=config.integer("linear_conv_kernel_dim", maximum=MOST_TAPS),
        delta=True,
        strength="sigmoid",
        strength_scale=2.0 if config.get_bool("linear_allow_neg_eigval") else 1.0,
        l2_norm=True,
        norm=Norm("rms", 1e-5),
        norm_width=value_dim,
        norm_shared=True,
        norm_first=True,
    )


def _layer_types(config: Config) -> list[str]:
    last = config.layers - 1  # one layer at least sees everything
    return config.layer_types(lambda index: index % 4 != 3 and (index < last or last >= 3), "linear_attention")


def olmo_hybrid(config: Config) -> DecoderSpec:
    norm, mlp = rms(config), gated(config)
    # Published models have no positions: their rope_theta is null.
    without = config.mapping("rope_parameters").is_null("rope_theta")
    ropes = () if without else (rope(config, config.head_dim),)
    bias = config.get_bool("attention_bias")
    full = Layer(
        attention(config, rope=len(ropes) - 1, bias=bias, qk_norm=QkNorm(norm, across=True)),
        mlp,
        attn_post_norm=norm,
        mlp_post_norm=norm,
    )
    linear = pre_norm(norm, None, mlp, recurrent=_gated_delta_net(config))
    layers = [full if kind == "full_attention" else linear for kind in _layer_types(config)]
    return decoder(config, layers, norm, ropes)


# transformers' names, then those of published checkpoints where they differ.
_NAMES = LLAMA.but(
    attn_norm=["input_layernorm", "attention_layer_norm"],
    attn_post_norm=["post_attention_layernorm", "feedforward_layer_norm"],
    mlp_norm=["post_attention_layernorm", "feedforward_layer_norm"],
    mlp_post_norm="post_feedforward_layernorm",
    mixer__in=tuple(f"linear_attn.{name}_proj" for name in "qkvg"),
    mixer__steps=("linear_attn.a_proj", "linear_attn.b_proj"),
    mixer__conv=["linear_attn.conv1d", tuple(f"linear_attn.{name}_conv1d" for name in "qkv")],
    mixer__rate="=linear_attn.A_log",
    mixer__step_bias="=linear_attn.dt_bias",
    mixer__norm="linear_attn.o_norm",
    mixer__out="linear_attn.o_proj",
)


FAMILIES = {
    "olmo_hybrid": Family(
        "OLMo Hybrid",
        olmo_hybrid,
        _NAMES,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 100352,
            "hidden_size": 3840,
            "num_attention_heads": 30,
            "max_position_embeddings": 65536,
            "linear_conv_kernel_dim": 4,
            "linear_allow_neg_eigval": True,
        },
    ),
}
