# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 (Li et al., 2025): heads from checkpoints of their own, which draft with hidden states of another model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.families.common import LLAMA_DEFAULTS, attention, decoder, gated, rms
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec, HiddenInputs, Layer
from anyaccel.inference.spec.mapping import Base, Names, Rule, Unsupported
from anyaccel.validation import Fields

# A head's own layer, in checkpoints of its authors and in those of others.
_LAYERS = ("midlayer.", "layers.0.")
_MODEL_LAYERS = "model_layers"  # in the config: of the model that it drafts for


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of such a head."""
    names = config.get("architectures")
    given = [name.lower() for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return any("eagle3" in name for name in given) or config.get("speculators_model_type") == "eagle3"


def eagle3_config(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The config of a head that drafts for a model of so many layers."""
    inner = Fields(config, "config: ").mapping("transformer_layer_config").known()
    return {**config, **inner, _MODEL_LAYERS: layers}


def _taps(config: Config) -> tuple[int, ...]:
    """Behind how many layers the model's hidden states are taken: an early, a middle and a late one."""
    layers = config.integer(_MODEL_LAYERS)
    least = 0
    ids = config.items("eagle_aux_hidden_state_layer_ids")
    if not ids:  # here they are the numbers of the layers, from 0 on
        ids, least = config.mapping("eagle_config").items("eagle_aux_hidden_state_layer_ids"), 1
    taps = tuple(int(each) + least for each in ids) or (2, layers // 2, layers - 3)
    if not all(0 < tap <= layers for tap in taps):
        raise ModelError(f"config: hidden states behind layers {taps} of a model with {layers}")
    return taps


def eagle3(config: Config) -> DecoderSpec:
    norm, taps = rms(config), _taps(config)
    if config.layers != 1:
        raise Unsupported(f"EAGLE-3 head of {config.layers} layers")
    heads = attention(config, bias=config.get_bool("attention_bias"), out_bias=False, fused_input=True)
    layer = Layer(heads, gated(config), mlp_norm=norm)
    inputs = HiddenInputs(
        len(taps) * config.size("target_hidden_size", config.hidden),
        taps,
        own_tap=1,
        embed_norm=norm,
        hidden_norm=norm,
        reduced=True,
        fused=False,
        normed_residual=config.get_bool("norm_before_residual"),
        draft_vocab=config.size("draft_vocab_size", config.size("vocab_size")),
    )
    return decoder(config, [layer], norm, (rope(config, config.head_dim),), tied=False, hidden_inputs=inputs)


def _of_layer(*modules: str) -> list[Rule | tuple[Rule, ...]]:
    return [tuple(layer + module for module in modules) for layer in _LAYERS]


EAGLE3 = Family(
    "EAGLE-3",
    eagle3,
    Names(
        {
            "reduce": "fc",
            "fuse_embed_norm": _of_layer("input_layernorm"),
            "fuse_hidden_norm": _of_layer("hidden_norm"),
            "qkv": _of_layer("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "o": _of_layer("self_attn.o_proj"),
            "mlp_norm": _of_layer("post_attention_layernorm"),
            "mlp.gate_up": _of_layer("mlp.gate_proj", "mlp.up_proj"),
            "mlp.down": _of_layer("mlp.down_proj"),
            "final_norm": "norm",
            "head": "lm_head",
        },
        layer="",
        bases=(Base(""), Base("model.")),
    ),
    LLAMA_DEFAULTS,
)


def draft_tokens(source: Any, spec: DecoderSpec) -> list[int]:
    """The model's tokens that the rows of the head stand for: the checkpoint has how far each is from its row."""
    assert spec.hidden_inputs is not None
    rows = range(spec.hidden_inputs.draft_vocab)
    if "d2t" not in source and len(rows) == spec.vocab:
        return list(rows)
    found = [row + each for row, each in zip(rows, source.integers("d2t"), strict=False)]
    if len(found) != len(rows) or not all(0 <= each < spec.vocab for each in found):
        raise ModelError(f"d2t has {len(found)} of {len(rows)} tokens, or others than the {spec.vocab} of the model")
    return found
