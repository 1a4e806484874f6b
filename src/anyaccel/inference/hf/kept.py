# SPDX-License-Identifier: Apache-2.0
"""Puts back what transformers changes in configurations while it generates, whatever ends the call.

Its loops set values for the time of a call (a smaller number of layers for drafts, a mode of experts for decoding), and
some leave them as they are where an error or Ctrl-C ends the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def configurations_kept(*models: Any) -> Iterator[None]:
    """Give the configurations of these models the attributes that they have now when the block ends."""
    kept = {id(each): (each, dict(vars(each))) for model in models for each in _configurations(model)}
    try:
        yield
    finally:
        for each, attributes in kept.values():
            vars(each).clear()
            vars(each).update(attributes)


def _configurations(model: Any) -> Iterator[Any]:
    """`config` with all that are inside of it, and `generation_config`."""
    waiting = [getattr(model, name, None) for name in ("config", "generation_config")]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if hasattr(each, "to_dict") and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += vars(each).values()
