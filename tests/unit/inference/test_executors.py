# SPDX-License-Identifier: Apache-2.0
"""The two executors of DecoderSpec are called alike: what the native one takes, the other takes too."""

import ast
import inspect
from pathlib import Path

import pytest

import anyaccel
from anyaccel.inference.device.model import DeviceModel
from anyaccel.inference.device.request import Request

STUBS = ast.parse((Path(anyaccel.__file__).parent / "_llm.pyi").read_text())


def methods(name: str) -> dict[str, list[str]]:
    """The methods that _llm.pyi lists for a class, each with the names of its parameters."""
    found = next(each for each in STUBS.body if isinstance(each, ast.ClassDef) and each.name == name)
    return {
        each.name: [argument.arg for argument in (*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs)]
        for each in found.body
        if isinstance(each, ast.FunctionDef) and not each.decorator_list and not each.name.startswith("_")
    }


@pytest.mark.parametrize(("native", "device"), [("Model", DeviceModel), ("Request", Request)])
def test_both_executors_take_the_same_arguments(native: str, device: type) -> None:
    wanted = methods(native)
    shared = [name for name in wanted if inspect.isfunction(getattr(device, name, None))]
    assert len(shared) > 2, "the classes have been renamed"
    for name in shared:
        taken = inspect.signature(getattr(device, name)).parameters
        if not any(each.kind is each.VAR_POSITIONAL for each in taken.values()):
            assert list(taken) == wanted[name], f"{device.__name__}.{name}"
