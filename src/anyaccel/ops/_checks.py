# SPDX-License-Identifier: Apache-2.0
"""Checks of an optimizer's options and states before its native step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from anyaccel.errors import UsageError


def check_range(optimizer: str, **values: Any) -> None:
    """Raise UsageError for a hyper-parameter that is out of range: betas must be in [0, 1), others at least 0."""
    for name, given in values.items():
        value = to_float(optimizer, name, given)
        top = 1.0 if name.startswith("beta") else float("inf")
        if not 0.0 <= value < top:
            raise UsageError(
                f"{optimizer}: {name} must be {'from 0 to below 1' if top == 1.0 else '0 or more'}, not {value}"
            )


def to_float(optimizer: str, name: str, value: Any) -> float:
    """The present value of a numeric option, which may be a tensor; as in torch, its range is not checked again."""
    try:
        if not isinstance(value, str):
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise UsageError(f"{optimizer}: {name} must be one number, not {value!r}")


def read_betas(optimizer: str, betas: Any) -> tuple[float, float]:
    """The present betas of a group, checked: values out of range would make every parameter infinite or NaN."""
    try:
        beta1, beta2 = betas
    except (TypeError, ValueError):
        raise UsageError(f"{optimizer}: betas must be two numbers, not {betas!r}") from None
    beta1, beta2 = to_float(optimizer, "beta1", beta1), to_float(optimizer, "beta2", beta2)
    check_range(optimizer, beta1=beta1, beta2=beta2)
    return beta1, beta2


def check_complete(optimizer: str, needed: Iterable[str], state: Any) -> None:
    """Raise UsageError for a parameter's state that lacks entries: it is another optimizer's."""
    if not isinstance(state, Mapping):
        raise UsageError(f"{optimizer}: the state of a parameter must be a dict, not {type(state).__name__}")
    missing = set(needed) - state.keys()
    if missing:
        raise UsageError(
            f"{optimizer}: the state of a parameter has {', '.join(map(str, state))}; "
            f"{', '.join(sorted(missing))} is missing"
        )


def step_tensor(optimizer: str, state: Mapping[str, Any]) -> torch.Tensor:
    """A new float32 tensor, which native code increments, of a state's step: an int or a tensor of any dtype."""
    return torch.tensor(to_float(optimizer, "the step of a parameter", state["step"]), dtype=torch.float32)


def check_values(optimizer: str, param: torch.Tensor, name: str, value: Any) -> torch.Tensor:
    """`value`, when it can be the state `name` of this parameter.

    Raises:
        UsageError: it is no dense tensor of real numbers, or has another shape.
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_complex():
        what = f"{value.dtype} {value.layout}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise UsageError(f"{optimizer}: {name} of a parameter must be a dense tensor of real numbers, not {what}")
    if value.shape != param.shape:
        raise UsageError(f"{optimizer}: {name} has shape {tuple(value.shape)}, its parameter {tuple(param.shape)}")
    return value


def check_place(optimizer: str, name: str, value: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise UsageError for a state that the kernels cannot read."""
    if not value.is_cpu or value.dtype not in dtypes:
        raise UsageError(
            f"{optimizer}: {name} of a parameter is in {value.dtype} on {value.device}; it must be in "
            f"{' or '.join(map(str, dtypes))} in host memory"
        )
