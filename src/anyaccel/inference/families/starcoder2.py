# SPDX-License-Identifier: Apache-2.0
"""StarCoder2."""

from __future__ import annotations

from typing import Any

from anyaccel.inference.families.common import LLAMA, LLAMA_DEFAULTS, attention, decoder, layer_norm, plain, pre_norm
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import GGUF_ATTENTION, GGUF_MODULES, Architecture, Metadata
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec


def starcoder2(config: Config) -> DecoderSpec:
    norm = layer_norm(config, "norm_epsilon")
    bias = config.get_bool("use_bias")
    layer = pre_norm(
        norm,
        attention(config, window=config.window(), bias=bias),
        plain(config, config.size("intermediate_size"), "hidden_act", bias),
    )
    return decoder(config, [layer] * config.layers, norm, (rope(config, config.head_dim),))


STARCODER2 = LLAMA.but(mlp__gate_up="mlp.c_fc", mlp__down="mlp.c_proj")


def gguf_starcoder2(values: Metadata, config: dict[str, Any]) -> None:
    config["use_bias"] = values.has_tensor("blk.0.attn_q.bias")
    config["hidden_act"] = "gelu_pytorch_tanh"
    config["sliding_window"] = None  # the file does not have it


FAMILIES = {
    "starcoder2": Family(
        "StarCoder2",
        starcoder2,
        STARCODER2,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 49152,
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 30,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}
ARCHITECTURES = {
    "starcoder2": Architecture(
        "starcoder2",
        GGUF_MODULES,
        {**GGUF_ATTENTION, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
        norm_eps="norm_epsilon",
        extra=(gguf_starcoder2,),
    ),
}
