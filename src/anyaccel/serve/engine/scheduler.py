# SPDX-License-Identifier: Apache-2.0
"""Which request gets how many tokens in the next step: continuous batching, as a pure class.

Running answers get one token in every step. What else a step may compute (`Rates`) goes to chunks of prompts: first to
prompts that have begun, then to requests that wait, and among both to the key with the fewest computed tokens. When the
cache is full, it first evicts idle sequences, then preempts the youngest request, which resumes later with its answer
so far as a part of its prompt.

The class has no threads, clock or model: `plan()` says what to compute, and `done()` takes the results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from anyaccel.inference.spec.decoder import PAGE
from anyaccel.serve.engine.pages import CachedSequence, PageTable, count_pages
from anyaccel.serve.engine.queue import FairQueue
from anyaccel.serve.engine.rates import Rates
from anyaccel.serve.engine.step import CacheChange, End, StepPlan
from anyaccel.serve.interface import EngineFullError, Stats, TooLongError

_RETRY_S = (1.0, 60.0)


@dataclass(frozen=True)
class SchedulerLimits:
    """Bounds for all requests together.

    Attributes:
        max_batch: requests that run at once.
        max_waiting: requests in the queue.
        cache_pages: pages of the key/value cache.
        context: tokens of prompt and answer; 0: no limit.
        keep: whether the pages of ended requests are kept as a prefix cache.
        state_pages: as how many pages a sequence's recurrent state counts. Those of running requests have room beside
            `cache_pages`.
    """

    max_batch: int
    max_waiting: int
    cache_pages: int
    context: int = 0
    keep: bool = True
    state_pages: int = 0


@dataclass
class ScheduledRequest:
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
    sequence: CachedSequence = field(init=False)
    started: bool = False  # whether the decoder has it
    cached: int = 0  # tokens of its prompt that were in the prefix cache when it started
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.sequence = CachedSequence(self.id, self.tokens)

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
    """Decides which requests take part in the next step; see the module."""

    def __init__(self, limits: SchedulerLimits, rates: Rates | None = None) -> None:
        self.limits = limits
        self.rates = rates or Rates()
        self.pages = PageTable(limits.cache_pages, limits.state_pages)
        self._requests: dict[int, ScheduledRequest] = {}
        self._queue: FairQueue[ScheduledRequest] = FairQueue()
        self._running: dict[int, ScheduledRequest] = {}
        self._computing: dict[int, int] = {}  # key of a page -> the running request that will compute it
        self._changes: list[CacheChange] = []  # for requests that have ended since the last plan
        self._finished_s = 0.0  # the average time between two ends of requests
        self._last_end: float | None = None
        self._counts: Counter[str] = Counter()  # counters of `Stats`

    # --- requests

    def submit(self, request: ScheduledRequest) -> None:
        """Put a request into the queue.

        Raises:
            TooLongError: it can never be answered.
            EngineFullError: the queue is full.
        """
        total = request.prompt + request.max_tokens
        sizes = f"the prompt has {request.prompt} tokens and the answer may have {request.max_tokens}"
        if 0 < self.limits.context < total:
            raise TooLongError(f"{sizes}: together more than the context of {self.limits.context} tokens")
        if count_pages(total) > self.limits.cache_pages:
            room = self.limits.cache_pages * PAGE
            raise TooLongError(f"{sizes}: the key/value cache has room for {room} (--cache-bytes)")
        waiting = len(self._queue)
        if waiting >= self.limits.max_waiting:
            # One key must not keep the others out: each may have its share of the queue, up to twice the limit in all.
            own, share = self._queue.share(request.key, self.limits.max_waiting)
            if own >= share or waiting >= 2 * self.limits.max_waiting:
                raise EngineFullError(f"{waiting} requests wait already; try again later", self._retry_after(waiting))
        self._requests[request.id] = request
        self._queue.open(request)

    def _retry_after(self, waiting: int) -> float:
        least, most = _RETRY_S
        return min(max(self._finished_s * waiting / 4, least), most)

    def cancel(self, number: int) -> None:
        """Mark a request whose client has gone: the next plan ends it."""
        if number in self._requests:
            self._requests[number].cancelled = True

    def finish(self, number: int, why: End) -> None:
        """End a request now."""
        self._end(self._requests[number], why, [])

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def open(self) -> list[int]:
        """The numbers of all requests that have not ended."""
        return list(self._requests)

    @property
    def idle(self) -> bool:
        """Whether a plan would be empty: no request is open, and the decoder has dropped all that have ended."""
        return not self._requests and not self._changes

    def count_drafts(self, drafted: int, accepted: int) -> None:
        self._counts["drafted"] += drafted
        self._counts["accepted"] += accepted

    def stats(self, page_bytes: int) -> Stats:
        return Stats(
            running=len(self._running),
            waiting=self.waiting,
            cache_used=(self.pages.total - self.pages.available) * page_bytes,
            cache_total=self.limits.cache_pages * page_bytes,
            **self._counts,
        )

    def restore(self, number: int, tokens: list[int]) -> list[CacheChange] | None:
        """Take whole pages that come from elsewhere, as those of an ended request; returns what makes room for them.

        None: there is none, as running requests need it.
        """
        plan = StepPlan(changes=self._changes)
        self._changes = []
        if not self._make_room(count_pages(len(tokens)), plan):
            self._changes = plan.changes
            return None
        sequence = CachedSequence(number, tokens)
        sequence.ended = True
        self.pages.reserve(sequence, len(tokens))
        self.pages.commit(sequence, len(tokens))
        self.pages.mark_idle(sequence)
        return plan.changes

    # --- a step

    def plan(self, now: float) -> StepPlan:
        """The next step; it is empty if there is nothing to compute until another request or a deadline comes."""
        plan = StepPlan()
        for request in list(self._requests.values()):
            if request.cancelled:
                self._end(request, "cancelled", plan.ended)
            elif request.deadline <= now:
                self._end(request, "deadline", plan.ended)
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

    def steps_without_decision(self, plan: StepPlan) -> int:
        """The number of decode steps, at least 1, that can follow each other without a new plan.

        They end where a request needs a new page or is complete. While a prompt runs or could start, it is 1.
        """
        if self._queue and len(self._running) < self.limits.max_batch:
            return 1
        if plan.prompt_tokens or len(plan.run) != len(self._running):
            return 1
        requests = [self._requests[number] for number in plan.run]
        room = min(count_pages(each.sequence.cached + 1) * PAGE - each.sequence.cached for each in requests)
        left = min(each.max_tokens - (len(each.tokens) - each.prompt) for each in requests)
        return max(1, min(room, left))

    def done(
        self, plan: StepPlan, tokens: Sequence[int], seconds: float, now: float, failed: Collection[int] = ()
    ) -> list[tuple[int, End]]:
        """Take the results of a plan.

        Args:
            tokens: the new token of each request of plan.run, in order; negative: it has none, as its prompt goes on.
            failed: requests that could not be computed: the step has not changed them, and they end.

        Returns:
            The requests that have ended, and why.
        """
        ended: list[tuple[int, End]] = []
        self.rates.add(plan.prompt_tokens, plan.decodes, seconds)
        self._counts["steps"] += 1
        for (number, count), token in zip(plan.run.items(), tokens, strict=True):
            request = self._requests[number]
            if number in failed:
                self._end(request, "error", ended, now)
                continue
            self._record_progress(request, count)
            self.pages.commit(request.sequence, count)
            self._queue.count(request.key, count)
            if token < 0:
                if request.left == 0:  # a prompt without an answer
                    self._end(request, "length", ended, now)
                continue
            if request.max_tokens > 0:
                request.tokens.append(token)
                self._counts["generation_tokens"] += 1
            if request.max_tokens > 0 and token in request.ends:
                self._end(request, "stop", ended, now)
            elif len(request.tokens) - request.prompt >= request.max_tokens:
                self._end(request, "length", ended, now)
        return ended

    def _record_progress(self, request: ScheduledRequest, count: int) -> None:
        """Count the tokens of a prompt that a step has computed, and note that their pages are computed."""
        for page in range(request.sequence.cached // PAGE, (request.sequence.cached + count) // PAGE):
            key = request.sequence.key(page)
            if self._computing.get(key) == request.id:
                del self._computing[key]
        if request.sequence.cached < request.prompt:
            self._counts["prompt_tokens"] += min(count, request.prompt - request.sequence.cached)

    # --- parts of a plan

    def _plan_decodes(self, plan: StepPlan) -> None:
        for request in sorted(self._running.values(), key=lambda each: each.id):
            if not request.is_decoding or request.id not in self._running:
                continue
            while not self._make_room(self.pages.missing(request.sequence, 1), plan):
                youngest = self._youngest()
                self._preempt(youngest, plan)
                if youngest is request:
                    break
            else:
                self._schedule(request, 1, plan)
                plan.decodes += 1

    def _youngest(self) -> ScheduledRequest:
        return self._running[max(self._running)]

    def _plan_prefills(self, plan: StepPlan, left: int) -> int:
        """Schedule chunks of the prompts that have begun; returns the number of their tokens."""
        taken = 0
        begun = [
            request for request in self._running.values() if not request.is_decoding and request.id not in plan.run
        ]
        for request in sorted(begun, key=lambda each: self._queue.computed(each.key)):
            if taken >= left:
                break
            taken += self._schedule_chunk(request, left - taken, plan)
        return taken

    def _admit_waiting(self, plan: StepPlan, left: int) -> None:
        for request in self._queue:
            if left <= 0 or len(self._running) >= self.limits.max_batch:
                return
            if self._prefix_is_being_computed(request):
                continue
            # Admit only with room for the whole prompt: what a preempted prompt has computed would be lost.
            source, count = self._prefix_source(request)
            shared = sum(page.running > 0 for page in (source or request.sequence).pages[: count or None])
            if self._running and count_pages(len(request.tokens)) + 1 - shared > self.pages.available:
                return
            self._admit(request, source, count, plan)
            left -= self._schedule_chunk(request, left, plan)

    def _prefix_source(self, request: ScheduledRequest) -> tuple[CachedSequence | None, int]:
        """A sequence that has a longer prefix of this one in the cache than its own, and the number of pages."""
        if not request.shares or not self.limits.keep:
            return None, 0
        source, count = self.pages.match(request.sequence, request.shareable)
        return (source, count) if count * PAGE > request.sequence.cached else (None, 0)

    def _prefix_is_being_computed(self, request: ScheduledRequest) -> bool:
        if not request.shares or not self.limits.keep:
            return False
        most, sequence = request.shareable, request.sequence
        _, count = self.pages.match(sequence, most)
        if not self.limits.state_pages:
            return count < most and sequence.key(count) in self._computing
        for page in range(count, most):  # of use is one that a state is kept behind
            other = self._running.get(self._computing.get(sequence.key(page), -1))
            if other is not None and other.sequence.state == page + 1:
                return True
        return False

    def _admit(self, request: ScheduledRequest, source: CachedSequence | None, count: int, plan: StepPlan) -> None:
        self._queue.remove(request)
        self._running[request.id] = request
        sequence = request.sequence
        first = not request.started
        self.pages.mark_running(sequence)
        if source is not None:
            if sequence.cached > 0:
                self.pages.shrink(sequence, 0)
                plan.changes.append(CacheChange("shrink", request.id))
            self.pages.share(sequence, source, count)
        if first:
            request.started = True
            request.cached = sequence.cached
            self._counts["prefix_hits"] += sequence.cached
            self._counts["prefix_queries"] += request.prompt
        if first or source is not None:
            kind: Literal["start", "share"] = "start" if first else "share"
            plan.changes.append(CacheChange(kind, request.id, sequence.cached, source.id if source else -1))
        if request.shares and self.limits.keep:
            for page in range(sequence.cached // PAGE, (len(request.tokens) - 1) // PAGE):
                self._computing.setdefault(sequence.key(page), request.id)

    def _schedule_chunk(self, request: ScheduledRequest, left: int, plan: StepPlan) -> int:
        """Schedule the longest chunk of a prompt that the budget and the cache allow; returns its length."""
        count = min(request.next_chunk, left)
        self._keep_state(request, plan)
        while count > 0 and not self._make_room(self.pages.missing(request.sequence, count), plan):
            # Try again with one page less.
            count = (count_pages(request.sequence.cached + count) - 1) * PAGE - request.sequence.cached
        if count <= 0:
            return 0
        self._schedule(request, count, plan)
        plan.prompt_tokens += count
        return count

    def _keep_state(self, request: ScheduledRequest, plan: StepPlan) -> None:
        """Have the state behind the last whole page of a prompt kept, where it is of use and there is room."""
        sequence, pages = request.sequence, request.shareable
        wanted = self.limits.state_pages if self.limits.keep and request.shares else 0
        if not wanted or sequence.state or pages * PAGE <= sequence.cached:
            return
        whole = count_pages(request.prompt) - len(sequence.pages)
        if whole + wanted <= self.pages.available and self._make_room(wanted, plan):
            self.pages.keep_state(sequence, pages)
            plan.changes.append(CacheChange("keep", request.id, pages * PAGE))

    def _schedule(self, request: ScheduledRequest, count: int, plan: StepPlan) -> None:
        self.pages.reserve(request.sequence, count)
        plan.run[request.id] = count

    def _make_room(self, wanted: int, plan: StepPlan) -> bool:
        """Make `wanted` pages free, evicting idle sequences if needed; False if that is not enough."""
        if wanted > self.pages.available:
            return False
        for sequence in self.pages.evict(wanted):
            plan.changes.append(self._eviction(sequence))
        return True

    @staticmethod
    def _eviction(sequence: CachedSequence) -> CacheChange:
        if sequence.ended and sequence.cached == 0:
            return CacheChange("drop", sequence.id)
        return CacheChange("shrink", sequence.id, sequence.cached)

    def _preempt(self, request: ScheduledRequest, plan: StepPlan) -> None:
        """Put a running request back into the queue; its pages may be evicted."""
        self._counts["preemptions"] += 1
        self._stop_running(request)
        plan.run.pop(request.id, None)
        # A state without room of its own goes, and with it the use of the pages.
        cached = 0 if self.limits.state_pages else request.sequence.cached
        self.pages.shrink(request.sequence, cached)
        if self.limits.state_pages:
            plan.changes.append(CacheChange("shrink", request.id))
        self.pages.mark_idle(request.sequence)
        self._queue.push(request)

    def _stop_running(self, request: ScheduledRequest) -> None:
        self._running.pop(request.id, None)
        for key in request.sequence.keys:
            if self._computing.get(key) == request.id:
                del self._computing[key]

    def _end(self, request: ScheduledRequest, why: End, ended: list[tuple[int, End]], now: float | None = None) -> None:
        ended.append((request.id, why))
        del self._requests[request.id]
        self._stop_running(request)
        self._queue.close(request)
        if now is not None:
            if self._last_end is not None:
                self._finished_s += 0.1 * (now - self._last_end - self._finished_s)
            self._last_end = now
        if not request.started:
            return
        sequence = request.sequence
        sequence.ended = True
        keep = sequence.cached // PAGE * PAGE if self.limits.keep else 0
        if self.limits.state_pages:
            keep = sequence.state * PAGE if sequence.cached >= sequence.state * PAGE else 0
        self.pages.mark_running(sequence)  # a preempted one is idle
        self.pages.shrink(sequence, keep)
        if self.pages.held_by_others(sequence) and not sequence.state:  # the prefix cache has these pages already
            self.pages.shrink(sequence, 0)
        if sequence.pages:
            self.pages.mark_idle(sequence)
        self._changes.append(self._eviction(sequence))
