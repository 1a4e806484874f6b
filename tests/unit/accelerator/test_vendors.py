# SPDX-License-Identifier: Apache-2.0
"""vendors.py is the one table of vendors: every backend has its row, and nobody keeps a list of his own."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import anyaccel
from anyaccel.accelerator.select import REGISTRY
from anyaccel.launch.plan import devices
from anyaccel.vendors import FAMILIES, OTHERS, PORTED, VENDORS

PACKAGE = Path(anyaccel.__file__).parent
# What DeepSpeed has modules for is DeepSpeed's choice, and where optimizers can be captured is torch's.
OTHER_LISTS = {"vendors.py", "compat/deepspeed/_names.py", "cuda/functions.py"}
WORDS = re.compile(rf"(?<![a-z])(?:{'|'.join(OTHERS)})(?![a-z])")


def test_every_backend_has_a_row_that_says_what_it_says() -> None:
    for name, vendor in VENDORS.items():
        for backend, (_, package) in vendor.backends.items():
            spec = REGISTRY[backend].load().spec
            # Kunlunxin's devices are torch's cuda.
            assert (spec.name, spec.device_type) == (name, PORTED if backend == "klxpu" else name)
            assert (spec.package, spec.visible_devices) == (package, vendor.visible), backend
    assert all(set(members) <= set(VENDORS[name].backends) for name, members in FAMILIES.items())


def test_the_launcher_knows_where_to_look_for_each() -> None:
    assert devices.ACCELERATORS.keys() == VENDORS.keys()
    by_file = {name for name, vendor in VENDORS.items() if vendor.device_files}
    by_code = devices._FIND.keys() | devices._ALSO_VISIBLE.keys()
    assert by_code <= VENDORS.keys() - by_file
    # Apple's devices have no files, nobody sells Meta's, and Neuron's and XLA's runtimes divide chips as they are told.
    assert VENDORS.keys() - by_file - by_code == {"mps", "mtia", "cpu", "neuron", "xla"}


def vendors_in(source: str) -> set[str]:
    """Those that stand in the texts of a module, docstrings apart."""
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and isinstance(node.body[0], ast.Expr)
    }
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return {word for each in constants if isinstance(each.value, str) for word in WORDS.findall(each.value)}


def test_nobody_else_lists_them() -> None:
    assert vendors_in('"""mlu"""\nx = ["npu:0", "torch_musa"]\n') == {"npu", "musa"}
    lists = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if PACKAGE / "accelerator" / "backends" not in path.parents and len(vendors_in(path.read_text())) > 2
    }
    assert lists == OTHER_LISTS
