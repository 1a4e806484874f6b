# SPDX-License-Identifier: Apache-2.0
"""Aria's language model."""

from __future__ import annotations

import dataclasses

from anyaccel.inference.families.common import (
    LLAMA,
    LLAMA_DEFAULTS,
    MOST_EXPERTS,
    attention,
    decoder,
    gated,
    pre_norm,
    rms,
)
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec, Mlp, Moe
from anyaccel.inference.spec.mapping import stacked


def aria(config: Config) -> DecoderSpec:
    """Llama with experts, which are gated by SiLU whatever the MLP beside them is."""
    shared = gated(config, config.get_bool("mlp_bias"))
    count = config.integer("moe_num_experts", maximum=MOST_EXPERTS)
    moe = Moe(
        count,
        config.integer("moe_topk", maximum=count),
        Mlp(shared.features, "silu", gated=True),
        scoring="none",
        normalise=False,
        softmax_after=True,
        shared=dataclasses.replace(
            shared, features=shared.features * config.integer("moe_num_shared_experts", maximum=MOST_EXPERTS)
        ),
    )
    norm = rms(config)
    layer = pre_norm(norm, attention(config, bias=config.get_bool("attention_bias")), moe)
    return decoder(config, [layer] * config.layers, norm, (rope(config, config.head_dim),))


ARIA = LLAMA.but(
    router="mlp.router",
    experts__gate_up=[
        stacked("=mlp.experts.gate_up_proj", transposed=True),
        stacked("mlp.experts.fc1", transposed=True),
    ],
    experts__down=[stacked("=mlp.experts.down_proj", transposed=True), stacked("mlp.experts.fc2", transposed=True)],
    shared__gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared__down="mlp.shared_experts.down_proj",
)


FAMILIES = {
    "aria_text": Family(
        "Aria (text)",
        aria,
        ARIA,
        {
            **LLAMA_DEFAULTS,
            "intermediate_size": 4096,
            "moe_num_experts": 8,
            "moe_topk": 2,
            "moe_num_shared_experts": 2,
        },
    ),
}
