# SPDX-License-Identifier: Apache-2.0
"""GGUF metadata as values of a Hugging Face config: what is special about each architecture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.runtimes.gguf_file import GgufSource
from anyaccel.inference.runtimes.mapping import Unsupported


class Values:
    """The metadata of one architecture."""

    def __init__(self, source: GgufSource) -> None:
        self.source = source
        self.path = source.files[0].path
        self.architecture = str(source.metadata.get("general.architecture"))

    def get(self, name: str, default: Any = None) -> Any:
        return self.source.metadata.get(f"{self.architecture}.{name}", default)

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ModelError(f"{self.path}: its metadata lack {self.architecture}.{name}")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self[name] if default is None else self.get(name, default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if isinstance(value, list):
            raise Unsupported(f"layers of different sizes ({self.path}: {self.architecture}.{name})")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 40:
            raise ModelError(f"{self.path}: {self.architecture}.{name} is {value!r}, not a count")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self[name] if default is None else self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"{self.path}: {self.architecture}.{name} is {value!r}, not a number")
        return float(value)

    def has(self, tensor: str) -> bool:
        return tensor in self.source

    @property
    def heads(self) -> int:
        return self.count("attention.head_count")

    @property
    def head_dim(self) -> int:
        return self.count("attention.key_length", self.count("embedding_length") // max(self.heads, 1))


Extra = Callable[[Values, dict[str, Any]], None]


def biases(values: Values, config: dict[str, Any]) -> None:
    config["attention_bias"] = values.has("blk.0.attn_q.bias")
    config["mlp_bias"] = values.has("blk.0.ffn_up.bias")


def qwen_moe(values: Values, config: dict[str, Any]) -> None:
    config["num_experts"] = values.count("expert_count")
    config["num_experts_per_tok"] = values.count("expert_used_count")
    config["moe_intermediate_size"] = values.count("expert_feed_forward_length")
    config["decoder_sparse_step"] = 1
    config["norm_topk_prob"] = config["model_type"] == "qwen3_moe"  # llama.cpp normalises there too
    if config["model_type"] == "qwen2_moe":
        config["shared_expert_intermediate_size"] = values.count("expert_shared_feed_forward_length")


def gemma(values: Values, config: dict[str, Any]) -> None:
    config["head_dim"] = values.head_dim
    config["hidden_activation"] = config["hidden_act"] = "gelu_pytorch_tanh"


def gemma2(values: Values, config: dict[str, Any]) -> None:
    # Not in the file: llama.cpp knows the 27 B model by its number of layers, too.
    large = config["num_hidden_layers"] == 46
    config["query_pre_attn_scalar"] = config["hidden_size"] // values.heads if large else values.head_dim
    config["sliding_window"] = values.count("attention.sliding_window", 4096)
    config["attn_logit_softcapping"] = values.number("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = values.number("final_logit_softcapping", 30.0)
    config["layer_types"] = _pattern(config["num_hidden_layers"], 2)


def gemma3(values: Values, config: dict[str, Any]) -> None:
    large = config["num_hidden_layers"] == 62
    config["query_pre_attn_scalar"] = config["hidden_size"] // values.heads if large else values.head_dim
    config["sliding_window"] = values.count("attention.sliding_window", 4096)
    config["attn_logit_softcapping"] = config["final_logit_softcapping"] = None
    pattern = values.get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        config["layer_types"] = ["sliding_attention" if local else "full_attention" for local in pattern]
    else:
        config["layer_types"] = _pattern(config["num_hidden_layers"], int(pattern))
    full = {"rope_type": "default", **config.pop("rope_scaling", {}), "rope_theta": config.pop("rope_theta")}
    local = {"rope_type": "default", "rope_theta": values.number("rope.freq_base_swa", 10000.0)}
    config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}


def _pattern(layers: int, every: int) -> list[str]:
    """Every `every`-th layer sees all tokens."""
    return ["sliding_attention" if (index + 1) % every else "full_attention" for index in range(layers)]


def partial(values: Values, config: dict[str, Any]) -> None:
    config["partial_rotary_factor"] = values.count("rope.dimension_count", values.head_dim) / values.head_dim


def phi3(values: Values, config: dict[str, Any]) -> None:
    config["sliding_window"] = values.count("attention.sliding_window", 0) or None
    config["original_max_position_embeddings"] = values.count(
        "rope.scaling.original_context_length", config["max_position_embeddings"]
    )
    if values.has("rope_factors_long.weight"):
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": values.source.file_of("rope_factors_short.weight").floats("rope_factors_short.weight"),
            "long_factor": values.source.file_of("rope_factors_long.weight").floats("rope_factors_long.weight"),
        }
        factor = values.get("rope.scaling.attn_factor")
        if factor is not None:
            config["rope_scaling"]["attention_factor"] = float(factor)


def granite(values: Values, config: dict[str, Any]) -> None:
    config["embedding_multiplier"] = values.number("embedding_scale", 1.0)
    config["residual_multiplier"] = values.number("residual_scale", 1.0)
    config["attention_multiplier"] = values.number("attention.scale", values.head_dim**-0.5)
    config["logits_scaling"] = values.number("logit_scale", 1.0)


def starcoder2(values: Values, config: dict[str, Any]) -> None:
    config["use_bias"] = values.has("blk.0.attn_q.bias")
    config["hidden_act"] = "gelu_pytorch_tanh"
    config["sliding_window"] = None  # the file does not have it


def stablelm(values: Values, config: dict[str, Any]) -> None:
    if values.has("blk.0.attn_q_norm.weight"):
        raise Unsupported(f"norm of queries and keys in a StableLM GGUF file ({values.path})")
    config["use_qkv_bias"] = values.has("blk.0.attn_q.bias")
    config["use_parallel_residual"] = not values.has("blk.0.ffn_norm.weight")
    config["qk_layernorm"] = False


def cohere(values: Values, config: dict[str, Any]) -> None:
    config["logit_scale"] = values.number("logit_scale", 1.0)
    config["use_qk_norm"] = values.has("blk.0.attn_q_norm.weight")


def gpt2(values: Values, config: dict[str, Any]) -> None:
    config["activation_function"] = "gelu_new"
    for name in ("rope_theta", "hidden_act", "head_dim", "num_key_value_heads"):
        config.pop(name, None)


def rope_scaling(values: Values, config: Mapping[str, Any]) -> dict[str, Any]:
    kind = values.get("rope.scaling.type", "none")
    if values.has("rope_freqs.weight"):
        return _llama3_scaling(values, config)
    if kind == "linear":
        return {"rope_type": "linear", "factor": values.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": values.number("rope.scaling.factor")}
        if values.get("rope.scaling.original_context_length") is not None:
            scaling["original_max_position_embeddings"] = values.count("rope.scaling.original_context_length")
        for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if values.get(f"rope.scaling.{key}") is not None:
                scaling[name] = values.number(f"rope.scaling.{key}")
        return scaling
    if kind in ("none", "longrope"):  # longrope's factors are tensors: see phi3
        return {}
    raise Unsupported(f"rope.scaling.type {kind!r} ({values.path})")


def _llama3_scaling(values: Values, config: Mapping[str, Any]) -> dict[str, Any]:
    """Llama 3.1 and later: the file has the divisor of each frequency, not the parameters that they come from."""
    factors = values.source.file_of("rope_freqs.weight").floats("rope_freqs.weight")
    scaling = {
        "rope_type": "llama3",
        "factor": max(factors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    dim = 2 * len(factors)
    for index, found in enumerate(factors):
        wavelength = 2 * math.pi * config["rope_theta"] ** (2 * index / dim)
        smooth = (8192 / wavelength - 1.0) / 3.0
        expected = 1 / ((1 - min(max(smooth, 0.0), 1.0)) / max(factors) + min(max(smooth, 0.0), 1.0))
        if not math.isclose(found, expected, rel_tol=1e-3):
            raise Unsupported(f"factors of rotary frequencies like those in {values.path} ('rope_freqs.weight')")
    return scaling
