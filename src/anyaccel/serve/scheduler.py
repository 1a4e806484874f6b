# SPDX-License-Identifier: Apache-2.0
"""Which request gets how many tokens in the next step: continuous batching, as a pure class.

Answers under way get their token in every step. What a step may do beside that (`Rates`) goes to prompts, in parts:
first to those that have begun, then to those that wait, and among both to the key that has had least. A full cache
first forgets what nobody runs with, then puts the youngest request back, which goes on later with what it has said so
far as its prompt.

The class knows neither threads nor clocks nor models: `plan()` says what to do and `done()` hears what came of it.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from anyaccel.serve.contract import EngineFullError, Stats, TooLongError
from anyaccel.serve.pages import PAGE, PageTable, Sequence, pages_of
from anyaccel.serve.plans import Change, Drop, End, Plan, Share, Shrink, Start
from anyaccel.serve.rates import Rates
from anyaccel.serve.shares import Shares

_RETRY_S = (1.0, 60.0)


@dataclass(frozen=True)
class Limits:
    """What holds for all requests together.

    Attributes:
        max_batch: requests that run at once.
        max_waiting: requests that may wait for it.
        cache_pages: of the key/value cache.
        context: tokens of prompt and answer; 0: no limit.
        keep: whether the caches of ended requests are kept for those that begin alike.
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
        tokens: prompt, and the answer so far.
        prompt: how many of them are the prompt.
        max_tokens: of the answer; 0: there is none.
        ends: tokens that end the answer.
        shares: whether it may begin with another one's cache; one whose prompt is looked at token by token may not.
        deadline: when its time is over.
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
    started: bool = False  # the decoder knows it
    cached: int = 0  # of its prompt, that was in the cache when it began
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.sequence = Sequence(self.id, self.tokens)

    @property
    def left(self) -> int:
        """Tokens that are not in the cache."""
        return len(self.tokens) - self.sequence.cached

    @property
    def part(self) -> int:
        """Tokens that the next step may take: of an answer that is computed again, none beside its prompt's.

        The decoder passes these as few and those as many, so that they have the bits of the first time.
        """
        return self.left if self.sequence.cached >= self.prompt else self.prompt - self.sequence.cached

    @property
    def shareable(self) -> int:
        """Pages that it may begin with, though others have computed them.

        None of its answer: for another one, the same tokens may have been a prompt's.
        """
        return min(len(self.tokens) - 1, self.prompt) // PAGE

    @property
    def answers(self) -> bool:
        """Whether its next token takes one token of work."""
        return self.left == 1 and self.sequence.cached >= self.prompt


class Scheduler:
    """See the module."""

    def __init__(self, limits: Limits, rates: Rates | None = None) -> None:
        self.limits = limits
        self.rates = rates or Rates()
        self.pages = PageTable(limits.cache_pages)
        self._entries: dict[int, Entry] = {}
        self._waiting: dict[str, dict[int, Entry]] = {}  # of each key, in the order in which they came
        self._running: dict[int, Entry] = {}
        self._shares = Shares()
        self._computing: dict[int, int] = {}  # key of a page -> the request that will have computed it soon
        self._changes: list[Change] = []  # of requests that have ended since the last plan
        self._finished_s = 0.0  # between two ends
        self._last_end: float | None = None
        self._hits = self._queries = self._prompt_tokens = self._answer_tokens = self._preempted = self._steps = 0
        self._drafted = self._accepted = 0

    # --- from outside

    def submit(self, entry: Entry) -> None:
        """A request has come.

        Raises:
            TooLongError: it can never be answered.
            EngineFullError: too many wait.
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
            # The queue is full; but no key takes all of it while others come.
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
        """Nobody waits for it any more: it ends with the next plan."""
        if number in self._entries:
            self._entries[number].cancelled = True

    def finish(self, number: int, why: End) -> None:
        """It ends here and now."""
        self._end(self._entries[number], why, [])

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def open(self) -> list[int]:
        """All requests that have not ended."""
        return list(self._entries)

    @property
    def idle(self) -> bool:
        """Whether a plan would be empty: no request is open, and the decoder was told of all that have ended."""
        return not self._entries and not self._changes

    def next_deadline(self) -> float:
        return min((entry.deadline for entry in self._entries.values()), default=float("inf"))

    def cached_tokens(self, number: int) -> int:
        """Of the prompt, that were in the prefix cache."""
        return self._entries[number].cached

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """So many tokens were drafted, and so many of them right."""
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
            preemptions=self._preempted,
            steps=self._steps,
            drafted=self._drafted,
            accepted=self._accepted,
        )

    # --- a step

    def plan(self, now: float) -> Plan:
        """What to do next; nothing to run: there is nothing to do before another request comes or a deadline."""
        plan = Plan()
        for entry in list(self._entries.values()):
            if entry.cancelled:
                self._end(entry, "cancelled", plan.ended)
            elif entry.deadline <= now:
                self._end(entry, "deadline", plan.ended)
        plan.changes, self._changes = self._changes, []
        self._plan_answers(plan)
        left = self.rates.prompt_tokens(plan.answers)
        left -= self._plan_prompts(plan, left)
        self._plan_waiting(plan, left)
        while not plan.run and self._running:
            # All that run are in their prompts, and have the whole cache together.
            self._put_back(self._youngest(), plan)
            self._plan_prompts(plan, self.rates.prompt_tokens(0))
        return plan

    def ahead(self, plan: Plan) -> int:
        """How many steps the same answers could take, one after the other, before there is anything to decide.

        As far as the pages that they have reach, while no prompt is under way or could begin; at least 1.
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
        """What came of a plan.

        Args:
            tokens: of each request of plan.run, in order; negative: none, as its prompt goes on.
            wrong: requests that cannot be computed: they are as before the plan, and end.

        Returns:
            The requests that have ended, and why.
        """
        ended: list[tuple[int, End]] = []
        self.rates.add(plan.prompt_tokens, plan.answers, seconds)
        self._steps += 1
        for (number, count), token in zip(plan.run.items(), tokens, strict=True):
            entry = self._entries[number]
            if number in wrong:
                self._end(entry, "error", ended, now)
                continue
            self._count(entry, count)
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

    def _count(self, entry: Entry, count: int) -> None:
        """Keep what is counted of a part that has passed."""
        for page in range(entry.sequence.cached // PAGE, (entry.sequence.cached + count) // PAGE):
            key = entry.sequence.key(page)
            if self._computing.get(key) == entry.id:
                del self._computing[key]
        if entry.sequence.cached < entry.prompt:
            self._prompt_tokens += min(count, entry.prompt - entry.sequence.cached)

    # --- parts of a plan

    def _plan_answers(self, plan: Plan) -> None:
        for entry in sorted(self._running.values(), key=lambda each: each.id):
            if not entry.answers or entry.id not in self._running:
                continue
            while not self._room(self.pages.missing(entry.sequence, 1), plan):
                youngest = self._youngest()
                self._put_back(youngest, plan)
                if youngest is entry:
                    break
            else:
                self._take(entry, 1, plan)
                plan.answers += 1

    def _youngest(self) -> Entry:
        return self._running[max(self._running)]

    def _plan_prompts(self, plan: Plan, left: int) -> int:
        """Parts of the prompts that have begun; returns how many tokens they have."""
        taken = 0
        begun = [entry for entry in self._running.values() if not entry.answers and entry.id not in plan.run]
        for entry in sorted(begun, key=lambda each: self._shares.had(each.key)):
            if taken >= left:
                break
            taken += self._take_part(entry, left - taken, plan)
        return taken

    def _plan_waiting(self, plan: Plan, left: int) -> None:
        held: set[int] = set()  # they wait for what another one computes
        while left > 0 and len(self._running) < self.limits.max_batch:
            entry = self._next_waiting(held)
            if entry is None:
                return
            if self._waits_for_another(entry):
                held.add(entry.id)
                continue
            # Room for the whole prompt: one that is put back again has cost its time for nothing.
            source, count = self._source(entry)
            shared = sum(page.busy > 0 for page in (source or entry.sequence).pages[: count or None])
            if self._running and pages_of(len(entry.tokens)) + 1 - shared > self.pages.available:
                return
            self._admit(entry, source, count, plan)
            left -= self._take_part(entry, left, plan)

    def _next_waiting(self, held: set[int]) -> Entry | None:
        for key in sorted(self._waiting, key=self._shares.had):
            for entry in self._waiting[key].values():
                if entry.id not in held:
                    return entry
        return None

    def _source(self, entry: Entry) -> tuple[Sequence | None, int]:
        """Who has more of its beginning in the cache than itself, and how many pages."""
        if not entry.shares or not self.limits.keep:
            return None, 0
        source, count = self.pages.match(entry.sequence, entry.shareable)
        return (source, count) if count * PAGE > entry.sequence.cached else (None, 0)

    def _waits_for_another(self, entry: Entry) -> bool:
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
        self.pages.wake(sequence)
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

    def _take_part(self, entry: Entry, left: int, plan: Plan) -> int:
        """As much of a prompt as may pass and has room."""
        count = min(entry.part, left)
        while count > 0 and not self._room(self.pages.missing(entry.sequence, count), plan):
            # As much as fits the pages that there are.
            count = (pages_of(entry.sequence.cached + count) - 1) * PAGE - entry.sequence.cached
        if count <= 0:
            return 0
        self._take(entry, count, plan)
        plan.prompt_tokens += count
        return count

    def _take(self, entry: Entry, count: int, plan: Plan) -> None:
        self.pages.reserve(entry.sequence, count)
        plan.run[entry.id] = count

    def _room(self, wanted: int, plan: Plan) -> bool:
        """Whether so many pages are free, after forgetting what nobody runs with, if that is enough."""
        if wanted > self.pages.available:
            return False
        for sequence in self.pages.evict(wanted):
            plan.changes.append(self._change_of(sequence))
        return True

    @staticmethod
    def _change_of(sequence: Sequence) -> Change:
        if sequence.ended and sequence.cached == 0:
            return Drop(sequence.id)
        return Shrink(sequence.id, sequence.cached)

    def _put_back(self, entry: Entry, plan: Plan) -> None:
        """It waits again; what it has in the cache may be taken."""
        self._preempted += 1
        self._leave(entry)
        plan.run.pop(entry.id, None)
        self.pages.shrink(entry.sequence, entry.sequence.cached)
        self.pages.rest(entry.sequence)
        # Before those that came after it.
        mine = self._waiting.setdefault(entry.key, {})
        mine[entry.id] = entry
        self._waiting[entry.key] = dict(sorted(mine.items()))

    def _leave(self, entry: Entry) -> None:
        self._running.pop(entry.id, None)
        for page in range(len(entry.sequence.keys)):
            if self._computing.get(entry.sequence.keys[page]) == entry.id:
                del self._computing[entry.sequence.keys[page]]

    def _end(self, entry: Entry, why: End, ended: list[tuple[int, End]], now: float | None = None) -> None:
        ended.append((entry.id, why))
        del self._entries[entry.id]
        self._leave(entry)
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
        self.pages.wake(sequence)  # of one that was put back
        self.pages.shrink(sequence, keep)
        if self.pages.held_by_others(sequence):  # one more that is kept would bring nothing, and take no page
            self.pages.shrink(sequence, 0)
        if sequence.pages:
            self.pages.rest(sequence)
        self._changes.append(self._change_of(sequence))
