# SPDX-License-Identifier: Apache-2.0
"""GGUF files as Hugging Face models: which config and which tensor names an architecture of GGUF stands for.

After llama.cpp's convert_hf_to_gguf.py, the other way round. An architecture is one entry of ARCHITECTURES.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.gguf_file import GgufSource
from anyaccel.inference.checkpoints.gguf_unused import check_all_used
from anyaccel.inference.checkpoints.sources import RenamedSource
from anyaccel.inference.families import gguf_configs as extras
from anyaccel.inference.families.gguf_configs import Extra, Metadata
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.outside import Values, shown

Name = tuple[str, dict[str, Any], int | None]
_NO_TOKEN = (1 << 32) - 1  # stands for none in the number of a token


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
    "llama": Architecture("llama", _MODULES, _LLAMA, permuted=True, extra=(extras.biases,)),
    "qwen2": Architecture("qwen2", _MODULES, _LLAMA),
    "qwen3": Architecture("qwen3", _MODULES, {**_LLAMA, **_QK_NORM}, extra=(extras.biases,)),
    "qwen2moe": Architecture("qwen2_moe", _MODULES, _QWEN2_MOE, extra=(extras.qwen_moe,)),
    "qwen3moe": Architecture(
        "qwen3_moe", _MODULES, {**_ATTENTION, **_QK_NORM, **_EXPERTS}, extra=(extras.biases, extras.qwen_moe)
    ),
    "gemma": Architecture("gemma", _MODULES, _LLAMA, norms_less_one=True, extra=(extras.gemma,)),
    "gemma2": Architecture(
        "gemma2", _MODULES, {**_LLAMA, **_FOUR_NORMS}, norms_less_one=True, extra=(extras.gemma, extras.gemma2)
    ),
    "gemma3": Architecture(
        "gemma3_text",
        _MODULES,
        {**_LLAMA, **_FOUR_NORMS, **_QK_NORM},
        norms_less_one=True,
        extra=(extras.gemma, extras.gemma3),
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
        extra=(extras.partial, extras.phi3),
    ),
    "granite": Architecture("granite", _MODULES, _LLAMA, permuted=True, extra=(extras.biases, extras.granite)),
    "olmo2": Architecture(
        "olmo2",
        _MODULES,
        {
            **{name: of for name, of in _LLAMA.items() if name != "input_layernorm"},
            **_QK_NORM,
            "post_attention_layernorm": "post_attention_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
        extra=(extras.biases,),
    ),
    "starcoder2": Architecture(
        "starcoder2",
        _MODULES,
        {**_ATTENTION, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
        norm_eps="norm_epsilon",
        extra=(extras.starcoder2,),
    ),
    "stablelm": Architecture(
        "stablelm", _MODULES, _LLAMA, norm_eps="layer_norm_eps", extra=(extras.partial, extras.stablelm)
    ),
    "command-r": Architecture(
        "cohere", _MODULES, {**_LLAMA, **_QK_NORM}, norm_eps="layer_norm_eps", extra=(extras.biases, extras.cohere)
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
        extra=(extras.gpt2,),
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
    source: GgufTensors


class GgufTensors(RenamedSource):
    """The tensors of a GGUF file by Hugging Face's names.

    Args:
        config: the file's names of tensors that the config is made of.
    """

    def __init__(self, source: GgufSource, names: Mapping[str, Name], config: Collection[str]) -> None:
        super().__init__(source, names)
        self._file = source
        self._config = frozenset(config)

    def check_all_used(self, used: Iterable[str]) -> None:
        """Check that a model that reads these tensors, by Hugging Face's names, leaves out none that it needs.

        Raises:
            ModelError: it does.
        """
        check_all_used(self._file, self._config | {self.stored_name(name) for name in used})


def open_gguf(path: Path) -> GgufModel:
    """The model in a GGUF file.

    Raises:
        ModelError: the file is damaged, truncated, or its metadata are wrong.
        Unsupported: an architecture or a feature that is not in the tables here.
    """
    source = GgufSource(path)
    values = Metadata(source)
    architecture = ARCHITECTURES.get(values.architecture)
    if architecture is None:
        raise Unsupported(f"mapping for the GGUF architecture {shown(values.architecture)} ({path})")
    if values.whole("expert_count", 0) and values.architecture == "llama":
        architecture = _MIXTRAL
    config = _config(values, architecture)
    tensors = GgufTensors(source, _names(values, architecture), values.used)
    return GgufModel(config, _generation(values), tensors)


def _config(values: Metadata, architecture: Architecture) -> dict[str, Any]:
    embedding = values.source.file_of("token_embd.weight").infos["token_embd.weight"]
    if len(embedding.shape) != 2:
        raise ModelError(f"{values.path}: tensor 'token_embd.weight' has shape {embedding.shape}, not two dimensions")
    values.check_vocabulary(embedding.shape[0])
    if extras.partial not in architecture.extra and values.rotated != values.head_dim:
        raise ModelError(
            f"{values.where}rope.dimension_count={values.rotated}, but this architecture rotates all {values.head_dim} "
            "values of a head"
        )
    eps = "layer_norm_rms_epsilon" if values.has("attention.layer_norm_rms_epsilon") else "layer_norm_epsilon"
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": values.hidden,
        "num_hidden_layers": values.layers,
        "num_attention_heads": values.heads,
        "num_key_value_heads": values.kv_heads,
        "max_position_embeddings": values.count("context_length", minimum=1),
        "head_dim": values.head_dim,
        "rope_theta": values.number("rope.freq_base", 10000.0, above=0.0),
        "hidden_act": "silu",
        "tie_word_embeddings": not values.has_tensor("output.weight"),
        architecture.norm_eps: values.number(f"attention.{eps}", minimum=0.0),
    }
    if values.has("feed_forward_length"):
        config["intermediate_size"] = values.features("feed_forward_length")
    if architecture is _MIXTRAL:
        config["num_local_experts"] = values.features("expert_count")
        config["num_experts_per_tok"] = values.features("expert_used_count")
    scaling = extras.rope_scaling(values)
    if scaling:
        config["rope_scaling"] = scaling
    for extra in architecture.extra:
        extra(values, config)
    for name, other in architecture.renamed.items():
        if name in config:
            config[other] = config.pop(name)
    return config


_ONE_TOKEN = {"bos_token_id": "bos", "pad_token_id": "padding"}


def _generation(values: Metadata) -> dict[str, Any]:
    """The generation config: which tokens begin and end a text."""
    tokens = Values(values.source.metadata, f"{values.path}: ")

    def ids(*names: str) -> list[int]:
        keys = [f"tokenizer.ggml.{name}_token_id" for name in names]
        # For none, -1 or the largest number is written.
        return sorted({tokens.whole(key, None, -1, _NO_TOKEN) for key in keys if tokens.has(key)} - {-1, _NO_TOKEN})

    found: dict[str, Any] = {name: each[0] for name, key in _ONE_TOKEN.items() if (each := ids(key))}
    ends = ids("eos", "eot")
    return found | ({"eos_token_id": ends} if ends else {})


def _names(values: Metadata, architecture: Architecture) -> dict[str, Name]:
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
                if shape[:1] != (len(rows),):
                    raise ModelError(f"{values.path}: tensor {there!r} of shape {shape} has not {len(rows)} rows")
                changes["order"] = rows
            if architecture.norms_less_one and module.endswith("norm") and suffix == "weight":
                changes["plus"] = -1.0
            if "{expert}" not in module:
                found[f"{module}.{suffix}"] = (there, changes, None)
                continue
            if len(shape) < 2 or shape[0] != experts:
                raise ModelError(f"{values.path}: tensor {there!r} of shape {shape} is not one of {experts} experts")
            for expert in range(experts):
                found[f"{module.format(expert=expert)}.{suffix}"] = (there, changes, expert)

    for module, stored in architecture.modules.items():
        add(module, stored)
    queries = keys = None
    experts = values.whole("expert_count", 0)
    if architecture.permuted:
        queries = _interleaved(values, "blk.0.attn_q.weight", values.heads)
        keys = _interleaved(values, "blk.0.attn_k.weight", values.kv_heads)
    for layer in range(values.layers):
        prefix = architecture.prefix.format(layer=layer)
        for module, stored in architecture.layer.items():
            rows = {"attn_q": queries, "attn_k": keys}.get(stored)
            add(prefix + module, f"blk.{layer}.{stored}", module in architecture.conv1d, rows)
    return found


def _interleaved(values: Metadata, tensor: str, heads: int) -> list[int]:
    """Where a head's row is stored: halves of Hugging Face's head became the even and the odd rows of GGUF's."""
    head_dim, shape = values.head_dim, values.shape(tensor)
    if shape[:1] != (heads * head_dim,):
        raise ModelError(f"{values.path}: tensor {tensor!r} of shape {shape} has not {heads} x {head_dim} rows")
    half = head_dim // 2
    return [head * head_dim + 2 * row + part for head in range(heads) for part in (0, 1) for row in range(half)]
