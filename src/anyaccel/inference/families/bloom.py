# SPDX-License-Identifier: Apache-2.0
"""BLOOM."""

from __future__ import annotations

import math

from anyaccel.inference.families.common import (
    TRANSFORMER,
    attention,
    by_head,
    decoder,
    layer_norm,
    own_head_dim,
    pre_norm,
)
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import Architecture
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.spec.decoder import DecoderSpec, Mlp
from anyaccel.inference.spec.mapping import Names


def alibi_slopes(heads: int) -> list[float]:
    """Press et al., "Train Short, Test Long", 2022; heads that are no power of two get every other slope of twice."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (index + 1) / power) for index in range(power)]
    return slopes + [2 ** (-4 * (2 * index + 1) / power) for index in range(heads - power)]


def bloom(config: Config) -> DecoderSpec:
    norm = layer_norm(config, "layer_norm_epsilon")
    slopes = tuple(alibi_slopes(config.heads))
    layer = pre_norm(
        norm,
        attention(config, rope=-1, kv_heads=config.heads, head_dim=own_head_dim(config), bias=True, alibi=slopes),
        Mlp(4 * config.hidden, "gelu_tanh", gated=False, bias=True, out_bias=True),
        residual_from_norm=config.get_bool("apply_residual_connection_post_layernorm"),
    )
    return decoder(config, [layer] * config.layers, norm, embedding_norm=norm, max_tokens=0)


BLOOM = Names(
    {
        "embed": "word_embeddings",
        "embed_norm": "word_embeddings_layernorm",
        "head": "/lm_head",
        "final_norm": "ln_f",
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "qkv": [by_head("self_attention.query_key_value"), "self_attention.qkv"],
        "o": "self_attention.dense",
        "mlp.gate_up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    layer="h.{layer}.",
    bases=TRANSFORMER,
)


FAMILIES = {
    "bloom": Family(
        "BLOOM",
        bloom,
        BLOOM,
        {
            "vocab_size": 250880,
            "hidden_size": 64,
            "n_layer": 2,
            "n_head": 8,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        {"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    ),
}


GGUF_BLOOM_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attention.qkv": "attn_qkv",  # queries, keys and values one after another, not by head
    "self_attention.dense": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
ARCHITECTURES = {
    "bloom": Architecture(
        "bloom",
        {
            "transformer.word_embeddings": "token_embd",
            "transformer.word_embeddings_layernorm": "token_embd_norm",
            "transformer.ln_f": "output_norm",
            "lm_head": "output",
        },
        GGUF_BLOOM_LAYER,
        prefix="transformer.h.{layer}.",
        norm_eps="layer_norm_epsilon",
    ),
}
