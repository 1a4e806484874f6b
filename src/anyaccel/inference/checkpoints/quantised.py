# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints, read under the names and shapes of plain ones: which layouts each method's tensors are in.

The layouts are in the files beside this one. A matrix that is not quantised (`modules_to_not_convert`, `ignore`) is
told by its tensors, not by the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from anyaccel.errors import AnyAccelError, ModelError
from anyaccel.inference.checkpoints.bitnet import BitNet
from anyaccel.inference.checkpoints.bitsandbytes import BitsAndBytes4, BitsAndBytes8
from anyaccel.inference.checkpoints.float4 import Float4, Mxfp4Experts
from anyaccel.inference.checkpoints.float8 import Float8
from anyaccel.inference.checkpoints.gguf_file import GgufFile
from anyaccel.inference.checkpoints.hqq import Hqq
from anyaccel.inference.checkpoints.packed_integers import CompressedIntegers, Gptq, awq
from anyaccel.inference.checkpoints.quantised_layout import Layout, QuantisedSource, Unreadable
from anyaccel.inference.checkpoints.sources import SafetensorsSource, TensorSource
from anyaccel.inference.checkpoints.torchao import TorchAo
from anyaccel.validation import Fields, read_json, short_repr

_FLOATS = ("f32", "f16", "bf16", "f64")
_INTEGERS = ("U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")


# Files in which methods said how they had quantised before config.json did.
_BESIDE = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}


def _compressed(source: SafetensorsSource, settings: Fields) -> list[Layout]:
    """compressed-tensors and modelopt: a matrix's tensors tell which of these it is in, as several may be mixed."""
    return [layout(source, settings) for layout in (CompressedIntegers, Float8, Float4)]


def _auto_round(source: SafetensorsSource, settings: Fields) -> list[Layout]:
    """AutoRound writes the layouts of others; its own is GPTQ's with zero points as they are."""
    packing = settings.text("packing_format", "auto_round:auto_gptq")
    if "awq" in packing:
        return [awq(source, settings)]
    if "compressor" in packing or "fp" in packing:
        return _compressed(source, settings)
    return [Gptq(source, settings, int("gptq" in packing))]


# quant_method of a config -> the layout of its tensors, or what finds the layouts; see docs/add-a-format.md.
METHODS: dict[str, Callable[[SafetensorsSource, Fields], Layout | list[Layout]]] = {
    "gptq": Gptq,
    "awq": awq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "compressed-tensors": _compressed,
    "modelopt": _compressed,
    "fp8": Float8,
    "fbgemm_fp8": Float8,
    "mxfp4": Mxfp4Experts,
    "bitsandbytes": lambda source, settings: [BitsAndBytes4(source, settings), BitsAndBytes8(source, settings)],
    "torchao": TorchAo,
    "hqq": Hqq,
    "bitnet": BitNet,
}


def quantised_source(source: TensorSource, config: Mapping[str, Any]) -> Any:
    """`source`, wrapped for the quantised tensors that the config's `quantization_config` describes, if it has one.

    Raises:
        ModelError: a method or layout that is not read, or tensors that do not fit together; the message says which.
    """
    settings = quantisation_of(config)
    if not settings.known():
        refuse_integers(source)
        return source
    method = method_of(settings)
    if method not in METHODS:
        raise Unreadable(f"reader for quantization {short_repr(method)}")
    if not isinstance(source, SafetensorsSource):
        raise Unreadable(f"reader for {method} weights in files other than safetensors")
    made = METHODS[method](source, settings)
    return QuantisedSource(source, [made] if isinstance(made, Layout) else made)


def folder_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder, with a `quantization_config` where a file beside it says how weights are stored.

    Raises:
        ModelError: a file is none, or not readable.
    """
    config = read_json(folder / "config.json")
    for name, method in _BESIDE.items():
        if not quantisation_of(config).known() and (folder / name).is_file():
            said = read_json(folder / name)
            bits = {"bits": said["w_bit"]} if "w_bit" in said else {}
            config["quantization_config"] = {**said, **bits, "quant_method": method}
    return config


def has_quantised_weights(model: Path) -> bool:
    """Whether a folder or a GGUF file says so of its weights; False also for what cannot be read."""
    try:
        if model.is_dir():
            return bool(quantisation_of(folder_config(model)).known())
        return any(info.type not in _FLOATS for info in GgufFile(model).infos.values())
    except (AnyAccelError, OSError):
        return False  # opening the model says why


def quantisation_of(config: Mapping[str, Any]) -> Fields:
    """The `quantization_config` of a config.json, empty without one; some have it beside their text part's values."""
    given = Fields(config, "config: ")
    outer = given.mapping("quantization_config")
    return outer if outer.known() else given.mapping("text_config").mapping("quantization_config")


def method_of(settings: Fields) -> str:
    """The method of a `quantization_config`, in lower case; old ones of bitsandbytes do not name it."""
    if not settings.has("quant_method") and (settings.get_bool("load_in_4bit") or settings.get_bool("load_in_8bit")):
        return "bitsandbytes"
    return settings.text("quant_method", "").lower()


def refuse_integers(source: TensorSource) -> None:
    """Raise for integer weights without a quantization_config, whose meaning is unknown."""
    if not isinstance(source, SafetensorsSource):
        return
    for name in source.names():
        file, entry = source.entry(name)
        if name.endswith(".weight") and entry.dtype in _INTEGERS:
            raise ModelError(
                f"{file.path}: tensor {short_repr(name)} has integers ({entry.dtype}), and config.json has no "
                "quantization_config that says what they stand for"
            )
