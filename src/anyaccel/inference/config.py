# SPDX-License-Identifier: Apache-2.0
"""The options of `init_inference`, under DeepSpeed's names where it has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch

from anyaccel.env import WIRE_DTYPES
from anyaccel.errors import UsageError

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
}
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
DTYPE_NAMES = ("bf16", "fp16", "fp32")
# Of weights only: arithmetic on them is in the dtype that Precision says.
QUANTISED = ("int8", "int4")
GROUP_SIZES = (32, 64, 128)
CACHE_DTYPES = ("bf16", "int8", "int4", "fp32")
RUNTIMES = ("auto", "native", "device", "torch", "plain")
# What native code can hold; a sensible value is far below.
_MOST = {"cache_bytes": 2**63 - 1, "threads": 2**31 - 1}


def parse_dtype(value: torch.dtype | str) -> torch.dtype:
    """A torch dtype from itself or from its name (`bf16`, `float16`, `torch.float32`, ...).

    Raises:
        UsageError: not a dtype that inference supports.
    """
    dtype = value if isinstance(value, torch.dtype) else _DTYPES.get(str(value).removeprefix("torch."))
    if dtype is None or dtype not in _DTYPES.values():
        raise UsageError(f"dtype {value!r} is not supported; use one of {', '.join((*DTYPE_NAMES, *QUANTISED))}")
    return dtype


def parse_precision(value: torch.dtype | str) -> str:
    """The name of a precision: one of DTYPE_NAMES or QUANTISED, or "auto".

    Raises:
        UsageError: not a precision that inference supports.
    """
    if value is torch.int8:
        return "int8"
    if str(value) in ("auto", *QUANTISED):
        return str(value)
    return _NAMES[parse_dtype(value)]


@dataclass(frozen=True)
class TensorParallelConfig:
    """How layers are divided.

    Attributes:
        tp_size: ranks among which each layer is divided.
        wire_dtype: form in which what ranks of several hosts sum goes between these: fp32, bf16 or int8; "auto" is that
            of ANYACCEL_WIRE_DTYPE, or fp32.
    """

    tp_size: int = 1
    wire_dtype: str = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.tp_size, int) or self.tp_size < 1:
            raise UsageError(f"tensor_parallel tp_size={self.tp_size!r}: must be a whole number of at least 1")
        _one_of("tensor_parallel wire_dtype", self.wire_dtype, ("auto", *WIRE_DTYPES))


@dataclass(frozen=True)
class PipelineParallelConfig:
    """Attributes: size: stages among which the layers are divided, of `tp_size` ranks each."""

    size: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 1:
            raise UsageError(f"pipeline_parallel size={self.size!r}: must be a whole number of at least 1")


_Parallel = TypeVar("_Parallel", TensorParallelConfig, PipelineParallelConfig)


@dataclass(frozen=True)
class InferenceConfig:
    """What `init_inference` and `optimize` were asked for.

    Attributes:
        dtype: of weights and arithmetic: bf16, fp16, fp32; or of the weights alone: int8 (a scale a row), int4, or
            "auto": what the file has.
        tensor_parallel: see TensorParallelConfig.
        pipeline_parallel: see PipelineParallelConfig; of the native runtime only.
        group_size: weights that share a scale in int4: 32, 64 or 128.
        kv_cache: precision of the native runtime's key/value cache: bf16, int8, int4 or fp32; "auto" is fp32 for dtype
            fp32, else bf16.
        cache_bytes: most memory that the native key/value cache may take; 0: what the model and the machine allow.
        threads: of the native runtime; 0: the CPUs of this process.
        runtime: "native" (the decoder in csrc/llm, on the CPU), "device" (the same decoder in torch's operators, on any
            device), "torch" (the Hugging Face module with packed native linears and norms, on the CPU), "plain" (the
            Hugging Face module as it is), or "auto": on the CPU native, torch or plain, elsewhere device or plain, the
            first of these that has the model.
        draft: what guesses tokens for the native runtime: the path of a model folder or GGUF file, or a native engine
            of as many ranks; None: nothing.
    """

    dtype: str = "bf16"
    tensor_parallel: TensorParallelConfig = field(default_factory=TensorParallelConfig)
    pipeline_parallel: PipelineParallelConfig = field(default_factory=PipelineParallelConfig)
    group_size: int = 32
    kv_cache: str = "auto"
    cache_bytes: int = 0
    threads: int = 0
    runtime: str = "auto"
    draft: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", parse_precision(self.dtype))
        _one_of("runtime", self.runtime, RUNTIMES)
        _one_of("group_size", self.group_size, GROUP_SIZES)
        kv_cache = self.kv_cache if self.kv_cache == "auto" else str(self.kv_cache).removeprefix("torch.")
        kv_cache = {"bfloat16": "bf16", "float32": "fp32"}.get(kv_cache, kv_cache)
        object.__setattr__(self, "kv_cache", kv_cache)
        _one_of("kv_cache", kv_cache, ("auto", *CACHE_DTYPES))
        for name, most in _MOST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
                raise UsageError(f"{name}={value!r}: must be a whole number from 0 to {most}")
        if self.pipeline_parallel.size > 1 and self.runtime not in ("auto", "native"):
            raise UsageError(
                f"pipeline_parallel size={self.pipeline_parallel.size} needs the native runtime, not "
                f"runtime={self.runtime!r}"
            )
        if self.draft is not None and self.runtime not in ("auto", "native"):
            raise UsageError(f"draft={self.draft!r} needs the native runtime, not runtime={self.runtime!r}")
        if self.runtime == "plain" and self.dtype in QUANTISED:
            raise UsageError(f"dtype={self.dtype!r} needs packed weights, which runtime={self.runtime!r} does not have")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of what is not quantised, and of the logits."""
        return _DTYPES.get(self.dtype, torch.float32)

    @property
    def cache_dtype(self) -> str:
        """`kv_cache` with "auto" resolved."""
        if self.kv_cache != "auto":
            return self.kv_cache
        return "fp32" if self.dtype == "fp32" else "bf16"

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> InferenceConfig:
        """Check and convert the keyword arguments of `init_inference`.

        Raises:
            UsageError: an option is unknown or its value cannot be used; the message names it.
        """
        values = dict(options)
        given = {name: values.pop(name) for name in ("tensor_parallel", "tp", "mp_size") if name in values}
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} mean the same: give tensor_parallel only")
        parallel = {"tp_size": given["mp_size"]} if "mp_size" in given else next(iter(given.values()), None)
        # DeepSpeed's switch for kernels of its own: here they are used wherever they fit.
        values.pop("replace_with_kernel_inject", None)
        stages = _parallel_config("pipeline_parallel", values.pop("pipeline_parallel", None), PipelineParallelConfig)
        known = {f.name for f in fields(cls)} - {"tensor_parallel", "pipeline_parallel"}
        unknown = sorted(values.keys() - known)
        if unknown:
            raise UsageError(
                f"init_inference has no option {unknown[0]!r}; options: tensor_parallel, pipeline_parallel, "
                f"{', '.join(sorted(known))}"
            )
        ranks = _parallel_config("tensor_parallel", parallel, TensorParallelConfig)
        return cls(tensor_parallel=ranks, pipeline_parallel=stages, **values)  # type: ignore[arg-type]


def _one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name}={value!r}: must be one of {', '.join(map(str, choices))}")


def _parallel_config(option: str, value: object, kind: type[_Parallel]) -> _Parallel:
    if value is None:
        return kind()
    if isinstance(value, kind):
        return value
    names = [f.name for f in fields(kind)]
    if isinstance(value, Mapping) and "enabled" in value:  # DeepSpeed's switch
        enabled = value["enabled"]
        value = {name: option for name, option in value.items() if name != "enabled"} if enabled else {}
    if not isinstance(value, Mapping) or set(value) - set(names):
        raise UsageError(f"{option}={value!r}: needs a dict with {', '.join(names)}")
    return kind(**value)
