# SPDX-License-Identifier: Apache-2.0
"""GPT-NeoX and Pythia."""

from __future__ import annotations

from typing import Any

from anyaccel.inference.families.common import attention, by_head, decoder, layer_norm, own_head_dim, plain, pre_norm
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import Architecture, Metadata, partial
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec
from anyaccel.inference.spec.mapping import Base, Names


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
