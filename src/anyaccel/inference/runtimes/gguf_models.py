# SPDX-License-Identifier: Apache-2.0
"""GGUF files as Hugging Face models: which config and which tensor names an architecture of GGUF stands for.

After llama.cpp's convert_hf_to_gguf.py, the other way round. An architecture is one entry of ARCHITECTURES.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.runtimes.gguf_file import GgufSource, StringArray
from anyaccel.inference.runtimes.mapping import Unsupported
from anyaccel.inference.runtimes.sources import RenamedSource, TensorSource


class _Values:
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


Extra = Callable[[_Values, dict[str, Any]], None]


@dataclass(frozen=True)
class Architecture:
    """One architecture of GGUF.

    Attributes:
        model_type: of Hugging Face.
        modules: Hugging Face module -> GGUF name, for what is not in a layer.
        layer: the same in a layer, relative to `prefix`; "{expert}" stands for the entry of a stacked tensor.
        permuted: rows of queries and keys are stored for interleaved rotary positions.
        norms_less_one: GGUF stores 1 + weight of norms.
        conv1d: modules that Hugging Face stores [in, out].
        extra: adds to the config what is special.
    """

    model_type: str
    modules: Mapping[str, str]
    layer: Mapping[str, str]
    prefix: str = "model.layers.{layer}."
    permuted: bool = False
    norms_less_one: bool = False
    conv1d: frozenset[str] = frozenset()
    norm_eps: str = "rms_norm_eps"
    extra: tuple[Extra, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)  # config key here -> the family's


_MODULES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_ATTENTION = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
}
_GATED = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_QK_NORM = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_EXPERTS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.{expert}.gate_proj": "ffn_gate_exps",
    "mlp.experts.{expert}.up_proj": "ffn_up_exps",
    "mlp.experts.{expert}.down_proj": "ffn_down_exps",
}
_LLAMA = {**_ATTENTION, **_GATED}
_FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def _biases(values: _Values, config: dict[str, Any]) -> None:
    config["attention_bias"] = values.has("blk.0.attn_q.bias")
    config["mlp_bias"] = values.has("blk.0.ffn_up.bias")


def _qwen_moe(values: _Values, config: dict[str, Any]) -> None:
    config["num_experts"] = values.count("expert_count")
    config["num_experts_per_tok"] = values.count("expert_used_count")
    config["moe_intermediate_size"] = values.count("expert_feed_forward_length")
    config["decoder_sparse_step"] = 1
    config["norm_topk_prob"] = config["model_type"] == "qwen3_moe"  # llama.cpp normalises there too
    if config["model_type"] == "qwen2_moe":
        config["shared_expert_intermediate_size"] = values.count("expert_shared_feed_forward_length")


def _gemma(values: _Values, config: dict[str, Any]) -> None:
    config["head_dim"] = values.head_dim
    config["hidden_activation"] = config["hidden_act"] = "gelu_pytorch_tanh"


def _gemma2(values: _Values, config: dict[str, Any]) -> None:
    # Not in the file: llama.cpp knows the 27 B model by its number of layers, too.
    large = config["num_hidden_layers"] == 46
    config["query_pre_attn_scalar"] = config["hidden_size"] // values.heads if large else values.head_dim
    config["sliding_window"] = values.count("attention.sliding_window", 4096)
    config["attn_logit_softcapping"] = values.number("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = values.number("final_logit_softcapping", 30.0)
    config["layer_types"] = _pattern(config["num_hidden_layers"], 2)


def _gemma3(values: _Values, config: dict[str, Any]) -> None:
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


def _partial(values: _Values, config: dict[str, Any]) -> None:
    config["partial_rotary_factor"] = values.count("rope.dimension_count", values.head_dim) / values.head_dim


def _phi3(values: _Values, config: dict[str, Any]) -> None:
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


def _granite(values: _Values, config: dict[str, Any]) -> None:
    config["embedding_multiplier"] = values.number("embedding_scale", 1.0)
    config["residual_multiplier"] = values.number("residual_scale", 1.0)
    config["attention_multiplier"] = values.number("attention.scale", values.head_dim**-0.5)
    config["logits_scaling"] = values.number("logit_scale", 1.0)


def _starcoder2(values: _Values, config: dict[str, Any]) -> None:
    config["use_bias"] = values.has("blk.0.attn_q.bias")
    config["hidden_act"] = "gelu_pytorch_tanh"
    config["sliding_window"] = None  # the file does not have it


def _stablelm(values: _Values, config: dict[str, Any]) -> None:
    if values.has("blk.0.attn_q_norm.weight"):
        raise Unsupported(f"norm of queries and keys in a StableLM GGUF file ({values.path})")
    config["use_qkv_bias"] = values.has("blk.0.attn_q.bias")
    config["use_parallel_residual"] = not values.has("blk.0.ffn_norm.weight")
    config["qk_layernorm"] = False


def _cohere(values: _Values, config: dict[str, Any]) -> None:
    config["logit_scale"] = values.number("logit_scale", 1.0)
    config["use_qk_norm"] = values.has("blk.0.attn_q_norm.weight")


def _gpt2(values: _Values, config: dict[str, Any]) -> None:
    config["activation_function"] = "gelu_new"
    for name in ("rope_theta", "hidden_act", "head_dim", "num_key_value_heads"):
        config.pop(name, None)


_QWEN2_MOE = {
    **_ATTENTION,
    **_EXPERTS,
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_GPT2_LAYER = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _MODULES, _LLAMA, permuted=True, extra=(_biases,)),
    "qwen2": Architecture("qwen2", _MODULES, _LLAMA),
    "qwen3": Architecture("qwen3", _MODULES, {**_LLAMA, **_QK_NORM}, extra=(_biases,)),
    "qwen2moe": Architecture("qwen2_moe", _MODULES, _QWEN2_MOE, extra=(_qwen_moe,)),
    "qwen3moe": Architecture("qwen3_moe", _MODULES, {**_ATTENTION, **_QK_NORM, **_EXPERTS}, extra=(_biases, _qwen_moe)),
    "gemma": Architecture("gemma", _MODULES, _LLAMA, norms_less_one=True, extra=(_gemma,)),
    "gemma2": Architecture("gemma2", _MODULES, {**_LLAMA, **_FOUR_NORMS}, norms_less_one=True, extra=(_gemma, _gemma2)),
    "gemma3": Architecture(
        "gemma3_text",
        _MODULES,
        {**_LLAMA, **_FOUR_NORMS, **_QK_NORM},
        norms_less_one=True,
        extra=(_gemma, _gemma3),
    ),
    "phi3": Architecture(
        "phi3",
        _MODULES,
        {
            "input_layernorm": "attn_norm",
            "self_attn.qkv_proj": "attn_qkv",
            "self_attn.o_proj": "attn_output",
            "post_attention_layernorm": "ffn_norm",
            "mlp.gate_up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        },
        extra=(_partial, _phi3),
    ),
    "granite": Architecture("granite", _MODULES, _LLAMA, permuted=True, extra=(_biases, _granite)),
    "olmo2": Architecture(
        "olmo2",
        _MODULES,
        {
            **{name: of for name, of in _LLAMA.items() if name != "input_layernorm"},
            **_QK_NORM,
            "post_attention_layernorm": "post_attention_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
        extra=(_biases,),
    ),
    "starcoder2": Architecture(
        "starcoder2",
        _MODULES,
        {**_ATTENTION, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
        norm_eps="norm_epsilon",
        extra=(_starcoder2,),
    ),
    "stablelm": Architecture("stablelm", _MODULES, _LLAMA, norm_eps="layer_norm_eps", extra=(_partial, _stablelm)),
    "command-r": Architecture(
        "cohere", _MODULES, {**_LLAMA, **_QK_NORM}, norm_eps="layer_norm_eps", extra=(_biases, _cohere)
    ),
    "gpt2": Architecture(
        "gpt2",
        {
            "transformer.wte": "token_embd",
            "transformer.wpe": "position_embd",
            "transformer.ln_f": "output_norm",
            "lm_head": "output",
        },
        _GPT2_LAYER,
        prefix="transformer.h.{layer}.",
        conv1d=frozenset({"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
        norm_eps="layer_norm_epsilon",
        extra=(_gpt2,),
        renamed={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "intermediate_size": "n_inner",
        },
    ),
}
# A llama file with experts is a Mixtral.
_MIXTRAL = Architecture(
    "mixtral",
    _MODULES,
    {
        **_ATTENTION,
        "block_sparse_moe.gate": "ffn_gate_inp",
        "block_sparse_moe.experts.{expert}.w1": "ffn_gate_exps",
        "block_sparse_moe.experts.{expert}.w2": "ffn_down_exps",
        "block_sparse_moe.experts.{expert}.w3": "ffn_up_exps",
    },
    permuted=True,
)


@dataclass(frozen=True)
class GgufModel:
    """A GGUF file as a Hugging Face checkpoint: `config` as in config.json, tensors by Hugging Face's names."""

    config: dict[str, Any]
    generation_config: dict[str, Any]
    source: TensorSource


def open_gguf(path: Path) -> GgufModel:
    """The model in a GGUF file.

    Raises:
        ModelError: the file is damaged, truncated, or its metadata are wrong.
        Unsupported: an architecture or a feature that is not in the tables here.
    """
    source = GgufSource(path)
    values = _Values(source)
    architecture = ARCHITECTURES.get(values.architecture)
    if architecture is None:
        raise Unsupported(f"mapping for the GGUF architecture {values.architecture!r} ({path})")
    if values.get("expert_count") and values.architecture == "llama":
        architecture = _MIXTRAL
    config = _config(values, architecture)
    return GgufModel(config, _generation(source), RenamedSource(source, _names(values, architecture)))


def _config(values: _Values, architecture: Architecture) -> dict[str, Any]:
    embedding = values.source.file_of("token_embd.weight").infos["token_embd.weight"]
    if len(embedding.shape) != 2:
        raise ModelError(f"{values.path}: tensor 'token_embd.weight' has shape {embedding.shape}, not two dimensions")
    eps = "layer_norm_epsilon" if values.get("attention.layer_norm_rms_epsilon") is None else "layer_norm_rms_epsilon"
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": values.count("embedding_length"),
        "num_hidden_layers": values.count("block_count"),
        "num_attention_heads": values.heads,
        "num_key_value_heads": values.count("attention.head_count_kv", values.heads),
        "max_position_embeddings": values.count("context_length"),
        "head_dim": values.head_dim,
        "rope_theta": values.number("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": not values.has("output.weight"),
        architecture.norm_eps: values.number(f"attention.{eps}"),
    }
    if values.get("feed_forward_length") is not None:
        config["intermediate_size"] = values.count("feed_forward_length")
    if min(config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]) < 1:
        raise ModelError(f"{values.path}: its metadata have no layers, heads or hidden size")
    if architecture is _MIXTRAL:
        config["num_local_experts"] = values.count("expert_count")
        config["num_experts_per_tok"] = values.count("expert_used_count")
    scaling = _rope_scaling(values, config)
    if scaling:
        config["rope_scaling"] = scaling
    for extra in architecture.extra:
        extra(values, config)
    for name, other in architecture.renamed.items():
        if name in config:
            config[other] = config.pop(name)
    return config


def _rope_scaling(values: _Values, config: Mapping[str, Any]) -> dict[str, Any]:
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
    if kind in ("none", "longrope"):  # longrope's factors are tensors: see _phi3
        return {}
    raise Unsupported(f"rope.scaling.type {kind!r} ({values.path})")


def _llama3_scaling(values: _Values, config: Mapping[str, Any]) -> dict[str, Any]:
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


def _generation(source: GgufSource) -> dict[str, Any]:
    """The generation config: which tokens begin and end a text."""
    get = source.metadata.get
    ends = [get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    found = {
        "bos_token_id": get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted({end for end in ends if isinstance(end, int)}) or None,
        "pad_token_id": get("tokenizer.ggml.padding_token_id"),
    }
    return {name: value for name, value in found.items() if value is not None and not isinstance(value, StringArray)}


Name = tuple[str, dict[str, Any], int | None]


def _names(values: _Values, architecture: Architecture) -> dict[str, Name]:
    """Hugging Face's name -> the file's name, what has to be changed, entry of a stacked tensor."""
    found: dict[str, Name] = {}

    def add(module: str, stored: str, conv1d: bool = False, rows: list[int] | None = None) -> None:
        for suffix in ("weight", "bias"):
            there = f"{stored}.{suffix}"
            if there not in values.source:
                continue
            changes: dict[str, Any] = {}
            shape = values.source.file_of(there).infos[there].shape
            if conv1d and suffix == "weight":
                changes["transposed"] = True
            if rows is not None:
                if shape[0] != len(rows):
                    raise ModelError(f"{values.path}: tensor {there!r} has {shape[0]} rows, not {len(rows)}")
                changes["order"] = rows
            if architecture.norms_less_one and module.endswith("norm") and suffix == "weight":
                changes["plus"] = -1.0
            if "{expert}" not in module:
                found[f"{module}.{suffix}"] = (there, changes, None)
                continue
            for expert in range(shape[0]):
                found[f"{module.format(expert=expert)}.{suffix}"] = (there, changes, expert)

    for module, stored in architecture.modules.items():
        add(module, stored)
    queries = keys = None
    if architecture.permuted:
        queries = _interleaved(values.heads, values.head_dim)
        keys = _interleaved(values.count("attention.head_count_kv", values.heads), values.head_dim)
    for layer in range(values.count("block_count")):
        prefix = architecture.prefix.format(layer=layer)
        for module, stored in architecture.layer.items():
            rows = {"attn_q": queries, "attn_k": keys}.get(stored)
            add(prefix + module, f"blk.{layer}.{stored}", module in architecture.conv1d, rows)
    return found


def _interleaved(heads: int, head_dim: int) -> list[int]:
    """Where a head's row is stored: halves of Hugging Face's head became the even and the odd rows of GGUF's."""
    half = head_dim // 2
    return [head * head_dim + 2 * row + part for head in range(heads) for part in (0, 1) for row in range(half)]
