# SPDX-License-Identifier: Apache-2.0
"""Hunyuan, with experts and without."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.families.common import (
    LLAMA,
    LLAMA_DEFAULTS,
    MOST_EXPERTS,
    attention,
    decoder,
    each_mlp,
    gated,
    mixture,
    pre_norm,
    rms,
)
from anyaccel.inference.families.deepseek import DEEPSEEK, shared_expert
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import (
    GGUF_EXPERTS,
    GGUF_LLAMA,
    GGUF_MODULES,
    GGUF_QK_NORM,
    GGUF_SHARED_EXPERTS,
    Architecture,
    Metadata,
    biases,
    gguf_mixture,
)
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.qwen import QWEN_MOE
from anyaccel.inference.families.rope import rope, rope_parameters
from anyaccel.inference.spec.decoder import DecoderSpec, Mlp, Moe, QkNorm
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.validation import Fields, check_integer


def hunyuan(config: Config, mlps: Sequence[Mlp | Moe] = ()) -> DecoderSpec:
    parameters = rope_parameters(config)
    dim = config.head_dim
    given = Fields(parameters, "config: rope_parameters: ")
    alpha = given.number("alpha", 0.0, minimum=0.0) if dim > 2 else 0.0
    if parameters["rope_type"] == "dynamic" and alpha:  # static all the same
        parameters["rope_theta"] = given.number("rope_theta", above=0.0) * alpha ** (dim / (dim - 2))
        parameters["rope_type"] = "default"
    norm = rms(config)
    heads = attention(config, bias=config.get_bool("attention_bias"), qk_norm=QkNorm(norm, after_rope=True))
    layers = [pre_norm(norm, heads, mlp) for mlp in mlps or [gated(config)] * config.layers]
    return decoder(config, layers, norm, (rope(config, dim, parameters=parameters),))


def hunyuan_moe(config: Config) -> DecoderSpec:
    """Beside the experts, an MLP as large as one of them; the number of experts may be each layer's own."""
    expert = gated(config)

    def of_layer(name: str, index: int, most: int) -> int:
        if not config.is_list(name):
            return config.integer(name, maximum=most)
        given = config.items(name)
        if len(given) < config.layers:
            raise ModelError(f"config: {name} of {len(given)} layers for {config.layers} layers")
        return check_integer(given[index], f"config: {name}[{index}]", 1, most)

    moes = []
    for index in range(config.layers):
        experts = of_layer("num_experts", index, MOST_EXPERTS)
        moes.append(Moe(experts, of_layer("moe_topk", index, experts), expert, shared=expert))
    return hunyuan(config, moes)


def hy3(config: Config) -> DecoderSpec:
    """Hunyuan 3: norms of queries and keys before their rotation, and DeepSeek-V3's router without groups."""
    bias = config.get_bool("mlp_bias")
    expert = gated(config, features="moe_intermediate_size")
    moe = mixture(
        config,
        "num_experts",
        expert,
        scoring="sigmoid",
        scale=config.number("router_scaling_factor"),
        choice_bias=True,
        shared=dataclasses.replace(shared_expert(config, expert, "num_shared_experts"), bias=bias, out_bias=bias),
    )
    norm = rms(config)
    heads = attention(config, bias=config.get_bool("attention_bias"), qk_norm=QkNorm(norm))
    layers = [pre_norm(norm, heads, mlp) for mlp in each_mlp(config, moe, gated(config, bias), 1)]
    return decoder(config, layers, norm, (rope(config, config.head_dim),))


HUNYUAN = LLAMA.but(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")


HUNYUAN_MOE = HUNYUAN.but(
    router="mlp.gate.wg",
    experts__gate_up=QWEN_MOE.rules["experts.gate_up"],
    experts__down=QWEN_MOE.rules["experts.down"],
    shared__gate_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
    shared__down="mlp.shared_mlp.down_proj",
)


# Published checkpoints have the names of the model's own code.
HY3 = DEEPSEEK.but(
    router=["mlp.gate", "mlp.router.gate"],
    router__choice_bias=["=mlp.e_score_correction_bias", "=mlp.expert_bias"],
    shared__gate_up=[
        ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        ("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
    ],
    shared__down=["mlp.shared_experts.down_proj", "mlp.shared_mlp.down_proj"],
)


def gguf_hunyuan_moe(values: Metadata, config: dict[str, Any]) -> None:
    """Experts and the MLP beside them are as large as the file's feed_forward_length."""
    gguf_mixture(values, config)
    config["moe_topk"] = config.pop("num_experts_per_tok")
    config["intermediate_size"] = values.features("expert_feed_forward_length")
    shared = values.count("expert_shared_feed_forward_length", config["intermediate_size"])
    if shared != config["intermediate_size"] or values.count("expert_shared_count", 1) != 1:
        raise Unsupported(f"shared experts of another size ({values.where}expert_shared_feed_forward_length={shared})")


def gguf_hy3(values: Metadata, config: dict[str, Any]) -> None:
    gguf_mixture(values, config)
    expert = config["moe_intermediate_size"] = values.features("expert_feed_forward_length")
    shared = values.count("expert_shared_feed_forward_length", expert, minimum=1)
    if shared % expert:
        raise ModelError(f"{values.where}expert_shared_feed_forward_length={shared} is not a multiple of {expert}")
    config["num_shared_experts"] = shared // expert
    config["router_scaling_factor"] = values.number("expert_weights_scale", 1.0)
    config["mlp_layer_types"] = values.layers_with({"ffn_gate_inp.weight": "sparse", "ffn_gate.weight": "dense"})


FAMILIES = {
    "hunyuan_v1_dense": Family(
        "Hunyuan (dense)",
        hunyuan,
        HUNYUAN,
        {**LLAMA_DEFAULTS, "vocab_size": 290943, "rms_norm_eps": 1e-5},
    ),
    "hunyuan_v1_moe": Family(
        "Hunyuan (A13B)",
        hunyuan_moe,
        HUNYUAN_MOE,
        {**LLAMA_DEFAULTS, "vocab_size": 290943, "rms_norm_eps": 1e-5, "num_experts": 1, "moe_topk": 1},
        {"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
    ),
    "hy_v3": Family(
        "Hunyuan 3",
        hy3,
        HY3,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 120832,
            "intermediate_size": 13312,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11158840.0,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826,
        },
        {"num_local_experts": "num_experts"},
    ),
}


ARCHITECTURES = {
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        GGUF_MODULES,
        {**GGUF_LLAMA, "self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"},
        extra=(biases,),
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        GGUF_MODULES,
        {
            **GGUF_LLAMA,
            **GGUF_EXPERTS,
            "self_attn.query_layernorm": "attn_q_norm",
            "self_attn.key_layernorm": "attn_k_norm",
            "mlp.gate.wg": "ffn_gate_inp",
            "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
            "mlp.shared_mlp.up_proj": "ffn_up_shexp",
            "mlp.shared_mlp.down_proj": "ffn_down_shexp",
        },
        extra=(biases, gguf_hunyuan_moe),
    ),
    "hy_v3": Architecture(
        "hy_v3",
        GGUF_MODULES,
        {
            **GGUF_LLAMA,
            **GGUF_QK_NORM,
            **GGUF_EXPERTS,
            **GGUF_SHARED_EXPERTS,
            # Files have it under either name.
            "=mlp.e_score_correction_bias": "exp_probs_b",
            "=mlp.expert_bias": "exp_probs_b.bias",
        },
        extra=(biases, gguf_hy3),
    ),
}
