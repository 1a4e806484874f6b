# SPDX-License-Identifier: Apache-2.0
"""docs/add-a-runtime.md: its executor answers as the page says, and the server's scheduler drives it."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anyaccel._llm import ExternalModel, Request
from anyaccel.errors import ModelError

GUIDE = Path(__file__).parents[3] / "docs" / "add-a-runtime.md"


@pytest.fixture
def model(tmp_path: Path) -> Any:
    found: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[0], found)
    return found["load"]()


def test_the_guide_is_followed(tmp_path: Path) -> None:
    executor, use = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "counting.py").write_text(executor)
    done = subprocess.run([sys.executable, "-c", use], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.stdout == f"{use.rpartition('# ')[2]}", done.stderr


def test_sampling_grammars_scores_and_prefixes_need_nothing_of_the_executor(model: ExternalModel) -> None:
    mask = (1 << 50).to_bytes(16, "little")
    masked = Request(model, [5, 6, 7], {"max_new_tokens": 2})
    masked.set_mask(mask)
    scored = Request(model, [5, 6, 7], {"max_new_tokens": 2, "logprobs": 2, "prompt_logprobs": 0})
    biased = Request(model, [5, 6, 7], {"max_new_tokens": 2, "bias": {60: 5.0}})
    model.step([masked, scored, biased])
    assert (masked.tokens, scored.tokens, biased.tokens) == ([50], [8], [60])
    assert [token for token, _, _ in scored.prompt_scores()] == [6, 7]
    follower = Request(model, [5, 6, 7, 8, 9], {"max_new_tokens": 1}, scored)
    model.step([follower])
    assert follower.tokens == [10]
    assert model.cache_used_bytes == 3 * 3 + 5
    for request in (masked, scored, biased, follower):
        request.finish()
    assert model.cache_used_bytes == 0


def test_a_full_cache_leaves_the_requests_as_they_were(model: ExternalModel) -> None:
    model.executor.limit_bytes = 4
    request = Request(model, [5, 6, 7], {"max_new_tokens": 4})
    assert model.step([request]) == [8]
    assert model.step([request]) == [9]
    with pytest.raises(ModelError, match="the cache is full"):
        model.step([request])
    assert (request.tokens, request.cached) == ([8, 9], 4)
    model.executor.limit_bytes = 100
    assert model.step([request]) == [10]
