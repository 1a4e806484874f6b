# SPDX-License-Identifier: Apache-2.0
"""docs/backends.md says what the backends do."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from vendors import BACKENDS, NAMES, run_all

TOOL = Path(__file__).parents[3] / "tools" / "backend_table.py"


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("backend_table", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(tool: ModuleType) -> None:
    assert tool.page(run_all()) == tool.PAGE.read_text(), "run python tools/backend_table.py"


def test_each_method_has_one_row_and_each_backend_its_place(tool: ModuleType) -> None:
    rows = [method for methods in tool.GROUPS.values() for method in methods.split()]
    assert sorted(rows) == sorted(NAMES)
    other = {"xpu.external", "xpu.external.older", "xpu.ipex.older"}  # told in words, or gone
    assert {*tool.COLUMNS.values(), *tool.VARIANTS} == set(BACKENDS) - other
