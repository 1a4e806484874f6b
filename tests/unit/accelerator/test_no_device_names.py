# SPDX-License-Identifier: Apache-2.0
"""Code outside accelerator/backends/ asks for a capability; it does not compare device names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import anyaccel
from anyaccel.vendors import VENDORS

DEVICES = set(VENDORS)

# The backends, and what looks for such names in others' code and calls.
EXEMPT = {Path("accelerator/backends"), Path("port"), Path("cuda")}


def comparisons(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        tested = [node] if isinstance(node, ast.Compare | ast.MatchValue) else []
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".startswith", ".endswith")):
            tested += node.args
        for inner in (inner for part in tested for inner in ast.walk(part)):
            if isinstance(inner, ast.Constant) and str(inner.value).partition(":")[0] in DEVICES:
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_the_search_finds_what_it_looks_for() -> None:
    source = "x.type == 'cuda'\n'cpu' != y\nz in ('a', 'xpu:0')\ns.startswith('npu:')\nfine('cpu')\n"
    assert len(list(comparisons(source))) == 4


def test_no_device_name_is_compared() -> None:
    root = Path(anyaccel.__file__).parent
    found = [
        f"{path.relative_to(root)} {where}"
        for path in root.rglob("*.py")
        if not EXEMPT & set(path.relative_to(root).parents)
        for where in comparisons(path.read_text())
    ]
    assert found == []
