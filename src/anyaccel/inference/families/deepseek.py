# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2 and V3, and models that are like them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anyaccel.inference.families.common import (
    LLAMA_DEFAULTS,
    MOST_EXPERTS,
    decoder,
    each_mlp,
    gated,
    mixture,
    pre_norm,
    rms,
)
from anyaccel.inference.families.family import DraftHead, Family
from anyaccel.inference.families.gguf import (
    GGUF_EXPERTS,
    GGUF_GATED,
    GGUF_MODULES,
    GGUF_SHARED_EXPERTS,
    Architecture,
    DraftLayer,
    Metadata,
    gguf_mixture,
)
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.qwen import QWEN_MOE
from anyaccel.inference.families.rope import rope, rope_parameters, yarn_mscale
from anyaccel.inference.spec.decoder import Attention, DecoderSpec, Layer, Mla, Mlp, Moe, Norm, Rope
from anyaccel.inference.spec.mapping import At, Part, Unsupported
from anyaccel.validation import Fields, short_repr


def latent_attention(config: Config, value_dim: int | None = None) -> Attention:
    """Multi-head latent attention (DeepSeek-V2, 2024).

    Args:
        value_dim: values of a head; None: `v_head_dim`.
    """
    nope, rotated = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    latent_norm = Norm("rms", 1e-6)  # not the config's
    q_rank = config.size("q_lora_rank") if config.has("q_lora_rank") else 0
    bias = config.get_bool("attention_bias")
    scale: float = (nope + rotated) ** -0.5
    parameters = rope_parameters(config)
    if parameters["rope_type"] != "default" and parameters.get("mscale_all_dim"):
        given = Fields(parameters, "config: rope_parameters: ")
        scale *= yarn_mscale(given.number("factor", above=0.0), given.number("mscale_all_dim")) ** 2
    return Attention(
        heads=config.heads,
        kv_heads=config.heads,
        head_dim=nope + rotated,
        value_dim=value_dim or config.size("v_head_dim"),
        scale=scale,
        rope=0,
        qkv_bias=bias,
        out_bias=bias,
        mla=Mla(q_rank, config.size("kv_lora_rank"), nope, rotated, latent_norm if q_rank else None, latent_norm),
    )


def after_dense(config: Config, heads: Attention, dense: Mlp, moe: Moe) -> list[Layer]:
    """The first layers have no experts."""
    norm = rms(config)
    first = config.integer("first_k_dense_replace", minimum=0)
    return [pre_norm(norm, heads, dense if index < first else moe) for index in range(config.layers)]


def shared_expert(config: Config, expert: Mlp, count: str = "n_shared_experts") -> Mlp:
    """Several shared experts are one that is as large as all."""
    features = expert.features * config.integer(count, maximum=MOST_EXPERTS)
    return Mlp(features, expert.activation, gated=True, bias=expert.bias, out_bias=expert.bias)


def deepseek_v2(config: Config) -> DecoderSpec:
    method = config.text("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise Unsupported(f"topk_method {short_repr(method)}")
    grouped = method == "group_limited_greedy"
    bias = config.get_bool("mlp_bias")
    moe = mixture(
        config,
        "n_routed_experts",
        gated(config, features="moe_intermediate_size"),
        normalise=False,  # transformers does not read norm_topk_prob here
        scale=config.number("routed_scaling_factor"),
        groups=config.integer("n_group") if grouped else 1,
        top_groups=config.integer("topk_group") if grouped else 1,
        shared=shared_expert(config, gated(config, bias, "moe_intermediate_size")),
    )
    layers = after_dense(config, latent_attention(config), gated(config, bias), moe)
    return decoder(config, layers, rms(config), (latent_rope(config, interleaved=True),))


def latent_rope(config: Config, interleaved: bool) -> Rope:
    return rope(
        config,
        config.integer("qk_rope_head_dim"),
        interleaved=interleaved,
        first=config.integer("qk_nope_head_dim"),
    )


def choice_by_bias(config: Config, experts: str = "n_routed_experts", shared: str = "n_shared_experts") -> Moe:
    """DeepSeek-V3's router: sigmoid scores, and a bias that balances the load takes part in the choice only.

    Args:
        experts, shared: names of how many there are.
    """
    expert = gated(config, features="moe_intermediate_size")
    return mixture(
        config,
        experts,
        expert,
        scoring="sigmoid",
        normalise=config.get_bool("norm_topk_prob"),
        scale=config.number("routed_scaling_factor"),
        groups=config.integer("n_group"),
        top_groups=config.integer("topk_group"),
        group_score="top2",
        choice_bias=True,
        shared=shared_expert(config, expert, shared),
    )


def deepseek_v3(config: Config) -> DecoderSpec:
    layers = after_dense(config, latent_attention(config), gated(config), choice_by_bias(config))
    return decoder(config, layers, rms(config), (latent_rope(config, config.get_bool("rope_interleave")),))


def axk1(config: Config) -> DecoderSpec:
    """DeepSeek-V3 with a norm behind the experts."""
    if not config.items("mlp_layer_types") and config.integer_or("moe_layer_freq", 1) != 1:
        raise Unsupported(f"moe_layer_freq={config.integer('moe_layer_freq')}")
    norm, heads = rms(config), latent_attention(config)
    first = config.integer_or("first_k_dense_replace", 1, minimum=0)
    layers = [
        pre_norm(norm, heads, mlp, mlp_post_norm=norm if isinstance(mlp, Moe) else None)
        for mlp in each_mlp(config, choice_by_bias(config), gated(config), first)
    ]
    return decoder(config, layers, norm, (latent_rope(config, config.get_bool("rope_interleave")),))


def youtu(config: Config) -> DecoderSpec:
    """DeepSeek-V3's attention without its experts."""
    norm = rms(config)
    layer = pre_norm(norm, latent_attention(config), gated(config))
    return decoder(config, [layer] * config.layers, norm, (latent_rope(config, config.get_bool("rope_interleave")),))


def _keys_and_values(at: At) -> Sequence[Part]:
    """As GGUF stores them for attention on the latents: [heads, latents, keys] and [heads, values, latents]."""
    keys, values = (at.name(f"self_attn.{name}_b_proj") for name in ("k", "v"))
    return [
        part
        for head in range(at.attention.heads)
        for part in (Part(keys, transposed=True, index=head), Part(values, index=head))
    ]


DEEPSEEK = QWEN_MOE.but(
    q_a="self_attn.q_a_proj",
    q_a_norm="self_attn.q_a_layernorm",
    q_b=["self_attn.q_b_proj", "self_attn.q_proj"],
    kv_a="self_attn.kv_a_proj_with_mqa",
    kv_a_norm="self_attn.kv_a_layernorm",
    kv_b=["self_attn.kv_b_proj", _keys_and_values],
    router__choice_bias="=mlp.gate.e_score_correction_bias",
    shared__gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared__down="mlp.shared_experts.down_proj",
)


# Its embedding and head are those of the model, also where a checkpoint has copies of them.
NEXTN = DraftHead(
    {
        "fuse": "layers.{first}.eh_proj",
        "fuse_embed_norm": "layers.{first}.enorm",
        "fuse_hidden_norm": "layers.{first}.hnorm",
        "final_norm": "layers.{first}.shared_head.norm",
    }
)


DEEPSEEK_ALIASES = {"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"}


V3_DEFAULTS = {
    **LLAMA_DEFAULTS,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rope_interleave": True,
}


FAMILIES = {
    "deepseek_v2": Family(
        "DeepSeek-V2",
        deepseek_v2,
        DEEPSEEK,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 102400,
            "first_k_dense_replace": 0,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "v_head_dim": 128,
            "moe_intermediate_size": 1407,
        },
        DEEPSEEK_ALIASES,
    ),
    "deepseek_v3": Family(
        "DeepSeek-V3, DeepSeek-R1", deepseek_v3, DEEPSEEK, V3_DEFAULTS, DEEPSEEK_ALIASES, draft_head=NEXTN
    ),
    "axk1": Family(
        "A.X K1",
        axk1,
        DEEPSEEK.but(mlp_post_norm=["post_mlp_layernorm", "mlp.post_mlp_layernorm"]),
        {
            **V3_DEFAULTS,
            "vocab_size": 163840,
            "num_attention_heads": 64,
            "n_routed_experts": 192,
            "max_position_embeddings": 32768,
            "first_k_dense_replace": 1,
        },
        DEEPSEEK_ALIASES,
    ),
    "youtu": Family(
        "Youtu-LLM",
        youtu,
        DEEPSEEK,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 16,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "qk_nope_head_dim": 128,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "rope_interleave": True,
        },
    ),
}


def gguf_deepseek_experts(values: Metadata, config: dict[str, Any]) -> None:
    gguf_mixture(values, config, "n_routed_experts")
    config["moe_intermediate_size"] = values.features("expert_feed_forward_length")
    config["n_shared_experts"] = values.count("expert_shared_count", 1, 1)
    config["first_k_dense_replace"] = values.count("leading_dense_block_count", 0)
    config["routed_scaling_factor"] = values.number("expert_weights_scale", 1.0)
    config["norm_topk_prob"] = values.get_bool("expert_weights_norm")
    config["n_group"] = values.count("expert_group_count", 1, 1)
    config["topk_group"] = values.count("expert_group_used_count", 1, 1)


_SOFTMAX, _SIGMOID = 1, 2  # llama.cpp's numbers


def gguf_latent(values: Metadata, config: dict[str, Any]) -> None:
    config["num_key_value_heads"] = values.heads
    config["qk_rope_head_dim"] = values.rotated
    config["qk_nope_head_dim"] = values.head_dim - values.rotated
    config["v_head_dim"] = values.value_dim
    config["kv_lora_rank"] = values.features("attention.kv_lora_rank")
    low_rank = values.has_tensor("blk.0.attn_q_a.weight")
    config["q_lora_rank"] = values.features("attention.q_lora_rank") if low_rank else None
    config.pop("head_dim")


def _gguf_deepseek(values: Metadata, config: dict[str, Any]) -> None:
    biased = any(values.has_tensor(f"blk.{layer}.exp_probs_b.bias") for layer in range(values.layers))
    scoring = values.count("expert_gating_func", _SIGMOID if biased else _SOFTMAX, _SOFTMAX, _SIGMOID)
    if scoring == _SIGMOID:
        config["model_type"] = "deepseek_v3"
    else:
        config["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"


GGUF_DEEPSEEK_EXPERTS = {
    **GGUF_EXPERTS,
    **GGUF_SHARED_EXPERTS,
    "=mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}
GGUF_LATENT = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
}
GGUF_NEXTN = DraftLayer(
    "model.layers.{layer}.",
    {
        "model.layers.{layer}.eh_proj": "nextn.eh_proj",
        "model.layers.{layer}.enorm": "nextn.enorm",
        "model.layers.{layer}.hnorm": "nextn.hnorm",
        "model.layers.{layer}.shared_head.norm": "nextn.shared_head_norm",
    },
)
ARCHITECTURES = {
    "deepseek2": Architecture(
        "deepseek_v2",
        GGUF_MODULES,
        {**GGUF_LATENT, **GGUF_GATED, **GGUF_DEEPSEEK_EXPERTS},
        latent=True,
        extra=(gguf_deepseek_experts, gguf_latent, _gguf_deepseek),
        others=("deepseek_v3",),
        draft=GGUF_NEXTN,
    ),
}
