# SPDX-License-Identifier: Apache-2.0
"""MiniMax-Text-01."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from anyaccel.inference.families.common import LLAMA_DEFAULTS, QKV, attention, decoder, gated, mixture, rms
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.mistral import MIXTRAL
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec, Layer, LinearAttention, Norm
from anyaccel.inference.spec.mapping import At, Part, Unsupported


def lightning_attention(config: Config, index: int) -> LinearAttention:
    """Heads that forget at a fixed rate, later layers more slowly (Qin et al., "Lightning Attention-2", 2024)."""
    if config.activation() != "silu":
        raise Unsupported(f"hidden_act {config.activation()!r} of lightning attention")
    heads, dim = config.heads, config.head_dim
    factor = 1 - index / (config.layers - 1 + 1e-5) + 1e-5
    return LinearAttention(
        heads,
        heads,
        dim,
        dim,
        slopes=tuple(2 ** (-8 * (head + 1) / heads) * factor for head in range(heads)),
        silu=True,
        norm=Norm("rms", 1e-6),
        norm_width=heads * dim,
        norm_first=True,
        gate_activation="sigmoid",
    )


def _factors(config: Config, kind: str) -> tuple[float, float]:
    """What the residual behind a mixer or an MLP is multiplied by, and what is added to it."""
    alpha = config.number(f"{kind}_alpha_factor", above=0.0)
    return alpha, config.number(f"{kind}_beta_factor") / alpha


def minimax(config: Config) -> DecoderSpec:
    """The residual of both halves of a layer is the norm's result, times alpha.

    The next norm takes alpha out again: without it, the norm's epsilon is that much smaller.
    """
    mlp_alpha, mlp_scale = _factors(config, "mlp")
    plain = rms(config)
    of_mlp = replace(plain, eps=plain.eps / mlp_alpha**2)
    moe = mixture(config, "num_local_experts", gated(config))
    types = config.layer_types(lambda index: index % 2 == 1, "linear_attention")
    layers = []
    for index, kind in enumerate(types):
        linear = kind == "linear_attention"
        alpha, scale = _factors(config, "linear_attn" if linear else "full_attn")
        if scale != mlp_scale:
            raise Unsupported(f"factors {scale} and {mlp_scale} of a layer's attention and MLP")
        layers.append(
            Layer(
                None if linear else attention(config, window=config.window()),
                moe,
                attn_norm=of_mlp if index else plain,
                mlp_norm=replace(plain, eps=plain.eps / alpha**2),
                residual_scale=scale,
                residual_from_norm=True,
                recurrent=lightning_attention(config, index) if linear else None,
            )
        )
    return decoder(config, layers, of_mlp, (rope(config, config.head_dim),))


def _by_head(at: At) -> Sequence[Part]:
    """A head has its queries, keys and values one after another."""
    mixer = at.of_layer.recurrent
    assert isinstance(mixer, LinearAttention)
    dim, name = mixer.key_dim, at.name("self_attn.qkv_proj")
    rows = [
        Part(name, order=tuple((3 * head + kind) * dim + i for head in range(mixer.heads) for i in range(dim)))
        for kind in range(3)
    ]
    return [*rows, Part(at.name("self_attn.output_gate"))]


FAMILIES = {
    "minimax": Family(
        "MiniMax-Text-01",
        minimax,
        MIXTRAL.but(
            qkv=QKV,
            mixer__in=_by_head,
            mixer__norm="self_attn.norm",
            mixer__out="self_attn.out_proj",
        ),
        {
            **LLAMA_DEFAULTS,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "full_attn_alpha_factor": 1,
            "full_attn_beta_factor": 1,
            "linear_attn_alpha_factor": 1,
            "linear_attn_beta_factor": 1,
            "mlp_alpha_factor": 1,
            "mlp_beta_factor": 1,
        },
        {"num_experts": "num_local_experts"},
    ),
}
