# SPDX-License-Identifier: Apache-2.0
"""runtime="device" when a signal ends a call between any two lines, and under what a caller's thread has set."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import anyaccel.inference.device as device
from anyaccel._llm import Request
from anyaccel.inference.device.pages import PAGE
from device_models import on_device

pytest.importorskip("transformers")

_FILES = tuple(f"{Path(device.__file__).parent}/{name}.py" for name in ("executor", "pages", "sampling"))
_OPTIONS = {"max_new_tokens": 6, "keep_states": True, "repetition_penalty": 1.2, "frequency_penalty": 0.4}


class _Interrupt:
    """Raises KeyboardInterrupt before the given line, counted over all that run in `_FILES`."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, _argument: object) -> Any:
        if frame.f_code.co_filename not in _FILES:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def _finish(model: Any, requests: list[Any]) -> list[list[int]]:
    for _ in range(100):
        if all(request.finished for request in requests):
            break
        model.step([request for request in requests if not request.finished])
    return [request.tokens for request in requests]


def _work(model: Any, requests: list[Any]) -> None:
    """Answers that share a prefix, a fork whose page is copied, one that is dropped, a cache that grows."""
    first = Request(model, list(range(3, 103)), _OPTIONS)
    requests.append(first)
    model.step([first])
    follower = Request(model, [*range(3, 93), 9, 9], _OPTIONS, first)
    requests.append(follower)
    dropped = Request(model, list(range(20, 20 + PAGE)), _OPTIONS)
    model.step([first, follower, dropped])
    dropped.finish()
    _finish(model, requests)


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_whatever_line_a_signal_ends_the_rest_is_right(name: str) -> None:
    """Also of states, which are there once more where a request has kept its own."""
    expected: list[Any] = []
    _work(on_device(name, positions=1024), expected)
    answers = [request.tokens for request in expected]
    count = _Interrupt(10**9)
    _traced(count, on_device(name, positions=1024), [])
    lines = 10**9 - count.left
    assert lines > 1000
    for line in range(1, lines, 41):
        model = on_device(name, positions=1024)
        requests: list[Any] = []
        assert _traced(_Interrupt(line), model, requests), line
        assert _finish(model, requests) == answers[: len(requests)], line
        again: list[Any] = []
        _work(model, again)
        assert [request.tokens for request in again] == answers, line
        del requests, again
        gc.collect()
        assert model.cache_used_bytes == 0, line


def _traced(interrupt: _Interrupt, model: Any, requests: list[Any]) -> bool:
    """Whether the interrupt came."""
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        _work(model, requests)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_autocast_and_other_defaults_of_the_caller_change_nothing() -> None:
    model = on_device("llama", positions=1024)
    options = _OPTIONS | {"bias": {7: 1.5}, "logprobs": 1}

    def answer() -> list[list[int]]:
        return _finish(model, [Request(model, list(range(3, 40)), options)])

    expected = answer()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert answer() == expected
    with torch.device("meta"):
        assert answer() == expected
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert answer() == expected
    finally:
        torch.set_default_dtype(default)
