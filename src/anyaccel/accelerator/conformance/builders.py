# SPDX-License-Identifier: Apache-2.0
"""Op builders: each loads its op, or says why it cannot."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from anyaccel.accelerator.base import Accelerator
from anyaccel.accelerator.conformance.checking import (
    ConformanceError,
    check,
    expect,
    expect_equal,
    expect_error,
    expect_type,
)
from anyaccel.errors import AnyAccelError, CapabilityError

_UNKNOWN = "NoSuchOpBuilder"


def _builders(package: str) -> dict[str, type[Any]]:
    """The builders of a package, known by what they can do: those of older code have other base classes."""
    module = importlib.import_module(package)
    values = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, type)
        and all(callable(getattr(value, method, None)) for method in ("is_compatible", "load"))
        and getattr(value, "NAME", None)  # base classes have no NAME
        and not inspect.isabstract(value)
    }


@check("op builders", "op_builder_dir", "get_op_builder", "create_op_builder")
def check_every_builder_loads_or_says_why_not(accelerator: Accelerator) -> str:
    """The first load of an op may compile it, which takes a while."""
    package = accelerator.op_builder_dir()
    expect_type("op_builder_dir()", package, str)
    builders = _builders(package)
    loaded = 0
    for name, kind in builders.items():
        expect(accelerator.get_op_builder(name) is kind, f"get_op_builder({name!r}) {kind}", "another")
        builder = accelerator.create_op_builder(name)
        expect(isinstance(builder, kind), f"create_op_builder({name!r}) an instance of {kind}", builder)
        compatible = builder.is_compatible(verbose=False)
        expect_type(f"{name}.is_compatible()", compatible, bool)
        if not compatible:
            reason = builder.why_not() if hasattr(builder, "why_not") else "older builders log it"
            expect(isinstance(reason, str) and reason, f"{name}.why_not() to give a reason", reason)
            continue
        try:
            op = builder.load(verbose=False)
        except AnyAccelError as error:
            raise ConformanceError(f"expected {name}, which is compatible, to load, got: {error}") from error
        expect(op is not None, f"{name}.load() to return the op", op)
        loaded += 1
    others = ", the others say why not" if loaded < len(builders) else ""
    return f"{loaded} of {len(builders)} load{others}"


@check("op builders", "get_op_builder")
def check_an_unknown_builder_is_told(accelerator: Accelerator) -> None:
    """None for the class, an error with the name for an object."""
    expect_equal(f"get_op_builder({_UNKNOWN!r})", accelerator.get_op_builder(_UNKNOWN), None)
    expect_error(
        f"create_op_builder({_UNKNOWN!r})",
        lambda: accelerator.create_op_builder(_UNKNOWN),
        CapabilityError,
        _UNKNOWN,
    )
