# SPDX-License-Identifier: Apache-2.0
"""Gemma 3n, of which the language model runs."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.families.common import attention, decoder, pre_norm, rms
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gemma import GEMMA4, GEMMA4_DEFAULTS, layer_inputs, sharing
from anyaccel.inference.families.gguf import (
    GGUF_FOUR_NORMS,
    GGUF_LLAMA,
    GGUF_MODULES,
    GGUF_QK_NORM,
    Architecture,
    Metadata,
    sliding_layers,
)
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope, rope_parameters_of
from anyaccel.inference.spec.decoder import DecoderSpec, InputGate, Laurel, Mlp, QkNorm, Streams
from anyaccel.inference.spec.mapping import At, Part, Rules, Unsupported
from anyaccel.validation import check_integer, check_number

_MOST_STREAMS = 16
_SPARSE_LAYERS, _SPARSITY = 10, 0.95  # of a config that says nothing


def _of_each_layer(config: Config, name: str) -> list[Any]:
    given = config.items(name)
    if len(given) != config.layers:
        raise ModelError(f"config: {len(given)} values of {name} for {config.layers} layers")
    return given


def _cutoffs(config: Config) -> list[float | None]:
    """Of each layer: how many standard deviations above the mean of its gates the share of them ends that is left."""
    name = "activation_sparsity_pattern"
    if not config.has(name):
        sparse = _SPARSE_LAYERS if config.layers > _SPARSE_LAYERS else 0
        shares = [_SPARSITY] * sparse + [0.0] * (config.layers - sparse)
    else:
        shares = [check_number(each, f"config: {name}", 0.0, 1.0) for each in _of_each_layer(config, name)]
    if 1.0 in shares:
        raise ModelError(f"config: {name}: a layer without any feature (1.0)")
    return [statistics.NormalDist().inv_cdf(share) if share else None for share in shares]


def gemma3n(config: Config) -> DecoderSpec:
    """Several residuals, a low-rank way beside attention, inputs of each layer, gates that are cut.

    Later layers see earlier ones' keys and values.
    """
    if config.integer("altup_active_idx", minimum=0):
        raise Unsupported(f"altup_active_idx={config.integer('altup_active_idx')}")
    kinds = config.layer_types(lambda index: (index + 1) % 5 != 0)
    sources = sharing(config, kinds)
    norm = rms(config)
    features = config.size("hidden_size_per_layer_input")
    if config.is_list("intermediate_size"):
        where = "config: intermediate_size"
        sizes = [check_integer(each, where, 1, 1 << 20) for each in _of_each_layer(config, "intermediate_size")]
    else:
        sizes = [config.size("intermediate_size")] * config.layers
    act = config.activation("hidden_activation")
    streams = Streams(
        config.integer("altup_num_inputs", 2, _MOST_STREAMS), norm, scaled=config.get_bool("altup_correct_scale")
    )
    layers = []
    for kind, source, size, cutoff in zip(kinds, sources, sizes, _cutoffs(config), strict=True):
        sliding = kind == "sliding_attention"
        heads = attention(
            config,
            scale=1.0,
            rope=int(sliding),
            window=config.window() if sliding else 0,
            bias=config.get_bool("attention_bias"),
            qk_norm=QkNorm(norm),
            value_norm=None if source >= 0 else dataclasses.replace(norm, weight=False),
            kv_layer=source,
        )
        layers.append(
            pre_norm(
                norm,
                heads,
                Mlp(size, act, gated=True, cutoff=cutoff),
                attn_post_norm=norm,
                mlp_post_norm=norm,
                input_gate=InputGate(Mlp(features, act, gated=True), norm),
                laurel=Laurel(config.size("laurel_rank"), norm, 1 / math.sqrt(2)),
                streams=streams,
            )
        )
    full = rope_parameters_of(config, "full_attention", config.number("rope_theta", 1e6), scaled=True)
    sliding_theta = config.number("rope_local_base_freq", 1e4)
    local = rope_parameters_of(config, "sliding_attention", sliding_theta, scaled=False)
    return decoder(
        config,
        layers,
        norm,
        tuple(rope(config, config.head_dim, parameters=each) for each in (full, local)),
        embedding_scale=config.hidden**0.5,
        logits_softcap=config.number("final_logit_softcapping", 0.0, minimum=0.0),
        layer_inputs=layer_inputs(config, features, norm),
        streams=streams.count,
    )


def _linears(module: str) -> Rules:
    """One linear for each stream but the first, or all in one tensor (GGUF)."""

    def modules(at: At) -> list[Part]:
        return [Part(at.name(f"{module}.{index}")) for index in range(at.spec.streams - 1)]

    def entries(at: At) -> list[Part]:
        return [Part(at.name(module), index=index) for index in range(at.spec.streams - 1)]

    return [modules, entries]


GEMMA3N = GEMMA4.but(
    streams_in=_linears("altup_projections"),
    streams_out=_linears("altup_unembed_projections"),
    laurel_down="laurel.linear_left",
    laurel_up="laurel.linear_right",
    laurel_norm="laurel.post_laurel_norm",
    stream_norm="altup.router_norm",
    stream_router="altup.modality_router",
    stream_predict="altup.prediction_coefs",
    stream_correct="altup.correction_coefs",
    stream_scale="=altup.correct_output_scale",
)


GEMMA3N_DEFAULTS = {
    **{name: value for name, value in GEMMA4_DEFAULTS.items() if name not in ("per_layer_config", "rope_parameters")},
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "num_kv_shared_layers": 15,
    "final_logit_softcapping": 30.0,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "laurel_rank": 64,
}


def gguf_gemma3n(values: Metadata, config: dict[str, Any]) -> None:
    config["hidden_activation"] = "gelu_pytorch_tanh"
    config["num_key_value_heads"] = values.kv_heads
    name = "feed_forward_length"
    if values.is_list(name):
        config["intermediate_size"] = [check_integer(each, values.where + name, 1) for each in values.items(name)]
    else:
        config["intermediate_size"] = values.features(name)
    config["layer_types"] = sliding_layers(values, 5)
    config["sliding_window"] = values.count("attention.sliding_window", 512)
    config["num_kv_shared_layers"] = values.count("attention.shared_kv_layers", 0)
    # llama.cpp does not ask the file for it either.
    config["final_logit_softcapping"] = values.number("final_logit_softcapping", 30.0)
    config["hidden_size_per_layer_input"] = values.features("embedding_length_per_layer_input")
    config["vocab_size_per_layer_input"] = values.shape("per_layer_token_embd.weight")[0]
    config["altup_active_idx"] = values.count("altup.active_idx", 0)
    config["altup_num_inputs"] = values.count("altup.num_inputs", 4)
    config["laurel_rank"] = values.shape("blk.0.laurel_l.weight")[0]
    config["altup_correct_scale"] = values.has_tensor("blk.0.altup_correct_scale.weight")
    name = "activation_sparsity_scale"
    given = values.items(name) if values.is_list(name) else [-math.inf] * values.layers
    # As many standard deviations; for a layer without a cutoff, minus infinity.
    config["activation_sparsity_pattern"] = [
        0.0 if each == -math.inf else statistics.NormalDist().cdf(check_number(each, values.where + name))
        for each in given
    ]
    config["rope_parameters"] = {
        "full_attention": {"rope_type": "default", "rope_theta": config.pop("rope_theta")},
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": values.number("rope.freq_base_swa", 1e4, above=0.0),
        },
    }


FAMILIES = {
    "gemma3n_text": Family("Gemma 3n (text)", gemma3n, GEMMA3N, GEMMA3N_DEFAULTS),
    "gemma3n": Family("Gemma 3n (text part)", gemma3n, GEMMA3N, GEMMA3N_DEFAULTS, text="text_config"),
}
ARCHITECTURES = {
    "gemma3n": Architecture(
        "gemma3n_text",
        {
            **GGUF_MODULES,
            "model.embed_tokens_per_layer": "per_layer_token_embd",
            "model.per_layer_model_projection": "per_layer_model_proj",
            "model.per_layer_projection_norm": "per_layer_proj_norm",
            "model.altup_projections": "altup_proj",
            "model.altup_unembed_projections": "altup_unembd_proj",
        },
        {
            **GGUF_LLAMA,
            **GGUF_FOUR_NORMS,
            **GGUF_QK_NORM,
            "per_layer_input_gate": "inp_gate",
            "per_layer_projection": "proj",
            "post_per_layer_input_norm": "post_norm",
            "laurel.linear_left": "laurel_l",
            "laurel.linear_right": "laurel_r",
            "laurel.post_laurel_norm": "laurel_post_norm",
            "altup.router_norm": "altup_router_norm",
            "altup.modality_router": "altup_router",
            "altup.prediction_coefs": "altup_predict_coef",
            "altup.correction_coefs": "altup_correct_coef",
            "=altup.correct_output_scale": "altup_correct_scale.weight",
        },
        by_layer=True,
        extra=(gguf_gemma3n,),
        others=("gemma3n",),
    ),
}
