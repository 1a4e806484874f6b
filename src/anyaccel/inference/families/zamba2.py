# SPDX-License-Identifier: Apache-2.0
"""Zamba2: Mamba-2, and blocks of attention and an MLP that several layers share, each with adapters of its own.

Where blocks are packed, each layer has a copy with its adapters added: a token reads as many bytes either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anyaccel.errors import ModelError
from anyaccel.inference.families.common import LLAMA, attention, decoder, rms
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.mamba import state_space, state_space_names
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.qwen_next import MOST_TAPS
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec, Layer, Mlp, Norm, SideBlock
from anyaccel.inference.spec.mapping import At, Part, Rules, Unsupported
from anyaccel.validation import check_text, short_repr

_MAMBA, _HYBRID = ("linear_attention", "mamba"), "hybrid"


def _hybrid_layers(config: Config) -> list[int]:
    given = config.items("layers_block_type")
    if len(given) < config.layers:
        raise ModelError(f"config: {len(given)} layers_block_type for {config.layers} layers")
    kinds = [check_text(kind, "config: layers_block_type") for kind in given[: config.layers]]
    for kind in kinds:
        if kind not in (*_MAMBA, _HYBRID):
            raise Unsupported(f"layer type {short_repr(kind)}")
    return [index for index, kind in enumerate(kinds) if kind == _HYBRID]


def zamba2(config: Config) -> DecoderSpec:
    norm, bias = rms(config), config.get_bool("add_bias_linear")
    heads, wide = config.size("n_mamba_heads"), config.size("mamba_expand") * config.hidden
    if wide % heads or 2 * config.hidden % config.heads:
        raise ModelError(f"config: hidden_size={config.hidden} cannot be divided among the heads")
    mixer = state_space(
        heads,
        wide // heads,
        config.size("mamba_ngroups"),
        config.size("mamba_d_state"),
        config.integer("mamba_d_conv", maximum=MOST_TAPS),
        Norm("rms", 1e-5),
        conv_bias=True,
        in_bias=bias,
        out_bias=bias,
        step_min=config.number("time_step_min", minimum=0.0),
    )
    dim = 2 * config.hidden // config.heads
    rotary = config.get_bool("use_mem_rope")
    full = attention(config, rope=0 if rotary else -1, head_dim=dim, scale=(dim / 2) ** -0.5, fused_input=True)
    features = config.size("intermediate_size", 4 * config.hidden)
    mlp = Mlp(features, config.activation(), gated=True, bias=bias, out_bias=bias)
    layers = [Layer(None, None, attn_norm=norm, recurrent=mixer)] * config.layers
    hybrids, blocks = _hybrid_layers(config), config.integer("num_mem_blocks")
    tied = config.get_bool("tie_word_embeddings")  # which is of blocks too, in transformers
    for use, index in enumerate(hybrids):
        side = SideBlock(norm, hybrids[use % blocks] if tied else index)
        layers[index] = Layer(full, mlp, attn_norm=norm, mlp_norm=norm, recurrent=mixer, side_block=side)
    longest = 16384 if config.get_bool("use_long_context") else config.integer("max_position_embeddings")
    return decoder(config, layers, norm, (rope(config, dim),) if rotary else (), max_tokens=longest)


def _shared(module: str, adapter: str = "") -> Callable[[At], Sequence[Part]]:
    """A module of a layer's block, which the first layer with the block has; and the adapter of this layer."""

    def parts(at: At) -> Sequence[Part]:
        side = at.of_layer.side_block
        assert side is not None
        block = f"{at.base.body}layers.{side.layer}.shared_transformer."
        use = sum(layer.side_block is not None for layer in at.spec.layers[: at.layer])
        names = [f"{block}{adapter}_list.{use}.{which}.weight" for which in (0, 1)] if adapter else []
        return [Part(f"{block}{module}.{at.suffix}", adapter=tuple(names))]

    return parts


def _attention_norm(at: At) -> Sequence[Part]:
    if at.of_layer.side_block is None:
        return [Part(at.name("input_layernorm"))]
    return _shared("input_layernorm")(at)


def _gate_up(at: At) -> Sequence[Part]:
    adapter = "" if at.suffix == "bias" else "feed_forward.gate_up_proj_adapter"
    return _shared("feed_forward.gate_up_proj", adapter)(at)


_QKV: Rules = [
    tuple(_shared(f"self_attn.{name}_proj", f"self_attn.linear_{name}_adapter") for name in "qkv"),
    tuple(_shared(f"self_attn.{name}_proj") for name in "qkv"),
]
_OF_MAMBA, _OF_HYBRID = state_space_names("mamba"), state_space_names("mamba_decoder.mamba")


FAMILIES = {
    "zamba2": Family(
        "Zamba2",
        zamba2,
        LLAMA.but(
            final_norm="final_layernorm",
            attn_norm=_attention_norm,
            qkv=_QKV,
            o=_shared("self_attn.o_proj"),
            mlp_norm=_shared("pre_ff_layernorm"),
            mlp__gate_up=_gate_up,
            mlp__down=_shared("feed_forward.down_proj"),
            side="linear",
            side_norm="mamba_decoder.input_layernorm",
            **{name: [rule, _OF_HYBRID[name]] for name, rule in _OF_MAMBA.items()},
        ),
        {
            "vocab_size": 32000,
            "hidden_size": 2560,
            "num_hidden_layers": 54,
            "num_attention_heads": 32,
            "max_position_embeddings": 4096,
            "layers_block_type": [
                *["mamba"] * 6,
                *["hybrid", *["mamba"] * 5] * 6,
                *["hybrid", *["mamba"] * 4],
                *["hybrid", *["mamba"] * 3],
                *["hybrid", *["mamba"] * 2],
            ],
            "mamba_d_state": 64,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "time_step_min": 0.001,
            "hidden_act": "gelu",
            "num_mem_blocks": 1,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        {"layer_types": "layers_block_type"},
    ),
}
