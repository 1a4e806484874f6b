# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next and Qwen3.5: gated attention in every fourth layer, the gated delta rule in the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.families.common import attention, check_convolution, decoder, gated, mixture, pre_norm, rms
from anyaccel.inference.families.family import DraftHead, Family
from anyaccel.inference.families.gguf import (
    GGUF_GATED,
    GGUF_LATER_NORM,
    GGUF_MODULES,
    GGUF_QK_NORM,
    GGUF_RATES,
    Architecture,
    DraftLayer,
    Metadata,
    partial,
)
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.qwen import GGUF_QWEN2_MOE, QWEN_DEFAULTS, QWEN_MOE, gguf_qwen_moe, sparse
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec, LinearAttention, Mlp, Moe, QkNorm
from anyaccel.inference.spec.mapping import At, Base, Part, plus_one

MOST_TAPS = 16  # tokens that a convolution sees; kMostTaps in csrc/llm/kernels/mixers.h


def gated_delta_net(config: Config) -> LinearAttention:
    heads, key_heads = config.size("linear_num_value_heads"), config.size("linear_num_key_heads")
    if heads % key_heads:
        raise ModelError(f"config: {heads} linear_num_value_heads are not a multiple of {key_heads} key heads")
    check_convolution(config)
    key_dim, value_dim = config.size("linear_key_head_dim"), config.size("linear_value_head_dim")
    return LinearAttention(
        heads,
        key_heads,
        key_dim,
        value_dim,
        scale=key_dim**-0.5,
        kernel=config.integer("linear_conv_kernel_dim", maximum=MOST_TAPS),
        delta=True,
        strength="sigmoid",
        l2_norm=True,
        norm=rms(config),
        norm_width=value_dim,
        norm_shared=True,
        norm_first=True,
        tiled=config.get_bool("linear_value_heads_tiled"),
    )


def _layer_types(config: Config) -> list[str]:
    every = config.integer("full_attention_interval")
    return config.layer_types(lambda index: (index + 1) % every != 0, "linear_attention")


def _decoder(config: Config, mlps: Sequence[Mlp | Moe]) -> DecoderSpec:
    norm = rms(config)
    full = attention(config, bias=config.get_bool("attention_bias"), gated=True, qk_norm=QkNorm(norm))
    linear = gated_delta_net(config)
    layers = [
        pre_norm(norm, full, mlp) if kind == "full_attention" else pre_norm(norm, None, mlp, recurrent=linear)
        for kind, mlp in zip(_layer_types(config), mlps, strict=True)
    ]
    return decoder(config, layers, norm, (rope(config, config.head_dim, partial=True),))


def _moe(config: Config, normalise: bool) -> Moe:
    return mixture(
        config,
        "num_experts",
        gated(config, features="moe_intermediate_size"),
        normalise=normalise,
        shared=gated(config, features="shared_expert_intermediate_size"),
        shared_gate=True,
    )


def qwen3_next(config: Config) -> DecoderSpec:
    return _decoder(config, sparse(config, _moe(config, config.get_bool("norm_topk_prob")), gated(config)))


def qwen3_5(config: Config) -> DecoderSpec:
    return _decoder(config, [gated(config)] * config.layers)


def qwen3_5_moe(config: Config) -> DecoderSpec:
    return _decoder(config, [_moe(config, normalise=True)] * config.layers)


def _gated_qkv(at: At) -> Sequence[Part]:
    """A head of `q_proj` has its queries, then its gate."""
    a = at.attention

    def half(which: int) -> tuple[int, ...]:
        return tuple((2 * head + which) * a.head_dim + i for head in range(a.heads) for i in range(a.head_dim))

    queries = at.name("self_attn.q_proj")
    others = [Part(at.name(f"self_attn.{name}_proj")) for name in "kv"]
    return [Part(queries, order=half(0)), *others, Part(queries, order=half(1))]


def _of_key_heads(
    module: str, sizes: Callable[[LinearAttention], Sequence[int]], order: Sequence[int]
) -> Callable[[At], Sequence[Part]]:
    """Rows that lie by head of the keys, each in pieces of `sizes`, of which `order` says how they come."""

    def parts(at: At) -> Sequence[Part]:
        mixer = at.of_layer.recurrent
        assert isinstance(mixer, LinearAttention)
        each = sizes(mixer)
        starts = [sum(each[:piece]) for piece in range(len(each))]
        return [
            Part(
                at.name(module),
                order=tuple(
                    head * sum(each) + starts[piece] + i for head in range(mixer.key_heads) for i in range(each[piece])
                ),
            )
            for piece in order
        ]

    return parts


def _values_of_key(mixer: LinearAttention) -> int:
    return mixer.heads // mixer.key_heads * mixer.value_dim


_GATED = QWEN_MOE.but(
    embed="embed_tokens",
    final_norm=plus_one("norm"),
    attn_norm=plus_one("input_layernorm"),
    mlp_norm=plus_one("post_attention_layernorm"),
    q_norm=plus_one("self_attn.q_norm"),
    k_norm=plus_one("self_attn.k_norm"),
    qkv=_gated_qkv,
    mixer__conv="linear_attn.conv1d",
    mixer__rate="=linear_attn.A_log",
    mixer__step_bias="=linear_attn.dt_bias",
    mixer__norm="linear_attn.norm",
    mixer__out="linear_attn.out_proj",
)
_NEXT = _GATED.but(
    mixer__in=[
        _of_key_heads(
            "linear_attn.in_proj_qkvz",
            lambda m: (m.key_dim, m.key_dim, _values_of_key(m), _values_of_key(m)),
            (0, 1, 2, 3),
        ),
        ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),  # llama.cpp's converter divides it
    ],
    mixer__steps=_of_key_heads("linear_attn.in_proj_ba", lambda m: (m.heads // m.key_heads,) * 2, (1, 0)),
)
_3_5 = _GATED.but(
    mixer__in=("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    mixer__steps=("linear_attn.in_proj_a", "linear_attn.in_proj_b"),
)
_MTP = DraftHead(
    {
        "fuse": "fc",
        "fuse_embed_norm": plus_one("pre_fc_norm_embedding"),
        "fuse_hidden_norm": plus_one("pre_fc_norm_hidden"),
        "final_norm": plus_one("norm"),
    },
    layer="layers.{layer}.",
    bases=(Base("mtp."),),
)
_DEFAULTS = {
    **QWEN_DEFAULTS,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
_5_DEFAULTS = {**_DEFAULTS, "vocab_size": 248320, "num_experts": 256, "num_experts_per_tok": 8}


FAMILIES = {
    "qwen3_next": Family(
        "Qwen3-Next",
        qwen3_next,
        _NEXT,
        {
            **_DEFAULTS,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 48,
            "num_experts": 512,
            "num_experts_per_tok": 10,
        },
        draft_head=_MTP,
    ),
    "qwen3_5_text": Family(
        "Qwen3.5",
        qwen3_5,
        _3_5,
        {**_5_DEFAULTS, "hidden_size": 4096, "intermediate_size": 12288, "num_key_value_heads": 4},
        draft_head=_MTP,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3.5-MoE",
        qwen3_5_moe,
        _3_5,
        {**_5_DEFAULTS, "hidden_size": 2048, "num_hidden_layers": 40},
        draft_head=_MTP,
    ),
}


def _gguf_delta(values: Metadata, config: dict[str, Any]) -> None:
    heads, inner = values.features("ssm.time_step_rank"), values.features("ssm.inner_size")
    if inner % heads:
        raise ModelError(f"{values.where}ssm.inner_size={inner} is not a multiple of ssm.time_step_rank={heads}")
    config["linear_num_value_heads"], config["linear_value_head_dim"] = heads, inner // heads
    config["linear_num_key_heads"] = values.features("ssm.group_count")
    config["linear_key_head_dim"] = values.features("ssm.state_size")
    config["linear_conv_kernel_dim"] = values.count("ssm.conv_kernel", minimum=1)
    config["layer_types"] = values.layers_with({GGUF_RATES: "linear_attention", "attn_q.weight": "full_attention"})
    config["num_key_value_heads"] = values.count_where_present("attention.head_count_kv")
    config["attention_bias"] = values.has_in_a_layer("attn_q.bias")
    if values.has("feed_forward_length"):
        config["intermediate_size"] = values.features("feed_forward_length")
    # The converter puts the first value head of each key head first, then the second ones.
    config["linear_value_heads_tiled"] = values.architecture != "qwen3next"


def _gguf_experts(values: Metadata, config: dict[str, Any]) -> None:
    gguf_qwen_moe(values, config)
    config["shared_expert_intermediate_size"] = values.features("expert_shared_feed_forward_length")
    config["norm_topk_prob"] = True


_GGUF_LAYER = {
    **GGUF_QWEN2_MOE,
    **GGUF_QK_NORM,
    **GGUF_LATER_NORM,
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.conv1d": "ssm_conv1d",
    "=linear_attn.dt_bias": "ssm_dt.bias",
    "=linear_attn.A_log": GGUF_RATES,
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_GGUF_3_5 = {**_GGUF_LAYER, "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta"}
_GGUF_MTP = DraftLayer(
    "mtp.layers.0.",
    {
        "mtp.fc": "nextn.eh_proj",
        "mtp.pre_fc_norm_embedding": "nextn.enorm",
        "mtp.pre_fc_norm_hidden": "nextn.hnorm",
        "mtp.norm": "nextn.shared_head_norm",
    },
)
ARCHITECTURES = {
    "qwen3next": Architecture(
        "qwen3_next",
        GGUF_MODULES,
        {**_GGUF_LAYER, "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.in_proj_qkvz": "ssm_in"},
        norms_less_one=True,
        by_layer=True,
        extra=(partial, _gguf_delta, _gguf_experts),
        draft=_GGUF_MTP,
    ),
    "qwen35": Architecture(
        "qwen3_5_text",
        GGUF_MODULES,
        {**_GGUF_3_5, **GGUF_GATED},
        norms_less_one=True,
        by_layer=True,
        extra=(partial, _gguf_delta),
        draft=_GGUF_MTP,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        GGUF_MODULES,
        _GGUF_3_5,
        norms_less_one=True,
        by_layer=True,
        extra=(partial, _gguf_delta, _gguf_experts),
        draft=_GGUF_MTP,
    ),
}
