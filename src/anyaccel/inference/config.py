# SPDX-License-Identifier: Apache-2.0
"""The options of `init_inference`, under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch

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
DTYPE_NAMES = ("bf16", "fp16", "fp32")


def parse_dtype(value: torch.dtype | str) -> torch.dtype:
    """A torch dtype from itself or from its name (`bf16`, `float16`, `torch.float32`, ...).

    Raises:
        UsageError: not a dtype that inference supports.
    """
    dtype = value if isinstance(value, torch.dtype) else _DTYPES.get(str(value).removeprefix("torch."))
    if dtype is None or dtype not in _DTYPES.values():
        raise UsageError(f"dtype {value!r} is not supported; use one of {', '.join(DTYPE_NAMES)}")
    return dtype


@dataclass(frozen=True)
class TensorParallelConfig:
    """Attributes: tp_size: ranks among which each layer is divided."""

    tp_size: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.tp_size, int) or self.tp_size < 1:
            raise UsageError(f"tensor_parallel tp_size={self.tp_size!r}: must be a whole number of at least 1")


@dataclass(frozen=True)
class InferenceConfig:
    """Attributes: dtype: of weights and arithmetic. tensor_parallel: see TensorParallelConfig."""

    dtype: torch.dtype = torch.bfloat16
    tensor_parallel: TensorParallelConfig = field(default_factory=TensorParallelConfig)

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
        if values.pop("replace_with_kernel_inject", False):
            raise UsageError("replace_with_kernel_inject=True is not supported: leave it out")
        dtype = parse_dtype(values.pop("dtype", torch.bfloat16))  # type: ignore[arg-type]
        if values:
            raise UsageError(f"init_inference has no option {sorted(values)[0]!r}; options: dtype, tensor_parallel")
        return cls(dtype, _parallel_config(parallel))


def _parallel_config(value: object) -> TensorParallelConfig:
    if value is None:
        return TensorParallelConfig()
    if isinstance(value, TensorParallelConfig):
        return value
    names = [f.name for f in fields(TensorParallelConfig)]
    if isinstance(value, Mapping) and "enabled" in value:  # DeepSpeed's switch
        enabled = value["enabled"]
        value = {name: option for name, option in value.items() if name != "enabled"} if enabled else {}
    if not isinstance(value, Mapping) or set(value) - set(names):
        raise UsageError(f"tensor_parallel={value!r}: needs a dict with {', '.join(names)}")
    return TensorParallelConfig(**value)
