# SPDX-License-Identifier: Apache-2.0
"""What GPT-2 and its contemporaries compute: config -> DecoderSpec. Each follows transformers' modeling_<family>.py."""

from __future__ import annotations

import math
import struct
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.families.decoders import attention, decoder, gated, layer_norm, plain, pre_norm
from anyaccel.inference.families.model_config import MOST_LAYERS, Config
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec, Layer, Mlp, Norm, QkNorm
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.outside import MOST, items, shown, text, whole


def _head_dim(config: Config) -> int:
    """Of families that do not read `head_dim`."""
    if config.hidden % config.heads:
        raise ModelError(f"config: hidden_size={config.hidden} is not a multiple of {config.heads} heads")
    return config.hidden // config.heads


def gpt2(config: Config) -> DecoderSpec:
    config.refuse("add_cross_attention")
    norm = layer_norm(config, "layer_norm_epsilon")
    dim = _head_dim(config)
    mlp = plain(config, config.size("n_inner", 4 * config.hidden), "activation_function")
    layers = []
    for index in range(config.layers):
        scale = dim**-0.5 if config.flag("scale_attn_weights") else 1.0
        if config.flag("scale_attn_by_inverse_layer_idx"):
            scale /= index + 1
        heads = attention(config, rope=-1, kv_heads=config.heads, head_dim=dim, scale=scale, bias=True)
        layers.append(pre_norm(norm, heads, mlp))
    return decoder(config, layers, norm, positions=config.integer("max_position_embeddings"))


def _neo_kinds(config: Config) -> list[str]:
    """Which layers have a window: a list, or groups ([["global", "local"], 12])."""
    if config.has("attention_layers"):
        given = config.items("attention_layers")
        return [text(each, "config: attention_layers", ("global", "local")) for each in given]
    kinds: list[str] = []
    what = "config: attention_types"
    for group in config.items("attention_types"):
        given, times = items(group, what, 2)
        names = [text(each, what, ("global", "local")) for each in items(given, what)]
        kinds += names * whole(times, what, 1, MOST_LAYERS)
        if len(kinds) > MOST_LAYERS * 2:
            raise ModelError(f"{what}={shown(config.items('attention_types'))}: more than {MOST_LAYERS} layers")
    return kinds


def gpt_neo(config: Config) -> DecoderSpec:
    """GPT-2 without a scale of the scores; every other layer has a window."""
    kinds = _neo_kinds(config)
    if len(kinds) < config.layers:
        raise ModelError(f"config: attention_types of {len(kinds)} layers for {config.layers} layers")
    norm = layer_norm(config, "layer_norm_epsilon")
    mlp = plain(config, config.size("intermediate_size", 4 * config.hidden), "activation_function")
    layers = []
    for kind in kinds[: config.layers]:
        window = config.integer("window_size") if kind == "local" else 0
        heads = attention(
            config,
            rope=-1,
            kv_heads=config.heads,
            head_dim=_head_dim(config),
            scale=1.0,
            window=window,
            out_bias=True,
        )
        layers.append(pre_norm(norm, heads, mlp))
    return decoder(config, layers, norm, positions=config.integer("max_position_embeddings"))


def gpt_bigcode(config: Config) -> DecoderSpec:
    config.refuse("add_cross_attention")
    norm = layer_norm(config, "layer_norm_epsilon")
    dim = _head_dim(config)
    heads = attention(
        config,
        rope=-1,
        kv_heads=1 if config.flag("multi_query") else config.heads,
        head_dim=dim,
        scale=dim**-0.5 if config.flag("scale_attn_weights") else 1.0,
        bias=True,
    )
    mlp = plain(config, config.size("n_inner", 4 * config.hidden), "activation_function")
    layers = [pre_norm(norm, heads, mlp)] * config.layers
    return decoder(config, layers, norm, positions=config.integer("max_position_embeddings"))


def gptj(config: Config) -> DecoderSpec:
    dim = _head_dim(config)
    rotated = rope(
        config,
        config.size("rotary_dim"),
        interleaved=True,
        parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    )
    norm = layer_norm(config, "layer_norm_epsilon")
    layer = Layer(
        attention(config, kv_heads=config.heads, head_dim=dim),
        plain(config, config.size("n_inner", 4 * config.hidden), "activation_function"),
        attn_norm=norm,
        parallel=True,
    )
    return decoder(config, [layer] * config.layers, norm, (rotated,), head_bias=True)


def gpt_neox(config: Config) -> DecoderSpec:
    norm = layer_norm(config, "layer_norm_eps")
    dim = _head_dim(config)
    layer = pre_norm(
        norm,
        attention(config, kv_heads=config.heads, head_dim=dim, bias=config.flag("attention_bias")),
        plain(config, config.size("intermediate_size"), "hidden_act"),
        parallel=config.flag("use_parallel_residual"),
    )
    return decoder(config, [layer] * config.layers, norm, (rope(config, dim, partial=True),))


def opt(config: Config) -> DecoderSpec:
    if not config.flag("do_layer_norm_before"):
        raise Unsupported("do_layer_norm_before=False (OPT-350M's norms after the residual)")
    if config.integer_or("word_embed_proj_dim", config.hidden) != config.hidden:
        raise Unsupported("word_embed_proj_dim (projections beside the embedding)")
    affine = config.flag("layer_norm_elementwise_affine")
    norm = Norm("layer", 1e-5, weight=affine, bias=affine)
    bias = config.flag("enable_bias")
    layer = pre_norm(
        norm,
        attention(config, rope=-1, kv_heads=config.heads, head_dim=_head_dim(config), bias=bias),
        plain(config, config.size("ffn_dim"), "activation_function", bias),
    )
    longest = config.integer("max_position_embeddings", maximum=MOST - 2)
    final = None if config.flag("_remove_final_layer_norm") else norm
    return decoder(config, [layer] * config.layers, final, positions=longest + 2, position_offset=2)


def _alibi_slopes(heads: int) -> list[float]:
    """Press et al., "Train Short, Test Long", 2022; heads that are no power of two get every other slope of twice."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (index + 1) / power) for index in range(power)]
    return slopes + [2 ** (-4 * (2 * index + 1) / power) for index in range(heads - power)]


def _bf16(value: float) -> float:
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    (rounded,) = struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))
    return float(rounded)


def bloom(config: Config) -> DecoderSpec:
    norm = layer_norm(config, "layer_norm_epsilon")
    slopes = tuple(_alibi_slopes(config.heads))
    layer = pre_norm(
        norm,
        attention(config, rope=-1, kv_heads=config.heads, head_dim=_head_dim(config), bias=True, alibi=slopes),
        Mlp(4 * config.hidden, "gelu_tanh", gated=False, bias=True, out_bias=True),
        residual_from_norm=config.flag("apply_residual_connection_post_layernorm"),
    )
    return decoder(config, [layer] * config.layers, norm, embedding_norm=norm, max_tokens=0)


def mpt(config: Config) -> DecoderSpec:
    """transformers' module ignores the options refused here; the checkpoints that have them need their own code."""
    options = config.mapping("attn_config")
    given = options.known()
    wanted: dict[str, Any] = {
        "alibi": True,
        "alibi_bias_max": 8,
        "qk_ln": False,
        "prefix_lm": False,
        "attn_type": "multihead_attention",
    }
    for name, value in wanted.items():
        if given.get(name, value) != value:
            raise Unsupported(f"attn_config {name}={shown(given[name])}")
    config.refuse("logit_scale")
    no_bias, ratio = config.flag("no_bias"), config.integer("expansion_ratio")
    if not no_bias or ratio != 4:
        raise Unsupported(f"no_bias={no_bias} with expansion_ratio={ratio}")
    dim = _head_dim(config)
    power = 2 ** math.ceil(math.log2(config.heads))
    slopes = [2 ** (-8 * (index + 1) / power) for index in range(power)]
    if power != config.heads:
        slopes = (slopes[1::2] + slopes[::2])[: config.heads]
    norm = layer_norm(config, "layer_norm_epsilon", bias=False)
    heads = attention(
        config,
        rope=-1,
        kv_heads=config.heads,
        head_dim=dim,
        scale=options.number("softmax_scale", 0.0) or dim**-0.5,
        alibi=tuple(slopes),
        clip=options.number("clip_qkv", 0.0, minimum=0.0),
    )
    layers = [pre_norm(norm, heads, Mlp(4 * config.hidden, "gelu", gated=False))] * config.layers
    return decoder(config, layers, norm, max_tokens=config.integer("max_seq_len"))


def falcon(config: Config) -> DecoderSpec:
    """The 7B (one KV head), the 40B ("new decoder architecture": groups, two norms side by side), the RW models."""
    grouped, parallel = config.flag("new_decoder_architecture"), config.flag("parallel_attn")
    norms = config.integer_or("num_ln_in_parallel_attn", 2 if grouped else 1)
    if (grouped and not parallel) or norms not in (1, 2) or (norms == 2 and not grouped and parallel):
        raise Unsupported(f"num_ln_in_parallel_attn={norms}, parallel_attn={parallel} in this architecture")
    kv_heads = config.integer_or("num_kv_heads", config.heads)
    if not grouped:
        kv_heads = 1 if config.flag("multi_query") else config.heads
    dim = _head_dim(config)
    norm = layer_norm(config, "layer_norm_epsilon")
    bias = config.flag("bias")
    alibi = config.flag("alibi")
    # transformers rounds the slopes to bf16 and adds the bias before the scores are divided by sqrt(head_dim).
    slopes = tuple(_bf16(slope) * dim**-0.5 for slope in _alibi_slopes(config.heads)) if alibi else ()
    layer = Layer(
        attention(config, rope=-1 if alibi else 0, kv_heads=kv_heads, head_dim=dim, bias=bias, alibi=slopes),
        plain(config, config.size("ffn_hidden_size", 4 * config.hidden), "activation", bias),
        attn_norm=norm,
        mlp_norm=None if parallel and norms == 1 else norm,
        parallel=parallel,
    )
    longest = {"max_tokens": 0} if alibi else {}
    return decoder(config, [layer] * config.layers, norm, () if alibi else (rope(config, dim),), **longest)


def phi(config: Config) -> DecoderSpec:
    """Phi-1, Phi-1.5 and Phi-2: attention and MLP side by side after one norm."""
    norm = layer_norm(config, "layer_norm_eps")
    layer = Layer(
        attention(config, bias=True, qk_norm=QkNorm(norm) if config.flag("qk_layernorm") else None),
        plain(config, config.size("intermediate_size"), "hidden_act"),
        attn_norm=norm,
        parallel=True,
    )
    ropes = (rope(config, config.head_dim, partial=True),)
    return decoder(config, [layer] * config.layers, norm, ropes, head_bias=True)


def stablelm(config: Config) -> DecoderSpec:
    norm = layer_norm(config, "layer_norm_eps")
    dim = _head_dim(config)
    parallel = config.flag("use_parallel_residual")
    qk_norm = QkNorm(layer_norm(config, "layer_norm_eps", bias=False), own_weights=True)
    layer = Layer(
        attention(
            config,
            head_dim=dim,
            bias=config.flag("use_qkv_bias"),
            out_bias=False,
            qk_norm=qk_norm if config.flag("qk_layernorm") else None,
        ),
        gated(config),
        attn_norm=norm,
        mlp_norm=None if parallel else norm,
        parallel=parallel,
    )
    return decoder(config, [layer] * config.layers, norm, (rope(config, dim, partial=True),))


def starcoder2(config: Config) -> DecoderSpec:
    norm = layer_norm(config, "norm_epsilon")
    bias = config.flag("use_bias")
    layer = pre_norm(
        norm,
        attention(config, window=config.window(), bias=bias),
        plain(config, config.size("intermediate_size"), "hidden_act", bias),
    )
    return decoder(config, [layer] * config.layers, norm, (rope(config, config.head_dim),))


def nemotron(config: Config) -> DecoderSpec:
    norm = layer_norm(config, "norm_eps")
    layer = pre_norm(
        norm,
        attention(config, bias=config.flag("attention_bias")),
        plain(config, config.size("intermediate_size"), "hidden_act", config.flag("mlp_bias")),
    )
    return decoder(config, [layer] * config.layers, norm, (rope(config, config.head_dim, partial=True),))
