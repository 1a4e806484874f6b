# SPDX-License-Identifier: Apache-2.0
"""What is said of --draft where nothing drafts, and where drafts cannot pay."""

from types import SimpleNamespace
from typing import Any

import pytest

from anyaccel.cli._model_options import Drafts, warn_of_unused_drafts
from anyaccel.inference.native.draft import warn_if_useless


@pytest.mark.parametrize(
    ("runtime", "tokens", "said"),
    [("native", 15, False), ("device", 0, False), ("device", 15, True), ("plain", 15, True)],
)
def test_a_runtime_that_decodes_without_drafts_is_named(runtime: str, tokens: int, said: bool) -> None:
    lines: list[str] = []
    screen: Any = SimpleNamespace(line=lines.append)
    backend: Any = SimpleNamespace(runtime=runtime)
    warn_of_unused_drafts(SimpleNamespace(draft=Drafts(tokens)), backend, screen)  # type: ignore[arg-type]
    assert bool(lines) == said
    assert not said or f"runtime={runtime!r}" in lines[0]


@pytest.mark.parametrize(("cost", "pays", "said"), [(None, False, False), (0.3, True, False), (0.97, False, True)])
def test_a_draft_model_that_cannot_pay_is_named(cost: float | None, pays: bool, said: bool) -> None:
    lines: list[str] = []
    native: Any = SimpleNamespace(model=SimpleNamespace(draft_cost=cost, draft_can_pay=pays))
    warn_if_useless(native, "twin", lines.append)
    assert bool(lines) == said
    assert not said or "twin reads 97% of the model's bytes for a token, so drafts cannot pay" in lines[0]
