# SPDX-License-Identifier: Apache-2.0
"""GGUF files of a family: its metadata as values of a config, and the names of its tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.gguf_file import GgufSource, StringArray
from anyaccel.inference.families.model_config import MOST_LAYERS
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.validation import MAX_INT, Fields, check_bool, check_integer, check_number, one_line


class Metadata(Fields):
    """The metadata of one architecture; counts are checked against the file's own tensors."""

    def __init__(self, source: GgufSource) -> None:
        path = source.files[0].path
        self.source = source
        self.used: set[str] = set()  # tensors that are read into the config
        self.vectors: dict[str, list[float]] = {}  # tensors of Hugging Face whose values are metadata here
        self.architecture = Fields(source.metadata, f"{path}: ").text("general.architecture")
        super().__init__(source.metadata, f"{path}: {one_line(self.architecture)}.")
        self.path = path

    def _value(self, name: str) -> Any:
        return super()._value(f"{self.architecture}.{name}")

    def count(self, name: str, default: int | None = None, minimum: int = 0, maximum: int = MAX_INT) -> int:
        """A whole number; one for each layer is one where they are all alike."""
        if self.is_list(name):
            each = [check_integer(value, self.where + name) for value in self.items(name)]
            if len(set(each)) != 1:
                raise Unsupported(f"layers of different sizes ({self.where}{name})")
            return check_integer(each[0], self.where + name, minimum, maximum)
        return self.get_int(name, default, minimum, maximum)

    def count_where_present(self, name: str) -> int:
        """A whole number; in a list of one for each layer, 0 stands for a layer that lacks such a part."""
        if not self.is_list(name):
            return self.features(name)
        each = {check_integer(value, self.where + name, 0, self._largest) for value in self.items(name)} - {0}
        if len(each) != 1:
            raise Unsupported(f"layers of {len(each)} sizes ({self.where}{name})")
        return each.pop()

    def has_tensor(self, name: str) -> bool:
        return name in self.source

    def has_in_a_layer(self, name: str) -> bool:
        """Whether any layer has this tensor."""
        return any(self.has_tensor(f"blk.{layer}.{name}") for layer in range(self.layers))

    def layers_with(self, kinds: Mapping[str, str]) -> list[str]:
        """The kind of each layer, by the first tensor of `kinds` that it has."""
        found = []
        for layer in range(self.layers):
            kind = next((kind for name, kind in kinds.items() if self.has_tensor(f"blk.{layer}.{name}")), None)
            if kind is None:
                raise ModelError(f"{self.path}: layer {layer} has none of the tensors {', '.join(kinds)}")
            found.append(kind)
        return found

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Of a tensor that must be there."""
        return self.source.file_of(tensor).infos[tensor].shape

    @functools.cached_property
    def layers(self) -> int:
        """Layers that the file has tensors for, without those for multi-token prediction."""
        named = self.count("block_count", minimum=1)
        count = max(named - self.get_int("nextn_predict_layers", 0, 0), 1)
        if count > MOST_LAYERS or not any(name.startswith(f"blk.{count - 1}.") for name in self.source.names()):
            raise ModelError(f"{self.where}block_count={named}, but the file has no tensor of layer {count - 1}")
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
        """Values of a head of the queries; of latent attention, not those of its compressed keys."""
        name = "attention.key_length_mla" if self.has("attention.key_length_mla") else "attention.key_length"
        return self.count(name, max(self.hidden // self.heads, 1), 1, self._largest)

    @functools.cached_property
    def value_dim(self) -> int:
        name = "attention.value_length_mla" if self.has("attention.value_length_mla") else "attention.value_length"
        return self.count(name, self.head_dim, 1, self._largest)

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


@dataclass(frozen=True)
class DraftLayer:
    """The layer for multi-token prediction, which comes behind the model's.

    Attributes:
        prefix: of its modules that the model's layers have too.
        modules: Hugging Face module -> GGUF name, for the others.
    """

    prefix: str
    modules: Mapping[str, str]


@dataclass(frozen=True)
class Architecture:
    """One architecture of GGUF.

    Attributes:
        model_type: of Hugging Face.
        others: further families that a file of it may be, as its metadata say.
        modules: Hugging Face module -> GGUF name, for what is not in a layer.
        layer: the same in a layer, relative to `prefix`; "{expert}" stands for the entry of a stacked tensor. With "="
            before a module both are whole names of tensors.
        permuted: rows of queries and keys are stored for interleaved rotary positions.
        norms_less_one: GGUF stores 1 + weight of norms, except of those of recurrent mixers.
        conv1d: modules that Hugging Face stores [in, out].
        attention: some layers have it; without any, the metadata have no heads.
        latent: attention is DeepSeek's, whose values have a length of their own and whose heads are rotated in part.
        by_layer: layers have sizes and rotary positions of their own, which `extra` reads.
        extra: adds to the config what is special.
        draft: a layer that drafts, which a file may have.
        variant: which architecture a file of this name is, where several share it.
    """

    model_type: str
    modules: Mapping[str, str]
    layer: Mapping[str, str]
    prefix: str = "model.layers.{layer}."
    permuted: bool = False
    norms_less_one: bool = False
    attention: bool = True
    conv1d: frozenset[str] = frozenset()
    latent: bool = False
    by_layer: bool = False
    norm_eps: str = "rms_norm_eps"
    extra: tuple[Extra, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)  # config key here -> the family's
    variant: Callable[[Metadata], Architecture] | None = None
    others: tuple[str, ...] = ()
    draft: DraftLayer | None = None


GGUF_MODULES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


GGUF_ATTENTION = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
}


GGUF_GATED = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


GGUF_QK_NORM = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}


GGUF_EXPERTS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.{expert}.gate_proj": "ffn_gate_exps",
    "mlp.experts.{expert}.up_proj": "ffn_up_exps",
    "mlp.experts.{expert}.down_proj": "ffn_down_exps",
}


GGUF_SHARED_EXPERTS = {
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}


# Where the norm before the MLP is named after its place behind attention.
GGUF_LATER_NORM = {"post_attention_layernorm": "post_attention_norm"}


# Norms after attention and MLP beside those before.
GGUF_FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


# Norms after attention and MLP only.
GGUF_POST_NORMS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    **GGUF_GATED,
    **GGUF_QK_NORM,
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


GGUF_LLAMA = {**GGUF_ATTENTION, **GGUF_GATED}


def gguf_state_space(module: str) -> dict[str, str]:
    """The tensors of Mamba's modules."""
    return {
        f"{module}.in_proj": "ssm_in",
        f"{module}.conv1d": "ssm_conv1d",
        f"={module}.dt_bias": "ssm_dt.bias",
        f"={module}.A_log": GGUF_RATES,
        f"={module}.D": "ssm_d",
        f"{module}.norm": "ssm_norm",
        f"{module}.out_proj": "ssm_out",
    }


GGUF_RATES = "ssm_a"  # has -exp(rate)


def biases(values: Metadata, config: dict[str, Any]) -> None:
    config["attention_bias"] = values.has_tensor("blk.0.attn_q.bias")
    config["mlp_bias"] = values.has_tensor("blk.0.ffn_up.bias")


def partial(values: Metadata, config: dict[str, Any]) -> None:
    config["partial_rotary_factor"] = values.rotated / values.head_dim


def sliding_layers(values: Metadata, every: int) -> list[str]:
    """The type of each layer: as the file lists them, or every so many-th sees all tokens (`every` if it is silent)."""
    name = "attention.sliding_window_pattern"
    if values.is_list(name):
        local = [check_bool(each, values.where + name) for each in values.items(name)]
    else:
        every = values.get_int(name, every, 1)
        local = [bool((index + 1) % every) for index in range(values.layers)]
    return ["sliding_attention" if each else "full_attention" for each in local]


def gguf_mixture(values: Metadata, config: dict[str, Any], experts: str = "num_experts") -> None:
    """Numbers of experts, under the family's name for how many there are."""
    config[experts] = values.features("expert_count")
    config["num_experts_per_tok"] = values.features("expert_used_count")


def rope_factors(values: Metadata, name: str, count: int) -> list[float]:
    """The divisors of the rotary frequencies."""
    values.used.add(name)
    found = values.source.file_of(name).floats(name, (count,))
    return [check_number(each, f"{values.path}: tensor {name!r}: factor", above=0.0) for each in found]


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
        return scaling | _yarn_mscale(values)
    return {}  # longrope's factors are tensors: see gguf_phi3


def _yarn_mscale(values: Metadata) -> dict[str, Any]:
    """DeepSeek's and Mistral's factors, which are alike in all their models: cosine and sine stay as they are."""
    name = "rope.scaling.yarn_log_multiplier"
    if not values.has(name):
        return {}
    multiplier = values.number(name)
    if values.architecture in ("deepseek2", "deepseek32", "glm-dsa"):
        multiplier /= 0.1  # the converter has multiplied it
    return {"mscale": multiplier, "mscale_all_dim": multiplier}


def _llama3_scaling(values: Metadata) -> dict[str, Any]:
    """Llama 3.1 and later: the file has the divisor of each frequency, not the parameters that they come from.

    Those of Meta's models are known; other divisors are taken one by one, as longrope does.
    """
    factors = rope_factors(values, "rope_freqs.weight", values.rotated // 2)
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
            return {
                "rope_type": "longrope",
                "factor": 1.0,
                "attention_factor": 1.0,
                "short_factor": factors,
                "long_factor": factors,
                "original_max_position_embeddings": values.count("context_length"),
            }
    return scaling
