# SPDX-License-Identifier: Apache-2.0
"""Every rule does what its examples in docs/porting-rules.md say, and writes only what the interface has."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from anyaccel.accelerator.base import Accelerator
from anyaccel.port import tables
from anyaccel.port.engine import port_text
from anyaccel.port.rules import BY_CODE, RULES

ROOT = Path(__file__).parents[3]
IMPORTS = "import os\nimport subprocess\n\nimport torch\nimport torch as th\n\n"
EXAMPLES = [(rule.code, *example) for rule in RULES for example in rule.examples]


def body(text: str) -> str:
    """The text without its imports."""
    lines = text.split("\n")
    while lines and (not lines[0] or lines[0].startswith(("import os", "import sub", "import torch", "from anyaccel"))):
        lines.pop(0)
    return "\n".join(lines)


@pytest.mark.parametrize(("code", "before", "after"), EXAMPLES)
def test_examples(code: str, before: str, after: str) -> None:
    ported = port_text(f"{IMPORTS}{before}\n")
    assert body(ported.text) == f"{after}\n"
    assert code in {found.code for found in ported.findings}
    assert any(found.fixable for found in ported.findings) == (before != after)
    assert ("from anyaccel import get_accelerator\n" in ported.text) == ("get_accelerator" in after)
    again = port_text(ported.text)
    assert again.text == ported.text
    assert not any(found.fixable for found in again.findings)
    assert len(again.findings) == sum(not found.fixable for found in ported.findings)


def test_every_rule_has_an_example_and_codes_are_in_order() -> None:
    assert all(rule.examples for rule in RULES)
    assert [rule.code for rule in RULES] == sorted(BY_CODE)


@pytest.mark.parametrize(
    "method",
    [*tables.FUNCTIONS.values(), *tables.GRAPH_FUNCTIONS.values(), *tables.NVTX.values()],
    ids=lambda method: method.name,
)
def test_methods_take_what_they_are_given(method: tables.Method) -> None:
    parameters = list(inspect.signature(getattr(Accelerator, method.name)).parameters)[1:]
    wanted = [name for _, name in method.parameters]
    assert parameters[: len(wanted)] == wanted


@pytest.mark.parametrize("name", [*tables.OTHER_METHODS, *tables.CLASSES, *tables.TYPED_TENSORS])
def test_other_methods_exist(name: str) -> None:
    assert hasattr(Accelerator, name)


def test_functions_of_the_table_are_torchs() -> None:
    import torch

    for name, method in tables.FUNCTIONS.items():
        function = getattr(torch.cuda, name)
        parameters = [] if inspect.isclass(function) else list(inspect.signature(function).parameters)
        wanted = [parameter for parameter, _ in method.parameters]
        assert not parameters or parameters[: len(wanted)] == wanted, name
    for name, wanted in tables.AMP.items():
        function = getattr(torch.cuda.amp, name)
        parameters = [each for each in inspect.signature(function).parameters if each != "self"]
        assert tuple(parameters[: len(wanted)]) == wanted, name


def test_no_function_is_forgotten() -> None:
    """What torch.cuda and the interface both have is in the table, or in a rule of its own."""
    import torch

    interface = {name for name in dir(Accelerator) if not name.startswith("_")}
    both = {name for name in dir(torch.cuda) if name in interface}
    of_their_own = {"current_device", "is_bf16_supported", *tables.CLASSES, *tables.TYPED_TENSORS}
    others = {"random", "device"}  # a module and a context manager there, something else here
    assert both <= {*tables.FUNCTIONS, *of_their_own, *others}, both - {*tables.FUNCTIONS, *of_their_own, *others}


def test_advice_calls_only_what_exists() -> None:
    advice = [*tables.ADVICE.values(), *tables.CUDA_ONLY.values(), tables.MANAGEMENT_ADVICE]
    for text in advice:
        for name in re.findall(r"(?<![.\w])(\w+)\(", text):
            known = {"get_accelerator", "pool", "has", "range", "to", "device"}
            assert hasattr(Accelerator, name) or name in known, text


def test_page_is_current() -> None:
    """docs/porting-rules.md says what the rules say; else run python tools/porting_page.py."""
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "porting_page.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_needs_no_libcst_to_list_its_rules() -> None:
    for name in ("rules", "tables", "finding", "config", "files", "source", "notebook", "output", "run"):
        tree = ast.parse((ROOT / "src" / "anyaccel" / "port" / f"{name}.py").read_text())
        imported = {
            alias.name
            for node in tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in ([ast.alias(node.module or "")] if isinstance(node, ast.ImportFrom) else node.names)
        }
        assert not any(each.startswith("libcst") for each in imported), name
