# SPDX-License-Identifier: Apache-2.0
"""Falcon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anyaccel.inference.families.bloom import BLOOM, GGUF_BLOOM_LAYER, alibi_slopes
from anyaccel.inference.families.common import attention, decoder, layer_norm, own_head_dim, plain, round_bf16
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import Architecture, Metadata
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec, Layer
from anyaccel.inference.spec.mapping import At, Part, Rule, Unsupported


def falcon(config: Config) -> DecoderSpec:
    """The 7B (one KV head), the 40B ("new decoder architecture": groups, two norms side by side), the RW models."""
    grouped, parallel = config.get_bool("new_decoder_architecture"), config.get_bool("parallel_attn")
    norms = config.integer_or("num_ln_in_parallel_attn", 2 if grouped else 1)
    if (grouped and not parallel) or norms not in (1, 2) or (norms == 2 and not grouped and parallel):
        raise Unsupported(f"num_ln_in_parallel_attn={norms}, parallel_attn={parallel} in this architecture")
    kv_heads = config.integer_or("num_kv_heads", config.heads)
    if not grouped:
        kv_heads = 1 if config.get_bool("multi_query") else config.heads
    dim = own_head_dim(config)
    norm = layer_norm(config, "layer_norm_epsilon")
    bias = config.get_bool("bias")
    alibi = config.get_bool("alibi")
    # transformers rounds the slopes to bf16 and adds the bias before the scores are divided by sqrt(head_dim).
    slopes = tuple(round_bf16(slope) * dim**-0.5 for slope in alibi_slopes(config.heads)) if alibi else ()
    layer = Layer(
        attention(config, rope=-1 if alibi else 0, kv_heads=kv_heads, head_dim=dim, bias=bias, alibi=slopes),
        plain(config, config.size("ffn_hidden_size", 4 * config.hidden), "activation", bias),
        attn_norm=norm,
        mlp_norm=None if parallel and norms == 1 else norm,
        parallel=parallel,
    )
    longest = {"max_tokens": 0} if alibi else {}
    return decoder(config, [layer] * config.layers, norm, () if alibi else (rope(config, dim),), **longest)


def _falcon_norm(shared: str, own: str) -> Rule:
    """Two norms side by side have names of their own."""

    def parts(at: At) -> Sequence[Part]:
        layer = at.of_layer
        return [Part(at.name(own if layer.parallel and layer.mlp_norm is not None else shared))]

    return parts


FALCON = BLOOM.but(
    attn_norm=_falcon_norm("input_layernorm", "ln_attn"), mlp_norm=_falcon_norm("post_attention_layernorm", "ln_mlp")
)


FAMILIES = {
    "falcon": Family(
        "Falcon",
        falcon,
        FALCON,
        {
            "vocab_size": 65024,
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "layer_norm_epsilon": 1e-5,
            "multi_query": True,
            "parallel_attn": True,
            "max_position_embeddings": 2048,
            "activation": "gelu",
            "tie_word_embeddings": True,
        },
        {"n_embed": "hidden_size"},
    ),
}


def _gguf_falcon(values: Metadata, config: dict[str, Any]) -> None:
    grouped = values.has_tensor("blk.0.attn_norm_2.weight")
    config["new_decoder_architecture"] = grouped
    config["multi_query"] = not grouped and values.kv_heads == 1
    config["num_kv_heads"] = values.kv_heads
    config["activation"] = "gelu"
    config.pop("head_dim")


ARCHITECTURES = {
    "falcon": Architecture(
        "falcon",
        {"transformer.word_embeddings": "token_embd", "transformer.ln_f": "output_norm", "lm_head": "output"},
        {**GGUF_BLOOM_LAYER, "ln_mlp": "attn_norm", "ln_attn": "attn_norm_2"},
        prefix="transformer.h.{layer}.",
        norm_eps="layer_norm_epsilon",
        extra=(_gguf_falcon,),
        renamed={"intermediate_size": "ffn_hidden_size"},
    ),
}
