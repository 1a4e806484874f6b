# SPDX-License-Identifier: Apache-2.0
"""docs/models.md says what FAMILIES has."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "model_table.py"


def test_the_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("model_table", TOOL)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    monkeypatch.syspath_prepend(str(TOOL.parents[1] / "tests" / "helpers"))
    assert tool.page() == tool.PAGE.read_text(), "run python tools/model_table.py"
