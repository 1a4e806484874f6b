# SPDX-License-Identifier: Apache-2.0
"""OPT and BioGPT."""

from __future__ import annotations

from dataclasses import replace

from anyaccel.inference.families.common import attention, decoder, own_head_dim, plain, pre_norm
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.spec.decoder import DecoderSpec, Norm
from anyaccel.inference.spec.mapping import Base, Names, Unsupported
from anyaccel.validation import MAX_INT


def opt(config: Config) -> DecoderSpec:
    if not config.get_bool("do_layer_norm_before"):
        raise Unsupported("do_layer_norm_before=False (OPT-350M's norms after the residual)")
    if config.integer_or("word_embed_proj_dim", config.hidden) != config.hidden:
        raise Unsupported("word_embed_proj_dim (projections beside the embedding)")
    affine = config.get_bool("layer_norm_elementwise_affine")
    norm = Norm("layer", 1e-5, weight=affine, bias=affine)
    bias = config.get_bool("enable_bias")
    layer = pre_norm(
        norm,
        attention(config, rope=-1, kv_heads=config.heads, head_dim=own_head_dim(config), bias=bias),
        plain(config, config.size("ffn_dim"), "activation_function", bias),
    )
    longest = config.integer("max_position_embeddings", maximum=MAX_INT - 2)
    final = None if config.get_bool("_remove_final_layer_norm") else norm
    return decoder(config, [layer] * config.layers, final, positions=longest + 2, position_offset=2)


def biogpt(config: Config) -> DecoderSpec:
    norm = Norm("layer", 1e-5, bias=True)  # not the config's
    layer = pre_norm(
        norm,
        attention(config, rope=-1, kv_heads=config.heads, head_dim=own_head_dim(config), bias=True),
        plain(config, config.size("intermediate_size"), "hidden_act"),
    )
    longest = config.integer("max_position_embeddings", maximum=MAX_INT - 2)
    return decoder(
        config,
        [layer] * config.layers,
        norm,
        positions=longest + 2,
        position_offset=2,
        embedding_scale=config.hidden**0.5 if config.get_bool("scale_embedding") else 1.0,
    )


OPT = Names(
    {
        "embed": "embed_tokens",
        "head": "/lm_head",
        "positions": "embed_positions",
        "final_norm": "final_layer_norm",
        "attn_norm": "self_attn_layer_norm",
        "mlp_norm": "final_layer_norm",
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": "self_attn.out_proj",
        "mlp.gate_up": "fc1",
        "mlp.down": "fc2",
    },
    bases=(Base("model.decoder."), Base("decoder.")),
)


BIOGPT = replace(OPT.but(head="/output_projection", final_norm="layer_norm"), bases=(Base("biogpt."), Base("")))


FAMILIES = {
    "biogpt": Family(
        "BioGPT",
        biogpt,
        BIOGPT,
        {
            "vocab_size": 42384,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "hidden_act": "gelu",
            "max_position_embeddings": 1024,
            "scale_embedding": True,
            "tie_word_embeddings": True,
        },
    ),
    "opt": Family(
        "OPT",
        opt,
        OPT,
        {
            "vocab_size": 50272,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "ffn_dim": 3072,
            "max_position_embeddings": 2048,
            "do_layer_norm_before": True,
            "num_attention_heads": 12,
            "activation_function": "relu",
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "tie_word_embeddings": True,
        },
    ),
}
