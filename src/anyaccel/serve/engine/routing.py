# SPDX-License-Identifier: Apache-2.0
"""Prefix-aware routing among engines with the same model: the replicas of one server, or of a Ray cluster."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from anyaccel.serve.engine.pages import PAGE
from anyaccel.serve.engine.pages import Sequence as Cached

# An engine that has more of a prompt in its cache is preferred while it has at most this many more open requests than
# the least loaded one.
_IMBALANCE = 4

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Routes(Generic[K]):
    """An estimate of what each engine has in its prefix cache, from the prompts that it was sent.

    Args:
        shares: whether the engines have a prefix cache.
    """

    def __init__(self, shares: bool = True) -> None:
        self._shares = shares
        self._seen: dict[K, OrderedDict[int, None]] = {}  # keys of pages, the oldest first

    def order(self, prompt: Sequence[int], load: Mapping[K, int]) -> list[K]:
        """The engines, the best one for this prompt first.

        The best one has the longest prefix of the prompt in its cache, unless it is much busier than another; without
        such a prefix it is the least loaded one.

        Args:
            load: the number of open requests of each engine that may be chosen.
        """
        most = min(load.values(), default=0) + _IMBALANCE
        keys = _keys(prompt)

        def rank(engine: K) -> tuple[bool, int, int]:
            seen = self._seen.get(engine, ())
            count = next((place for place, key in enumerate(keys) if key not in seen), len(keys))
            return load[engine] > most, -count, load[engine]

        return sorted(load, key=rank)

    def note(self, engine: K, tokens: Sequence[int], cache_pages: int) -> None:
        """Note that an engine computes these tokens; its cache has room for `cache_pages` pages."""
        if not self._shares:
            return
        seen = self._seen.setdefault(engine, OrderedDict())
        for key in reversed(_keys(tokens)):  # most requests share the first pages, so they are to be evicted last
            seen[key] = None
            seen.move_to_end(key)
        while len(seen) > cache_pages:
            seen.popitem(last=False)

    def forget(self, engine: K) -> None:
        """Forget an engine that has lost its cache or has ended."""
        self._seen.pop(engine, None)

    def known(self) -> list[K]:
        """The engines that have been sent prompts."""
        return list(self._seen)


def _keys(tokens: Sequence[int]) -> list[int]:
    """The keys of the pages that the tokens fill."""
    cached: Any = Cached(0, list(tokens))
    return [cached.key(page) for page in range(len(tokens) // PAGE)]


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all calls; when one fails, the others are cancelled and awaited before its error is raised."""
    asked = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*asked)
    finally:
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
