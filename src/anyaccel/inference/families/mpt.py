# SPDX-License-Identifier: Apache-2.0
"""MPT."""

from __future__ import annotations

import math
from typing import Any

from anyaccel.inference.families.common import TRANSFORMER, attention, decoder, layer_norm, own_head_dim, pre_norm
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import Architecture, Metadata
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.spec.decoder import DecoderSpec, Mlp
from anyaccel.inference.spec.mapping import Names, Unsupported
from anyaccel.validation import short_repr


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
            raise Unsupported(f"attn_config {name}={short_repr(given[name])}")
    config.refuse("logit_scale")
    no_bias, ratio = config.get_bool("no_bias"), config.integer("expansion_ratio")
    if not no_bias or ratio != 4:
        raise Unsupported(f"no_bias={no_bias} with expansion_ratio={ratio}")
    dim = own_head_dim(config)
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


MPT = Names(
    {
        "embed": "wte",
        "head": "/lm_head",
        "final_norm": "norm_f",
        "attn_norm": "norm_1",
        "mlp_norm": "norm_2",
        "qkv": "attn.Wqkv",
        "o": "attn.out_proj",
        "mlp.gate_up": "ffn.up_proj",
        "mlp.down": "ffn.down_proj",
    },
    layer="blocks.{layer}.",
    bases=TRANSFORMER,
)


FAMILIES = {
    "mpt": Family(
        "MPT",
        mpt,
        MPT,
        {
            "d_model": 2048,
            "n_heads": 16,
            "n_layers": 24,
            "expansion_ratio": 4,
            "max_seq_len": 2048,
            "vocab_size": 50368,
            "layer_norm_epsilon": 1e-5,
            "no_bias": True,
            "tie_word_embeddings": True,
        },
        {"num_attention_heads": "n_heads", "hidden_size": "d_model", "num_hidden_layers": "n_layers"},
    ),
}


def _gguf_mpt(values: Metadata, config: dict[str, Any]) -> None:
    slope = values.number("attention.max_alibi_bias", 0.0)
    config["attn_config"] = {
        "alibi": slope > 0,
        "alibi_bias_max": int(slope),
        "clip_qkv": values.number("attention.clamp_kqv", 0.0),
        "qk_ln": values.has_tensor("blk.0.attn_q_norm.weight"),
    }
    config["expansion_ratio"] = config["intermediate_size"] // config["hidden_size"]


ARCHITECTURES = {
    "mpt": Architecture(
        "mpt",
        {"transformer.wte": "token_embd", "transformer.norm_f": "output_norm", "lm_head": "output"},
        {
            "norm_1": "attn_norm",
            "attn.Wqkv": "attn_qkv",
            "attn.out_proj": "attn_output",
            "norm_2": "ffn_norm",
            "ffn.up_proj": "ffn_up",
            "ffn.down_proj": "ffn_down",
        },
        prefix="transformer.blocks.{layer}.",
        norm_eps="layer_norm_epsilon",
        extra=(_gguf_mpt,),
        renamed={"max_position_embeddings": "max_seq_len"},
    ),
}
