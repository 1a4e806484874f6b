# SPDX-License-Identifier: Apache-2.0
"""Flint."""

from __future__ import annotations

from anyaccel.inference.families.common import (
    LLAMA_DEFAULTS,
    attention,
    decoder,
    gated,
    mixture,
    pre_norm,
    rms,
    windows,
)
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.qwen import QWEN_MOE, sparse
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec, QkNorm


def flint(config: Config) -> DecoderSpec:
    """Qwen's layers with experts, sinks, and positions in layers with a window only."""
    norm = rms(config)
    last = config.layers - 1
    each_window = windows(config, config.layer_types(lambda index: index >= 2 and index % 4 != 1 and index != last))
    moe = mixture(
        config,
        "num_experts",
        gated(config, features="moe_intermediate_size"),
        scoring="sigmoid",
        normalise=config.get_bool("norm_topk_prob"),
        shared=gated(config, features="shared_expert_intermediate_size"),
    )
    bias = config.get_bool("attention_bias")
    layers = [
        pre_norm(
            norm,
            attention(config, rope=0 if window else -1, window=window, bias=bias, qk_norm=QkNorm(norm), sinks=True),
            mlp,
        )
        for window, mlp in zip(each_window, sparse(config, moe, gated(config), (0, 1)), strict=True)
    ]
    return decoder(config, layers, norm, (rope(config, config.head_dim),))


FAMILIES = {
    "flint": Family(
        "Flint",
        flint,
        QWEN_MOE.but(sinks=["=self_attn.sinks", "=self_attn.softmax_offset"]),
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 150144,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 1024,
            "num_hidden_layers": 49,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "sliding_window": 513,
            "num_experts": 256,
            "num_experts_per_tok": 6,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        },
    ),
}
