# SPDX-License-Identifier: Apache-2.0
"""Who holds which pages of the key/value cache: the native cache's own book, kept a second time where plans are made.

Pages are shared whole, so that counting them here gives the same numbers as there, and no page is ever copied. A
sequence whose request has ended stays as long as nobody needs its room: its pages are found by their content, each
page's key made of its tokens and of the key of the page before it.
"""

from __future__ import annotations

from collections import OrderedDict

PAGE = 64  # tokens; kPageTokens in csrc/llm/attention.h


def pages_of(tokens: int) -> int:
    """How many pages so many tokens take."""
    return -(-tokens // PAGE)


class Page:
    """One page.

    Attributes:
        busy: how many of its holders belong to requests that run.
    """

    __slots__ = ("busy", "holders", "key")

    def __init__(self) -> None:
        self.holders: dict[Sequence, None] = {}
        self.busy = 0
        self.key: int | None = None


class Sequence:
    """Tokens in the cache.

    Attributes:
        tokens: all that the request has, in the cache or not.
        cached: how many of them are in the cache.
        pages: of those, and of what the step under way adds.
        ended: nobody goes on with it.
    """

    __slots__ = ("busy", "cached", "ended", "id", "keys", "pages", "tokens")

    def __init__(self, number: int, tokens: list[int]) -> None:
        self.id = number
        self.tokens = tokens
        self.cached = 0
        self.pages: list[Page] = []
        self.keys: list[int] = []
        self.ended = False
        self.busy = True

    def key(self, page: int) -> int:
        """Of a page that is full, or will be."""
        while len(self.keys) <= page:
            first = len(self.keys) * PAGE
            before = self.keys[-1] if self.keys else 0
            self.keys.append(hash((before, tuple(self.tokens[first : first + PAGE]))))
        return self.keys[page]


class PageTable:
    """All pages of a cache.

    Args:
        total: how many there may be.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._pinned = 0  # of sequences that run
        self._index: dict[int, Page] = {}
        self._idle: OrderedDict[Sequence, None] = OrderedDict()  # the least recently used first

    @property
    def available(self) -> int:
        """Pages that are free, or can be made so by forgetting what nobody runs with."""
        return self.total - self._pinned

    @property
    def idle(self) -> int:
        """How many sequences are kept for others."""
        return len(self._idle)

    # --- what is there already

    def match(self, sequence: Sequence, most: int) -> tuple[Sequence | None, int]:
        """Who has the longest beginning of a sequence, and how many whole pages of it, at most `most`."""
        found: Page | None = None
        count = 0
        while count < most and (page := self._index.get(sequence.key(count))) is not None:
            found = page
            count += 1
        if found is None:
            return None, 0
        source = next(iter(found.holders))
        # Keys are hashes: another text may have the same ones.
        if source.tokens[: count * PAGE] != sequence.tokens[: count * PAGE]:
            return None, 0
        return source, count

    def share(self, sequence: Sequence, source: Sequence, count: int) -> None:
        """Let a sequence without pages begin with those of another one."""
        for page in source.pages[:count]:
            self._hold(sequence, page)
        sequence.cached = count * PAGE
        if source in self._idle:
            self._idle.move_to_end(source)

    # --- growing

    def missing(self, sequence: Sequence, tokens: int) -> int:
        """New pages that so many more tokens need."""
        return pages_of(sequence.cached + tokens) - len(sequence.pages)

    def reserve(self, sequence: Sequence, tokens: int) -> None:
        """Take the pages that the step under way needs; they are free."""
        for _ in range(self.missing(sequence, tokens)):
            self._hold(sequence, Page())
            self.used += 1
        assert self.used <= self.total

    def commit(self, sequence: Sequence, tokens: int) -> None:
        """The tokens are in the cache: others may share their pages."""
        first = sequence.cached // PAGE
        sequence.cached += tokens
        for number in range(first, sequence.cached // PAGE):
            page = sequence.pages[number]
            if page.key is None:
                page.key = sequence.key(number)
                self._index.setdefault(page.key, page)

    # --- shrinking

    def shrink(self, sequence: Sequence, tokens: int) -> None:
        """Forget what is in the cache from token `tokens` on."""
        while len(sequence.pages) > pages_of(tokens):
            self._release(sequence)
        sequence.cached = min(sequence.cached, tokens)

    def rest(self, sequence: Sequence) -> None:
        """Nobody runs with it: its pages may be taken from its end on."""
        if sequence.busy:
            sequence.busy = False
            for page in sequence.pages:
                page.busy -= 1
                self._pinned -= page.busy == 0
        self._idle[sequence] = None
        self._idle.move_to_end(sequence)

    def held_by_others(self, sequence: Sequence) -> bool:
        """Whether others have all that it has: who shares a page shares those before it, so the last one tells."""
        return bool(sequence.pages) and len(sequence.pages[-1].holders) > 1

    def wake(self, sequence: Sequence) -> None:
        """A request goes on with it."""
        if sequence.busy:
            return
        sequence.busy = True
        self._idle.pop(sequence, None)
        for page in sequence.pages:
            self._pinned += page.busy == 0
            page.busy += 1

    def evict(self, wanted: int) -> list[Sequence]:
        """Make so many pages free, from the least recently used sequence's end on; returns those that are shorter."""
        changed: dict[Sequence, None] = {}
        while self.total - self.used < wanted and self._idle:
            sequence = next(iter(self._idle))
            if sequence.pages:
                self._release(sequence)
                sequence.cached = min(sequence.cached, len(sequence.pages) * PAGE)
                changed[sequence] = None
            if not sequence.pages:
                del self._idle[sequence]
        return list(changed)

    def _hold(self, sequence: Sequence, page: Page) -> None:
        sequence.pages.append(page)
        page.holders[sequence] = None
        if sequence.busy:
            self._pinned += page.busy == 0
            page.busy += 1

    def _release(self, sequence: Sequence) -> None:
        page = sequence.pages.pop()
        del page.holders[sequence]
        if sequence.busy:
            page.busy -= 1
            self._pinned -= page.busy == 0
        if not page.holders:
            self.used -= 1
            if page.key is not None and self._index.get(page.key) is page:
                del self._index[page.key]
