# SPDX-License-Identifier: Apache-2.0
"""StableLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anyaccel.inference.families.common import (
    LLAMA,
    LLAMA_DEFAULTS,
    attention,
    decoder,
    gated,
    layer_norm,
    own_head_dim,
)
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import GGUF_LLAMA, GGUF_MODULES, Architecture, Metadata, partial
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec, Layer, QkNorm
from anyaccel.inference.spec.mapping import At, Part, Rule, Unsupported


def stablelm(config: Config) -> DecoderSpec:
    norm = layer_norm(config, "layer_norm_eps")
    dim = own_head_dim(config)
    parallel = config.get_bool("use_parallel_residual")
    qk_norm = QkNorm(layer_norm(config, "layer_norm_eps", bias=False), own_weights=True)
    layer = Layer(
        attention(
            config,
            head_dim=dim,
            bias=config.get_bool("use_qkv_bias"),
            out_bias=False,
            qk_norm=qk_norm if config.get_bool("qk_layernorm") else None,
        ),
        gated(config),
        attn_norm=norm,
        mlp_norm=None if parallel else norm,
        parallel=parallel,
    )
    return decoder(config, [layer] * config.layers, norm, (rope(config, dim, partial=True),))


def _each_head(module: str, queries: bool) -> Rule:
    """A norm of its own for each head."""

    def parts(at: At) -> Sequence[Part]:
        heads = at.attention.heads if queries else at.attention.kv_heads
        return [Part(at.name(f"{module}.{head}")) for head in range(heads)]

    return parts


STABLELM = LLAMA.but(
    q_norm=_each_head("self_attn.q_layernorm.norms", queries=True),
    k_norm=_each_head("self_attn.k_layernorm.norms", queries=False),
)


def gguf_stablelm(values: Metadata, config: dict[str, Any]) -> None:
    if values.has_tensor("blk.0.attn_q_norm.weight"):
        raise Unsupported(f"norm of queries and keys in a StableLM GGUF file ({values.path})")
    config["use_qkv_bias"] = values.has_tensor("blk.0.attn_q.bias")
    config["use_parallel_residual"] = not values.has_tensor("blk.0.ffn_norm.weight")
    config["qk_layernorm"] = False


FAMILIES = {
    "stablelm": Family(
        "StableLM",
        stablelm,
        STABLELM,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 50304,
            "hidden_size": 2560,
            "intermediate_size": 6912,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
        },
    ),
}
ARCHITECTURES = {
    "stablelm": Architecture(
        "stablelm", GGUF_MODULES, GGUF_LLAMA, norm_eps="layer_norm_eps", extra=(partial, gguf_stablelm)
    ),
}
