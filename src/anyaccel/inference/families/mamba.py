# SPDX-License-Identifier: Apache-2.0
"""Mamba-2, alone (Codestral Mamba) and beside attention: Bamba, Granite 4, Nemotron-H."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    plain,
    pre_norm,
    rms,
)
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import (
    GGUF_ATTENTION,
    GGUF_EXPERTS,
    GGUF_MODULES,
    Architecture,
    Metadata,
    gguf_mixture,
    gguf_state_space,
    partial,
)
from anyaccel.inference.families.granite import (
    GGUF_GRANITE_SHARED,
    GRANITE_MOE_DEFAULTS,
    GRANITE_MOE_SHARED,
    gguf_granite,
    granite_moe,
)
from anyaccel.inference.families.model_config import MOST_LAYERS, Config
from anyaccel.inference.families.qwen_next import MOST_TAPS
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec, Layer, LinearAttention, Norm
from anyaccel.inference.spec.mapping import At, Base, Part, Unsupported, stacked
from anyaccel.validation import check_integer, check_number, check_text, short_repr

_BLOCKS = {
    "mamba": "linear_attention",
    "attention": "full_attention",
    **{kind: kind for kind in ("linear_attention", "full_attention", "moe", "mlp")},
}
_PATTERN = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}


def state_space(
    heads: int, head_dim: int, groups: int, state: int, kernel: int, norm: Norm, **more: Any
) -> LinearAttention:
    """Mamba-2's mixer: B and C are keys and queries, the state's size is theirs."""
    if heads % groups:
        raise ModelError(f"config: {heads} heads of Mamba are not a multiple of {groups} groups")
    values = {
        "kernel": kernel,
        "skip": True,
        "norm": norm,
        "norm_width": heads * head_dim // groups,
    }
    return LinearAttention(heads, groups, state, head_dim, **{**values, **more})


def step_limits(config: Config) -> dict[str, float]:
    """The limits of steps; JSON has no infinity, so that a missing or unreadable upper one means none."""
    given = config.items("time_step_limit")
    if len(given) != 2:
        return {}
    low, high = given
    unlimited = isinstance(high, dict) or (isinstance(high, float) and math.isinf(high)) or high is None
    return {
        "step_min": check_number(low, "config: time_step_limit[0]", minimum=0.0),
        "step_max": 0.0 if unlimited else check_number(high, "config: time_step_limit[1]", minimum=0.0),
    }


def mamba2(config: Config) -> DecoderSpec:
    heads, head_dim = config.size("num_heads"), config.size("head_dim")
    if heads * head_dim != config.hidden * config.size("expand"):
        raise ModelError(f"config: {heads} heads of {head_dim} are not hidden_size={config.hidden} times expand")
    check_convolution(config)
    norm = rms(config, "layer_norm_epsilon")
    bias = config.get_bool("use_bias")
    mixer = state_space(
        heads,
        head_dim,
        config.size("n_groups"),
        config.size("state_size"),
        config.integer("conv_kernel", maximum=MOST_TAPS),
        norm,
        conv_bias=config.get_bool("use_conv_bias"),
        in_bias=bias,
        out_bias=bias,
        **step_limits(config),
    )
    layer = Layer(None, None, attn_norm=norm, recurrent=mixer)
    return decoder(config, [layer] * config.layers, norm, max_tokens=0)


def _hybrid_mixer(config: Config) -> LinearAttention:
    """Of Bamba and Granite 4, under their names."""
    heads = config.size("mamba_n_heads")
    wide = config.hidden * config.size("mamba_expand")
    head_dim = wide // heads if config.known().get("mamba_d_head") in ("auto", None) else config.size("mamba_d_head")
    if heads * head_dim != wide:
        raise ModelError(f"config: {heads} mamba_n_heads of {head_dim} are not hidden_size times mamba_expand")
    check_convolution(config)
    bias = config.get_bool("mamba_proj_bias")
    return state_space(
        heads,
        head_dim,
        config.size("mamba_n_groups"),
        config.size("mamba_d_state"),
        config.integer("mamba_d_conv", maximum=MOST_TAPS),
        rms(config),
        conv_bias=config.get_bool("mamba_conv_bias"),
        in_bias=bias,
        out_bias=bias,
        **step_limits(config),
    )


def bamba(config: Config) -> DecoderSpec:
    chosen = [check_integer(each, "config: attn_layer_indices") for each in config.items("attn_layer_indices")]
    norm = rms(config)
    full = attention(config, bias=config.get_bool("attention_bias"))
    mixer, mlp = _hybrid_mixer(config), gated(config, config.get_bool("mlp_bias"))
    layers = [
        pre_norm(norm, full, mlp) if index in chosen else pre_norm(norm, None, mlp, recurrent=mixer)
        for index in range(config.layers)
    ]
    return decoder(config, layers, norm, (rope(config, config.head_dim, partial=True),))


def granitemoehybrid(config: Config) -> DecoderSpec:
    types = config.layer_types(lambda index: True, "linear_attention")
    norm, mixer = rms(config), _hybrid_mixer(config)
    rotary = config.text("position_embedding_type", "") == "rope"
    ropes = (rope(config, config.head_dim),) if rotary else ()
    full = attention(
        config,
        rope=0 if rotary else -1,
        bias=config.get_bool("attention_bias"),
        scale=config.number("attention_multiplier"),
    )
    dense = gated(config, features="shared_intermediate_size")
    mlp = granite_moe(config, shared=True) if config.integer("num_local_experts", minimum=0) else dense
    factor = config.number("residual_multiplier")
    layers = [
        pre_norm(norm, full, mlp, residual_scale=factor)
        if kind == "full_attention"
        else pre_norm(norm, None, mlp, recurrent=mixer, residual_scale=factor)
        for kind in types
    ]
    return decoder(
        config,
        layers,
        norm,
        ropes,
        embedding_scale=config.number("embedding_multiplier"),
        logits_scale=1.0 / config.number("logits_scaling", above=0.0),
    )


def _blocks(config: Config) -> list[str]:
    given = list(config.text("hybrid_override_pattern", "")) or config.items("layers_block_type")
    if not 1 <= len(given) <= MOST_LAYERS:
        raise ModelError(f"config: {len(given)} layers_block_type")
    names = [check_text(each, "config: layers_block_type") for each in given]
    kinds = [_PATTERN.get(each) or _BLOCKS.get(each) for each in names]
    for kind, name in zip(kinds, names, strict=True):
        if kind is None:
            raise Unsupported(f"layer type {short_repr(name)}")
    return [kind for kind in kinds if kind]


def nemotron_h(config: Config) -> DecoderSpec:
    """Each block is one of Mamba-2, attention, an MLP and a mixture of experts."""
    config.refuse("moe_latent_size", "sliding_window")
    norm = rms(config, "layer_norm_epsilon")
    bias, mlp_bias = config.get_bool("use_bias"), config.get_bool("mlp_bias")
    if config.activation("mamba_hidden_act") != "silu":
        raise Unsupported(f"mamba_hidden_act {config.activation('mamba_hidden_act')!r}")
    mixer = state_space(
        config.size("mamba_num_heads"),
        config.size("mamba_head_dim"),
        config.size("n_groups"),
        config.size("ssm_state_size"),
        config.integer("conv_kernel", maximum=MOST_TAPS),
        norm,
        conv_bias=config.get_bool("use_conv_bias"),
        in_bias=bias,
        out_bias=bias,
        # As transformers: the lower limit of what steps begin with, in training.
        step_min=config.number("time_step_min", minimum=0.0),
    )

    def mlp(features: str) -> Any:
        return plain(config, config.size(features), "mlp_hidden_act", mlp_bias)

    kinds = _blocks(config)
    made = {
        "linear_attention": Layer(None, None, attn_norm=norm, recurrent=mixer),
        "full_attention": Layer(attention(config, rope=-1), None, attn_norm=norm),
        "mlp": Layer(None, mlp("intermediate_size"), mlp_norm=norm),
    }
    if "moe" in kinds:
        moe = mixture(
            config,
            "n_routed_experts",
            plain(config, config.size("moe_intermediate_size"), "mlp_hidden_act", False),
            scoring="sigmoid",
            choice_bias=True,
            normalise=config.get_bool("norm_topk_prob"),
            scale=config.number("routed_scaling_factor"),
            groups=config.integer("n_group"),
            top_groups=config.integer("topk_group"),
            group_score="top2",
            shared=mlp("moe_shared_expert_intermediate_size"),
        )
        made["moe"] = Layer(None, moe, mlp_norm=norm)
    longest = config.integer("max_position_embeddings")
    return decoder(config, [made[kind] for kind in kinds], norm, max_tokens=longest)


def _mixer(at: At) -> LinearAttention:
    mixer = at.of_layer.recurrent
    assert isinstance(mixer, LinearAttention)
    return mixer


def state_space_names(module: str) -> dict[str, Any]:
    """The weights of Mamba-2's modules: in_proj has the gate, x, B, C and the steps, the convolution x, B and C."""

    def sizes(at: At) -> tuple[int, int]:
        mixer = _mixer(at)
        return mixer.heads * mixer.value_dim, mixer.key_heads * mixer.key_dim

    def rows(at: At) -> Sequence[Part]:
        wide, keys = sizes(at)
        name = at.name(f"{module}.in_proj")
        firsts = ((2 * wide + keys, keys), (2 * wide, keys), (wide, wide), (0, wide))
        return [Part(name, first=first, count=count) for first, count in firsts]

    def steps(at: At) -> Sequence[Part]:
        wide, keys = sizes(at)
        return [Part(at.name(f"{module}.in_proj"), first=2 * (wide + keys), count=_mixer(at).heads)]

    def conv(at: At) -> Sequence[Part]:
        wide, keys = sizes(at)
        each = _mixer(at).kernel if at.suffix == "weight" else 1
        name = at.name(f"{module}.conv1d")
        firsts = ((wide + keys, keys), (wide, keys), (0, wide))
        return [Part(name, first=first * each, count=count * each) for first, count in firsts]

    return {
        "mixer__in": rows,
        "mixer__steps": steps,
        "mixer__conv": conv,
        "mixer__rate": f"={module}.A_log",
        "mixer__step_bias": f"={module}.dt_bias",
        "mixer__skip": f"={module}.D",
        "mixer__norm": f"{module}.norm",
        "mixer__out": f"{module}.out_proj",
    }


BACKBONE = (Base("backbone."), Base("model."), Base(""))
_MAMBA2 = LLAMA.but(
    embed=["embeddings", "embedding"], final_norm="norm_f", attn_norm="norm", **state_space_names("mixer")
)
_NEMOTRON_H = _MAMBA2.but(
    mlp_norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    o="mixer.o_proj",
    mlp__gate_up="mixer.up_proj",
    mlp__down="mixer.down_proj",
    router="mixer.gate",
    router__choice_bias="=mixer.gate.e_score_correction_bias",
    experts__gate_up=["mixer.experts.{expert}.up_proj", stacked("=mixer.experts.up_proj")],
    experts__down=["mixer.experts.{expert}.down_proj", stacked("=mixer.experts.down_proj")],
    shared__gate_up="mixer.shared_experts.up_proj",
    shared__down="mixer.shared_experts.down_proj",
)
_BAMBA = LLAMA.but(
    final_norm="final_layernorm",
    mlp_norm="pre_ff_layernorm",
    mlp__gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    mlp__down="feed_forward.down_proj",
    **state_space_names("mamba"),
)
_GRANITE_HYBRID = GRANITE_MOE_SHARED.but(
    mlp__gate_up=["shared_mlp.input_linear", ("shared_mlp.gate_proj", "shared_mlp.up_proj")],
    mlp__down="shared_mlp.output_linear",
    **state_space_names("mamba"),
)
_HYBRID_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}


def _with_bases(names: Any) -> Any:
    return type(names)(names.rules, names.layer, BACKBONE)


FAMILIES = {
    "mamba2": Family(
        "Mamba-2, Codestral Mamba",
        mamba2,
        _with_bases(_MAMBA2),
        {
            "num_heads": 128,
            "head_dim": 64,
            "vocab_size": 32768,
            "hidden_size": 4096,
            "state_size": 128,
            "num_hidden_layers": 64,
            "layer_norm_epsilon": 1e-5,
            "expand": 2,
            "conv_kernel": 4,
            "n_groups": 8,
            "use_conv_bias": True,
            "hidden_act": "silu",
        },
    ),
    "bamba": Family(
        "Bamba",
        bamba,
        _BAMBA,
        {
            **_HYBRID_DEFAULTS,
            "vocab_size": 128000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262144,
            "partial_rotary_factor": 0.5,
        },
    ),
    "granitemoehybrid": Family(
        "Granite 4",
        granitemoehybrid,
        _GRANITE_HYBRID,
        {**GRANITE_MOE_DEFAULTS, **_HYBRID_DEFAULTS, "shared_intermediate_size": 1024},
        {"layers_block_type": "layer_types"},
    ),
    "nemotron_h": Family(
        "Nemotron-H, Nemotron 3",
        nemotron_h,
        _with_bases(_NEMOTRON_H),
        {
            "vocab_size": 131072,
            "hidden_size": 4096,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "intermediate_size": 21504,
            "mlp_hidden_act": "relu2",
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "mamba_hidden_act": "silu",
            "n_groups": 8,
            "conv_kernel": 4,
            "time_step_min": 0.001,
            "use_conv_bias": True,
            "n_routed_experts": 8,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "layer_norm_epsilon": 1e-5,
        },
        {
            "layer_types": "layers_block_type",
            "num_local_experts": "n_routed_experts",
            "mamba_n_groups": "n_groups",
            "mamba_d_conv": "conv_kernel",
            "mamba_dt_min": "time_step_min",
            "mamba_conv_bias": "use_conv_bias",
        },
    ),
}


def gguf_sizes(values: Metadata) -> tuple[int, int]:
    """Heads of the states, and values of one of them."""
    heads, inner = values.features("ssm.time_step_rank"), values.features("ssm.inner_size")
    if inner % heads:
        raise ModelError(f"{values.where}ssm.inner_size={inner} is not a multiple of ssm.time_step_rank={heads}")
    return heads, inner // heads


def gguf_expand(values: Metadata) -> int:
    inner = values.features("ssm.inner_size")
    if inner % values.hidden:
        raise Unsupported(f"ssm.inner_size={inner} that is not a multiple of embedding_length={values.hidden}")
    return inner // values.hidden


def _gguf_mamba2(values: Metadata, config: dict[str, Any]) -> None:
    config["num_heads"], config["head_dim"] = gguf_sizes(values)
    config["expand"] = gguf_expand(values)
    config["n_groups"] = values.features("ssm.group_count")
    config["state_size"] = values.features("ssm.state_size")
    config["conv_kernel"] = values.count("ssm.conv_kernel", minimum=1)
    config["use_conv_bias"] = values.has_in_a_layer("ssm_conv1d.bias")
    config["use_bias"] = values.has_in_a_layer("ssm_in.bias")


def _gguf_hybrid(values: Metadata, config: dict[str, Any]) -> None:
    """Mamba-2 beside attention, under the names of Bamba and Granite 4."""
    config["num_key_value_heads"] = values.count_where_present("attention.head_count_kv")
    config["intermediate_size"] = values.features("feed_forward_length")
    config["mamba_n_heads"], config["mamba_d_head"] = gguf_sizes(values)
    config["mamba_expand"] = gguf_expand(values)
    config["mamba_n_groups"] = values.features("ssm.group_count")
    config["mamba_d_state"] = values.features("ssm.state_size")
    config["mamba_d_conv"] = values.count("ssm.conv_kernel", minimum=1)
    config["mamba_conv_bias"] = values.has_in_a_layer("ssm_conv1d.bias")
    config["mamba_proj_bias"] = values.has_in_a_layer("ssm_in.bias")
    config["attention_bias"] = values.has_in_a_layer("attn_q.bias")
    config["layer_types"] = values.layers_with({"attn_q.weight": "full_attention", "ssm_a": "linear_attention"})


def _gguf_granite_hybrid(values: Metadata, config: dict[str, Any]) -> None:
    config["num_local_experts"] = values.count("expert_count", 0)
    if config["num_local_experts"]:
        gguf_mixture(values, config, "num_local_experts")
    config["shared_intermediate_size"] = values.features("expert_shared_feed_forward_length")


def _gguf_bamba(values: Metadata, config: dict[str, Any]) -> None:
    types = config.pop("layer_types")
    config["attn_layer_indices"] = [index for index, kind in enumerate(types) if kind == "full_attention"]
    config["mlp_bias"] = values.has_in_a_layer("ffn_up.bias")


_GGUF_BAMBA = Architecture(
    "bamba",
    {**GGUF_MODULES, "model.final_layernorm": "output_norm"},
    {
        **GGUF_ATTENTION,
        **gguf_state_space("mamba"),
        "pre_ff_layernorm": "ffn_norm",
        "feed_forward.gate_proj": "ffn_gate",
        "feed_forward.up_proj": "ffn_up",
        "feed_forward.down_proj": "ffn_down",
    },
    permuted=True,
    by_layer=True,
    extra=(partial, _gguf_hybrid, _gguf_bamba),
)
_GGUF_GRANITE_HYBRID = Architecture(
    "granitemoehybrid",
    GGUF_MODULES,
    {
        **GGUF_ATTENTION,
        **GGUF_EXPERTS,
        **gguf_state_space("mamba"),
        **GGUF_GRANITE_SHARED,
        "block_sparse_moe.router.layer": "ffn_gate_inp",
    },
    permuted=True,
    by_layer=True,
    extra=(_gguf_hybrid, gguf_granite, _gguf_granite_hybrid),
)


_GGUF_GRANITE_DENSE = replace(
    _GGUF_GRANITE_HYBRID,
    layer={
        **GGUF_ATTENTION,
        **gguf_state_space("mamba"),
        "shared_mlp.gate_proj": "ffn_gate",
        "shared_mlp.up_proj": "ffn_up",
        "shared_mlp.output_linear": "ffn_down",
    },
)


def _gguf_granite_kind(values: Metadata) -> Architecture:
    """Granite 4 has no positions beside Mamba; what has them is Bamba."""
    if values.get_bool("rope.scaling.finetuned"):
        return _GGUF_BAMBA
    return _GGUF_GRANITE_HYBRID if values.count("expert_count", 0) else _GGUF_GRANITE_DENSE


def _gguf_nemotron_h(values: Metadata, config: dict[str, Any]) -> None:
    kinds = {
        "ssm_a": "linear_attention",
        "attn_q.weight": "full_attention",
        "ffn_gate_inp.weight": "moe",
        "ffn_up.weight": "mlp",
    }
    config["layers_block_type"] = values.layers_with(kinds)
    config["num_key_value_heads"] = values.count_where_present("attention.head_count_kv")
    config["mamba_num_heads"], config["mamba_head_dim"] = gguf_sizes(values)
    config["n_groups"] = values.features("ssm.group_count")
    config["ssm_state_size"] = values.features("ssm.state_size")
    config["conv_kernel"] = values.count("ssm.conv_kernel", minimum=1)
    config["use_conv_bias"] = values.has_in_a_layer("ssm_conv1d.bias")
    config["use_bias"] = values.has_in_a_layer("ssm_in.bias")
    config["mlp_bias"] = values.has_in_a_layer("ffn_up.bias")
    if "mlp" in config["layers_block_type"]:
        layer = config["layers_block_type"].index("mlp")
        config["intermediate_size"] = values.shape(f"blk.{layer}.ffn_up.weight")[0]
    if "moe" in config["layers_block_type"]:
        gguf_mixture(values, config, "n_routed_experts")
        config["moe_intermediate_size"] = values.features("expert_feed_forward_length")
        config["moe_shared_expert_intermediate_size"] = values.features("expert_shared_feed_forward_length")
        config["norm_topk_prob"] = values.get_bool("expert_weights_norm")
        config["routed_scaling_factor"] = values.number("expert_weights_scale", 1.0)
        config["n_group"] = values.count("expert_group_count", 1, minimum=1)
        config["topk_group"] = values.count("expert_group_used_count", 1, minimum=1)
    config["moe_latent_size"] = values.count("moe_latent_size", 0)


_GGUF_BACKBONE = {"backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm", "lm_head": "output"}
_GGUF_NEMOTRON_H = {
    "norm": "attn_norm",
    **gguf_state_space("mixer"),
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
}
ARCHITECTURES = {
    "mamba2": Architecture(
        "mamba2",
        _GGUF_BACKBONE,
        {"norm": "attn_norm", **gguf_state_space("mixer")},
        "backbone.layers.{layer}.",
        attention=False,
        by_layer=True,
        norm_eps="layer_norm_epsilon",
        extra=(_gguf_mamba2,),
    ),
    "granitehybrid": replace(_GGUF_GRANITE_HYBRID, variant=_gguf_granite_kind, others=("bamba",)),
    "nemotron_h": Architecture(
        "nemotron_h",
        _GGUF_BACKBONE,
        _GGUF_NEMOTRON_H,
        "backbone.layers.{layer}.",
        by_layer=True,
        norm_eps="layer_norm_epsilon",
        extra=(_gguf_nemotron_h,),
    ),
    "nemotron_h_moe": Architecture(
        "nemotron_h",
        _GGUF_BACKBONE,
        {
            **_GGUF_NEMOTRON_H,
            "mixer.gate": "ffn_gate_inp",
            "=mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
            "mixer.experts.{expert}.up_proj": "ffn_up_exps",
            "mixer.experts.{expert}.down_proj": "ffn_down_exps",
            "mixer.shared_experts.up_proj": "ffn_up_shexp",
            "mixer.shared_experts.down_proj": "ffn_down_shexp",
        },
        "backbone.layers.{layer}.",
        by_layer=True,
        norm_eps="layer_norm_epsilon",
        extra=(_gguf_nemotron_h,),
    ),
}
