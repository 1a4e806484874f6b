# SPDX-License-Identifier: Apache-2.0
"""EXAONE 4."""

from __future__ import annotations

from typing import Any

from anyaccel.inference.families.common import LLAMA_DEFAULTS, attention, decoder, gated, rms, windows
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import GGUF_MODULES, GGUF_POST_NORMS, Architecture, Metadata, sliding_layers
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.olmo import OLMO2
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec, Layer, QkNorm
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.validation import short_repr


def exaone4(config: Config) -> DecoderSpec:
    """Norms after attention and MLP only; with windows, layers that see everything have no positions."""
    norm = rms(config)
    each_window = [0] * config.layers
    if config.has("sliding_window"):
        pattern = 0
        if not config.items("layer_types"):
            if isinstance(config.required("sliding_window_pattern"), str):  # "LLLG": the first models of this family
                raise Unsupported(f"sliding_window_pattern={short_repr(config.text('sliding_window_pattern'))}")
            pattern = config.integer("sliding_window_pattern")
        each_window = windows(config, config.layer_types(lambda index: (index + 1) % pattern != 0))
    rotate = [window > 0 or not config.has("sliding_window") for window in each_window]
    layers = [
        Layer(
            attention(config, rope=0 if rotate[index] else -1, window=window, qk_norm=QkNorm(norm)),
            gated(config),
            attn_post_norm=norm,
            mlp_post_norm=norm,
        )
        for index, window in enumerate(each_window)
    ]
    return decoder(config, layers, norm, (rope(config, config.head_dim),))


FAMILIES = {
    "exaone4": Family(
        "EXAONE 4",
        exaone4,
        OLMO2,
        {
            **LLAMA_DEFAULTS,
            "vocab_size": 102400,
            "intermediate_size": 16384,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
}


def _gguf_exaone4(values: Metadata, config: dict[str, Any]) -> None:
    config["sliding_window"] = values.count("attention.sliding_window", 0) or None
    config["layer_types"] = sliding_layers(values, 4 if config["sliding_window"] else 1)


ARCHITECTURES = {"exaone4": Architecture("exaone4", GGUF_MODULES, GGUF_POST_NORMS, extra=(_gguf_exaone4,))}
