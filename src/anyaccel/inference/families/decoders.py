# SPDX-License-Identifier: Apache-2.0
"""What Llama and its relatives compute: config -> DecoderSpec. Each follows transformers' modeling_<family>.py."""

from __future__ import annotations

import dataclasses
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope, rope_parameters, rope_parameters_of
from anyaccel.inference.spec.decoder import Attention, DecoderSpec, Layer, Mlp, Moe, Norm, QkNorm, Rope
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.outside import MOST, Values, flag, shown


def rms(config: Config, name: str = "rms_norm_eps") -> Norm:
    return Norm("rms", config.number(name, minimum=0.0))


def layer_norm(config: Config, name: str, bias: bool = True) -> Norm:
    return Norm("layer", config.number(name, minimum=0.0), bias=bias)


def attention(
    config: Config, *, rope: int = 0, bias: bool = False, out_bias: bool | None = None, **more: Any
) -> Attention:
    """Attention with a config's usual heads; `out_bias` as `bias` unless given, the scale 1 / sqrt(head_dim).

    Args:
        more: other fields of Attention.
    """
    dim = more.pop("head_dim", None) or config.head_dim
    values = {
        "heads": config.heads,
        "kv_heads": more.pop("kv_heads", None) or config.kv_heads,
        "head_dim": dim,
        "value_dim": dim,
        "scale": dim**-0.5,
        "rope": rope,
        "qkv_bias": bias,
        "out_bias": bias if out_bias is None else out_bias,
    }
    return Attention(**{**values, **more})


def gated(config: Config, bias: bool = False, features: str = "intermediate_size", act: str = "hidden_act") -> Mlp:
    return Mlp(config.size(features), config.activation(act), gated=True, bias=bias, out_bias=bias)


def plain(config: Config, features: int, act: str, bias: bool = True) -> Mlp:
    return Mlp(features, config.activation(act), gated=False, bias=bias, out_bias=bias)


def pre_norm(norm: Norm, attention: Attention, mlp: Mlp | Moe, **more: Any) -> Layer:
    """The usual layer: a norm before attention and another before the MLP."""
    return Layer(attention, mlp, attn_norm=norm, mlp_norm=norm, **more)


def max_tokens(config: Config, ropes: tuple[Rope, ...]) -> int:
    """The longest context: dynamic rotary positions reach `dynamic_factor` times as far as the config says."""
    longest = config.integer("max_position_embeddings")
    return min(max([longest, *(int(longest * each.dynamic_factor) for each in ropes)]), MOST)


def decoder(
    config: Config, layers: list[Layer], final_norm: Norm | None, ropes: tuple[Rope, ...] = (), **more: Any
) -> DecoderSpec:
    """A decoder with a config's usual sizes.

    Args:
        more: other fields of DecoderSpec.
    """
    if any(layer.attention.rope >= len(ropes) for layer in layers):
        raise ModelError("config: a layer has no rotary positions")
    for each, layer in ((ropes[layer.attention.rope], layer) for layer in layers if layer.attention.rope >= 0):
        if each.first + 2 * len(each.inv_freq) > layer.attention.head_dim:
            raise ModelError(f"config: {2 * len(each.inv_freq)} rotated values in heads of {layer.attention.head_dim}")
    values = {
        "vocab": config.integer("vocab_size"),
        "hidden": config.hidden,
        "layers": tuple(layers),
        "final_norm": final_norm,
        "ropes": ropes,
        "tied": config.flag("tie_word_embeddings"),
    }
    if "max_tokens" not in more:
        values["max_tokens"] = max_tokens(config, ropes)
    return DecoderSpec(**{**values, **more})


def windows(config: Config, types: list[str]) -> list[int]:
    """The window of each layer."""
    window = config.window()
    return [window if kind == "sliding_attention" else 0 for kind in types]


def llama_like(
    config: Config, each_window: list[int] | None = None, mlp: Mlp | None = None, norm: Norm | None = None, **more: Any
) -> DecoderSpec:
    """Llama's structure: RMS norms before attention and a gated MLP, rotary positions in every layer.

    Args:
        each_window: the window of each layer.
        more: fields of Attention, `bias` and `out_bias`.
    """
    norm = norm or rms(config)
    mlp = mlp or gated(config)
    layers = [
        pre_norm(norm, attention(config, window=window, **more), mlp) for window in each_window or [0] * config.layers
    ]
    return decoder(config, layers, norm, (rope(config, config.head_dim),))


def llama(config: Config) -> DecoderSpec:
    return llama_like(config, mlp=gated(config, config.flag("mlp_bias")), bias=config.flag("attention_bias"))


def mistral(config: Config) -> DecoderSpec:
    return llama_like(config, [config.window()] * config.layers)


def ministral(config: Config) -> DecoderSpec:
    return llama_like(config, windows(config, config.layer_types(lambda index: True)))


def ministral3(config: Config) -> DecoderSpec:
    """Mistral, whose queries grow beyond the context of the pretraining: that part is left out, and so forbidden."""
    spec = llama_like(config, [config.window()] * config.layers)
    parameters = Values(rope_parameters(config), "config: rope_parameters: ")
    if not parameters.number("llama_4_scaling_beta", 0.0):
        return spec
    return dataclasses.replace(spec, max_tokens=parameters.whole("original_max_position_embeddings", minimum=1))


def _qwen_windows(config: Config) -> list[int]:
    first = config.integer("max_window_layers", minimum=0)
    types = config.layer_types(lambda index: index >= first)
    return windows(config, types) if config.flag("use_sliding_window") else [0] * config.layers


def qwen2(config: Config) -> DecoderSpec:
    return llama_like(config, _qwen_windows(config), bias=True, out_bias=False)


def qwen3(config: Config) -> DecoderSpec:
    bias = config.flag("attention_bias")
    return llama_like(config, _qwen_windows(config), bias=bias, qk_norm=QkNorm(rms(config)))


def seed_oss(config: Config) -> DecoderSpec:
    mlp = gated(config, config.flag("mlp_bias"))
    return llama_like(config, mlp=mlp, bias=config.flag("attention_bias"), out_bias=config.flag("attention_out_bias"))


def arcee(config: Config) -> DecoderSpec:
    mlp = plain(config, config.size("intermediate_size"), "hidden_act", config.flag("mlp_bias"))
    return llama_like(config, mlp=mlp, bias=config.flag("attention_bias"))


def ernie(config: Config) -> DecoderSpec:
    bias = config.flag("use_bias")
    spec = llama_like(config, mlp=gated(config, bias), bias=bias)
    return dataclasses.replace(spec, ropes=(rope(config, config.head_dim, interleaved=True),))


def helium(config: Config) -> DecoderSpec:
    mlp = gated(config, config.flag("mlp_bias"))
    spec = llama_like(config, mlp=mlp, bias=config.flag("attention_bias"), out_bias=False)
    return dataclasses.replace(spec, ropes=(rope(config, config.head_dim, interleaved=True),))


def hunyuan(config: Config) -> DecoderSpec:
    parameters = rope_parameters(config)
    dim = config.head_dim
    given = Values(parameters, "config: rope_parameters: ")
    alpha = given.number("alpha", 0.0, minimum=0.0) if dim > 2 else 0.0
    if parameters["rope_type"] == "dynamic" and alpha:  # static all the same
        parameters["rope_theta"] = given.number("rope_theta", above=0.0) * alpha ** (dim / (dim - 2))
        parameters["rope_type"] = "default"
    norm = rms(config)
    heads = attention(config, bias=config.flag("attention_bias"), qk_norm=QkNorm(norm, after_rope=True))
    layers = [pre_norm(norm, heads, gated(config))] * config.layers
    return decoder(config, layers, norm, (rope(config, dim, parameters=parameters),))


def smollm3(config: Config) -> DecoderSpec:
    """Llama, some of whose layers have no positions."""
    rotate = [flag(each, f"config: no_rope_layers[{at}]") for at, each in enumerate(config.items("no_rope_layers"))]
    if rotate and len(rotate) < config.layers:
        raise ModelError(f"config: {len(rotate)} no_rope_layers for {config.layers} layers")
    if not rotate:
        interval = config.integer("no_rope_layer_interval")
        rotate = [(index + 1) % interval != 0 for index in range(config.layers)]
    each_window = [0] * config.layers
    if config.flag("use_sliding_window"):
        each_window = windows(config, config.layer_types(lambda index: not rotate[index]))
    norm = rms(config)
    bias = config.flag("attention_bias")
    mlp = gated(config, config.flag("mlp_bias"))
    layers = [
        pre_norm(norm, attention(config, rope=0 if rotate[index] else -1, window=each_window[index], bias=bias), mlp)
        for index in range(config.layers)
    ]
    return decoder(config, layers, norm, (rope(config, config.head_dim),))


def granite(config: Config, mlp: Mlp | Moe | None = None) -> DecoderSpec:
    """Llama with factors on embedding, residuals, scores and logits."""
    norm = rms(config)
    scores = attention(config, bias=config.flag("attention_bias"), scale=config.number("attention_multiplier"))
    mlp = mlp or gated(config, config.flag("mlp_bias"))
    layer = pre_norm(norm, scores, mlp, residual_scale=config.number("residual_multiplier"))
    return decoder(
        config,
        [layer] * config.layers,
        norm,
        (rope(config, config.head_dim),),
        embedding_scale=config.number("embedding_multiplier"),
        logits_scale=1.0 / config.number("logits_scaling", above=0.0),
    )


def phi3(config: Config) -> DecoderSpec:
    parameters = rope_parameters(config)
    if parameters["rope_type"] in ("su", "yarn"):  # older names of the same
        parameters["rope_type"] = "longrope"
        parameters.setdefault("original_max_position_embeddings", config.integer("original_max_position_embeddings"))
    norm = rms(config)
    layer = pre_norm(norm, attention(config, window=config.window()), gated(config))
    rotated = rope(config, config.head_dim, partial=True, parameters=parameters)
    return decoder(config, [layer] * config.layers, norm, (rotated,))


def glm(config: Config, post_norms: bool = False) -> DecoderSpec:
    """GLM-4; the models of April 2025 (glm4) have norms after attention and MLP too."""
    norm = rms(config)
    post = norm if post_norms else None
    heads = attention(config, bias=config.flag("attention_bias"), out_bias=False)
    layer = pre_norm(norm, heads, gated(config), attn_post_norm=post, mlp_post_norm=post)
    return decoder(
        config, [layer] * config.layers, norm, (rope(config, config.head_dim, partial=True, interleaved=True),)
    )


def glm4(config: Config) -> DecoderSpec:
    return glm(config, post_norms=True)


def _gemma(config: Config, layers: list[Layer], ropes: tuple[Rope, ...], softcap: float = 0.0) -> DecoderSpec:
    config.refuse("use_bidirectional_attention")
    scale = config.hidden**0.5
    return decoder(config, layers, rms(config), ropes, embedding_scale=scale, logits_softcap=softcap)


def gemma(config: Config) -> DecoderSpec:
    mlp = gated(config)
    if mlp.activation == "gelu":  # the first configs say "gelu" and mean its approximation
        mlp = dataclasses.replace(mlp, activation="gelu_tanh")
    layer = pre_norm(rms(config), attention(config, bias=config.flag("attention_bias")), mlp)
    return _gemma(config, [layer] * config.layers, (rope(config, config.head_dim),))


def _gemma_layer(config: Config, **more: Any) -> Layer:
    norm = rms(config)
    scores = attention(
        config,
        bias=config.flag("attention_bias"),
        scale=config.number("query_pre_attn_scalar", above=0.0) ** -0.5,
        **more,
    )
    mlp = gated(config, act="hidden_activation")
    return pre_norm(norm, scores, mlp, attn_post_norm=norm, mlp_post_norm=norm)


def gemma2(config: Config) -> DecoderSpec:
    softcap = config.number("attn_logit_softcapping", 0.0, minimum=0.0)
    each_window = windows(config, config.layer_types(lambda index: index % 2 == 0))
    layers = [_gemma_layer(config, window=window, softcap=softcap) for window in each_window]
    ropes = (rope(config, config.head_dim),)
    return _gemma(config, layers, ropes, config.number("final_logit_softcapping", 0.0, minimum=0.0))


def gemma3(config: Config) -> DecoderSpec:
    """Two kinds of rotary positions; transformers does not use `attn_logit_softcapping` here."""
    pattern = config.integer("sliding_window_pattern")
    each_window = windows(config, config.layer_types(lambda index: (index + 1) % pattern != 0))
    qk_norm = QkNorm(rms(config))
    layers = [_gemma_layer(config, window=window, rope=int(window > 0), qk_norm=qk_norm) for window in each_window]
    full = rope_parameters_of(config, "full_attention", config.number("rope_theta", 1e6), scaled=True)
    sliding = rope_parameters_of(config, "sliding_attention", config.number("rope_local_base_freq", 1e4), False)
    ropes = tuple(rope(config, config.head_dim, parameters=each) for each in (full, sliding))
    return _gemma(config, layers, ropes, config.number("final_logit_softcapping", 0.0, minimum=0.0))


def olmo(config: Config) -> DecoderSpec:
    """Norms without weights; values clamped after the projections."""
    norm = Norm("layer", 1e-5, weight=False)
    clip = config.number("clip_qkv", 0.0, minimum=0.0)
    return llama_like(config, norm=norm, bias=config.flag("attention_bias"), clip=clip)


def _olmo2(config: Config, each_window: list[int], ropes: tuple[Rope, ...]) -> DecoderSpec:
    """Norms after attention and MLP only; queries and keys are normed over all heads."""
    norm = rms(config)
    bias = config.flag("attention_bias")
    layers = [
        Layer(
            attention(config, rope=min(window, len(ropes) - 1), window=window, bias=bias, qk_norm=QkNorm(norm, True)),
            gated(config),
            attn_post_norm=norm,
            mlp_post_norm=norm,
        )
        for window in each_window
    ]
    return decoder(config, layers, norm, ropes)


def olmo2(config: Config) -> DecoderSpec:
    return _olmo2(config, [0] * config.layers, (rope(config, config.head_dim),))


def olmo3(config: Config) -> DecoderSpec:
    each_window = windows(config, config.layer_types(lambda index: (index + 1) % 4 != 0))
    full = rope_parameters_of(config, "full_attention", config.number("rope_theta", 5e5), scaled=True)
    sliding = rope_parameters_of(config, "sliding_attention", 5e5, scaled=False)
    ropes = tuple(rope(config, config.head_dim, parameters=each) for each in (full, sliding))
    return _olmo2(config, each_window, ropes)


def exaone4(config: Config) -> DecoderSpec:
    """Norms after attention and MLP only; with windows, layers that see everything have no positions."""
    norm = rms(config)
    each_window = [0] * config.layers
    if config.has("sliding_window"):
        pattern = 0
        if not config.items("layer_types"):
            if isinstance(config.required("sliding_window_pattern"), str):  # "LLLG": the first models of this family
                raise Unsupported(f"sliding_window_pattern={shown(config.text('sliding_window_pattern'))}")
            pattern = config.integer("sliding_window_pattern")
        each_window = windows(config, config.layer_types(lambda index: (index + 1) % pattern != 0))
    rotate = [window > 0 or not config.has("sliding_window") for window in each_window]
    layers = [
        Layer(
            attention(config, rope=0 if rotate[index] else -1, window=window, qk_norm=QkNorm(norm)),
            gated(config),
            attn_post_norm=norm,
            mlp_post_norm=norm,
        )
        for index, window in enumerate(each_window)
    ]
    return decoder(config, layers, norm, (rope(config, config.head_dim),))


def _cohere(config: Config, each_window: list[int], rotate: list[bool], qk_norm: QkNorm | None) -> DecoderSpec:
    """Attention and MLP side by side after one norm; pairs of neighbours rotate."""
    norm = layer_norm(config, "layer_norm_eps", bias=False)
    bias = config.flag("attention_bias")
    layers = [
        Layer(
            attention(config, rope=0 if rotate[index] else -1, window=window, bias=bias, qk_norm=qk_norm),
            gated(config),
            attn_norm=norm,
            parallel=True,
        )
        for index, window in enumerate(each_window)
    ]
    ropes = (rope(config, config.head_dim, interleaved=True),)
    return decoder(config, layers, norm, ropes, logits_scale=config.number("logit_scale"))


def cohere(config: Config) -> DecoderSpec:
    norm = layer_norm(config, "layer_norm_eps", bias=False)
    qk_norm = QkNorm(norm, own_weights=True) if config.flag("use_qk_norm") else None
    return _cohere(config, [0] * config.layers, [True] * config.layers, qk_norm)


def cohere2(config: Config) -> DecoderSpec:
    """Layers that see everything have no positions."""
    pattern = config.integer("sliding_window_pattern")
    each_window = windows(config, config.layer_types(lambda index: (index + 1) % pattern != 0))
    return _cohere(config, each_window, [window > 0 for window in each_window], None)
