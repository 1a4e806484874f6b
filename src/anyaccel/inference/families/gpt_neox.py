# SPDX-License-Identifier: Apache-2.0
"""GPT-NeoX, Pythia and Persimmon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anyaccel.inference.families.common import (
    LLAMA,
    attention,
    by_head,
    decoder,
    layer_norm,
    own_head_dim,
    plain,
    pre_norm,
)
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import Architecture, Metadata, partial
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec, QkNorm
from anyaccel.inference.spec.mapping import At, Base, Names, Part
from anyaccel.validation import MAX_INT, check_integer


def gpt_neox(config: Config) -> DecoderSpec:
    norm = layer_norm(config, "layer_norm_eps")
    dim = own_head_dim(config)
    layer = pre_norm(
        norm,
        attention(config, kv_heads=config.heads, head_dim=dim, bias=config.get_bool("attention_bias")),
        plain(config, config.size("intermediate_size"), "hidden_act"),
        parallel=config.get_bool("use_parallel_residual"),
    )
    return decoder(config, [layer] * config.layers, norm, (rope(config, dim, partial=True),))


GPT_NEOX = Names(
    {
        "embed": "embed_in",
        "head": ["/embed_out", "/lm_head"],
        "final_norm": "final_layer_norm",
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "qkv": [by_head("attention.query_key_value"), "attention.qkv"],
        "o": "attention.dense",
        "mlp.gate_up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    bases=(Base("gpt_neox."), Base("")),
)


def gpt_neox_japanese(config: Config) -> DecoderSpec:
    """Only the last layer's attention has a bias."""
    norm = layer_norm(config, "layer_norm_eps")
    dim = own_head_dim(config)
    features = int(config.hidden * config.number("intermediate_multiple_size", above=0.0))
    mlp = plain(config, check_integer(features, "config: intermediate_multiple_size", 1, MAX_INT), "hidden_act", False)
    layers = [
        pre_norm(norm, attention(config, kv_heads=config.heads, head_dim=dim, out_bias=index == config.layers - 1), mlp)
        for index in range(config.layers)
    ]
    return decoder(config, layers, norm, (rope(config, dim, partial=True),))


def persimmon(config: Config) -> DecoderSpec:
    norm = layer_norm(config, "layer_norm_eps")
    dim = own_head_dim(config)
    layer = pre_norm(
        norm,
        attention(
            config,
            kv_heads=config.heads,
            head_dim=dim,
            bias=True,
            qk_norm=QkNorm(norm) if config.get_bool("qk_layernorm") else None,
        ),
        plain(config, config.size("intermediate_size"), "hidden_act"),
    )
    return decoder(config, [layer] * config.layers, norm, (rope(config, dim, partial=True),))


def _dense(at: At) -> Sequence[Part]:
    return [Part(at.name("=attention.dense_bias" if at.suffix == "bias" else "attention.dense"))]


GPT_NEOX_JAPANESE = replace(
    GPT_NEOX.but(final_norm="final_layer_norm", qkv=by_head("attention.query_key_value"), o=_dense),
    bases=(Base("gpt_neox_japanese."), Base("")),
)


PERSIMMON = LLAMA.but(
    final_norm="final_layernorm",
    qkv=by_head("self_attn.query_key_value"),
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    o="self_attn.dense",
    mlp__gate_up="mlp.dense_h_to_4h",
    mlp__down="mlp.dense_4h_to_h",
)


FAMILIES = {
    "gpt_neox": Family(
        "GPT-NeoX, Pythia",
        gpt_neox,
        GPT_NEOX,
        {
            "vocab_size": 50432,
            "hidden_size": 6144,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "intermediate_size": 24576,
            "hidden_act": "gelu",
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "use_parallel_residual": True,
            "attention_bias": True,
            "partial_rotary_factor": 0.25,
        },
        {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
    ),
    "gpt_neox_japanese": Family(
        "GPT-NeoX Japanese",
        gpt_neox_japanese,
        GPT_NEOX_JAPANESE,
        {
            "vocab_size": 32000,
            "hidden_size": 2560,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_multiple_size": 4,
            "hidden_act": "gelu",
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
    ),
    "persimmon": Family(
        "Persimmon",
        persimmon,
        PERSIMMON,
        {
            "vocab_size": 262144,
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "hidden_act": "relu2",
            "max_position_embeddings": 16384,
            "layer_norm_eps": 1e-5,
            "qk_layernorm": True,
            "partial_rotary_factor": 0.5,
        },
    ),
}


def _gguf_gpt_neox(values: Metadata, config: dict[str, Any]) -> None:
    config["hidden_act"] = "gelu"
    config["use_parallel_residual"] = values.get_bool("use_parallel_residual", True)
    config["attention_bias"] = values.has_tensor("blk.0.attn_qkv.bias")


ARCHITECTURES = {
    "gptneox": Architecture(
        "gpt_neox",
        {"gpt_neox.embed_in": "token_embd", "gpt_neox.final_layer_norm": "output_norm", "lm_head": "output"},
        {
            "input_layernorm": "attn_norm",
            "attention.qkv": "attn_qkv",  # queries, keys and values one after another, not by head
            "attention.dense": "attn_output",
            "post_attention_layernorm": "ffn_norm",
            "mlp.dense_h_to_4h": "ffn_up",
            "mlp.dense_4h_to_h": "ffn_down",
        },
        prefix="gpt_neox.layers.{layer}.",
        norm_eps="layer_norm_eps",
        extra=(partial, _gguf_gpt_neox),
    ),
}
