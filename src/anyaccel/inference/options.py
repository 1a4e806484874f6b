# SPDX-License-Identifier: Apache-2.0
"""The options of a model, for `init_inference`, the commands and their ranks alike. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from anyaccel.env import WIRE_DTYPES
from anyaccel.errors import UsageError
from anyaccel.numerals import parse_bytes

# Of weights only: arithmetic on them is in floats.
QUANTISED = ("int8", "int4")
DTYPES = ("bf16", "fp16", "fp32", *QUANTISED, "auto")
GROUP_SIZES = (32, 64, 128)
CACHE_DTYPES = ("auto", "bf16", "int8", "int4", "fp32")
RUNTIMES = ("auto", "native", "device", "torch", "plain")
# The names of torch and transformers.
_ALIASES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
# What native code can hold; a sensible value is far below.
_MOST = {"cache_bytes": 2**63 - 1, "memory": 2**63 - 1, "threads": 2**31 - 1}


def dtype_name(value: object) -> str:
    """Our name for a dtype that may be given by an alias or as torch's object, such as float32 or torch.bfloat16."""
    name = str(value).removeprefix("torch.")
    return _ALIASES.get(name, name)


@dataclass(frozen=True)
class ModelOptions:
    """How a model is loaded and run, whichever it is.

    Attributes:
        dtype: of weights and arithmetic: bf16, fp16, fp32; or of the weights alone: int8 (a scale a row), int4; or
            "auto": what the file has.
        group_size: weights that share a scale in int4: 32, 64 or 128.
        kv_cache: precision of the native runtime's key/value cache: bf16, int8, int4 or fp32; "auto" is fp32 for dtype
            fp32, else bf16.
        cache_bytes: most memory that the key/value cache of each rank may take; 0: what the model and the machine
            allow.
        memory: most bytes that weights and key/value cache may take in this machine's memory; 0: no bound. Experts
            that do not fit stay in the file of packed weights, and are read when tokens need them (native runtime).
            This and cache_bytes may be texts, such as "8GiB".
        threads: of the native runtime; 0: the CPUs of this process.
        tp: ranks among which each layer is divided (tensor parallelism).
        pp: stages among which the layers are divided, of `tp` ranks each (pipeline parallelism, native runtime only).
        wire_dtype: type in which sums of ranks on several hosts go between these: fp32, bf16 or int8; "auto" is that of
            ANYACCEL_WIRE_DTYPE, or fp32.
        runtime: "native" (the decoder in csrc/llm, on the CPU), "device" (the same decoder in torch's operators, on any
            device), "torch" (the Hugging Face module with packed native linears and norms, on the CPU), "plain" (the
            Hugging Face module as it is), or "auto": on the CPU native, torch or plain, elsewhere device or plain, the
            first of these that has the model.
        draft: what guesses tokens for the native runtime: the path of a model folder or GGUF file, a native engine of
            as many ranks, or "mtp", the layer of the model's checkpoint for multi-token prediction; None: nothing.
        lora: folder of a LoRA adapter of PEFT, which is added to the weights as they are read (native and device
            runtimes); "": none.

    Raises:
        UsageError: a value is out of its range, or does not go with another one; the message names it.
    """

    dtype: str = "bf16"
    group_size: int = 32
    kv_cache: str = "auto"
    cache_bytes: int = 0
    memory: int = 0
    threads: int = 0
    tp: int = 1
    pp: int = 1
    wire_dtype: str = "auto"
    runtime: str = "auto"
    draft: Any = None
    lora: str = ""

    def __post_init__(self) -> None:
        dtype, kv_cache = dtype_name(self.dtype), dtype_name(self.kv_cache)
        if dtype not in DTYPES:
            raise UsageError(f"dtype {self.dtype!r} is not supported; use one of {', '.join(DTYPES)}")
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "kv_cache", kv_cache)
        _check_choice("runtime", self.runtime, RUNTIMES)
        _check_choice("group_size", self.group_size, GROUP_SIZES)
        _check_choice("kv_cache", kv_cache, CACHE_DTYPES)
        _check_choice("wire_dtype", self.wire_dtype, ("auto", *WIRE_DTYPES))
        for name, most in _MOST.items():
            value = getattr(self, name)
            if isinstance(value, str) and name != "threads":
                value = _size(name, value)
                object.__setattr__(self, name, value)
            if not _is_whole(value) or not 0 <= value <= most:
                raise UsageError(f"{name}={value!r}: must be a whole number from 0 to {most}")
        for name in ("tp", "pp"):
            _check_count(name, getattr(self, name))
        if 0 < self.memory <= self.cache_bytes:
            raise UsageError(f"memory={self.memory}: must be more than its part cache_bytes={self.cache_bytes}")
        if self.pp > 1 and self.runtime not in ("auto", "native"):
            raise UsageError(f"pp={self.pp} needs the native runtime, not runtime={self.runtime!r}")
        if self.draft is not None and self.runtime not in ("auto", "native"):
            raise UsageError(f"draft={self.draft!r} needs the native runtime, not runtime={self.runtime!r}")
        if self.lora and self.runtime not in ("auto", "native", "device"):
            raise UsageError(
                f"lora={self.lora!r}: runtime={self.runtime!r} runs the model's own code; merge the adapter with PEFT"
            )
        if self.runtime == "plain" and dtype in QUANTISED:
            raise UsageError(f"dtype={dtype!r} needs packed weights, which runtime='plain' does not have")

    @property
    def ranks(self) -> int:
        """How many processes share the model."""
        return self.tp * self.pp

    @property
    def cache_dtype(self) -> str:
        """`kv_cache` with "auto" resolved."""
        if self.kv_cache != "auto":
            return self.kv_cache
        return "fp32" if self.dtype == "fp32" else "bf16"

    @property
    def arithmetic(self) -> str:
        """The dtype of what is not quantised, and of the logits."""
        return self.dtype if self.dtype in ("bf16", "fp16") else "fp32"

    @property
    def rank_options(self) -> str:
        """The options that ask for this number of ranks, as the commands have them, for messages."""
        return f"--tp {self.tp}" + (f" --pp {self.pp}" if self.pp > 1 else "")

    def for_draft(self) -> ModelOptions:
        """The options of the draft model: in the precision of a GGUF file, else in int4.

        With fewer bits it is faster, and only slightly fewer of its tokens are accepted. A layer of the model's own
        checkpoint is in its precision where the model is too.
        """
        own = self.draft == "mtp" and self.dtype == "auto"
        dtype = "auto" if own or Path(self.draft).is_file() else "int4"
        return replace(self, draft=None, dtype=dtype, kv_cache="auto", cache_bytes=0, memory=0, lora="")

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, object]) -> ModelOptions:
        """Check and convert the keyword arguments of `init_inference`, which have DeepSpeed's names where it has them.

        Raises:
            UsageError: an option is unknown or its value cannot be used; the message names it.
        """
        values = dict(arguments)
        given = {name: values.pop(name) for name in ("tensor_parallel", "tp", "mp_size") if name in values}
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} mean the same: give tensor_parallel only")
        parallel = {"tp_size": given["mp_size"]} if "mp_size" in given else next(iter(given.values()), None)
        # DeepSpeed's switch for kernels of its own: here they are used wherever they fit.
        values.pop("replace_with_kernel_inject", None)
        tensor = _read_parallel("tensor_parallel", parallel, "tp_size", "wire_dtype")
        pipeline = _read_parallel("pipeline_parallel", values.pop("pipeline_parallel", None), "size")
        known = {field.name for field in fields(cls)} - {"tp", "pp", "wire_dtype"}
        if unknown := sorted(values.keys() - known):
            raise UsageError(
                f"init_inference has no option {unknown[0]!r}; options: tensor_parallel, pipeline_parallel, "
                f"{', '.join(sorted(known))}"
            )
        return cls(
            tp=tensor["tp_size"],
            pp=pipeline["size"],
            wire_dtype=tensor.get("wire_dtype", "auto"),
            **values,  # type: ignore[arg-type]
        )


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name}={value!r}: must be one of {', '.join(map(str, choices))}")


def _check_count(name: str, value: object) -> None:
    if not _is_whole(value) or value < 1:  # type: ignore[operator]
        raise UsageError(f"{name}={value!r}: must be a whole number of at least 1")


def _size(name: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"{name}={text!r}: {error}") from None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read_parallel(option: str, value: object, size: str, *others: str) -> dict[str, Any]:
    """The dict that such an option has, with a size in it."""
    if isinstance(value, Mapping) and "enabled" in value:  # DeepSpeed's switch
        value = {name: own for name, own in value.items() if name != "enabled"} if value["enabled"] else {}
    value = {} if value is None else value
    if not isinstance(value, Mapping) or set(value) - {size, *others}:
        raise UsageError(f"{option}={value!r}: needs a dict with {', '.join((size, *others))}")
    found = {size: 1, **value}
    _check_count(f"{option} {size}", found[size])
    return found


DEFAULTS = ModelOptions()
