# SPDX-License-Identifier: Apache-2.0
"""Record DeepSpeed's public names and signatures: tests/data/deepspeed_names.json.

Run it with a Python that has DeepSpeed and torch:

    python tools/record_deepspeed_names.py tests/data/deepspeed_names.json

Only names and the names of parameters are recorded, nothing of what they do.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

# Packages that are recorded name by name: those of the accelerator layer's documents and users. Of the others, the list
# of packages is enough.
IN_DETAIL = (
    "accelerator", "comm", "launcher", "module_inject", "ops.adagrad", "ops.adam", "ops.aio", "ops.lion", "utils"
)  # fmt: skip
ALSO = ("constants", "env_report", "git_version_info", "ops", "ops.op_builder", "ops.op_builder.all_ops",
        "ops.op_builder.builder", "ops.op_builder.cpu", "inference.config", "inference.engine",
        "runtime", "runtime.utils")  # fmt: skip
# Classes whose methods are part of what is compared.
WITH_METHODS = ("DeepSpeedAccelerator", "OpBuilder", "InferenceEngine", "OnDevice", "MultiNodeRunner")

_DESCRIPTORS = (property, staticmethod, classmethod)


def modules() -> list[str]:
    found = {"deepspeed", *(f"deepspeed.{name}" for name in ALSO)}
    for name in IN_DETAIL:
        package = importlib.import_module(f"deepspeed.{name}")
        found.add(package.__name__)
        found.update(
            item.name
            for item in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lambda _: None)
            if ".containers" not in item.name and ".auto_ep" not in item.name
        )
    return sorted(found)


def parameters(value: object) -> list[list[Any]] | None:
    """[name, kind, has a default] of each parameter."""
    if getattr(value, "__qualname__", "").endswith("log_wrapper"):  # the collectives, as what measures them wraps them
        value = inspect.getclosurevars(value).nonlocals["func"]  # type: ignore[arg-type]
    try:
        signature = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return [
        [item.name, item.kind.name, item.default is not item.empty]
        for item in signature.parameters.values()
        if item.name != "self"
    ]


def describe(value: object) -> dict[str, Any]:
    if isinstance(value, type):
        entry: dict[str, Any] = {"kind": "class"}
        if "__init__" in vars(value) and not issubclass(value, BaseException):
            entry["parameters"] = parameters(value.__init__)
        if value.__name__ in WITH_METHODS:
            entry["methods"] = {
                name: None if isinstance(member, property) else parameters(getattr(value, name))
                for name, member in sorted(vars(value).items())
                if not name.startswith("_")
                and (callable(member) or isinstance(member, (property, staticmethod, classmethod)))
            }
        return entry
    if callable(value):
        return {"kind": "function", "parameters": parameters(value)}
    return {"kind": "value"}


def is_own(name: str, value: object, module: Any) -> bool:
    if name.startswith("_") or inspect.ismodule(value):
        return False
    origin = getattr(value, "__module__", None)
    if isinstance(value, type) or callable(value):
        # What a package re-exports is its own; what a module imports to work with is not.
        return origin == module.__name__ or (hasattr(module, "__path__") and str(origin).startswith("deepspeed."))
    # Values know nothing of their origin: those that the module assigns itself, and the one that everybody imports.
    if name == "logger":
        return hasattr(module, "__path__")
    return name in getattr(module, "__all__", ()) or f"\n{name} =" in inspect.getsource(module)


def main(target: str) -> None:
    import deepspeed

    found: dict[str, Any] = {}
    for name in modules():
        try:
            module = importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - some need what is not installed
            print(f"{name} is left out: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        members = {key: value for key, value in sorted(vars(module).items()) if is_own(key, value, module)}
        found[name] = {key: describe(value) for key, value in members.items()}
    packages = sorted(item.name for item in pkgutil.iter_modules(deepspeed.__path__))
    lines = [f"{json.dumps(name)}: {{\n" + ",\n".join(
        f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in members.items()) + "\n}"
        for name, members in found.items()]  # fmt: skip
    text = (
        f'{{\n"version": "{deepspeed.__version__}",\n"packages": {json.dumps(packages)},\n"modules": {{\n'
        + ",\n".join(lines)
        + "\n}\n}\n"
    )
    json.loads(text)
    Path(target).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1])
