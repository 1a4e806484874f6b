# SPDX-License-Identifier: Apache-2.0
"""Mamba's first version, alone (Mamba, Falcon Mamba) and beside attention (Jamba)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.families.common import (
    LLAMA,
    attention,
    check_convolution,
    decoder,
    gated,
    mixture,
    pre_norm,
    rms,
)
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import (
    GGUF_ATTENTION,
    GGUF_MODULES,
    GGUF_RATES,
    Architecture,
    Metadata,
    gguf_mixture,
)
from anyaccel.inference.families.mamba import BACKBONE, gguf_expand
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.qwen_next import MOST_TAPS
from anyaccel.inference.spec.decoder import DecoderSpec, Layer, Norm, SelectiveScan
from anyaccel.inference.spec.mapping import Names, stacked
from anyaccel.validation import check_integer, check_text


def _scan(config: Config, prefix: str, state: str, kernel: str, rank: str, norm: Norm | None) -> SelectiveScan:
    """Mamba's mixer; the names of its sizes begin with `prefix`."""
    check_convolution(config)
    channels = int(config.number(f"{prefix}expand", above=0.0, maximum=1e3) * config.hidden)
    if channels < 1:
        raise ModelError(f"config: {prefix}expand of hidden_size={config.hidden} gives no channel")
    automatic = config.known().get(rank) in ("auto", None)
    bias = config.get_bool("mamba_proj_bias" if prefix else "use_bias")
    return SelectiveScan(
        channels,
        config.integer(state, maximum=1 << 10),
        config.integer(kernel, maximum=MOST_TAPS),
        -(-config.hidden // 16) if automatic else config.size(rank),
        conv_bias=config.get_bool("mamba_conv_bias" if prefix else "use_conv_bias"),
        in_bias=bias,
        out_bias=bias,
        norm=norm,
    )


def mamba(config: Config, norm: Norm | None = None) -> DecoderSpec:
    before = rms(config, "layer_norm_epsilon")
    mixer = _scan(config, "", "state_size", "conv_kernel", "time_step_rank", norm)
    return decoder(config, [Layer(None, None, attn_norm=before, recurrent=mixer)] * config.layers, before, max_tokens=0)


def falcon_mamba(config: Config) -> DecoderSpec:
    return mamba(config, replace(rms(config, "mixer_rms_eps"), weight=False))


def _of_period(config: Config, what: str) -> list[bool]:
    """Which layers are of a kind: every so many-th, from an offset on."""
    period, offset = config.integer(f"{what}_layer_period"), config.integer(f"{what}_layer_offset", minimum=0)
    return [index % period == offset for index in range(config.layers)]


def jamba(config: Config) -> DecoderSpec:
    norm = rms(config)
    mixer = _scan(config, "mamba_", "mamba_d_state", "mamba_d_conv", "mamba_dt_rank", norm)
    full, dense = attention(config, rope=-1), gated(config)
    experts = config.integer("num_experts")
    moe = mixture(config, "num_experts", dense, normalise=False) if experts > 1 else dense
    kinds = [check_text(kind, "config: layers_block_type") for kind in config.items("layers_block_type")]
    counts = [check_integer(count, "config: layers_num_experts") for count in config.items("layers_num_experts")]
    of_attention = [kind == "attention" for kind in kinds] or _of_period(config, "attn")
    sparse = [count > 1 for count in counts] or _of_period(config, "expert")
    if min(len(of_attention), len(sparse)) < config.layers:
        raise ModelError(f"config: layers_block_type or layers_num_experts have fewer than {config.layers} layers")
    layers = []
    for index in range(config.layers):
        mlp = moe if sparse[index] else dense
        if of_attention[index]:
            layers.append(pre_norm(norm, full, mlp))
        else:
            layers.append(pre_norm(norm, None, mlp, recurrent=mixer))
    return decoder(config, layers, norm)


def _scan_names(module: str) -> dict[str, Any]:
    return {
        "mixer__in": f"{module}.in_proj",
        "mixer__conv": f"{module}.conv1d",
        "mixer__select": f"{module}.x_proj",
        "mixer__step_norm": f"{module}.dt_layernorm",
        "mixer__b_norm": f"{module}.b_layernorm",
        "mixer__c_norm": f"{module}.c_layernorm",
        "mixer__step_up": f"{module}.dt_proj",
        "mixer__rate": f"={module}.A_log",
        "mixer__skip": f"={module}.D",
        "mixer__out": f"{module}.out_proj",
    }


_OF_MAMBA = LLAMA.but(embed=["embeddings", "embedding"], final_norm="norm_f", attn_norm="norm", **_scan_names("mixer"))
_MAMBA = Names(_OF_MAMBA.rules, _OF_MAMBA.layer, BACKBONE)
_JAMBA = LLAMA.but(
    final_norm="final_layernorm",
    mlp_norm="pre_ff_layernorm",
    mlp__gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    mlp__down="feed_forward.down_proj",
    router="feed_forward.router",
    experts__gate_up=[
        ("feed_forward.experts.{expert}.gate_proj", "feed_forward.experts.{expert}.up_proj"),
        stacked("=feed_forward.experts.gate_up_proj"),
    ],
    experts__down=["feed_forward.experts.{expert}.down_proj", stacked("=feed_forward.experts.down_proj")],
    **_scan_names("mamba"),
)
_MAMBA_DEFAULTS = {
    "vocab_size": 50280,
    "hidden_size": 768,
    "state_size": 16,
    "num_hidden_layers": 32,
    "layer_norm_epsilon": 1e-5,
    "expand": 2,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "time_step_rank": "auto",
    "tie_word_embeddings": True,
    "mixer_rms_eps": 1e-6,
}


FAMILIES = {
    "mamba": Family("Mamba", mamba, _MAMBA, _MAMBA_DEFAULTS),
    "falcon_mamba": Family("Falcon Mamba", falcon_mamba, _MAMBA, _MAMBA_DEFAULTS),
    "jamba": Family(
        "Jamba",
        jamba,
        _JAMBA,
        {
            "vocab_size": 65536,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262144,
            "num_experts_per_tok": 2,
            "num_experts": 16,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": "auto",
            "mamba_conv_bias": True,
        },
        {"num_local_experts": "num_experts"},
    ),
}


def _gguf_scan(values: Metadata, config: dict[str, Any]) -> None:
    prefix = "mamba_" if config["model_type"] == "jamba" else ""
    names = ("d_state", "d_conv", "dt_rank") if prefix else ("state_size", "conv_kernel", "time_step_rank")
    state, kernel, rank = (prefix + name for name in names)
    config[state] = values.features("ssm.state_size")
    config[kernel] = values.count("ssm.conv_kernel", minimum=1)
    config[rank] = values.features("ssm.time_step_rank")
    config[f"{prefix}expand"] = gguf_expand(values)
    config["mamba_conv_bias" if prefix else "use_conv_bias"] = values.has_in_a_layer("ssm_conv1d.bias")
    config["mamba_proj_bias" if prefix else "use_bias"] = values.has_in_a_layer("ssm_in.bias")


def _gguf_jamba(values: Metadata, config: dict[str, Any]) -> None:
    config["layers_block_type"] = values.layers_with({"attn_q.weight": "attention", GGUF_RATES: "mamba"})
    gguf_mixture(values, config)
    kinds = values.layers_with({"ffn_gate_inp.weight": "moe", "ffn_up.weight": "mlp"})
    config["layers_num_experts"] = [config["num_experts"] if kind == "moe" else 1 for kind in kinds]
    config["num_key_value_heads"] = values.count_where_present("attention.head_count_kv")
    config["intermediate_size"] = values.features("feed_forward_length")


def _gguf_scan_names(module: str) -> dict[str, str]:
    return {
        f"{module}.in_proj": "ssm_in",
        f"{module}.conv1d": "ssm_conv1d",
        f"{module}.x_proj": "ssm_x",
        f"{module}.dt_proj": "ssm_dt",
        f"{module}.dt_layernorm": "ssm_dt_norm",
        f"{module}.b_layernorm": "ssm_b_norm",
        f"{module}.c_layernorm": "ssm_c_norm",
        f"={module}.A_log": GGUF_RATES,
        f"={module}.D": "ssm_d",
        f"{module}.out_proj": "ssm_out",
    }


_GGUF_MAMBA = Architecture(
    "mamba",
    {"backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm", "lm_head": "output"},
    {"norm": "attn_norm", **_gguf_scan_names("mixer")},
    "backbone.layers.{layer}.",
    attention=False,
    by_layer=True,
    norm_eps="layer_norm_epsilon",
    extra=(_gguf_scan,),
)


def _gguf_mamba_kind(values: Metadata) -> Architecture:
    return replace(_GGUF_MAMBA, model_type="falcon_mamba") if values.get_bool("ssm.dt_b_c_rms") else _GGUF_MAMBA


ARCHITECTURES = {
    "mamba": replace(_GGUF_MAMBA, variant=_gguf_mamba_kind, others=("falcon_mamba",)),
    "jamba": Architecture(
        "jamba",
        {**GGUF_MODULES, "model.final_layernorm": "output_norm"},
        {
            **GGUF_ATTENTION,
            **_gguf_scan_names("mamba"),
            "pre_ff_layernorm": "ffn_norm",
            "feed_forward.gate_proj": "ffn_gate",
            "feed_forward.up_proj": "ffn_up",
            "feed_forward.down_proj": "ffn_down",
            "feed_forward.router": "ffn_gate_inp",
            "feed_forward.experts.{expert}.gate_proj": "ffn_gate_exps",
            "feed_forward.experts.{expert}.up_proj": "ffn_up_exps",
            "feed_forward.experts.{expert}.down_proj": "ffn_down_exps",
        },
        by_layer=True,
        extra=(_gguf_scan, _gguf_jamba),
    ),
}
