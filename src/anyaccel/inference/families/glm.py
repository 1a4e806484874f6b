# SPDX-License-Identifier: Apache-2.0
"""GLM-4, with experts and without."""

from __future__ import annotations

from typing import Any

from anyaccel.inference.families.common import (
    LLAMA,
    LLAMA_DEFAULTS,
    QKV,
    attention,
    decoder,
    each_mlp,
    gated,
    pre_norm,
    rms,
)
from anyaccel.inference.families.deepseek import (
    DEEPSEEK,
    DEEPSEEK_ALIASES,
    GGUF_DEEPSEEK_EXPERTS,
    GGUF_NEXTN,
    NEXTN,
    after_dense,
    choice_by_bias,
    gguf_deepseek_experts,
    latent_attention,
    latent_rope,
)
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import (
    GGUF_ATTENTION,
    GGUF_LATER_NORM,
    GGUF_LLAMA,
    GGUF_MODULES,
    GGUF_QK_NORM,
    Architecture,
    Metadata,
    biases,
    partial,
)
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import check_whole, rope, rope_parameters
from anyaccel.inference.spec.decoder import DecoderSpec, QkNorm


def glm(config: Config, post_norms: bool = False) -> DecoderSpec:
    """GLM-4; the models of April 2025 (glm4) have norms after attention and MLP too."""
    norm = rms(config)
    post = norm if post_norms else None
    heads = attention(config, bias=config.get_bool("attention_bias"), out_bias=False)
    layer = pre_norm(norm, heads, gated(config), attn_post_norm=post, mlp_post_norm=post)
    return decoder(
        config, [layer] * config.layers, norm, (rope(config, config.head_dim, partial=True, interleaved=True),)
    )


def glm4(config: Config) -> DecoderSpec:
    return glm(config, post_norms=True)


def glm4_moe(config: Config) -> DecoderSpec:
    norm = rms(config)
    heads = attention(
        config,
        bias=config.get_bool("attention_bias"),
        out_bias=False,
        qk_norm=QkNorm(norm) if config.get_bool("use_qk_norm") else None,
    )
    layers = after_dense(config, heads, gated(config), choice_by_bias(config))
    return decoder(config, layers, norm, (rope(config, config.head_dim, partial=True),))


def glm4_moe_lite(config: Config) -> DecoderSpec:
    """DeepSeek-V3's layers."""
    check_whole(rope_parameters(config))
    norm, heads = rms(config), latent_attention(config)
    layers = [pre_norm(norm, heads, mlp) for mlp in each_mlp(config, choice_by_bias(config), gated(config), 1)]
    return decoder(config, layers, norm, (latent_rope(config, config.get_bool("rope_interleave")),))


def solar_open(config: Config) -> DecoderSpec:
    check_whole(rope_parameters(config))
    norm = rms(config)
    heads = attention(config, bias=config.get_bool("attention_bias"), out_bias=False)
    layers = [pre_norm(norm, heads, choice_by_bias(config))] * config.layers
    return decoder(config, layers, norm, (rope(config, config.head_dim),))


GLM = LLAMA.but(qkv=[QKV, "self_attn.qkv_proj"], mlp__gate_up="mlp.gate_up_proj")


GLM4 = GLM.but(attn_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm")


GLM_DEFAULTS = {
    **LLAMA_DEFAULTS,
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}


FAMILIES = {
    "glm": Family("GLM-4", glm, GLM, GLM_DEFAULTS),
    "glm4": Family("GLM-4-0414", glm4, GLM4, GLM_DEFAULTS),
    "glm4_moe": Family(
        "GLM-4.5, GLM-4.6",
        glm4_moe,
        DEEPSEEK,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 151552,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.5,
        },
        DEEPSEEK_ALIASES,
        draft_head=NEXTN,
    ),
    "glm4_moe_lite": Family(
        "GLM-4.7-Flash",
        glm4_moe_lite,
        DEEPSEEK,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 154880,
            "hidden_size": 2048,
            "intermediate_size": 10240,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 47,
            "num_attention_heads": 20,
            "n_shared_experts": 1,
            "n_routed_experts": 64,
            "routed_scaling_factor": 1.8,
            "kv_lora_rank": 512,
            "q_lora_rank": 768,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "qk_nope_head_dim": 192,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "rope_interleave": True,
        },
        {**DEEPSEEK_ALIASES, "head_dim": "qk_rope_head_dim"},
        draft_head=NEXTN,
    ),
    "solar_open": Family(
        "Solar Open",
        solar_open,
        DEEPSEEK,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 196608,
            "moe_intermediate_size": 1280,
            "num_hidden_layers": 48,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        },
        DEEPSEEK_ALIASES,
    ),
}


def _gguf_glm4_moe(values: Metadata, config: dict[str, Any]) -> None:
    config["use_qk_norm"] = values.has_tensor("blk.0.attn_q_norm.weight")


_GGUF_GLM = {
    **GGUF_ATTENTION,
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ARCHITECTURES = {
    "chatglm": Architecture("glm", GGUF_MODULES, _GGUF_GLM, extra=(biases, partial)),
    "glm4": Architecture(
        "glm4",
        GGUF_MODULES,
        {**_GGUF_GLM, "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
        extra=(biases, partial),
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        GGUF_MODULES,
        {**GGUF_LLAMA, **GGUF_LATER_NORM, **GGUF_QK_NORM, **GGUF_DEEPSEEK_EXPERTS},
        extra=(biases, partial, gguf_deepseek_experts, _gguf_glm4_moe),
        draft=GGUF_NEXTN,
    ),
}
