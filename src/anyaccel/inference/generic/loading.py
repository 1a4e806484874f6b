# SPDX-License-Identifier: Apache-2.0
"""Loads the structure of a model, and finds its weights, which stay in the files."""

from __future__ import annotations

import importlib
import json
import logging
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.counts import check_folder
from anyaccel.inference.checkpoints.dequantised import DequantisedCheckpoint, HeldRows, checkpoint_in
from anyaccel.inference.checkpoints.gguf_file import GgufSource
from anyaccel.inference.checkpoints.model_path import check_language_model, check_model_path
from anyaccel.inference.checkpoints.slices import Slice
from anyaccel.inference.checkpoints.torch_files import Checkpoint
from anyaccel.inference.generic.gguf_conversion import converted, pad_within_vocabulary
from anyaccel.inference.generic.tp.apply import LoadedWeights, WeightSource
from anyaccel.validation import Fields, error_text, read_json, short_repr

if TYPE_CHECKING:
    from anyaccel.inference.native.runtime import NativeModel

logger = logging.getLogger(__name__)

_COMPUTED = {"float64": torch.float32, "float32": torch.float32, "float16": torch.float16}
_GGUF_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16"}


def model_folder(path: str | Path, announce: Callable[[str], object] | None = None) -> Path:
    """The Hugging Face folder for `path`: a folder itself, or a `.gguf` file, which is converted once.

    Args:
        announce: called with one line before a conversion.

    Raises:
        ModelError: there is no such model.
    """
    location = Path(path).expanduser()
    check_model_path(location)
    return location if location.is_dir() else converted(location, announce)


def skeleton(folder: Path, dtype: torch.dtype) -> Any:
    """The model of a folder with its parameters on the meta device: structure without memory.

    Args:
        dtype: in which buffers are computed, as when transformers loads the model in it.

    Raises:
        ModelError: the configuration cannot be read, or the model needs code from the checkpoint, which is not run.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    check_folder(folder, lambda: Checkpoint(folder).shapes())
    where = folder / "config.json"
    check_dtype(read_json(where), f"{where}: ")
    check_language_model(folder, read_json(where))
    config: Any
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        _forget_quantisation(config)
        pad_within_vocabulary(config)
        # Buffers (rotary frequencies, masks) get values, as checkpoints do not have them.
        kind = _own_class(config)
        with init_empty_weights(include_buffers=False):
            if kind is None:
                model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
            else:
                model = kind._from_config(config, dtype=dtype)
        model.tie_weights()  # init_empty_weights has separated tied parameters
        model.eval()
        model.name_or_path = str(folder)
        _read_generation_config(model, folder)
    except ModelError:
        raise
    except Exception as error:  # a configuration can be wrong in any way
        raise ModelError(f"{folder}: transformers cannot build this model ({error_text(error)})") from error
    return model


def stored_dtype(model: nn.Module | Path) -> torch.dtype:
    """In what dtype most weights of a model are: float32, float16, or bfloat16, also for those that are quantised.

    Args:
        model: in memory, or the path of a folder or GGUF file.

    Raises:
        ModelError: a file is damaged.
    """
    if isinstance(model, nn.Module):
        found = [(str(each.dtype).removeprefix("torch."), each.numel()) for each in model.parameters()]
    elif model.is_dir():
        found = [(str(t.dtype).removeprefix("torch."), t.numel()) for t in Checkpoint(model).tensors().values()]
    else:
        infos = [info for file in GgufSource(model).files for info in file.infos.values()]
        found = [(_GGUF_FLOATS.get(info.type, ""), math.prod(info.shape)) for info in infos]
    values: Counter[str] = Counter()
    for name, count in found:
        values[name] += count
    return _COMPUTED.get(values.most_common(1)[0][0] if values else "", torch.bfloat16)


def native_skeleton(path: Path, native: NativeModel, dtype: torch.dtype) -> Any:
    """The model of a folder or GGUF file that the native runtime computes: structure and configuration only.

    Nothing is read from `path`, which may be another model by now, or gone.

    Raises:
        ModelError: transformers does not know the architecture.
    """
    from transformers import GenerationConfig

    check_dtype(native.config, f"{path / 'config.json'}: ")
    try:
        config = _configuration(native.config)
        _forget_quantisation(config)
        pad_within_vocabulary(config)
        with torch.device("meta"):
            own = _of_several(config)
            model: Any = own._from_config(config, dtype=dtype) if own else _by_config(config, dtype)
        model.eval()
        model.name_or_path = config.name_or_path = str(path)
        if native.generation_config:
            model.generation_config = GenerationConfig.from_dict(native.generation_config)
    except Exception as error:  # a configuration can be wrong in any way
        raise ModelError(f"{path}: transformers cannot build this model ({error_text(error)})") from error
    return model


def _by_config(config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def _of_several(config: Any) -> Any:
    """The language model that transformers has for models of several modalities only, as Mistral 4's; None if none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    modeling = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    return getattr(modeling, f"{type(config).__name__.removesuffix('Config')}ForCausalLM", None)


def _configuration(values: Mapping[str, Any]) -> Any:
    """transformers' configuration for the content of a config.json."""
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory(prefix="anyaccel-") as folder:  # transformers reads files only
        (Path(folder) / "config.json").write_text(json.dumps(values))
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def check_dtype(given: Any, where: str) -> None:
    """Raise ModelError for a dtype in config.json that torch does not have, for which transformers would fail."""
    config = Fields(given, where)
    for values in (config, config.mapping("text_config")):
        name = "dtype" if values.has("dtype") else "torch_dtype"
        given = values.required(name) if values.has(name) else None
        if isinstance(given, str) and not isinstance(getattr(torch, given, None), torch.dtype):
            raise ModelError(f"{values.where}{name}={short_repr(given)}: torch has no such dtype; bfloat16 is usual")


def _own_class(config: Any) -> Any:
    """transformers' class that a configuration names, where that generates and is no causal LM: for several modalities,
    or with an encoder for the prompt; None for causal LMs.
    """
    import transformers

    named = getattr(transformers, (config.architectures or [""])[0], None)
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not config.is_encoder_decoder:
        return None
    generates = isinstance(named, type) and issubclass(named, transformers.GenerationMixin)
    return named if generates else None


def _forget_quantisation(config: Any) -> None:
    """Weights are unpacked as they are read: the model has plain layers."""
    for each in filter(None, (config, getattr(config, "text_config", None))):
        if getattr(each, "quantization_config", None) is not None:
            del each.quantization_config


def _read_generation_config(model: Any, folder: Path) -> None:
    if (folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(folder)


class CheckpointWeights:
    """Weights of a checkpoint under the parameter names of a model."""

    mapped = True

    def __init__(
        self, checkpoint: Checkpoint, names: dict[str, str], as_linears: Collection[str] = (), keep: bool = False
    ) -> None:
        """`as_linears`: those of a Conv1D [in, out] that are stored [out, in]; `keep`: see `weights_for`."""
        self._keep = keep
        self._checkpoint = checkpoint
        self._names = names
        self._as_linears = as_linears

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def read(self, name: str, shape: torch.Size, part: Slice | None) -> torch.Tensor:
        if name not in self._as_linears:
            return self._checkpoint.read(self._names[name], shape, part)
        return self._checkpoint.read(self._names[name], torch.Size(shape[::-1]), _turned(part)).T

    def held(self, name: str, part: Slice | None) -> HeldRows | None:
        """What was read as floats, as a packed format holds it; None where it is not to be kept."""
        if not self._keep or not isinstance(self._checkpoint, DequantisedCheckpoint):
            return None
        return self._checkpoint.held(self._names[name], _turned(part) if name in self._as_linears else part)


def _turned(part: Slice | None) -> Slice | None:
    """The part of the transpose of a matrix."""
    return None if part is None else Slice(1 - part.dim, part.ranges)


def weights_for(model: nn.Module, folder: Path, keep: bool = False) -> WeightSource:
    """Where the weights of `model` (a skeleton of `folder`) come from.

    Slices are read from the files when the checkpoint has the model's own tensor names. A checkpoint that transformers
    renames or merges while loading is loaded whole through transformers first.

    Args:
        keep: quantised matrices stay as they are where packed formats hold them, for layers that will be packed.
    """
    checkpoint = checkpoint_in(folder)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."

    def stored(name: str) -> str | None:
        return next((each for each in (name, name.removeprefix(prefix), prefix + name) if each in checkpoint), None)

    _untie(model, folder, lambda target, origin: _differ(checkpoint, stored(target), stored(origin)))
    names: dict[str, str] = {}
    missing = []
    tied = getattr(model, "all_tied_weights_keys", {})
    buffers = {name for name, _ in model.named_buffers()} & model.state_dict().keys()
    for name in [*(name for name, _ in model.named_parameters()), *sorted(buffers)]:
        same = [name, *(target for target, origin in tied.items() if origin == name)]
        same += [origin for target, origin in tied.items() if target == name]
        found = next(filter(None, map(stored, same)), None)
        if found is None and name in buffers:
            continue  # the model has computed this buffer
        if found is None:
            missing.append(name)
        else:
            names[name] = found
    if not missing:
        if isinstance(
            checkpoint, DequantisedCheckpoint
        ):  # libraries that quantise have a Conv1D's weight as a linear's
            kinds = {f"{name}.weight": type(module).__name__ for name, module in model.named_modules()}
            as_linears = {
                name for name in names if kinds.get(name) == "Conv1D" and checkpoint.is_quantised(names[name])
            }
            held = {name for name in names.values() if keep and checkpoint.held(name, None) is not None}
            _say_cost(folder, checkpoint.cost(set(names.values()) - held))
            return CheckpointWeights(checkpoint, names, as_linears, keep)
        return CheckpointWeights(checkpoint, names)
    logger.info("%s: %s is stored under another name; loading through transformers", folder, missing[0])
    if isinstance(checkpoint, DequantisedCheckpoint):
        _say_cost(folder, checkpoint.cost(checkpoint.names()))
    whole = _load_whole(folder, model, checkpoint)
    each = dict(whole.named_parameters(remove_duplicate=False))
    _untie(model, folder, lambda target, origin: {target, origin} <= each.keys() and each[target] is not each[origin])
    return LoadedWeights(whole, mapped=True)  # transformers keeps the files mapped


def _say_cost(folder: Path, cost: str) -> None:
    if cost:
        logger.warning("%s: %s", folder, cost)


def _differ(checkpoint: Checkpoint, target: str | None, origin: str | None) -> bool:
    return target is not None and origin is not None and target != origin and not checkpoint.same(target, origin)


def _untie(model: Any, folder: Path, differ: Callable[[str, str], bool]) -> None:
    """Untie the parameters of a skeleton for which the checkpoint has different values.

    As in transformers, the weights take precedence over the configuration.

    Args:
        differ: whether a parameter and the one that it is tied to, both given by name, have different values.
    """
    tied = getattr(model, "all_tied_weights_keys", {})
    for target, origin in list(tied.items()):
        if not differ(target, origin):
            continue
        logger.warning(
            "%s: config.json ties %s to %s, but the checkpoint has both with different values: each is used as it is; "
            "tie_word_embeddings=false there says so",
            *(folder, target, origin),
        )
        owner, _, short = target.rpartition(".")
        parameter = model.get_parameter(target)
        # It has the shape of the configuration; a stored tensor of another shape is refused when it is read.
        setattr(model.get_submodule(owner), short, nn.Parameter(torch.empty_like(parameter), requires_grad=False))
        del tied[target]


def _load_whole(folder: Path, model: Any, checkpoint: Checkpoint) -> nn.Module:
    dtype = next(model.parameters()).dtype
    options: dict[str, Any] = {"dtype": "auto", "output_loading_info": True, "trust_remote_code": False}
    where: Path | None = folder
    try:
        if isinstance(checkpoint, DequantisedCheckpoint):
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            _forget_quantisation(config)
            where = None
            options |= {"dtype": dtype, "config": config, "state_dict": checkpoint.plain_tensors(dtype)}
        loaded: Any = type(model).from_pretrained(where, **options)
        whole, info = loaded
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise ModelError(f"{folder}: transformers cannot load this checkpoint ({error_text(error)})") from error
    if info["missing_keys"]:
        names = sorted(info["missing_keys"])
        raise ModelError(f"{folder}: the checkpoint lacks {len(names)} weights, for example {names[0]!r}")
    return whole  # type: ignore[no-any-return]
