# SPDX-License-Identifier: Apache-2.0
"""Checks the counts and sizes of a configuration against the tensors of its file, before modules are built.

This is for models that transformers builds, which makes all layers of the configuration before it looks for weights.
The native runtime looks for each weight first (`inference/native/packing.py`). Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.gguf_file import GgufSource
from anyaccel.validation import Fields, check_integer, one_line, read_json

# Their names in transformers' configurations and in GGUF.
_LAYERS = frozenset(
    {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "decoder_layers", "block_count"}
)
_EXPERTS = frozenset({"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "expert_count"})
_SIZES = frozenset(
    {
        *("hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "ffn_dim", "vocab_size", "head_dim"),
        *("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads", "moe_intermediate_size"),
        *("embedding_length", "feed_forward_length", "expert_feed_forward_length", "ssm.inner_size"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    }
)
_MOST_SIZE = 1 << 20
_FEW = 512


def check_folder(folder: Path, shapes: Callable[[], Sequence[Sequence[int]]]) -> None:
    """Check the config.json of a model folder.

    Args:
        shapes: returns the shapes of all its tensors; only called if a count is not small.

    Raises:
        ModelError: it has more layers than tensors, more experts than a tensor has rows, or an impossible size.
    """
    config = Fields(read_json(folder / "config.json"), f"{folder / 'config.json'}: ")
    for values in (config, config.mapping("text_config")):
        _check(values, values.known(), shapes)


def check_gguf(path: Path) -> None:
    """Check the metadata of a GGUF file, or of the first of several.

    Raises:
        ModelError: as above.
    """
    source = GgufSource(path)
    kind = Fields(source.metadata, f"{path}: ").text("general.architecture")
    own = {name.removeprefix(f"{kind}."): value for name, value in source.metadata.items()}
    shapes = [info.shape for file in source.files for info in file.infos.values()]
    _check(Fields(own, f"{path}: {one_line(kind)}."), own, lambda: shapes)


def _check(values: Fields, names: Iterable[str], shapes: Callable[[], Sequence[Sequence[int]]]) -> None:
    for name in names:
        if name not in _LAYERS | _EXPERTS | _SIZES:
            continue
        each: list[Any] = values.items(name) if values.is_list(name) else [values.required(name)]
        count = max((check_integer(value, values.where + name, -1, (1 << 32) - 1) for value in each), default=0)
        limit, why = _limit(name, shapes) if count > _FEW else (_FEW, "")
        if count > limit:
            raise ModelError(f"{values.where}{name}={count}, but {why}")


def _limit(name: str, shapes: Callable[[], Sequence[Sequence[int]]]) -> tuple[int, str]:
    if name in _SIZES:
        return _MOST_SIZE, f"{_MOST_SIZE} is more than any model has"
    found = shapes()
    if name in _LAYERS:
        return len(found), f"the model has {len(found)} tensors"
    largest = max((max(shape) for shape in found if shape), default=0)
    return largest, f"no tensor has more than {largest} rows or entries"
