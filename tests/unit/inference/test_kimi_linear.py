# SPDX-License-Identifier: Apache-2.0
"""Kimi Linear's config.json: what it says of its layers, as checkpoints have it and as transformers has it."""

from __future__ import annotations

from typing import Any

import pytest

from anyaccel.inference.families.registry import family_of
from anyaccel.inference.spec.decoder import LinearAttention, Moe

# As in Kimi-Linear-48B-A3B, with fewer of all.
CONFIG: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "model_max_length": 1024,
    "moe_renormalize": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.446,
    "linear_attn_config": {
        "full_attn_layers": [4, 8],
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "head_dim": 12,
        "num_heads": 3,
        "short_conv_kernel_size": 4,
    },
}


def test_the_layers_of_a_checkpoint() -> None:
    spec = family_of(CONFIG).spec(CONFIG)
    assert [index for index, layer in enumerate(spec.layers, 1) if layer.attention is not None] == [4, 8]
    assert [isinstance(layer.mlp, Moe) for layer in spec.layers] == [False] + 7 * [True]
    mixer = spec.layers[0].recurrent
    assert isinstance(mixer, LinearAttention)
    assert (mixer.heads, mixer.key_dim, mixer.kernel, mixer.decay_rank) == (3, 12, 4, 12)
    assert spec.max_tokens == 1024


def test_they_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    made = transformers.KimiLinearConfig(**{key: value for key, value in CONFIG.items() if key != "model_type"})
    assert family_of(CONFIG).spec(made.to_dict()) == family_of(CONFIG).spec(CONFIG)
