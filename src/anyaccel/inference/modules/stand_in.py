# SPDX-License-Identifier: Apache-2.0
"""What is in the place of a weight that has been packed: it says shape, dtype and device, and refuses its values."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from anyaccel.errors import UsageError

_aten: Any = torch.ops.aten
# Operations that make another tensor of its dtype and device and read none of its values.
_MAKE = {
    *(_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like),
    *(_aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty_strided),
}
# Operations that give a view of the same values.
_VIEW = {
    *(_aten.detach, _aten.alias, _aten.view, _aten.t, _aten.transpose, _aten.permute, _aten.expand, _aten.unsqueeze),
    *(_aten.squeeze, _aten.slice, _aten.select, _aten.as_strided, _aten._unsafe_view, _aten._reshape_alias),
}


class StandIn(torch.Tensor):
    """A tensor without values; `stand_in` makes it.

    Attributes:
        message: of the error that whoever wants the values gets.
    """

    message: str
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # shapes and the like are torch's own to tell

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run what asks for no values; raise UsageError for everything else."""
        kind, kwargs = func.overloadpacket, kwargs or {}
        first = args[0] if args else None
        if not isinstance(first, StandIn) or kind not in _MAKE | _VIEW:
            # It may be made of operations that ask for shapes only; in inference mode torch does not take it apart.
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            found = first if isinstance(first, StandIn) else _first(args, kwargs)
            raise UsageError(found.message if found is not None else "the values of a packed weight are asked for")
        like = torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device="meta")
        if kind in _MAKE:
            return func(like, *args[1:], **{"device": first.device, **kwargs})
        return _made(func(like, *args[1:], **kwargs).shape, first.dtype, first.device, first.message)

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, _value: torch.Tensor) -> NoReturn:
        self._refuse()

    def numpy(self, **_: Any) -> NoReturn:
        self._refuse()

    def tolist(self) -> NoReturn:
        self._refuse()

    def __deepcopy__(self, _memo: Any) -> NoReturn:
        self._refuse()

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UsageError(self.message)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _first(*values: Any) -> StandIn | None:
    """The first stand-in among the arguments of an operation, in lists and dictionaries too."""
    for value in values:
        if isinstance(value, StandIn):
            return value
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if (found := _first(*inner)) is not None:
            return found
    return None


def _made(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, message: str) -> StandIn:
    one = torch.empty((), dtype=dtype, device=device)
    if dtype.is_floating_point:
        one.fill_(float("nan"))  # code that reads the memory directly gets NaN instead of plausible values
    made = torch.Tensor._make_subclass(StandIn, one.expand(shape))
    made.message = message
    return made


def stand_in(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, message: str) -> nn.Parameter:
    """A parameter of this description, which takes the memory of one value.

    Args:
        message: of the UsageError that reading or writing it raises.
    """
    parameter = nn.Parameter(_made(shape, dtype, device, message), requires_grad=False)
    parameter.message = message  # type: ignore[attr-defined]
    return parameter
