# SPDX-License-Identifier: Apache-2.0
"""The block table of the KV cache for the scheduler, a copy of the native cache's own; a block is called page here.

Only whole pages are shared, so that the counts here equal those of the native cache, and no page is ever copied. The
sequence of an ended request stays in the cache until its pages are needed (a prefix cache): its pages are found by
content, through keys that hash a page's tokens and the key of the page before it.

Of a model with recurrent states, a prefix is of use only where a state was kept behind its last page: a sequence keeps
one, behind the last whole page of its prompt, which takes room as so many pages.
"""

from __future__ import annotations

from collections import OrderedDict

from anyaccel.inference.spec.decoder import PAGE


def count_pages(tokens: int) -> int:
    """The number of pages that this number of tokens takes."""
    return -(-tokens // PAGE)


class Page:
    """One page.

    Attributes:
        holders: the sequences that have it.
        running: the number of holders whose requests run.
        state: the holder that has kept its recurrent state behind this page.
    """

    __slots__ = ("holders", "key", "running", "state")

    def __init__(self) -> None:
        self.holders: dict[CachedSequence, None] = {}
        self.running = 0
        self.key: int | None = None
        self.state: CachedSequence | None = None


class CachedSequence:
    """Tokens in the cache.

    Attributes:
        tokens: all tokens of the request, in the cache or not.
        cached: the number of tokens that are in the cache.
        pages: the pages of those, and of the tokens that the current step adds.
        ended: whether its request has ended.
        running: whether its request runs.
        state: its recurrent state is kept behind so many pages, once they are computed; 0: it is not.
    """

    __slots__ = ("cached", "ended", "id", "keys", "pages", "running", "state", "tokens")

    def __init__(self, number: int, tokens: list[int]) -> None:
        self.id = number
        self.tokens = tokens
        self.cached = 0
        self.pages: list[Page] = []
        self.keys: list[int] = []
        self.ended = False
        self.running = True
        self.state = 0

    def key(self, page: int) -> int:
        """The key of a page that is full, or will be."""
        while len(self.keys) <= page:
            first = len(self.keys) * PAGE
            before = self.keys[-1] if self.keys else 0
            self.keys.append(hash((before, tuple(self.tokens[first : first + PAGE]))))
        return self.keys[page]


class PageTable:
    """All pages of a cache.

    Args:
        total: how many there may be.
        state_pages: as how many pages a recurrent state counts; 0: the model has none.
    """

    def __init__(self, total: int, state_pages: int = 0) -> None:
        self.total = total
        self.state_pages = state_pages
        self.used = 0
        self._pinned = 0  # pages of running sequences, which cannot be evicted
        self._index: dict[int, Page] = {}  # by key
        self._idle: OrderedDict[CachedSequence, None] = OrderedDict()  # the least recently used first

    @property
    def available(self) -> int:
        """The number of pages that are free or can be evicted."""
        return self.total - self._pinned

    @property
    def idle(self) -> int:
        """The number of sequences that do not run, kept as a prefix cache."""
        return len(self._idle)

    # --- the prefix cache

    def match(self, sequence: CachedSequence, most: int) -> tuple[CachedSequence | None, int]:
        """The sequence with the longest common prefix, and the prefix's number of whole pages, at most `most`."""
        source: CachedSequence | None = None
        count = pages = 0
        while pages < most and (page := self._index.get(sequence.key(pages))) is not None:
            pages += 1
            holder = page.state if self.state_pages else next(iter(page.holders))
            if holder is not None:
                source, count = holder, pages
        if source is None:
            return None, 0
        # Keys are hashes: other tokens may have the same keys.
        if source.tokens[: count * PAGE] != sequence.tokens[: count * PAGE]:
            return None, 0
        return source, count

    def known(self, sequence: CachedSequence, most: int) -> int:
        """How many of its first pages are in the cache, at most `most`; roughly, where another thread changes it."""
        pages = 0
        while pages < most and sequence.key(pages) in self._index:
            pages += 1
        return pages

    def share(self, sequence: CachedSequence, source: CachedSequence, count: int) -> None:
        """Give a sequence without pages the first pages of another one."""
        for page in source.pages[:count]:
            self._attach(sequence, page)
        sequence.cached = count * PAGE
        if source in self._idle:
            self._idle.move_to_end(source)

    # --- growing

    def missing(self, sequence: CachedSequence, tokens: int) -> int:
        """The number of new pages that `tokens` more tokens need."""
        return count_pages(sequence.cached + tokens) - len(sequence.pages)

    def reserve(self, sequence: CachedSequence, tokens: int) -> None:
        """Allocate the pages that the current step needs; the caller has made them free."""
        for _ in range(self.missing(sequence, tokens)):
            self._attach(sequence, Page())
            self.used += 1
        assert self.used <= self.total

    def commit(self, sequence: CachedSequence, tokens: int) -> None:
        """Note that the step has computed the tokens, so that other sequences may share their pages."""
        first = sequence.cached // PAGE
        sequence.cached += tokens
        for number in range(first, sequence.cached // PAGE):
            page = sequence.pages[number]
            if page.key is None:
                page.key = sequence.key(number)
                self._index.setdefault(page.key, page)
            if number + 1 == sequence.state:
                page.state = sequence

    # --- recurrent states

    def keep_state(self, sequence: CachedSequence, pages: int) -> None:
        """Note that its state will be kept behind so many pages; the caller has made room."""
        assert sequence.state == 0
        sequence.state = pages
        self.used += self.state_pages
        self._pinned += self.state_pages * sequence.running

    def _release_state(self, sequence: CachedSequence) -> None:
        if sequence.state == 0:
            return
        if len(sequence.pages) >= sequence.state and (page := sequence.pages[sequence.state - 1]).state is sequence:
            page.state = None
        sequence.state = 0
        self.used -= self.state_pages
        self._pinned -= self.state_pages * sequence.running

    # --- shrinking

    def shrink(self, sequence: CachedSequence, tokens: int) -> None:
        """Keep only the first `tokens` tokens in the cache."""
        if tokens < sequence.state * PAGE:
            self._release_state(sequence)
        while len(sequence.pages) > count_pages(tokens):
            self._release(sequence)
        sequence.cached = min(sequence.cached, tokens)

    def mark_idle(self, sequence: CachedSequence) -> None:
        """Note that its request does not run: its pages may be evicted, the last ones first."""
        if sequence.running:
            sequence.running = False
            for page in sequence.pages:
                page.running -= 1
                self._pinned -= page.running == 0
            self._pinned -= self.state_pages * (sequence.state > 0)
        self._idle[sequence] = None
        self._idle.move_to_end(sequence)

    def held_by_others(self, sequence: CachedSequence) -> bool:
        """Whether other sequences hold all its pages: a holder of the last page holds those before it too."""
        return bool(sequence.pages) and len(sequence.pages[-1].holders) > 1

    def mark_running(self, sequence: CachedSequence) -> None:
        """Note that its request runs: its pages cannot be evicted."""
        if sequence.running:
            return
        sequence.running = True
        self._idle.pop(sequence, None)
        for page in sequence.pages:
            self._pinned += page.running == 0
            page.running += 1
        self._pinned += self.state_pages * (sequence.state > 0)

    def evict(self, wanted: int) -> list[CachedSequence]:
        """Make `wanted` pages free, from the end of the least recently used sequences; returns the shortened ones.

        Pages without the state behind them are of no use: where there are states, a sequence goes as a whole.
        """
        changed: dict[CachedSequence, None] = {}
        while self.total - self.used < wanted and self._idle:
            sequence = next(iter(self._idle))
            if self.state_pages:
                self.shrink(sequence, 0)
                changed[sequence] = None
            elif sequence.pages:
                self._release(sequence)
                sequence.cached = min(sequence.cached, len(sequence.pages) * PAGE)
                changed[sequence] = None
            if not sequence.pages:
                del self._idle[sequence]
        return list(changed)

    def _attach(self, sequence: CachedSequence, page: Page) -> None:
        sequence.pages.append(page)
        page.holders[sequence] = None
        if sequence.running:
            self._pinned += page.running == 0
            page.running += 1

    def _release(self, sequence: CachedSequence) -> None:
        page = sequence.pages.pop()
        del page.holders[sequence]
        if sequence.running:
            page.running -= 1
            self._pinned -= page.running == 0
        if not page.holders:
            self.used -= 1
            if page.key is not None and self._index.get(page.key) is page:
                del self._index[page.key]
