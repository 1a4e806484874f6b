# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3's layers, whose attention sees the tokens that an indexer chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.families.common import decoder, each_mlp, gated, pre_norm, rms
from anyaccel.inference.families.deepseek import (
    DEEPSEEK,
    DEEPSEEK_ALIASES,
    GGUF_DEEPSEEK_EXPERTS,
    GGUF_LATENT,
    GGUF_NEXTN,
    NEXTN,
    V3_DEFAULTS,
    choice_by_bias,
    gguf_deepseek_experts,
    gguf_latent,
    latent_attention,
    latent_rope,
)
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import GGUF_GATED, GGUF_MODULES, Architecture, Metadata
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec, Indexer, Norm
from anyaccel.validation import check_text


def _sparse(config: Config, interleaved: bool, own: Sequence[bool]) -> DecoderSpec:
    """A decoder of such layers.

    Args:
        interleaved: pairs of the indexer's rotary positions are neighbours; the rotated values are its first ones.
        own: which layers have an indexer, and which see what the last one before them that has one has chosen.
    """
    norm, heads = rms(config), latent_attention(config)
    key_norm = Norm("layer", 1e-6, bias=True)  # not the config's
    indexer = Indexer(
        top_k=config.integer("index_topk"),
        heads=config.integer("index_n_heads", maximum=1 << 16),
        head_dim=config.size("index_head_dim"),
        norm=key_norm,
        rope=1,
    )
    mlps = each_mlp(
        config, choice_by_bias(config), gated(config), config.integer_or("first_k_dense_replace", 3, minimum=0)
    )
    layers = [
        pre_norm(norm, replace(heads, indexer=replace(indexer, own=each)), mlp)
        for each, mlp in zip(own, mlps, strict=True)
    ]
    turned = rope(config, config.integer("qk_rope_head_dim"), interleaved=interleaved)
    return decoder(config, layers, norm, (latent_rope(config, interleaved=True), turned))


def deepseek_v32(config: Config) -> DecoderSpec:
    return _sparse(config, False, [True] * config.layers)


def glm_moe_dsa(config: Config) -> DecoderSpec:
    return _sparse(config, True, _with_indexer(config))


def _with_indexer(config: Config) -> list[bool]:
    """Listed for each layer, or by a pattern of letters, or one of so many from a layer on."""
    count, kinds = config.layers, {"full": True, "shared": False, "F": True, "S": False}
    listed = config.is_list("index_topk_pattern")
    pattern = config.items("index_topk_pattern") if listed else list(config.text("index_topk_pattern", ""))
    given = config.items("indexer_types") or pattern
    if not given:
        each = config.integer_or("index_topk_freq", 1)
        first = config.integer_or("index_skip_topk_offset", 2, minimum=0)
        return [max(index - first + 1, 0) % each == 0 for index in range(count)]
    if len(given) < count:
        raise ModelError(f"config: {len(given)} indexer_types for {count} layers")
    own = [
        kinds[check_text(kind, f"config: indexer_types[{index}]", tuple(kinds))]
        for index, kind in enumerate(given[:count])
    ]
    if not own[0]:
        raise ModelError("config: indexer_types[0] is 'shared', and there is no layer before it")
    return own


SPARSE = DEEPSEEK.but(
    index_q="self_attn.indexer.wq_b",
    index_k="self_attn.indexer.wk",
    index_norm="self_attn.indexer.k_norm",
    index_weights="self_attn.indexer.weights_proj",
)

_DEFAULTS = {
    **V3_DEFAULTS,
    "max_position_embeddings": 163840,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
}

FAMILIES = {
    "deepseek_v32": Family("DeepSeek-V3.2", deepseek_v32, SPARSE, _DEFAULTS, DEEPSEEK_ALIASES, draft_head=NEXTN),
    "glm_moe_dsa": Family(
        "GLM-5",
        glm_moe_dsa,
        SPARSE,
        {
            **_DEFAULTS,
            "vocab_size": 154880,
            "hidden_size": 6144,
            "intermediate_size": 12288,
            "num_hidden_layers": 78,
            "num_attention_heads": 64,
            "q_lora_rank": 2048,
            "v_head_dim": 256,
            "qk_nope_head_dim": 192,
            "n_group": 1,
            "topk_group": 1,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "index_n_heads": 32,
        },
        DEEPSEEK_ALIASES,
        draft_head=NEXTN,
    ),
}


def _gguf_indexer(values: Metadata, config: dict[str, Any]) -> None:
    config["index_n_heads"] = values.features("attention.indexer.head_count")
    config["index_head_dim"] = values.features("attention.indexer.key_length")
    config["index_topk"] = values.count("attention.indexer.top_k", minimum=1)


def _gguf_indexer_types(values: Metadata, config: dict[str, Any]) -> None:
    config["indexer_types"] = values.layers_with({"indexer.attn_k.weight": "full", "attn_norm.weight": "shared"})


_GGUF_SPARSE = {
    **GGUF_LATENT,
    **GGUF_GATED,
    **GGUF_DEEPSEEK_EXPERTS,
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
}
_EXTRA = (gguf_deepseek_experts, gguf_latent, _gguf_indexer)
ARCHITECTURES = {
    "deepseek32": Architecture("deepseek_v32", GGUF_MODULES, _GGUF_SPARSE, latent=True, extra=_EXTRA, draft=GGUF_NEXTN),
    "glm-dsa": Architecture(
        "glm_moe_dsa",
        GGUF_MODULES,
        _GGUF_SPARSE,
        latent=True,
        extra=(*_EXTRA, _gguf_indexer_types),
        draft=GGUF_NEXTN,
    ),
}
