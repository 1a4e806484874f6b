# SPDX-License-Identifier: Apache-2.0
"""Kimi Linear: Kimi delta attention in most layers, latent attention without positions in the others."""

from __future__ import annotations

from collections.abc import Mapping

from anyaccel.errors import ModelError
from anyaccel.inference.families.common import (
    LLAMA_DEFAULTS,
    check_convolution,
    decoder,
    each_mlp,
    gated,
    mixture,
    pre_norm,
    rms,
)
from anyaccel.inference.families.deepseek import DEEPSEEK, shared_expert
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.qwen_next import MOST_TAPS
from anyaccel.inference.spec.decoder import Attention, DecoderSpec, LinearAttention, Mla, Norm
from anyaccel.inference.spec.mapping import Rule
from anyaccel.validation import check_integer

# In checkpoints the parts are in a dict of their own; its layers are counted from 1 on.
_INNER = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def kimi_delta_attention(config: Config) -> LinearAttention:
    """The gated delta rule with a decay for each channel of the keys (Kimi Team, 2025)."""
    check_convolution(config)
    sizes = _sizes(config)
    heads, dim = sizes["linear_num_heads"], sizes["linear_head_dim"]
    return LinearAttention(
        heads,
        heads,
        dim,
        dim,
        scale=dim**-0.5,
        kernel=sizes["linear_conv_kernel_dim"],
        delta=True,
        strength="sigmoid",
        l2_norm=True,
        norm=rms(config),
        norm_width=dim,
        norm_shared=True,
        norm_first=True,
        gate_activation="sigmoid",
        decay_rank=dim,
        gate_rank=dim,
    )


def _sizes(config: Config) -> Mapping[str, int]:
    inner = config.mapping("linear_attn_config")
    most = {"linear_conv_kernel_dim": MOST_TAPS}
    return {name: inner.get_int(own, config.integer(name), 1, most.get(name, 1 << 14)) for own, name in _INNER.items()}


def _types(config: Config) -> list[str]:
    inner = config.mapping("linear_attn_config")
    if config.items("layer_types") or not inner.items("full_attn_layers"):
        return config.layer_types(lambda index: index == 0 or index % 4 != 0, "linear_attention")
    full = {check_integer(each, "config: full_attn_layers") for each in inner.items("full_attn_layers")}
    return ["full_attention" if index + 1 in full else "linear_attention" for index in range(config.layers)]


def _latent(config: Config) -> Attention:
    """DeepSeek's, without positions: the part of the keys that they would turn is still shared by all heads."""
    nope, shared = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    norm = Norm("rms", 1e-6)
    q_rank = config.size("q_lora_rank") if config.has("q_lora_rank") else 0
    bias = config.get_bool("attention_bias")
    return Attention(
        heads=config.heads,
        kv_heads=config.heads,
        head_dim=nope + shared,
        value_dim=config.size("v_head_dim"),
        scale=(nope + shared) ** -0.5,
        rope=-1,
        qkv_bias=bias,
        out_bias=bias,
        mla=Mla(q_rank, config.size("kv_lora_rank"), nope, shared, norm if q_rank else None, norm),
    )


def kimi_linear(config: Config) -> DecoderSpec:
    norm, types = rms(config), _types(config)
    expert = gated(config, features="moe_intermediate_size")
    moe = mixture(
        config,
        "num_local_experts",
        expert,
        scoring="sigmoid",
        normalise=config.get_bool("norm_topk_prob"),
        scale=config.number("routed_scaling_factor"),
        groups=config.integer("n_group"),
        top_groups=config.integer("topk_group"),
        group_score="top2",
        choice_bias=True,
        shared=shared_expert(config, expert),
    )
    if len(types) < config.layers:
        raise ModelError(f"config: {len(types)} layer_types for {config.layers} layers")
    mlps = each_mlp(config, moe, gated(config), config.integer("first_k_dense_replace", minimum=0))
    latent, delta = _latent(config), kimi_delta_attention(config)
    layers = [
        pre_norm(norm, latent, mlp) if kind == "full_attention" else pre_norm(norm, None, mlp, recurrent=delta)
        for kind, mlp in zip(types, mlps, strict=True)
    ]
    return decoder(config, layers, norm)


_EXPERT = "block_sparse_moe.experts.{expert}."


def _either(module: str) -> list[Rule | tuple[Rule, ...]]:
    """As checkpoints have it, and as transformers' module has it."""
    return [f"block_sparse_moe.{module}", f"mlp.{module}"]


def _either_own(name: str) -> list[Rule | tuple[Rule, ...]]:
    return [f"=self_attn.{name}", f"=self_attn.forget_gate.{name}"]


_GATES: list[Rule | tuple[Rule, ...]] = [
    (f"self_attn.{inner}f_a_proj", "self_attn.b_proj", "self_attn.g_a_proj") for inner in ("", "forget_gate.")
]


def _gated(at: str) -> tuple[Rule, ...]:
    return (f"{at}.gate_proj", f"{at}.up_proj")


def _stacked(name: str) -> Rule | tuple[Rule, ...]:
    rules = DEEPSEEK.rules[name]
    assert isinstance(rules, list)
    return rules[-1]


FAMILIES = {
    "kimi_linear": Family(
        "Kimi Linear",
        kimi_linear,
        DEEPSEEK.but(
            mixer__in=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            mixer__conv=[
                ("self_attn.q_conv1d", "self_attn.k_conv1d", "self_attn.v_conv1d"),
                "self_attn.conv1d",
            ],
            mixer__steps=_GATES,
            mixer__step_up=["self_attn.f_b_proj", "self_attn.forget_gate.f_b_proj"],
            mixer__gate_up="self_attn.g_b_proj",
            mixer__rate=_either_own("A_log"),
            mixer__step_bias=_either_own("dt_bias"),
            mixer__norm="self_attn.o_norm",
            mixer__out="self_attn.o_proj",
            router=_either("gate"),
            router__choice_bias=[
                "=block_sparse_moe.gate.e_score_correction_bias",
                "=mlp.gate.e_score_correction_bias",
            ],
            # transformers saves the MLPs of all layers under the name of those with experts.
            mlp__gate_up=[_gated("mlp"), _gated("block_sparse_moe")],
            mlp__down=_either("down_proj"),
            experts__gate_up=[(f"{_EXPERT}w1", f"{_EXPERT}w3"), _stacked("experts.gate_up")],
            experts__down=[f"{_EXPERT}w2", _stacked("experts.down")],
            shared__gate_up=[_gated("block_sparse_moe.shared_experts"), _gated("mlp.shared_experts")],
            shared__down=_either("shared_experts.down_proj"),
        ),
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 163840,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "moe_intermediate_size": 1024,
            "num_hidden_layers": 27,
            "n_shared_experts": 1,
            "num_local_experts": 256,
            "routed_scaling_factor": 2.446,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "qk_nope_head_dim": 128,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "max_position_embeddings": 1048576,
            "rms_norm_eps": 1e-5,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4,
        },
        {
            "model_max_length": "max_position_embeddings",
            "moe_renormalize": "norm_topk_prob",
            "num_expert_group": "n_group",
            "num_experts": "num_local_experts",
            "num_experts_per_token": "num_experts_per_tok",
            "num_shared_experts": "n_shared_experts",
        },
    ),
}
