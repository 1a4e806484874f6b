# SPDX-License-Identifier: Apache-2.0
"""Which request gets how many tokens in the next step: continuous batching, as a pure class.

Running answers get one token in every step. What else a step may compute (`Rates`) goes to chunks of prompts: first to
prompts that have begun, then to requests that wait, and among both to the key that has been served least. When the
cache is full, it first evicts idle sequences, then preempts the youngest request, which resumes later with what it has
generated so far as a part of its prompt.

The class has no threads, clock or model: `plan()` says what to compute, and `done()` takes the results.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from anyaccel.serve.engine.pages import PAGE, PageTable, Sequence, pages_of
from anyaccel.serve.engine.plans import Change, Drop, End, Plan, Share, Shrink, Start
from anyaccel.serve.engine.rates import Rates
from anyaccel.serve.engine.shares import Shares
from anyaccel.serve.interface import EngineFullError, Stats, TooLongError

_RETRY_S = (1.0, 60.0)


@dataclass(frozen=True)
class Limits:
    """Bounds for all requests together.

    Attributes:
        max_batch: requests that run at once.
        max_waiting: requests in the queue.
        cache_pages: pages of the key/value cache.
        context: tokens of prompt and answer; 0: no limit.
        keep: whether the pages of ended requests are kept as a prefix cache.
    """

    max_batch: int
    max_waiting: int
    cache_pages: int
    context: int = 0
    keep: bool = True


@dataclass
class Entry:
    """A request.

    Attributes:
        tokens: the prompt, and the answer so far.
        prompt: the length of the prompt.
        max_tokens: the most tokens of the answer; 0: it has no answer.
        ends: tokens that end the answer.
        shares: whether it may use the prefix cache; not if every token of the prompt has to be computed.
        deadline: the time at which it is ended.
    """

    id: int
    tokens: list[int]
    prompt: int
    max_tokens: int
    ends: frozenset[int] = frozenset()
    key: str = ""
    shares: bool = True
    deadline: float = float("inf")
    sequence: Sequence = field(init=False)
    started: bool = False  # whether the decoder has been told of it
    cached: int = 0  # tokens of its prompt that were in the prefix cache when it started
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.sequence = Sequence(self.id, self.tokens)

    @property
    def left(self) -> int:
        """The number of tokens that are not in the cache yet."""
        return len(self.tokens) - self.sequence.cached

    @property
    def next_chunk(self) -> int:
        """The most tokens that the next step may compute.

        After a preemption the prompt and the answer are recomputed in separate steps. The decoder uses other kernels
        for few tokens than for many, so that only this gives the same bits as the first time.
        """
        return self.left if self.sequence.cached >= self.prompt else self.prompt - self.sequence.cached

    @property
    def shareable(self) -> int:
        """The number of its pages that may come from the prefix cache.

        Pages of its answer may not: another request may have computed the same tokens as a prompt, with other bits.
        """
        return min(len(self.tokens) - 1, self.prompt) // PAGE

    @property
    def is_decoding(self) -> bool:
        """Whether its prompt is done, so that a step computes one token of it."""
        return self.left == 1 and self.sequence.cached >= self.prompt


class Scheduler:
    """See the module."""

    def __init__(self, limits: Limits, rates: Rates | None = None) -> None:
        self.limits = limits
        self.rates = rates or Rates()
        self.pages = PageTable(limits.cache_pages)
        self._entries: dict[int, Entry] = {}
        self._waiting: dict[str, dict[int, Entry]] = {}  # the queue of each key
        self._running: dict[int, Entry] = {}
        self._shares = Shares()
        self._computing: dict[int, int] = {}  # key of a page -> the running request that will compute it
        self._changes: list[Change] = []  # for requests that have ended since the last plan
        self._finished_s = 0.0  # the average time between two ends of requests
        self._last_end: float | None = None
        self._hits = self._queries = self._prompt_tokens = self._answer_tokens = self._preemptions = self._steps = 0
        self._drafted = self._accepted = 0

    # --- from outside

    def submit(self, entry: Entry) -> None:
        """Put a request into the queue.

        Raises:
            TooLongError: it can never be answered.
            EngineFullError: the queue is full.
        """
        total = entry.prompt + entry.max_tokens
        if 0 < self.limits.context < total:
            raise TooLongError(
                f"the prompt has {entry.prompt} tokens and the answer may have {entry.max_tokens}: together more than "
                f"the context of {self.limits.context} tokens"
            )
        if pages_of(total) > self.limits.cache_pages:
            raise TooLongError(
                f"the prompt has {entry.prompt} tokens and the answer may have {entry.max_tokens}: the key/value cache "
                f"has room for {self.limits.cache_pages * PAGE} (--cache-bytes)"
            )
        waiting = self.waiting
        if waiting >= self.limits.max_waiting:
            # One key must not keep the others out: each may have its share of the queue, up to twice the limit in all.
            mine = len(self._waiting.get(entry.key, ()))
            keys = len(self._waiting.keys() | {entry.key})
            if mine >= self.limits.max_waiting // keys or waiting >= 2 * self.limits.max_waiting:
                raise EngineFullError(f"{waiting} requests wait already; come again later", self._retry_after(waiting))
        self._entries[entry.id] = entry
        self._waiting.setdefault(entry.key, {})[entry.id] = entry
        self._shares.enter(entry.key)

    def _retry_after(self, waiting: int) -> float:
        least, most = _RETRY_S
        return min(max(self._finished_s * waiting / 4, least), most)

    def cancel(self, number: int) -> None:
        """Mark a request whose client has gone: the next plan ends it."""
        if number in self._entries:
            self._entries[number].cancelled = True

    def finish(self, number: int, why: End) -> None:
        """End a request now."""
        self._end(self._entries[number], why, [])

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def open(self) -> list[int]:
        """The numbers of all requests that have not ended."""
        return list(self._entries)

    @property
    def idle(self) -> bool:
        """Whether a plan would be empty: no request is open, and the decoder was told of all that have ended."""
        return not self._entries and not self._changes

    def count_drafts(self, drafted: int, accepted: int) -> None:
        self._drafted += drafted
        self._accepted += accepted

    def stats(self, page_bytes: int) -> Stats:
        return Stats(
            running=len(self._running),
            waiting=self.waiting,
            cache_used=(self.pages.total - self.pages.available) * page_bytes,
            cache_total=self.limits.cache_pages * page_bytes,
            prefix_hits=self._hits,
            prefix_queries=self._queries,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._answer_tokens,
            preemptions=self._preemptions,
            steps=self._steps,
            drafted=self._drafted,
            accepted=self._accepted,
        )

    # --- a step

    def plan(self, now: float) -> Plan:
        """The next step; it runs nothing if there is nothing to compute until another request comes or a deadline."""
        plan = Plan()
        for entry in list(self._entries.values()):
            if entry.cancelled:
                self._end(entry, "cancelled", plan.ended)
            elif entry.deadline <= now:
                self._end(entry, "deadline", plan.ended)
        plan.changes, self._changes = self._changes, []
        self._plan_decodes(plan)
        left = self.rates.prompt_tokens(plan.decodes)
        left -= self._plan_prefills(plan, left)
        self._admit_waiting(plan, left)
        while not plan.run and self._running:
            # The running requests are all in their prompts, and fill the cache together.
            self._preempt(self._youngest(), plan)
            self._plan_prefills(plan, self.rates.prompt_tokens(0))
        return plan

    def steps_without_decision(self, plan: Plan) -> int:
        """The number of decode steps, at least 1, that can follow each other without a new plan.

        They end where a request needs a new page or is complete. While a prompt runs or could start, it is 1.
        """
        if self._waiting and len(self._running) < self.limits.max_batch:
            return 1
        if plan.prompt_tokens or len(plan.run) != len(self._running):
            return 1
        entries = [self._entries[number] for number in plan.run]
        room = min(pages_of(each.sequence.cached + 1) * PAGE - each.sequence.cached for each in entries)
        left = min(each.max_tokens - (len(each.tokens) - each.prompt) for each in entries)
        return max(1, min(room, left))

    def done(
        self, plan: Plan, tokens: Items[int], seconds: float, now: float, wrong: Collection[int] = ()
    ) -> list[tuple[int, End]]:
        """Take the results of a plan.

        Args:
            tokens: the new token of each request of plan.run, in order; negative: it has none, as its prompt goes on.
            wrong: requests that could not be computed: the plan has not changed them, and they end.

        Returns:
            The requests that have ended, and why.
        """
        ended: list[tuple[int, End]] = []
        self.rates.add(plan.prompt_tokens, plan.decodes, seconds)
        self._steps += 1
        for (number, count), token in zip(plan.run.items(), tokens, strict=True):
            entry = self._entries[number]
            if number in wrong:
                self._end(entry, "error", ended, now)
                continue
            self._record_progress(entry, count)
            self.pages.commit(entry.sequence, count)
            self._shares.add(entry.key, count)
            if token < 0:
                if entry.left == 0:  # a prompt without an answer
                    self._end(entry, "length", ended, now)
                continue
            if entry.max_tokens > 0:
                entry.tokens.append(token)
                self._answer_tokens += 1
            if entry.max_tokens > 0 and token in entry.ends:
                self._end(entry, "stop", ended, now)
            elif len(entry.tokens) - entry.prompt >= entry.max_tokens:
                self._end(entry, "length", ended, now)
        return ended

    def _record_progress(self, entry: Entry, count: int) -> None:
        """Count the tokens of a prompt that a step has computed, and note that their pages are computed."""
        for page in range(entry.sequence.cached // PAGE, (entry.sequence.cached + count) // PAGE):
            key = entry.sequence.key(page)
            if self._computing.get(key) == entry.id:
                del self._computing[key]
        if entry.sequence.cached < entry.prompt:
            self._prompt_tokens += min(count, entry.prompt - entry.sequence.cached)

    # --- parts of a plan

    def _plan_decodes(self, plan: Plan) -> None:
        for entry in sorted(self._running.values(), key=lambda each: each.id):
            if not entry.is_decoding or entry.id not in self._running:
                continue
            while not self._make_room(self.pages.missing(entry.sequence, 1), plan):
                youngest = self._youngest()
                self._preempt(youngest, plan)
                if youngest is entry:
                    break
            else:
                self._schedule(entry, 1, plan)
                plan.decodes += 1

    def _youngest(self) -> Entry:
        return self._running[max(self._running)]

    def _plan_prefills(self, plan: Plan, left: int) -> int:
        """Schedule chunks of the prompts that have begun; returns the number of their tokens."""
        taken = 0
        begun = [entry for entry in self._running.values() if not entry.is_decoding and entry.id not in plan.run]
        for entry in sorted(begun, key=lambda each: self._shares.had(each.key)):
            if taken >= left:
                break
            taken += self._schedule_chunk(entry, left - taken, plan)
        return taken

    def _admit_waiting(self, plan: Plan, left: int) -> None:
        held: set[int] = set()  # requests that wait until another one has computed their prefix
        while left > 0 and len(self._running) < self.limits.max_batch:
            entry = self._next_waiting(held)
            if entry is None:
                return
            if self._prefix_is_being_computed(entry):
                held.add(entry.id)
                continue
            # Admit only with room for the whole prompt: what a preempted prompt has computed would be lost.
            source, count = self._prefix_source(entry)
            shared = sum(page.running > 0 for page in (source or entry.sequence).pages[: count or None])
            if self._running and pages_of(len(entry.tokens)) + 1 - shared > self.pages.available:
                return
            self._admit(entry, source, count, plan)
            left -= self._schedule_chunk(entry, left, plan)

    def _next_waiting(self, held: set[int]) -> Entry | None:
        for key in sorted(self._waiting, key=self._shares.had):
            for entry in self._waiting[key].values():
                if entry.id not in held:
                    return entry
        return None

    def _prefix_source(self, entry: Entry) -> tuple[Sequence | None, int]:
        """A sequence that has a longer prefix of this one in the cache than its own, and the number of pages."""
        if not entry.shares or not self.limits.keep:
            return None, 0
        source, count = self.pages.match(entry.sequence, entry.shareable)
        return (source, count) if count * PAGE > entry.sequence.cached else (None, 0)

    def _prefix_is_being_computed(self, entry: Entry) -> bool:
        if not entry.shares or not self.limits.keep:
            return False
        most = entry.shareable
        _, count = self.pages.match(entry.sequence, most)
        return count < most and entry.sequence.key(count) in self._computing

    def _admit(self, entry: Entry, source: Sequence | None, count: int, plan: Plan) -> None:
        mine = self._waiting[entry.key]
        del mine[entry.id]
        if not mine:
            del self._waiting[entry.key]
        self._running[entry.id] = entry
        sequence = entry.sequence
        first = not entry.started
        self.pages.mark_running(sequence)
        if source is not None:
            if sequence.cached > 0:
                self.pages.shrink(sequence, 0)
                plan.changes.append(Shrink(entry.id, 0))
            self.pages.share(sequence, source, count)
        if first:
            entry.started = True
            entry.cached = sequence.cached
            self._hits += sequence.cached
            self._queries += entry.prompt
            plan.changes.append(Start(entry.id, source.id if source else -1, sequence.cached))
        elif source is not None:
            plan.changes.append(Share(entry.id, source.id, sequence.cached))
        if entry.shares and self.limits.keep:
            for page in range(sequence.cached // PAGE, (len(entry.tokens) - 1) // PAGE):
                self._computing.setdefault(sequence.key(page), entry.id)

    def _schedule_chunk(self, entry: Entry, left: int, plan: Plan) -> int:
        """Schedule the longest chunk of a prompt that the budget and the cache allow; returns its length."""
        count = min(entry.next_chunk, left)
        while count > 0 and not self._make_room(self.pages.missing(entry.sequence, count), plan):
            # Try again with one page less.
            count = (pages_of(entry.sequence.cached + count) - 1) * PAGE - entry.sequence.cached
        if count <= 0:
            return 0
        self._schedule(entry, count, plan)
        plan.prompt_tokens += count
        return count

    def _schedule(self, entry: Entry, count: int, plan: Plan) -> None:
        self.pages.reserve(entry.sequence, count)
        plan.run[entry.id] = count

    def _make_room(self, wanted: int, plan: Plan) -> bool:
        """Make `wanted` pages free, evicting idle sequences if needed; False if that is not enough."""
        if wanted > self.pages.available:
            return False
        for sequence in self.pages.evict(wanted):
            plan.changes.append(self._eviction_of(sequence))
        return True

    @staticmethod
    def _eviction_of(sequence: Sequence) -> Change:
        if sequence.ended and sequence.cached == 0:
            return Drop(sequence.id)
        return Shrink(sequence.id, sequence.cached)

    def _preempt(self, entry: Entry, plan: Plan) -> None:
        """Put a running request back into the queue; its pages may be evicted."""
        self._preemptions += 1
        self._stop_running(entry)
        plan.run.pop(entry.id, None)
        self.pages.shrink(entry.sequence, entry.sequence.cached)
        self.pages.mark_idle(entry.sequence)
        # It keeps its place before requests that came later.
        mine = self._waiting.setdefault(entry.key, {})
        mine[entry.id] = entry
        self._waiting[entry.key] = dict(sorted(mine.items()))

    def _stop_running(self, entry: Entry) -> None:
        self._running.pop(entry.id, None)
        for page in range(len(entry.sequence.keys)):
            if self._computing.get(entry.sequence.keys[page]) == entry.id:
                del self._computing[entry.sequence.keys[page]]

    def _end(self, entry: Entry, why: End, ended: list[tuple[int, End]], now: float | None = None) -> None:
        ended.append((entry.id, why))
        del self._entries[entry.id]
        self._stop_running(entry)
        if entry.id in (mine := self._waiting.get(entry.key, {})):
            del mine[entry.id]
            if not mine:
                del self._waiting[entry.key]
        self._shares.leave(entry.key)
        if now is not None:
            if self._last_end is not None:
                self._finished_s += 0.1 * (now - self._last_end - self._finished_s)
            self._last_end = now
        if not entry.started:
            return
        sequence = entry.sequence
        sequence.ended = True
        keep = sequence.cached // PAGE * PAGE if self.limits.keep else 0
        self.pages.mark_running(sequence)  # a preempted one is idle
        self.pages.shrink(sequence, keep)
        if self.pages.held_by_others(sequence):  # the prefix cache has these pages already
            self.pages.shrink(sequence, 0)
        if sequence.pages:
            self.pages.mark_idle(sequence)
        self._changes.append(self._eviction_of(sequence))
