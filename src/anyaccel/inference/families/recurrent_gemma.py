# SPDX-License-Identifier: Apache-2.0
"""RecurrentGemma (Griffin): gated linear recurrent units, and attention within a window in every third layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from anyaccel.errors import ModelError
from anyaccel.inference.families.common import LLAMA, attention, decoder, gated, own_head_dim, pre_norm, rms, round_bf16
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.qwen_next import MOST_TAPS
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec, GatedLru
from anyaccel.inference.spec.mapping import At, Part, plus_one
from anyaccel.validation import check_text


def recurrent_gemma(config: Config) -> DecoderSpec:
    width, dim, norm = config.size("lru_width", config.hidden), own_head_dim(config), rms(config)
    if width % config.heads:
        raise ModelError(f"config: lru_width={width} is not a multiple of {config.heads} heads")
    mlp = gated(config, bias=True, act="hidden_activation")
    if mlp.features < 2:
        raise ModelError(f"config: intermediate_size={mlp.features} is of gates and features")
    mlp = replace(mlp, features=mlp.features // 2)
    unit = GatedLru(
        config.heads,
        width // config.heads,
        config.integer("conv1d_width", maximum=MOST_TAPS),
        config.activation("hidden_activation"),
    )
    full = attention(
        config,
        head_dim=dim,
        bias=config.get_bool("attention_bias"),
        out_bias=True,
        window=config.integer("attention_window_size"),
    )
    kinds = [
        check_text(kind, "config: block_types", ("recurrent", "attention")) for kind in config.items("block_types")
    ]
    if not kinds:
        raise ModelError("config: block_types is empty")
    made = {"recurrent": pre_norm(norm, None, mlp, recurrent=unit), "attention": pre_norm(norm, full, mlp)}
    return decoder(
        config,
        [made[kinds[index % len(kinds)]] for index in range(config.layers)],
        norm,
        (rope(config, dim, partial=True),),
        embedding_scale=round_bf16(config.hidden**0.5),
        logits_softcap=config.number("logits_soft_cap", minimum=0.0),
        max_tokens=0,
    )


def _gates(at: At) -> Sequence[Part]:
    """A matrix [in, out] of each head."""
    names = [at.name(f"=temporal_block.rg_lru.{kind}_gate_{at.suffix}") for kind in ("input", "recurrent")]
    unit = at.of_layer.recurrent
    assert isinstance(unit, GatedLru)
    if at.suffix == "bias":
        return [Part(name) for name in names]
    return [Part(name, index=head, transposed=True) for name in names for head in range(unit.heads)]


FAMILIES = {
    "recurrent_gemma": Family(
        "RecurrentGemma (Griffin)",
        recurrent_gemma,
        LLAMA.but(
            final_norm=plus_one("final_norm"),
            attn_norm=plus_one("temporal_pre_norm"),
            mlp_norm=plus_one("channel_pre_norm"),
            qkv=tuple(f"temporal_block.{name}_proj" for name in "qkv"),
            o="temporal_block.o_proj",
            mlp__gate_up=("mlp_block.gate_proj", "mlp_block.up_proj"),
            mlp__down="mlp_block.down_proj",
            mixer__in=("temporal_block.linear_x", "temporal_block.linear_y"),
            mixer__conv="temporal_block.conv_1d",
            mixer__gates=_gates,
            mixer__rate="=temporal_block.rg_lru.recurrent_param",
            mixer__out="temporal_block.linear_out",
        ),
        {
            "vocab_size": 256000,
            "hidden_size": 2560,
            "intermediate_size": 7680,
            "num_hidden_layers": 26,
            "num_attention_heads": 10,
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_window_size": 2048,
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "rms_norm_eps": 1e-6,
            "block_types": ["recurrent", "recurrent", "attention"],
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": True,
        },
        {"sliding_window": "attention_window_size"},
    ),
}
