# SPDX-License-Identifier: Apache-2.0
"""Apertus, by the Swiss AI Initiative."""

from __future__ import annotations

from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.families.common import LLAMA, LLAMA_DEFAULTS, llama_like, plain, rms
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import GGUF_ATTENTION, GGUF_MODULES, GGUF_QK_NORM, Architecture, Metadata, biases
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.spec.decoder import DecoderSpec, QkNorm
from anyaccel.validation import Fields, check_number

_VALUES = ("alpha_p", "alpha_n", "beta", "eps")  # that the activation of a layer has learned


def apertus(config: Config) -> DecoderSpec:
    """Llama with norms of queries and keys, and an activation with learned values in place of gates."""
    mlp = plain(config, config.size("intermediate_size"), "hidden_act", bias=False)
    return llama_like(config, mlp=mlp, bias=config.get_bool("attention_bias"), qk_norm=QkNorm(rms(config)))


def gguf_apertus(values: Metadata, config: dict[str, Any]) -> None:
    """The activations' values are metadata: one for each layer, or one for all."""
    config["hidden_act"] = "xielu"
    metadata = Fields(values.source.metadata, f"{values.path}: ")
    for name in _VALUES:
        at = f"xielu.{name}"
        given = metadata.items(at) if metadata.is_list(at) else [metadata.number(at)] * values.layers
        if len(given) != values.layers:
            raise ModelError(f"{metadata.where}{at} is of {len(given)} layers, not of {values.layers}")
        for layer, value in enumerate(given):
            values.vectors[f"model.layers.{layer}.mlp.act_fn.{name}"] = [check_number(value, metadata.where + at)]


FAMILIES = {
    "apertus": Family(
        "Apertus",
        apertus,
        LLAMA.but(
            attn_norm="attention_layernorm",
            mlp_norm="feedforward_layernorm",
            mlp__gate_up="mlp.up_proj",
            mlp__act=tuple(f"=mlp.act_fn.{name}" for name in _VALUES),
        ),
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 131072,
            "intermediate_size": 14336,
            "hidden_act": "xielu",
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 12000000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
    ),
}
ARCHITECTURES = {
    "apertus": Architecture(
        "apertus",
        GGUF_MODULES,
        {
            **{module: name for module, name in GGUF_ATTENTION.items() if not module.endswith("layernorm")},
            **GGUF_QK_NORM,
            "attention_layernorm": "attn_norm",
            "feedforward_layernorm": "ffn_norm",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        },
        extra=(biases, gguf_apertus),
    ),
}
