# SPDX-License-Identifier: Apache-2.0
"""GGUF metadata as values of a Hugging Face config: what is special about each architecture."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.gguf_file import GgufSource, StringArray
from anyaccel.inference.families.model_config import MOST_LAYERS
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.outside import MOST, Values, flag, line, number, whole


class Metadata(Values):
    """The metadata of one architecture; counts are checked against the file's own tensors."""

    def __init__(self, source: GgufSource) -> None:
        path = source.files[0].path
        self.source = source
        self.used: set[str] = set()  # tensors that are read into the config
        self.architecture = Values(source.metadata, f"{path}: ").text("general.architecture")
        super().__init__(source.metadata, f"{path}: {line(self.architecture)}.")
        self.path = path

    def _value(self, name: str) -> Any:
        return super()._value(f"{self.architecture}.{name}")

    def count(self, name: str, default: int | None = None, minimum: int = 0, maximum: int = MOST) -> int:
        """A whole number; one for each layer is one where they are all alike."""
        if self.is_list(name):
            each = [whole(value, self.where + name) for value in self.items(name)]
            if len(set(each)) != 1:
                raise Unsupported(f"layers of different sizes ({self.where}{name})")
            return whole(each[0], self.where + name, minimum, maximum)
        return self.whole(name, default, minimum, maximum)

    def has_tensor(self, name: str) -> bool:
        return name in self.source

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Of a tensor that must be there."""
        return self.source.file_of(tensor).infos[tensor].shape

    @functools.cached_property
    def layers(self) -> int:
        """Layers that the file has tensors for."""
        count = self.count("block_count", minimum=1)
        if count > MOST_LAYERS or not any(name.startswith(f"blk.{count - 1}.") for name in self.source.names()):
            raise ModelError(f"{self.where}block_count={count}, but the file has no tensor of layer {count - 1}")
        return count

    @functools.cached_property
    def heads(self) -> int:
        return self.count("attention.head_count", minimum=1, maximum=self._largest)

    @functools.cached_property
    def kv_heads(self) -> int:
        return self.count("attention.head_count_kv", self.heads, 1, self._largest)

    @functools.cached_property
    def hidden(self) -> int:
        """Columns of the embedding."""
        columns = self.shape("token_embd.weight")[1]
        return self.count("embedding_length", minimum=columns, maximum=columns)

    @functools.cached_property
    def head_dim(self) -> int:
        width = self.count("attention.key_length", max(self.hidden // self.heads, 1), 1, self._largest)
        if self.has("attention.value_length"):
            self.count("attention.value_length", minimum=width, maximum=width)  # no architecture here has another one
        return width

    @functools.cached_property
    def rotated(self) -> int:
        """Values of a head that positions rotate: pairs."""
        count = self.count("rope.dimension_count", self.head_dim, 2, self.head_dim)
        if count % 2 and self.has("rope.dimension_count"):
            raise ModelError(f"{self.where}rope.dimension_count={count} is not even")
        return count

    def check_vocabulary(self, rows: int) -> None:
        """Check that the vocabulary has a token for each row of the embedding, and no other.

        Raises:
            ModelError: it has more or fewer.
        """
        if self.has("vocab_size"):
            self.count("vocab_size", minimum=rows, maximum=rows)
        tokens = self.source.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, StringArray) and tokens.count != rows:
            raise ModelError(
                f"{self.path}: tokenizer.ggml.tokens has {tokens.count} tokens, but 'token_embd.weight' {rows} rows"
            )

    @functools.cached_property
    def _largest(self) -> int:
        """The largest dimension of all tensors: no count of heads, features or experts is above it."""
        return max(max(info.shape, default=1) for file in self.source.files for info in file.infos.values())

    def features(self, name: str) -> int:
        """Rows of a matrix, or how many matrices there are."""
        return self.count(name, minimum=1, maximum=self._largest)


Extra = Callable[[Metadata, dict[str, Any]], None]


def biases(values: Metadata, config: dict[str, Any]) -> None:
    config["attention_bias"] = values.has_tensor("blk.0.attn_q.bias")
    config["mlp_bias"] = values.has_tensor("blk.0.ffn_up.bias")


def qwen_moe(values: Metadata, config: dict[str, Any]) -> None:
    config["num_experts"] = values.features("expert_count")
    config["num_experts_per_tok"] = values.features("expert_used_count")
    config["moe_intermediate_size"] = values.features("expert_feed_forward_length")
    config["decoder_sparse_step"] = 1
    config["norm_topk_prob"] = config["model_type"] == "qwen3_moe"  # llama.cpp normalises there too
    if config["model_type"] == "qwen2_moe":
        config["shared_expert_intermediate_size"] = values.features("expert_shared_feed_forward_length")


def gemma(values: Metadata, config: dict[str, Any]) -> None:
    config["head_dim"] = values.head_dim
    config["hidden_activation"] = config["hidden_act"] = "gelu_pytorch_tanh"


def gemma2(values: Metadata, config: dict[str, Any]) -> None:
    # Not in the file: llama.cpp knows the 27 B model by its number of layers, too.
    large = config["num_hidden_layers"] == 46
    config["query_pre_attn_scalar"] = config["hidden_size"] // values.heads if large else values.head_dim
    config["sliding_window"] = values.count("attention.sliding_window", 4096)
    config["attn_logit_softcapping"] = values.number("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = values.number("final_logit_softcapping", 30.0)
    config["layer_types"] = _pattern(config["num_hidden_layers"], 2)


def gemma3(values: Metadata, config: dict[str, Any]) -> None:
    large = config["num_hidden_layers"] == 62
    config["query_pre_attn_scalar"] = config["hidden_size"] // values.heads if large else values.head_dim
    config["sliding_window"] = values.count("attention.sliding_window", 4096)
    config["attn_logit_softcapping"] = config["final_logit_softcapping"] = None
    pattern = "attention.sliding_window_pattern"
    if values.is_list(pattern):
        each = [flag(local, values.where + pattern) for local in values.items(pattern)]
        config["layer_types"] = ["sliding_attention" if local else "full_attention" for local in each]
    else:
        config["layer_types"] = _pattern(values.layers, values.whole(pattern, 6, 1))
    full = {"rope_type": "default", **config.pop("rope_scaling", {}), "rope_theta": config.pop("rope_theta")}
    local = {"rope_type": "default", "rope_theta": values.number("rope.freq_base_swa", 10000.0, above=0.0)}
    config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}


def _pattern(layers: int, every: int) -> list[str]:
    """Every `every`-th layer sees all tokens."""
    return ["sliding_attention" if (index + 1) % every else "full_attention" for index in range(layers)]


def partial(values: Metadata, config: dict[str, Any]) -> None:
    config["partial_rotary_factor"] = values.rotated / values.head_dim


def phi3(values: Metadata, config: dict[str, Any]) -> None:
    config["sliding_window"] = values.count("attention.sliding_window", 0) or None
    config["original_max_position_embeddings"] = values.count(
        "rope.scaling.original_context_length", config["max_position_embeddings"]
    )
    if values.has_tensor("rope_factors_long.weight"):
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": _factors(values, "rope_factors_short.weight", values.rotated // 2),
            "long_factor": _factors(values, "rope_factors_long.weight", values.rotated // 2),
        }
        factor = "rope.scaling.attn_factor"
        if values.has(factor):
            config["rope_scaling"]["attention_factor"] = values.number(factor)


def granite(values: Metadata, config: dict[str, Any]) -> None:
    config["embedding_multiplier"] = values.number("embedding_scale", 1.0)
    config["residual_multiplier"] = values.number("residual_scale", 1.0)
    config["attention_multiplier"] = values.number("attention.scale", values.head_dim**-0.5)
    config["logits_scaling"] = values.number("logit_scale", 1.0)


def starcoder2(values: Metadata, config: dict[str, Any]) -> None:
    config["use_bias"] = values.has_tensor("blk.0.attn_q.bias")
    config["hidden_act"] = "gelu_pytorch_tanh"
    config["sliding_window"] = None  # the file does not have it


def stablelm(values: Metadata, config: dict[str, Any]) -> None:
    if values.has_tensor("blk.0.attn_q_norm.weight"):
        raise Unsupported(f"norm of queries and keys in a StableLM GGUF file ({values.path})")
    config["use_qkv_bias"] = values.has_tensor("blk.0.attn_q.bias")
    config["use_parallel_residual"] = not values.has_tensor("blk.0.ffn_norm.weight")
    config["qk_layernorm"] = False


def cohere(values: Metadata, config: dict[str, Any]) -> None:
    config["logit_scale"] = values.number("logit_scale", 1.0)
    config["use_qk_norm"] = values.has_tensor("blk.0.attn_q_norm.weight")


def gpt2(values: Metadata, config: dict[str, Any]) -> None:
    config["activation_function"] = "gelu_new"
    for name in ("rope_theta", "hidden_act", "head_dim", "num_key_value_heads"):
        config.pop(name, None)
    if config.pop("rope_scaling", None):
        raise ModelError(f"{values.path}: a scaling of rotary positions, which a 'gpt2' model has not")


def _factors(values: Metadata, name: str, count: int) -> list[float]:
    """The divisors of the rotary frequencies."""
    values.used.add(name)
    found = values.source.file_of(name).floats(name, (count,))
    return [number(each, f"{values.path}: tensor {name!r}: factor", above=0.0) for each in found]


def rope_scaling(values: Metadata) -> dict[str, Any]:
    kind = values.text("rope.scaling.type", "linear", known=("none", "linear", "yarn", "longrope"))
    if kind == "longrope" and not values.has_tensor("rope_factors_long.weight"):
        raise ModelError(f"{values.where}rope.scaling.type='longrope', but the file has no 'rope_factors_long.weight'")
    if values.has_tensor("rope_freqs.weight"):
        return _llama3_scaling(values)
    if kind == "linear":
        # Old files call the factor by another name, and a file without the type means this one.
        name = next((each for each in ("rope.scaling.factor", "rope.scale_linear") if values.has(each)), None)
        factor = values.number(name, above=0.0) if name is not None else 1.0
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else {}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": values.number("rope.scaling.factor", above=0.0)}
        if values.has("rope.scaling.original_context_length"):
            scaling["original_max_position_embeddings"] = values.count("rope.scaling.original_context_length")
        for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if values.has(f"rope.scaling.{key}"):
                scaling[name] = values.number(f"rope.scaling.{key}")
        return scaling
    return {}  # longrope's factors are tensors: see phi3


def _llama3_scaling(values: Metadata) -> dict[str, Any]:
    """Llama 3.1 and later: the file has the divisor of each frequency, not the parameters that they come from."""
    factors = _factors(values, "rope_freqs.weight", values.rotated // 2)
    scaling = {
        "rope_type": "llama3",
        "factor": max(factors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    dim, theta = 2 * len(factors), values.number("rope.freq_base", 10000.0, above=0.0)
    for index, found in enumerate(factors):
        wavelength = 2 * math.pi * theta ** (2 * index / dim)
        smooth = (8192 / wavelength - 1.0) / 3.0
        expected = 1 / ((1 - min(max(smooth, 0.0), 1.0)) / max(factors) + min(max(smooth, 0.0), 1.0))
        if not math.isclose(found, expected, rel_tol=1e-3):
            raise Unsupported(f"factors of rotary frequencies like those in {values.path} ('rope_freqs.weight')")
    return scaling
