# SPDX-License-Identifier: Apache-2.0
"""nanochat."""

from __future__ import annotations

import dataclasses

from anyaccel.inference.families.common import LLAMA, LLAMA_DEFAULTS, attention, decoder, plain, pre_norm, rms
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec, QkNorm
from anyaccel.inference.spec.mapping import Unsupported


def nanochat(config: Config) -> DecoderSpec:
    """Norms without weights, one of them behind the embedding; positions rotate the other way round."""
    norm = dataclasses.replace(rms(config), weight=False)
    heads = attention(config, bias=config.get_bool("attention_bias"), qk_norm=QkNorm(norm, after_rope=True))
    layer = pre_norm(norm, heads, plain(config, config.size("intermediate_size"), "hidden_act", bias=False))
    forward = rope(config, config.head_dim)
    if forward.dynamic_base:
        raise Unsupported("rope_type 'dynamic' in this family")
    backward = dataclasses.replace(
        forward,
        inv_freq=tuple(-each for each in forward.inv_freq),
        long_inv_freq=tuple(-each for each in forward.long_inv_freq),
    )
    return decoder(
        config,
        [layer] * config.layers,
        norm,
        (backward,),
        embedding_norm=norm,
        logits_softcap=config.number("final_logit_softcapping", 0.0, minimum=0.0),
    )


FAMILIES = {
    "nanochat": Family(
        "nanochat",
        nanochat,
        LLAMA.but(mlp__gate_up="mlp.fc1", mlp__down="mlp.fc2"),
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 50304,
            "hidden_size": 768,
            "intermediate_size": 8192,
            "num_hidden_layers": 12,
            "num_attention_heads": 6,
            "hidden_act": "relu2",
            "final_logit_softcapping": 15.0,
        },
    ),
}
