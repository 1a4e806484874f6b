# SPDX-License-Identifier: Apache-2.0
"""The layers and weight names that most families are made of."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import Attention, DecoderSpec, Layer, Mlp, Moe, Norm, Rope
from anyaccel.inference.spec.mapping import At, Base, Names, Part, Unsupported
from anyaccel.validation import MAX_INT, check_text


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


def pre_norm(norm: Norm, attention: Attention | None, mlp: Mlp | Moe, **more: Any) -> Layer:
    """The usual layer: a norm before attention and another before the MLP."""
    return Layer(attention, mlp, attn_norm=norm, mlp_norm=norm, **more)


def max_tokens(config: Config, ropes: tuple[Rope, ...]) -> int:
    """The longest context: dynamic rotary positions reach `dynamic_factor` times as far as the config says."""
    longest = config.integer("max_position_embeddings")
    return min(max([longest, *(int(longest * each.dynamic_factor) for each in ropes)]), MAX_INT)


def check_convolution(config: Config) -> None:
    """Recurrent mixers have SiLU behind their convolution."""
    if config.activation() != "silu":
        raise Unsupported(f"hidden_act {config.activation()!r} of a convolution")


def decoder(
    config: Config, layers: list[Layer], final_norm: Norm | None, ropes: tuple[Rope, ...] = (), **more: Any
) -> DecoderSpec:
    """A decoder with a config's usual sizes.

    Args:
        more: other fields of DecoderSpec.
    """
    for attention in (layer.attention for layer in layers if layer.attention is not None):
        if attention.rope >= len(ropes):
            raise ModelError("config: a layer has no rotary positions")
        if attention.rope < 0:
            continue
        each = ropes[attention.rope]
        if each.first + 2 * len(each.inv_freq) > attention.head_dim:
            raise ModelError(f"config: {2 * len(each.inv_freq)} rotated values in heads of {attention.head_dim}")
    alike: dict[Layer, Layer] = {}
    values = {
        "vocab": config.integer("vocab_size"),
        "hidden": config.hidden,
        # Equal layers are one object: who lists their weights asks csrc/llm once for it.
        "layers": tuple(alike.setdefault(layer, layer) for layer in layers),
        "final_norm": final_norm,
        "ropes": ropes,
        "tied": config.get_bool("tie_word_embeddings"),
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


def round_bf16(value: float) -> float:
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    (rounded,) = struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))
    return float(rounded)


def own_head_dim(config: Config) -> int:
    """Of families that do not read `head_dim`."""
    if config.hidden % config.heads:
        raise ModelError(f"config: hidden_size={config.hidden} is not a multiple of {config.heads} heads")
    return config.hidden // config.heads


MOST_EXPERTS = 2048  # so that a damaged config does not fill the memory


def mixture(config: Config, experts: str, expert: Mlp, **more: Any) -> Moe:
    count, chosen = config.integer(experts, maximum=MOST_EXPERTS), config.integer("num_experts_per_tok")
    if chosen > count:
        raise ModelError(f"config: num_experts_per_tok={chosen} of {count} experts")
    return Moe(count, chosen, expert, **more)


def each_mlp(config: Config, moe: Moe, dense: Mlp, first: int) -> list[Mlp | Moe]:
    """The MLP of each layer: as `mlp_layer_types` lists them, or the `first` ones are dense."""
    given = config.items("mlp_layer_types") or [
        "dense" if index < first else "sparse" for index in range(config.layers)
    ]
    if len(given) < config.layers:
        raise ModelError(f"config: {len(given)} mlp_layer_types for {config.layers} layers")
    known: dict[str, Mlp | Moe] = {"dense": dense, "sparse": moe}
    return [
        known[check_text(kind, f"config: mlp_layer_types[{index}]", tuple(known))]
        for index, kind in enumerate(given[: config.layers])
    ]


TRANSFORMER = (Base("transformer."), Base(""))


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


LLAMA = Names(
    {
        "embed": "embed_tokens",
        "head": "/lm_head",
        "final_norm": "norm",
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "qkv": QKV,
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "o": "self_attn.o_proj",
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": "mlp.down_proj",
    }
)


def by_head(module: str) -> Callable[[At], Sequence[Part]]:
    """Fused queries, keys and values [KV heads, queries of the group + key + value, head_dim]."""

    def parts(at: At) -> Sequence[Part]:
        a = at.attention
        group = a.heads // a.kv_heads

        def pick(kinds: range) -> tuple[int, ...]:
            return tuple(
                ((head * (group + 2)) + kind) * a.head_dim + i
                for head in range(a.kv_heads)
                for kind in kinds
                for i in range(a.head_dim)
            )

        name = at.name(module)
        return [
            Part(name, order=pick(kinds))
            for kinds in (range(group), range(group, group + 1), range(group + 1, group + 2))
        ]

    return parts


LLAMA_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
