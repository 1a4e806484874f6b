# SPDX-License-Identifier: Apache-2.0
"""Each rule does what its examples say; the tables name what torch and the interface have; the page is current."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from anyaccel.accelerator.base import Accelerator
from anyaccel.cuda_names import CLASSES, CONTEXTS, FUNCTIONS, GRAPH_FUNCTIONS, NVTX, TYPED_TENSORS, Method
from anyaccel.port.engine import port_text
from anyaccel.port.rule import Rule, Tier
from anyaccel.port.rules import RULES
from anyaccel.port.rules.no_counterpart import _ADVICE

ROOT = Path(__file__).parents[3]
IMPORTS = "import os\nimport torch\nimport torch.distributed as dist\n"


def ids(rule: Rule) -> str:
    return rule.code


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_the_example_becomes_what_the_rule_says(rule: Rule) -> None:
    assert bool(rule.before) == (rule.tier is not Tier.REPORT)
    ported = port_text(f"{IMPORTS}{rule.before}\n", unsafe=rule.tier is Tier.UNSAFE)
    body = ported.text.replace("from anyaccel import get_accelerator\n", "").removeprefix(IMPORTS).lstrip("\n")
    assert body == (f"{rule.after}\n" if rule.before else "\n").lstrip("\n")
    assert rule.code in {found.code for found in ported.findings if found.fixed} or not rule.before
    again = port_text(ported.text, unsafe=True)
    assert again.text == ported.text
    assert not any(found.fixed for found in again.findings)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.left], ids=ids)
def test_what_the_rule_leaves_is_reported(rule: Rule) -> None:
    text = f"{IMPORTS}{rule.left}\n"
    found = port_text(text)
    assert found.text == text
    assert rule.code in {each.code for each in found.findings}


def test_codes_are_unique() -> None:
    assert len({rule.code for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(
    "method",
    [*FUNCTIONS.values(), *CONTEXTS.values(), *GRAPH_FUNCTIONS.values(), *NVTX.values()],
    ids=lambda method: method.name,
)
def test_methods_take_what_they_are_given(method: Method) -> None:
    parameters = list(inspect.signature(getattr(Accelerator, method.name)).parameters)[1:]
    wanted = [name for _, name in method.parameters]
    assert parameters[: len(wanted)] == wanted


@pytest.mark.parametrize("name", [*CLASSES, *TYPED_TENSORS])
def test_classes_exist(name: str) -> None:
    assert hasattr(Accelerator, name)


def test_functions_of_the_table_are_torchs() -> None:
    for name, method in FUNCTIONS.items():
        function = getattr(torch.cuda, name)
        parameters = [] if inspect.isclass(function) else list(inspect.signature(function).parameters)
        wanted = [parameter for parameter, _ in method.parameters]
        assert not parameters or parameters[: len(wanted)] == wanted, name


def test_no_function_is_forgotten() -> None:
    """What torch.cuda and the interface both have is in the table, or in a rule of its own."""
    interface = {name for name in dir(Accelerator) if not name.startswith("_")}
    both = {name for name in dir(torch.cuda) if name in interface}
    others = {"random"}  # a module there
    assert both <= {*FUNCTIONS, *CONTEXTS, "current_device", *CLASSES, *TYPED_TENSORS, *others}


def test_advice_calls_only_what_exists() -> None:
    for text in [*_ADVICE.values(), *(rule.why for rule in RULES)]:
        for name in re.findall(r"get_accelerator\(\)\.(\w+)\(", text):
            assert hasattr(Accelerator, name), text


def test_the_guide_adds_a_rule(tmp_path: Path) -> None:
    """The rule of docs/add-a-port-rule.md works as the page says."""
    guide = (ROOT / "docs" / "add-a-port-rule.md").read_text()
    rule, test = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)[:2]
    (tmp_path / "profiler_activity.py").write_text(rule)
    program = (
        "import profiler_activity\nfrom anyaccel.port.rules import register\nregister(profiler_activity.RULE)\n" + test
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
