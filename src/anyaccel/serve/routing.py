# SPDX-License-Identifier: Apache-2.0
"""Which of several engines with the same model gets a request: replicas of one server, or those of a Ray cluster."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from anyaccel.serve.pages import PAGE
from anyaccel.serve.pages import Sequence as Cached

_UNEVEN = 4  # so many more open requests than another one an engine may have that has more of a prompt in its cache

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Routes(Generic[K]):
    """What each engine has seen of prompts, and so what is in its cache, as far as can be told from outside.

    Args:
        shares: whether what one request has computed is kept for others.
    """

    def __init__(self, shares: bool = True) -> None:
        self._shares = shares
        self._seen: dict[K, OrderedDict[int, None]] = {}  # keys of pages, the oldest first

    def order(self, prompt: Sequence[int], load: Mapping[K, int]) -> list[K]:
        """The engines, the best one for this prompt first.

        That is the one that has seen the longest beginning of it, unless it is much busier than another; else the least
        loaded one.

        Args:
            load: open requests of each engine that may have it.
        """
        most = min(load.values(), default=0) + _UNEVEN
        keys = _keys(prompt)

        def rank(engine: K) -> tuple[bool, int, int]:
            seen = self._seen.get(engine, ())
            count = next((place for place, key in enumerate(keys) if key not in seen), len(keys))
            return load[engine] > most, -count, load[engine]

        return sorted(load, key=rank)

    def note(self, engine: K, tokens: Sequence[int], cache_pages: int) -> None:
        """An engine computes these tokens; its cache has room for so many pages."""
        if not self._shares:
            return
        seen = self._seen.setdefault(engine, OrderedDict())
        for key in reversed(_keys(tokens)):  # what is first is used by most, and forgotten last
            seen[key] = None
            seen.move_to_end(key)
        while len(seen) > cache_pages:
            seen.popitem(last=False)

    def forget(self, engine: K) -> None:
        """An engine has lost its cache, or is gone."""
        self._seen.pop(engine, None)

    def known(self) -> list[K]:
        """Engines of which something is known."""
        return list(self._seen)


def _keys(tokens: Sequence[int]) -> list[int]:
    """Of the pages that the tokens fill."""
    cached: Any = Cached(0, list(tokens))
    return [cached.key(page) for page in range(len(tokens) // PAGE)]


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What all calls bring; when one fails, the others are cancelled, and have ended when its error is raised."""
    asked = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*asked)
    finally:
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
