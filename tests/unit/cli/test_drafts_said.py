# SPDX-License-Identifier: Apache-2.0
"""What is said of --draft where nothing drafts."""

from types import SimpleNamespace
from typing import Any

import pytest

from anyaccel.cli._model_options import Drafts, warn_of_unused_drafts


@pytest.mark.parametrize(
    ("runtime", "tokens", "said"),
    [("native", 15, False), ("device", 0, False), ("device", 15, True), ("plain", 15, True)],
)
def test_a_runtime_that_decodes_without_drafts_is_named(runtime: str, tokens: int, said: bool) -> None:
    lines: list[str] = []
    screen: Any = SimpleNamespace(line=lines.append)
    backend: Any = SimpleNamespace(runtime=runtime)
    warn_of_unused_drafts(SimpleNamespace(drafts=Drafts(tokens)), backend, screen)  # type: ignore[arg-type]
    assert bool(lines) == said
    assert not said or f"runtime={runtime!r}" in lines[0]
