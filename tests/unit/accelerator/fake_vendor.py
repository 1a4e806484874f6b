# SPDX-License-Identifier: Apache-2.0
"""A torch device module built from recorded signatures.

Calling a function that the vendor does not have is an AttributeError, and arguments that it does not take are
a TypeError, as with the real module. What a function answers is given by the test.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

RECORDED = Path(__file__).parents[2] / "data" / "vendor_api"


def _signature(recorded: Mapping[str, Any]) -> inspect.Signature:
    defaults = recorded.get("defaults", {})
    parameters = []
    for position, name in enumerate(recorded["args"]):
        default = inspect.Parameter.empty if position < recorded["required"] else defaults.get(name)
        parameters.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default))
    if "vararg" in recorded:
        parameters.append(inspect.Parameter(recorded["vararg"], inspect.Parameter.VAR_POSITIONAL))
    if "varkw" in recorded:
        parameters.append(inspect.Parameter(recorded["varkw"], inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


class FakeVendor(ModuleType):
    """The module; `calls` lists (function, arguments by name) in order."""

    def __init__(self, name: str, answers: Mapping[str, Any]) -> None:
        super().__init__(f"torch.{name}")
        recorded = json.loads((RECORDED / f"{name}.json").read_text())
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.recorded_functions = set(recorded["functions"])
        unknown = set(answers) - self.recorded_functions - {"default_generators"}
        assert not unknown, f"the recorded module has no {unknown}"
        self.default_generators: tuple[Any, ...] = ()
        for function, signature in recorded["functions"].items():
            setattr(self, function, self._function(function, signature, answers.get(function)))
        for kind, methods in recorded["classes"].items():
            setattr(self, kind, self._class(kind, methods))
        for submodule, details in recorded["submodules"].items():
            functions = {
                function: self._function(f"{submodule}.{function}", signature, None)
                for function, signature in details["functions"].items()
            }
            setattr(self, submodule, SimpleNamespace(**functions))

    def _function(self, name: str, recorded: Mapping[str, Any], answer: Any) -> Callable[..., Any]:
        signature = _signature(recorded)

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            self.calls.append((name, dict(bound.arguments)))
            return answer(*args, **kwargs) if callable(answer) else answer

        return call

    def _class(self, kind: str, methods: Mapping[str, Any]) -> type[Any]:
        def construct(self: Any, *args: Any, **kwargs: Any) -> None:
            signature = methods.get("__init__") or methods.get("__new__")
            self.arguments = dict(_signature(signature).bind(*args, **kwargs).arguments) if signature else {}

        body: dict[str, Any] = {"__init__": construct}
        for method, recorded in methods.items():
            if method in ("__init__", "__new__", "__del__", "__repr__", "__eq__", "__hash__"):
                continue
            record = self._function(f"{kind}.{method}", recorded, None)
            body[method] = lambda self, *args, record=record: record(*args)
        return type(kind, (), body)

    def called(self, name: str) -> list[dict[str, Any]]:
        """Arguments of each call of this function."""
        return [arguments for function, arguments in self.calls if function == name]
