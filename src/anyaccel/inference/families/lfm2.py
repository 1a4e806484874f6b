# SPDX-License-Identifier: Apache-2.0
"""LFM2, by Liquid AI: short convolutions and attention, with experts and without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anyaccel.inference.families.common import LLAMA, attention, decoder, mixture, pre_norm, rms
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import Architecture, Metadata, gguf_mixture
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec, Mlp, Moe, QkNorm, ShortConv
from anyaccel.inference.spec.mapping import stacked
from anyaccel.validation import check_integer


def _features(config: Config) -> int:
    features = config.size("intermediate_size")
    if not config.get_bool("block_auto_adjust_ff_dim"):
        return features
    features = 2 * features // 3
    if config.has("block_ffn_dim_multiplier"):
        features = int(config.number("block_ffn_dim_multiplier", above=0.0, maximum=1e3) * features)
        multiple = config.size("block_multiple_of")
        features = (features + multiple - 1) // multiple * multiple
    return features


def _layer_types(config: Config) -> list[str]:
    chosen = [check_integer(each, "config: full_attn_idxs") for each in config.items("full_attn_idxs")]
    return config.layer_types(lambda index: bool(chosen) and index not in chosen, "conv")


def _decoder(config: Config, mlps: Sequence[Mlp | Moe]) -> DecoderSpec:
    norm = rms(config, "norm_eps")
    conv = ShortConv(config.hidden, config.integer("conv_L_cache", maximum=16), config.get_bool("conv_bias"))
    full = attention(config, qk_norm=QkNorm(norm))
    layers = [
        pre_norm(norm, full, mlp) if kind == "full_attention" else pre_norm(norm, None, mlp, recurrent=conv)
        for kind, mlp in zip(_layer_types(config), mlps, strict=True)
    ]
    return decoder(config, layers, norm, (rope(config, config.head_dim),))


def lfm2(config: Config) -> DecoderSpec:
    return _decoder(config, [Mlp(_features(config), "silu", gated=True)] * config.layers)


def lfm2_moe(config: Config) -> DecoderSpec:
    moe = mixture(
        config,
        "num_experts",
        Mlp(config.size("moe_intermediate_size"), "silu", gated=True),
        scoring="sigmoid",
        choice_bias=config.get_bool("use_expert_bias"),
        normalise=config.get_bool("norm_topk_prob"),
        scale=config.number("routed_scaling_factor"),
    )
    dense = Mlp(config.size("intermediate_size"), "silu", gated=True)
    first = config.integer("num_dense_layers", minimum=0)
    return _decoder(config, [dense if index < first else moe for index in range(config.layers)])


_NAMES = LLAMA.but(
    final_norm="embedding_norm",
    attn_norm="operator_norm",
    mlp_norm="ffn_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    o="self_attn.out_proj",
    mixer__in="conv.in_proj",
    mixer__conv="conv.conv",
    mixer__out="conv.out_proj",
    mlp__gate_up=("feed_forward.w1", "feed_forward.w3"),
    mlp__down="feed_forward.w2",
    router="feed_forward.gate",
    router__choice_bias="=feed_forward.expert_bias",
    experts__gate_up=[
        ("feed_forward.experts.{expert}.w1", "feed_forward.experts.{expert}.w3"),
        stacked("=feed_forward.experts.gate_up_proj"),
    ],
    experts__down=["feed_forward.experts.{expert}.w2", stacked("=feed_forward.experts.down_proj")],
)
_DEFAULTS = {
    "vocab_size": 65536,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "conv_bias": False,
    "conv_L_cache": 3,
}


FAMILIES: dict[str, Family] = {
    "lfm2": Family(
        "LFM2",
        lfm2,
        _NAMES,
        {
            **_DEFAULTS,
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
        },
        {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"},
    ),
    "lfm2_moe": Family(
        "LFM2-MoE",
        lfm2_moe,
        _NAMES,
        {
            **_DEFAULTS,
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts_per_tok": 4,
            "num_experts": 32,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
        },
        {"tie_embedding": "tie_word_embeddings"},
    ),
}


def _gguf_lfm2(values: Metadata, config: dict[str, Any]) -> None:
    config["layer_types"] = values.layers_with({"attn_q.weight": "full_attention", "shortconv.conv.weight": "conv"})
    config["num_key_value_heads"] = values.count_where_present("attention.head_count_kv")
    config["intermediate_size"] = values.features("feed_forward_length")
    config["block_auto_adjust_ff_dim"] = False
    config["conv_L_cache"] = values.count("shortconv.l_cache", minimum=1)
    config["conv_bias"] = values.has_in_a_layer("shortconv.in_proj.bias")


def _gguf_lfm2_moe(values: Metadata, config: dict[str, Any]) -> None:
    gguf_mixture(values, config)
    config["moe_intermediate_size"] = values.features("expert_feed_forward_length")
    config["num_dense_layers"] = values.count("leading_dense_block_count", 0)
    config["routed_scaling_factor"] = values.number("expert_weights_scale", 1.0)
    config["use_expert_bias"] = values.has_in_a_layer("exp_probs_b.bias")


_GGUF_MODULES = {
    "model.embed_tokens": "token_embd",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
}
_GGUF_LAYER = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
_GGUF_EXPERTS = {
    "feed_forward.gate": "ffn_gate_inp",
    "=feed_forward.expert_bias": "exp_probs_b.bias",
    "feed_forward.experts.{expert}.w1": "ffn_gate_exps",
    "feed_forward.experts.{expert}.w3": "ffn_up_exps",
    "feed_forward.experts.{expert}.w2": "ffn_down_exps",
}
ARCHITECTURES = {
    "lfm2": Architecture("lfm2", _GGUF_MODULES, _GGUF_LAYER, by_layer=True, norm_eps="norm_eps", extra=(_gguf_lfm2,)),
    "lfm2moe": Architecture(
        "lfm2_moe",
        _GGUF_MODULES,
        {**_GGUF_LAYER, **_GGUF_EXPERTS},
        by_layer=True,
        norm_eps="norm_eps",
        extra=(_gguf_lfm2, _gguf_lfm2_moe),
    ),
}
