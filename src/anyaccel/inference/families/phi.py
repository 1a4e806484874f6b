# SPDX-License-Identifier: Apache-2.0
"""Phi 1 to 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anyaccel.inference.families.common import (
    LLAMA,
    LLAMA_DEFAULTS,
    MOST_EXPERTS,
    QKV,
    attention,
    decoder,
    gated,
    layer_norm,
    plain,
    pre_norm,
    rms,
)
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import GGUF_MODULES, Architecture, Metadata, partial, rope_factors
from anyaccel.inference.families.mistral import MIXTRAL
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope, rope_parameters
from anyaccel.inference.spec.decoder import DecoderSpec, Layer, Moe, Norm, QkNorm
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.validation import Fields, short_repr


def phi3(config: Config) -> DecoderSpec:
    parameters = rope_parameters(config)
    if parameters["rope_type"] in ("su", "yarn"):  # older names of the same
        parameters["rope_type"] = "longrope"
        parameters.setdefault("original_max_position_embeddings", config.integer("original_max_position_embeddings"))
    norm = rms(config)
    layer = pre_norm(norm, attention(config, window=config.window()), gated(config))
    rotated = rope(config, config.head_dim, partial=True, parameters=parameters)
    return decoder(config, [layer] * config.layers, norm, (rotated,))


def phi(config: Config) -> DecoderSpec:
    """Phi-1, Phi-1.5 and Phi-2: attention and MLP side by side after one norm."""
    norm = layer_norm(config, "layer_norm_eps")
    layer = Layer(
        attention(config, bias=True, qk_norm=QkNorm(norm) if config.get_bool("qk_layernorm") else None),
        plain(config, config.size("intermediate_size"), "hidden_act"),
        attn_norm=norm,
        parallel=True,
    )
    ropes = (rope(config, config.head_dim, partial=True),)
    return decoder(config, [layer] * config.layers, norm, ropes, head_bias=True)


def phimoe(config: Config) -> DecoderSpec:
    """Experts are chosen one by one; longrope's factors of cosine and sine are the config's."""
    norm = Norm("layer", config.number("rms_norm_eps", minimum=0.0), bias=True)
    moe = Moe(
        config.integer("num_local_experts", minimum=2, maximum=MOST_EXPERTS),
        2,  # whatever the config says
        gated(config),
        scoring="sparsemixer",
        normalise=False,
        jitter=config.number("router_jitter_noise", minimum=0.0),
    )
    parameters = rope_parameters(config)
    turned = rope(config, config.head_dim, parameters=parameters)
    if parameters["rope_type"] == "longrope":
        given = Fields(parameters, "config: rope_parameters: ")
        turned = replace(turned, scale=given.number("short_mscale"), long_scale=given.number("long_mscale"))
    elif parameters["rope_type"] != "default":
        raise Unsupported(f"rope_type {short_repr(parameters['rope_type'])} in this family")
    heads = attention(config, window=config.window(), bias=config.get_bool("attention_bias"))
    layers = [pre_norm(norm, heads, moe)] * config.layers
    return decoder(config, layers, norm, (turned,), head_bias=config.get_bool("lm_head_bias"))


PHIMOE = MIXTRAL.but(router=["block_sparse_moe.gate", "mlp.router"])


PHI3 = LLAMA.but(qkv="self_attn.qkv_proj", mlp__gate_up="mlp.gate_up_proj")


PHI = LLAMA.but(
    final_norm="final_layernorm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    qkv=[QKV, "self_attn.qkv_proj"],
    o="self_attn.dense",
    mlp__gate_up="mlp.fc1",
    mlp__down="mlp.fc2",
)


def gguf_phi3(values: Metadata, config: dict[str, Any]) -> None:
    config["sliding_window"] = values.count("attention.sliding_window", 0) or None
    config["original_max_position_embeddings"] = values.count(
        "rope.scaling.original_context_length", config["max_position_embeddings"]
    )
    if values.has_tensor("rope_factors_long.weight"):
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": rope_factors(values, "rope_factors_short.weight", values.rotated // 2),
            "long_factor": rope_factors(values, "rope_factors_long.weight", values.rotated // 2),
        }
        factor = "rope.scaling.attn_factor"
        if values.has(factor):
            config["rope_scaling"]["attention_factor"] = values.number(factor)


FAMILIES = {
    "phi": Family(
        "Phi-1, Phi-1.5, Phi-2",
        phi,
        PHI,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 51200,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
    ),
    "phi3": Family(
        "Phi-3, Phi-3.5, Phi-4",
        phi3,
        PHI3,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
    ),
    "phimoe": Family(
        "Phi-3.5-MoE",
        phimoe,
        PHIMOE,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 32064,
            "intermediate_size": 6400,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_experts_per_tok": 2,
            "num_local_experts": 16,
            "router_jitter_noise": 0.01,
        },
    ),
}


def _gguf_phi2(values: Metadata, config: dict[str, Any]) -> None:
    config["hidden_act"] = "gelu_new"


ARCHITECTURES = {
    "phi2": Architecture(
        "phi",
        {"model.embed_tokens": "token_embd", "model.final_layernorm": "output_norm", "lm_head": "output"},
        {
            "input_layernorm": "attn_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.qkv_proj": "attn_qkv",
            "self_attn.dense": "attn_output",
            "mlp.fc1": "ffn_up",
            "mlp.fc2": "ffn_down",
        },
        norm_eps="layer_norm_eps",
        extra=(partial, _gguf_phi2),
    ),
    "phi3": Architecture(
        "phi3",
        GGUF_MODULES,
        {
            "input_layernorm": "attn_norm",
            "self_attn.qkv_proj": "attn_qkv",
            "self_attn.o_proj": "attn_output",
            "post_attention_layernorm": "ffn_norm",
            "mlp.gate_up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        },
        extra=(partial, gguf_phi3),
    ),
}
