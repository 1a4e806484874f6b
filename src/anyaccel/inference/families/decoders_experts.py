# SPDX-License-Identifier: Apache-2.0
"""What mixtures of experts compute: config -> DecoderSpec. Each follows transformers' modeling_<family>.py."""

from __future__ import annotations

from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.families.decoders import attention, decoder, gated, granite, pre_norm, rms, windows
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope, rope_parameters, yarn_mscale
from anyaccel.inference.spec.decoder import Attention, DecoderSpec, Layer, Mla, Mlp, Moe, Norm, QkNorm, Rope
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.outside import Values, shown, whole

_MOST_EXPERTS = 2048  # so that a damaged config does not fill the memory


def _moe(config: Config, experts: str, expert: Mlp, **more: Any) -> Moe:
    count, chosen = config.integer(experts, maximum=_MOST_EXPERTS), config.integer("num_experts_per_tok")
    if chosen > count:
        raise ModelError(f"config: num_experts_per_tok={chosen} of {count} experts")
    return Moe(count, chosen, expert, **more)


def mixtral(config: Config) -> DecoderSpec:
    norm = rms(config)
    layer = pre_norm(norm, attention(config, window=config.window()), _moe(config, "num_local_experts", gated(config)))
    return decoder(config, [layer] * config.layers, norm, (rope(config, config.head_dim),))


def _sparse(config: Config, moe: Moe, dense: Mlp) -> list[Mlp | Moe]:
    """Qwen's choice of the layers with experts."""
    step = config.integer("decoder_sparse_step")
    only = [whole(each, "config: mlp_only_layers") for each in config.items("mlp_only_layers")]
    return [moe if index not in only and (index + 1) % step == 0 else dense for index in range(config.layers)]


def qwen2_moe(config: Config) -> DecoderSpec:
    moe = _moe(
        config,
        "num_experts",
        gated(config, features="moe_intermediate_size"),
        normalise=config.flag("norm_topk_prob"),
        shared=gated(config, features="shared_expert_intermediate_size"),
        shared_gate=True,
    )
    each_window = [0] * config.layers
    if config.flag("use_sliding_window"):
        last = config.integer("max_window_layers", minimum=0)
        each_window = windows(config, config.layer_types(lambda index: index % 2 == 0 and index < last))
    norm = rms(config)
    layers = [
        pre_norm(norm, attention(config, window=window, bias=config.flag("qkv_bias"), out_bias=False), mlp)
        for window, mlp in zip(each_window, _sparse(config, moe, gated(config)), strict=True)
    ]
    return decoder(config, layers, norm, (rope(config, config.head_dim),))


def qwen3_moe(config: Config) -> DecoderSpec:
    expert = gated(config, features="moe_intermediate_size")
    moe = _moe(config, "num_experts", expert, normalise=config.flag("norm_topk_prob"))
    norm = rms(config)
    heads = attention(
        config,
        window=config.window() if config.flag("use_sliding_window") else 0,
        bias=config.flag("attention_bias"),
        qk_norm=QkNorm(norm),
    )
    layers = [pre_norm(norm, heads, mlp) for mlp in _sparse(config, moe, gated(config))]
    return decoder(config, layers, norm, (rope(config, config.head_dim),))


def olmoe(config: Config) -> DecoderSpec:
    config.refuse("clip_qkv")  # after the norms here
    norm = rms(config)
    heads = attention(config, bias=config.flag("attention_bias"), qk_norm=QkNorm(norm, across=True))
    moe = _moe(config, "num_experts", gated(config), normalise=config.flag("norm_topk_prob"))
    layers = [pre_norm(norm, heads, moe)] * config.layers
    return decoder(config, layers, norm, (rope(config, config.head_dim),))


def granitemoe(config: Config) -> DecoderSpec:
    moe = _moe(config, "num_local_experts", gated(config), scoring="none", normalise=False, softmax_after=True)
    return granite(config, moe)


def gpt_oss(config: Config) -> DecoderSpec:
    for name, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if config.number(name) != value:
            raise Unsupported(f"{name}={config.number(name)}")
    expert = Mlp(config.size("intermediate_size"), "swiglu_oai", gated=True, bias=True, out_bias=True)
    moe = _moe(
        config,
        "num_local_experts",
        expert,
        scoring="none",
        normalise=False,
        softmax_after=True,
        router_bias=True,
    )
    norm = rms(config)
    bias = config.flag("attention_bias")
    layers = [
        pre_norm(norm, attention(config, window=window, bias=bias, sinks=True), moe)
        for window in windows(config, config.layer_types(lambda index: index % 2 == 0))
    ]
    return decoder(config, layers, norm, (rope(config, config.head_dim),))


def _latent_attention(config: Config) -> Attention:
    """Multi-head latent attention (DeepSeek-V2, 2024)."""
    nope, rotated = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    latent_norm = Norm("rms", 1e-6)  # not the config's
    q_rank = config.size("q_lora_rank") if config.has("q_lora_rank") else 0
    bias = config.flag("attention_bias")
    scale: float = (nope + rotated) ** -0.5
    parameters = rope_parameters(config)
    if parameters["rope_type"] != "default" and parameters.get("mscale_all_dim"):
        given = Values(parameters, "config: rope_parameters: ")
        scale *= yarn_mscale(given.number("factor", above=0.0), given.number("mscale_all_dim")) ** 2
    return Attention(
        heads=config.heads,
        kv_heads=config.heads,
        head_dim=nope + rotated,
        value_dim=config.size("v_head_dim"),
        scale=scale,
        rope=0,
        qkv_bias=bias,
        out_bias=bias,
        mla=Mla(q_rank, config.size("kv_lora_rank"), nope, rotated, latent_norm if q_rank else None, latent_norm),
    )


def _after_dense(config: Config, heads: Attention, dense: Mlp, moe: Moe) -> list[Layer]:
    """The first layers have no experts."""
    norm = rms(config)
    first = config.integer("first_k_dense_replace", minimum=0)
    return [pre_norm(norm, heads, dense if index < first else moe) for index in range(config.layers)]


def _shared(config: Config, expert: Mlp) -> Mlp:
    features = expert.features * config.integer("n_shared_experts", maximum=_MOST_EXPERTS)
    return Mlp(features, expert.activation, gated=True, bias=expert.bias, out_bias=expert.bias)


def deepseek_v2(config: Config) -> DecoderSpec:
    method = config.text("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise Unsupported(f"topk_method {shown(method)}")
    grouped = method == "group_limited_greedy"
    bias = config.flag("mlp_bias")
    moe = _moe(
        config,
        "n_routed_experts",
        gated(config, features="moe_intermediate_size"),
        normalise=False,  # transformers does not read norm_topk_prob here
        scale=config.number("routed_scaling_factor"),
        groups=config.integer("n_group") if grouped else 1,
        top_groups=config.integer("topk_group") if grouped else 1,
        shared=_shared(config, gated(config, bias, "moe_intermediate_size")),
    )
    layers = _after_dense(config, _latent_attention(config), gated(config, bias), moe)
    return decoder(config, layers, rms(config), (_latent_rope(config, interleaved=True),))


def _latent_rope(config: Config, interleaved: bool) -> Rope:
    return rope(
        config,
        config.integer("qk_rope_head_dim"),
        interleaved=interleaved,
        first=config.integer("qk_nope_head_dim"),
    )


def _choice_by_bias(config: Config) -> Moe:
    """DeepSeek-V3's router: sigmoid scores, and a bias that balances the load takes part in the choice only."""
    expert = gated(config, features="moe_intermediate_size")
    return _moe(
        config,
        "n_routed_experts",
        expert,
        scoring="sigmoid",
        normalise=config.flag("norm_topk_prob"),
        scale=config.number("routed_scaling_factor"),
        groups=config.integer("n_group"),
        top_groups=config.integer("topk_group"),
        group_score="top2",
        choice_bias=True,
        shared=_shared(config, expert),
    )


def deepseek_v3(config: Config) -> DecoderSpec:
    layers = _after_dense(config, _latent_attention(config), gated(config), _choice_by_bias(config))
    return decoder(config, layers, rms(config), (_latent_rope(config, config.flag("rope_interleave")),))


def glm4_moe(config: Config) -> DecoderSpec:
    norm = rms(config)
    heads = attention(
        config,
        bias=config.flag("attention_bias"),
        out_bias=False,
        qk_norm=QkNorm(norm) if config.flag("use_qk_norm") else None,
    )
    layers = _after_dense(config, heads, gated(config), _choice_by_bias(config))
    return decoder(config, layers, norm, (rope(config, config.head_dim, partial=True),))
