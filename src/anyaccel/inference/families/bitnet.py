# SPDX-License-Identifier: Apache-2.0
"""BitNet b1.58, by Microsoft."""

from __future__ import annotations

import dataclasses

from anyaccel.inference.families.common import LLAMA, LLAMA_DEFAULTS, gated, llama_like, rms
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.spec.decoder import DecoderSpec


def bitnet(config: Config) -> DecoderSpec:
    """Llama with a norm before the last linear of attention, and of the MLP."""
    norm = rms(config)
    mlp = dataclasses.replace(gated(config), norm=norm)
    return llama_like(config, mlp=mlp, bias=config.get_bool("attention_bias"), out_norm=norm)


FAMILIES = {
    "bitnet": Family(
        "BitNet b1.58",
        bitnet,
        LLAMA.but(out_norm="self_attn.attn_sub_norm", mlp__norm="mlp.ffn_sub_norm"),
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 128256,
            "hidden_size": 2560,
            "intermediate_size": 6912,
            "num_hidden_layers": 30,
            "num_attention_heads": 20,
            "num_key_value_heads": 5,
            "hidden_act": "relu2",
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
        },
    ),
}
