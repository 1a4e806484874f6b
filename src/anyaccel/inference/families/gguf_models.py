# SPDX-License-Identifier: Apache-2.0
"""GGUF files as Hugging Face models: the config and the tensor names that an architecture of GGUF stands for.

After llama.cpp's convert_hf_to_gguf.py, the other way round. Each is an entry of ARCHITECTURES in its family.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.gguf_file import GgufSource
from anyaccel.inference.checkpoints.gguf_unused import check_all_used
from anyaccel.inference.checkpoints.sources import Tensor, TensorView, dense_strides, entry_of
from anyaccel.inference.families.gguf import GGUF_RATES, Architecture, Metadata, partial, rope_scaling
from anyaccel.inference.families.registry import ARCHITECTURES
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.inference.text.gguf_ends import gguf_ends
from anyaccel.validation import Fields, short_repr

# The file's own name of a tensor, fields of TensorView to replace, and the entry of a stacked tensor or None.
Name = tuple[str, dict[str, Any], int | None]
_NO_TOKEN = (1 << 32) - 1  # stands for none in the number of a token


@dataclass(frozen=True)
class GgufModel:
    """A GGUF file as a Hugging Face checkpoint: `config` as in config.json, tensors by Hugging Face's names."""

    config: dict[str, Any]
    generation_config: dict[str, Any]
    source: GgufTensors


class GgufTensors:
    """The tensors of a GGUF file by Hugging Face's names.

    Args:
        names: of the tensors that the file has.
        config: the file's names of tensors that the config is made of.
        vectors: tensors whose values are not among the file's tensors.
    """

    def __init__(
        self,
        file: GgufSource,
        names: Mapping[str, Name],
        config: Collection[str],
        vectors: Mapping[str, Sequence[float]],
    ) -> None:
        self._file = file
        self._names = names
        self._config = frozenset(config)
        self._vectors = {name: (ctypes.c_float * len(each))(*each) for name, each in vectors.items()}
        self._made: dict[str, Any] = {}  # values that are not in the file as they are needed

    def __contains__(self, name: str) -> bool:
        return name in self._names or name in self._vectors

    def names(self) -> Iterator[str]:
        return itertools.chain(self._names, self._vectors)

    def tensor(self, name: str) -> Tensor:
        if name in self._vectors:
            values = self._vectors[name]
            return TensorView(f"{name} in the metadata", "f32", (len(values),), (4,), ctypes.addressof(values))
        if name not in self._names:
            raise ModelError(f"the file has no tensor for {name!r}")
        stored, changes, entry = self._names[name]
        tensor: Any = self._file.tensor(stored)
        if stored.endswith(f".{GGUF_RATES}"):
            return self._rates(stored, tensor)
        if entry is not None:
            tensor = entry_of(tensor, entry)
        return replace(tensor, **changes) if changes else tensor  # type: ignore[no-any-return]

    def _rates(self, stored: str, tensor: Any) -> TensorView:
        """The rates of a state's decay, of which the file has -exp(rate)."""
        import numpy

        if not isinstance(tensor, TensorView) or tensor.type != "f32":
            raise ModelError(f"{tensor.where}: is {tensor.type}, not f32")
        if stored not in self._made:
            count = math.prod(tensor.shape)
            memory: Any = (ctypes.c_float * count).from_address(tensor.address)
            values = numpy.frombuffer(memory, numpy.float32)
            if not (values < 0).all():
                raise ModelError(f"{tensor.where}: the largest value is {values.max()}; all must be below 0")
            self._made[stored] = numpy.log(-values)
        address = self._made[stored].ctypes.data
        return replace(tensor, strides=dense_strides(tensor.shape, 4), address=address, file=None)

    def stored(self, name: str) -> tuple[str, Sequence[int] | None] | None:
        """The file's own name of a matrix and the stored row of each row; None when it is not one of its own there."""
        if name in self._vectors:
            return None
        stored, changes, entry = self._names[name]
        alone = sum(each[0] == stored for each in self._names.values()) == 1
        plain = entry is None and not changes.keys() - {"order"}
        return (stored, changes.get("order")) if alone and plain else None

    def release(self, name: str) -> None:
        """Nothing to do: its pages have gone as its rows were read, and another name may be of the same tensor."""

    def check_all_used(self, used: Iterable[str]) -> None:
        """Check that a model that reads these tensors, by Hugging Face's names, leaves out none that it needs.

        Raises:
            ModelError: it does.
        """
        read = {self._names[name][0] for name in used if name not in self._vectors}
        check_all_used(self._file, self._config | read)


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
        raise Unsupported(f"mapping for the GGUF architecture {short_repr(values.architecture)} ({path})")
    if architecture.variant is not None:
        architecture = architecture.variant(values)
    config = _config(values, architecture)
    tensors = GgufTensors(source, _names(values, architecture), values.used, values.vectors)
    return GgufModel(config, _generation(values), tensors)


def _config(values: Metadata, architecture: Architecture) -> dict[str, Any]:
    embedding = values.source.file_of("token_embd.weight").infos["token_embd.weight"]
    if len(embedding.shape) != 2:
        raise ModelError(f"{values.path}: tensor 'token_embd.weight' has shape {embedding.shape}, not two dimensions")
    values.check_vocabulary(embedding.shape[0])
    if architecture.attention and not architecture.latent and values.value_dim != values.head_dim:
        raise ModelError(
            f"{values.where}attention.value_length={values.value_dim}, but keys have a length of {values.head_dim}"
        )
    whole = partial in architecture.extra or architecture.latent or architecture.by_layer
    if not whole and values.rotated != values.head_dim:
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
        "max_position_embeddings": values.count("context_length", minimum=1),
        "rope_theta": values.number("rope.freq_base", 10000.0, above=0.0),
        "hidden_act": "silu",
        "tie_word_embeddings": not values.has_tensor("output.weight"),
        architecture.norm_eps: values.number(f"attention.{eps}", minimum=0.0),
    }
    if architecture.attention:
        config |= {"num_attention_heads": values.heads, "head_dim": values.head_dim}
    if not architecture.by_layer:
        config["num_key_value_heads"] = values.kv_heads
        if values.has("feed_forward_length"):
            config["intermediate_size"] = values.features("feed_forward_length")
        if scaling := rope_scaling(values):
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
    tokens = Fields(values.source.metadata, f"{values.path}: ")

    def ids(*names: str) -> list[int]:
        keys = [f"tokenizer.ggml.{name}_token_id" for name in names]
        # For none, -1 or the largest number is written.
        return sorted({tokens.get_int(key, None, -1, _NO_TOKEN) for key in keys if tokens.has(key)} - {-1, _NO_TOKEN})

    found: dict[str, Any] = {name: each[0] for name, key in _ONE_TOKEN.items() if (each := ids(key))}
    ends = gguf_ends(values.source.files[0])
    return found | ({"eos_token_id": ends} if ends else {})


def _names(values: Metadata, architecture: Architecture) -> dict[str, Name]:
    """Hugging Face's name -> the file's name, what has to be changed, entry of a stacked tensor."""
    found: dict[str, Name] = {}

    def add(module: str, stored: str, conv1d: bool = False, rows: list[int] | None = None) -> None:
        if "=" in module:
            if stored in values.source:
                found[module.replace("=", "")] = (stored, {}, None)
            return
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
            recurrent = stored.rpartition(".")[2].startswith("ssm_")
            if architecture.norms_less_one and stored.endswith("norm") and suffix == "weight" and not recurrent:
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
    experts = values.get_int("expert_count", 0)
    if architecture.permuted:
        kv_heads = values.count_where_present("attention.head_count_kv") if architecture.by_layer else values.kv_heads
        of_attention = [layer for layer in range(values.layers) if values.has_tensor(f"blk.{layer}.attn_q.weight")]
        first = of_attention[0] if of_attention else 0
        queries = _interleaved(values, f"blk.{first}.attn_q.weight", values.heads)
        keys = _interleaved(values, f"blk.{first}.attn_k.weight", kv_heads)
    for layer in range(values.layers):
        prefix = architecture.prefix.format(layer=layer)
        for module, stored in architecture.layer.items():
            rows = {"attn_q": queries, "attn_k": keys}.get(stored)
            add(prefix + module, f"blk.{layer}.{stored}", module in architecture.conv1d, rows)
    draft, layer = architecture.draft, values.layers
    if draft is not None:
        of_layer = {draft.prefix + module: stored for module, stored in architecture.layer.items()}
        modules = {**of_layer, **draft.modules}
        for module, stored in modules.items():
            add(module.replace("{layer}", str(layer)), f"blk.{layer}.{stored}")
    return found


def _interleaved(values: Metadata, tensor: str, heads: int) -> list[int]:
    """Where a head's row is stored: halves of Hugging Face's head became the even and the odd rows of GGUF's."""
    head_dim, shape = values.head_dim, values.shape(tensor)
    if shape[:1] != (heads * head_dim,):
        raise ModelError(f"{values.path}: tensor {tensor!r} of shape {shape} has not {heads} x {head_dim} rows")
    half = head_dim // 2
    return [head * head_dim + 2 * row + part for head in range(heads) for part in (0, 1) for row in range(half)]
