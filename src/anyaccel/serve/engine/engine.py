# SPDX-License-Identifier: Apache-2.0
"""The engine: one thread that plans steps, runs them on the decoder, and sends their results to asyncio. Torch-free.

Nothing that is called in the event loop waits for a step: messages go into an inbox that the thread empties between two
steps, and results come back through `Delivery`, once a step. The decoder runs in this process or on ranks (`ranks.py`);
when it fails, open requests end with EngineStoppedError, and it is loaded again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from anyaccel.errors import AnyAccelError, ModelError, UsageError
from anyaccel.inference.spec.decoder import PAGE
from anyaccel.serve.engine.checks import check_prompt, check_request, native_options
from anyaccel.serve.engine.delivery import LONGEST_CALL_S, Delivery, ResultStream, Subscriber
from anyaccel.serve.engine.disk_cache import ReadPages, page_keys
from anyaccel.serve.engine.facts import StepDecoder
from anyaccel.serve.engine.grammar import Constraint, GrammarCompiler
from anyaccel.serve.engine.pages import CachedSequence
from anyaccel.serve.engine.rates import Rates
from anyaccel.serve.engine.scheduler import ScheduledRequest, Scheduler, SchedulerLimits
from anyaccel.serve.engine.settings import EngineSettings
from anyaccel.serve.engine.step import End, MultiStep, Score, StepInput, StepOutput, StepPlan
from anyaccel.serve.engine.turns import Turn
from anyaccel.serve.interface import (
    Chunk,
    DeadlineError,
    EngineStoppedError,
    GenerationRequest,
    ModelFacts,
    Stats,
    TokenLogprob,
)

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)

_RESTART_S = (0.5, 30.0)  # the first and the longest delay before the decoder is loaded again
_LEAST_RESTORED = 4  # pages: fewer are computed sooner than they are read
_SAVED_BYTES = 32 << 20  # that are copied between two steps
_IDLE_S = 1.0  # between two health checks of an idle decoder


@dataclass(eq=False)
class OpenRequest:
    """A request that has not ended; used in the engine's thread.

    Attributes:
        queued_s: from its submission until its first step.
        drafts: numbers of drafted and of accepted tokens.
    """

    scheduled: ScheduledRequest
    options: dict[str, Any]
    stream: ResultStream
    constraint: Constraint | None
    submitted_at: float = field(default_factory=time.monotonic)
    queued_s: float = 0.0
    drafts: tuple[int, int] = (0, 0)

    @property
    def wants_logprobs(self) -> bool:
        return any(self.options.get(name, -1) >= 0 for name in ("logprobs", "prompt_logprobs"))


class ServingEngine:
    """See `Engine`.

    Args:
        load: returns a loaded decoder; called in the engine's thread, and again when a decoder has failed. It must call
            its argument now and then, which raises when the engine is to stop.
        grammars: makes the constraints that requests ask for.
        turn: that of all engines on the same cores.
    """

    def __init__(
        self,
        load: Callable[[Callable[[], object]], StepDecoder],
        settings: EngineSettings,
        grammars: GrammarCompiler,
        turn: Turn | None = None,
    ) -> None:
        self._load = load
        self._settings = settings
        self._grammars = grammars
        self._turn = turn or Turn()
        self._numbers = itertools.count()
        self._condition = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._stopping = self._draining = self._ready = False
        self._unsaved: deque[tuple[int, list[int]]] = deque()  # ended requests, and their tokens in whole pages
        self._open: dict[int, OpenRequest] = {}  # changed by the engine's thread only
        self._earlier = Stats()  # the counters of decoders that have failed
        self._refusal: Exception | None = None  # for requests that come while there is no decoder
        self._delivery = Delivery()
        self._decoder: StepDecoder
        self._scheduler: Scheduler
        loaded: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(loaded,), name="anyaccel-engine", daemon=True)
        self._thread.start()
        try:
            loaded.result()
        except BaseException:  # Ctrl-C too: `_raise_if_stopping` ends the load
            self._stopping = True
            self._thread.join()
            raise
        self.facts: ModelFacts = self._decoder.facts
        grammars.vocabulary, grammars.ends = self.facts.vocabulary, self.facts.ends

    # --- called in the loop

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        check_request(request, self.facts)
        constraint = None
        if request.grammar is not None and request.max_tokens > 0:
            constraint = await self._grammars.constraint(request.grammar)
        options = native_options(request)
        if self._settings.draft_tokens and request.max_tokens > 0:
            options |= {"draft_tokens": self._settings.draft_tokens, "draft_model": self._settings.draft_model}
        if request.prompt_logprobs is None:
            await self._restore(request.prompt)
        number, stream = self._submit(
            request.prompt,
            request.max_tokens,
            options,
            constraint,
            timeout_s=request.timeout_s,
            ends=frozenset() if request.ignore_end else request.ends,
            key=request.key,
            shares=request.prompt_logprobs is None,
        )
        ended = False
        try:
            while not ended:
                chunk = await stream.next()
                assert isinstance(chunk, Chunk)
                ended = chunk.finish is not None
                yield chunk
        finally:
            if not ended:
                self._cancel(number)

    async def embed(
        self, prompts: Sequence[Sequence[int]], pooling: Literal["mean", "last"], key: str = ""
    ) -> list[list[float]]:
        for prompt in prompts:
            check_prompt(prompt, self.facts)
        if pooling not in ("mean", "last"):
            raise UsageError(f"pooling={pooling!r}: must be 'mean' or 'last'")
        streams = dict(
            self._submit(prompt, 0, {"goal": pooling}, key=key, shares=pooling == "last") for prompt in prompts
        )
        embeddings = []
        try:
            for number in list(streams):
                embedding = await streams[number].next()
                assert isinstance(embedding, list)
                del streams[number]
                embeddings.append(embedding)
            return embeddings
        finally:
            for number in streams:
                self._cancel(number)

    def _submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        options: dict[str, Any],
        constraint: Constraint | None = None,
        timeout_s: float | None = None,
        **scheduling: Any,
    ) -> tuple[int, ResultStream]:
        """Send a request to the engine's thread; returns its number and the stream of its results."""
        number = next(self._numbers)
        deadline = time.monotonic() + (self._settings.timeout_s if timeout_s is None else timeout_s)
        scheduled = ScheduledRequest(number, list(prompt), len(prompt), max_tokens, deadline=deadline, **scheduling)
        self._delivery.attach()
        opened = OpenRequest(scheduled, options, ResultStream(deadline), constraint)
        self._post(lambda: self._admit(opened))
        return number, opened.stream

    async def _restore(self, prompt: Sequence[int]) -> None:
        """Read what the disk has of a prompt's pages and the cache has not; the engine takes them before the prompt."""
        disk = getattr(self._decoder, "disk", None)
        most = (len(prompt) - 1) // PAGE
        if disk is None or most < _LEAST_RESTORED:
            return
        keys = page_keys(prompt, most)
        there = disk.known(keys)
        if there - self._scheduler.pages.known(CachedSequence(-1, list(prompt)), there) < _LEAST_RESTORED:
            return
        found = await asyncio.to_thread(disk.read, keys[:there])
        if found is not None:
            self._post(lambda: self._take(list(prompt), found), quiet=True)

    def _cancel(self, number: int) -> None:
        self._post(lambda: self._scheduler.cancel(number), quiet=True)

    def stats(self) -> Stats:
        return self._earlier + self._scheduler.stats(self._decoder.page_bytes)

    @property
    def cache_pages(self) -> int:
        """The number of pages that the cache has room for."""
        return self._scheduler.limits.cache_pages

    def ready(self) -> bool:
        return self.alive() and not self._decoder.late()

    def alive(self) -> bool:
        """Whether the decoder is loaded; unlike `ready`, also while a step is late."""
        return self._ready and not self._draining

    async def drain(self, seconds: float) -> None:
        self._draining = True
        deadline = time.monotonic() + seconds
        while (self._open or self._inbox) and time.monotonic() < deadline and self._thread.is_alive():
            await asyncio.sleep(0.01)
        self._post(self._abort_all, quiet=True)
        while (self._open or self._inbox) and self._thread.is_alive():
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.shut_down)

    def shut_down(self) -> None:
        """Do what `close` does, blocking the caller."""
        with self._condition:
            self._stopping = self._draining = True
            self._delivery.stop()
            self._condition.notify()
        self._thread.join()
        self._delivery.close()
        self._grammars.close()

    def _post(self, message: Callable[[], None], quiet: bool = False) -> None:
        with self._condition:
            if self._stopping or not self._thread.is_alive():
                if quiet:
                    return
                raise EngineStoppedError("the server is shutting down")
            self._inbox.append(message)
            self._delivery.stop()
            self._condition.notify()

    # --- the thread

    def _raise_if_stopping(self) -> None:
        if self._stopping:
            raise EngineStoppedError("the server is shutting down")

    def _run(self, loaded: Future[None]) -> None:
        try:
            self._decoder = self._load(self._raise_if_stopping)
            self._scheduler = self._new_scheduler()
        except BaseException as error:  # noqa: BLE001  the constructor raises it
            loaded.set_exception(error)
            return
        self._ready = True
        loaded.set_result(None)
        try:
            while not self._stopping:
                try:
                    self._run_once()
                except Exception as error:  # noqa: BLE001  after any error the server goes on with a new decoder
                    self._restart(error)
        finally:
            self._ready = False
            self._fail_all(EngineStoppedError("the server has ended"))
            while self._unsaved:
                self._save_ended()
            self._decoder.close()

    def _run_once(self) -> None:
        """Handle the messages in the inbox, and run a step if there is anything to compute."""
        with self._condition:
            while not self._inbox and not self._stopping and self._scheduler.idle and not self._unsaved:
                if not self._condition.wait(_IDLE_S):
                    self._decoder.check()
            inbox, self._inbox = self._inbox, []
            self._delivery.stop(self._stopping)
        if self._stopping:
            return
        for message in inbox:
            message()
        plan = self._scheduler.plan(time.monotonic())
        for number, why in plan.ended:
            self._finish_request(number, why)
        if plan.run or plan.changes:
            self._step(plan)
        self._delivery.send()
        if self._unsaved:
            self._save_ended()
        if not plan.run and self._scheduler.open:  # should not happen; without a pause it would be a busy loop
            time.sleep(0.01)

    def _take(self, prompt: list[int], found: ReadPages) -> None:
        """Put pages from the disk into the cache, unless it has them by now."""
        tokens = prompt[: len(found.addresses) * PAGE]
        if self._scheduler.pages.known(CachedSequence(-1, tokens), len(found.addresses)) == len(found.addresses):
            return
        number = next(self._numbers)
        changes = self._scheduler.restore(number, tokens)
        if changes is not None:
            self._decoder.restore(changes, number, tokens, found.addresses)  # type: ignore[attr-defined]

    def _save_ended(self) -> None:
        """Write the pages of the requests that have ended, some at a time, as far as the disk has them not."""
        number, tokens = self._unsaved.popleft()
        disk = self._decoder.disk  # type: ignore[attr-defined]
        whole = len(tokens) // PAGE
        keys = page_keys(tokens, whole)
        first = disk.kept(keys)
        if first == whole:
            return
        count = min(whole - first, max(1, _SAVED_BYTES // self._decoder.page_bytes))
        addresses = self._decoder.pages(number, whole * PAGE, first, count)  # type: ignore[attr-defined]
        if addresses is None:  # it is not in the cache any more
            return
        if disk.write(keys[first : first + count], addresses) and first + count < whole:
            self._unsaved.append((number, tokens))

    def _step(self, plan: StepPlan) -> None:
        start = time.monotonic()
        step = StepInput(plan.changes, plan.run, masks=self._masks(plan))
        for change in plan.changes:
            if change.kind == "start":
                opened = self._open[change.id]
                opened.queued_s = start - opened.submitted_at
                step.new[change.id] = opened.scheduled.tokens[: opened.scheduled.prompt], opened.options
        multi_step = self._plan_multi_step(plan)
        with self._turn.taken(self._delivery.stop):
            output = self._decoder.apply(step, multi_step)
        if multi_step is not None:
            self._delivery.finish_call(multi_step)
        if not plan.run:
            return
        for number, drafts in output.drafts.items():
            opened = self._open[number]
            self._scheduler.count_drafts(drafts[0] - opened.drafts[0], drafts[1] - opened.drafts[1])
            opened.drafts = (drafts[0], drafts[1])
        now = time.monotonic()
        steps = [*output.before, output.tokens]
        for place, tokens in enumerate(steps):
            ended = dict(self._scheduler.done(plan, tokens, (now - start) / len(steps), now, output.errors.keys()))
            for number, token in zip(plan.run, tokens, strict=True) if place >= output.fed else ():
                self._publish(number, token, output, ended.get(number))

    def _plan_multi_step(self, plan: StepPlan) -> MultiStep | None:
        """A call of several steps, where nothing between them needs a decision or has results other than tokens."""
        seconds = self._scheduler.rates.decode_seconds(plan.decodes)
        if not self._decoder.multi_step or seconds == 0.0:
            return None
        most = min(self._scheduler.steps_without_decision(plan), int(LONGEST_CALL_S / seconds))
        opened = [self._open[number] for number in plan.run]
        if most < 2 or any(each.constraint is not None or each.wants_logprobs for each in opened):
            return None
        subscribers = [Subscriber(each.stream, each.scheduled.cached, each.queued_s) for each in opened]
        return self._delivery.start_call(most, subscribers)

    def _masks(self, plan: StepPlan) -> dict[int, bytes]:
        """The token masks of the constrained requests that sample a token in this step."""
        wanted = {}
        for number, count in plan.run.items():
            opened = self._open[number]
            if opened.constraint is not None and opened.scheduled.left == count:
                wanted[number] = opened.constraint
        return self._grammars.masks(wanted) if wanted else {}

    def _publish(self, number: int, token: int, output: StepOutput, why: End | None) -> None:
        """Send what a step has computed for a request to its stream, and end the request if `why` says so."""
        opened = self._open[number]
        if why == "error":
            self._finish_request(number, why, ModelError(output.errors[number]))
            return
        tokens = (token,) if token >= 0 and opened.scheduled.max_tokens > 0 else ()
        constraint = opened.constraint
        if tokens and constraint is not None and (why is None or constraint.problem):
            try:
                if constraint.take(token):
                    why = "stop"
                    self._scheduler.finish(number, why)
            except AnyAccelError as error:
                if why is None:
                    self._scheduler.finish(number, "error")
                self._finish_request(number, "error", error)
                return
        if number in output.embeddings:
            del self._open[number]
            self._delivery.add(opened.stream, output.embeddings[number])
            return
        prompt_scores = output.prompt_scores.get(number)
        chunk = Chunk(
            tokens,
            _logprobs(output.scores.get(number, [])),
            None if prompt_scores is None else _logprobs(prompt_scores),
            opened.scheduled.cached,
            None,
            opened.queued_s,
            opened.drafts,
        )
        if why is not None:
            self._finish_request(number, why, chunk=chunk)
        elif tokens or prompt_scores is not None:
            self._delivery.add(opened.stream, chunk)

    def _admit(self, opened: OpenRequest) -> None:
        try:
            if self._refusal is not None:
                raise self._refusal
            if self._draining:
                raise EngineStoppedError("the server takes no more requests: it is shutting down")
            self._scheduler.submit(opened.scheduled)
        except Exception as error:  # noqa: BLE001  raised where the stream is read
            self._delivery.add(opened.stream, error)
            return
        self._open[opened.scheduled.id] = opened

    def _finish_request(
        self, number: int, why: End, error: Exception | None = None, chunk: Chunk | None = None
    ) -> None:
        opened = self._open.pop(number)
        if why == "deadline":
            error = DeadlineError()
        if error is not None:
            self._delivery.add(opened.stream, error)
        elif why in ("stop", "length", "abort"):
            if getattr(self._decoder, "disk", None) is not None:
                scheduled = opened.scheduled
                self._unsaved.append((number, scheduled.tokens[: scheduled.sequence.cached // PAGE * PAGE]))
            last = chunk or Chunk((), cached_tokens=opened.scheduled.cached)
            self._delivery.add(opened.stream, replace(last, finish=why))

    def _abort_all(self) -> None:
        for number in list(self._open):
            self._scheduler.finish(number, "abort")
            self._finish_request(number, "abort")

    def _fail_all(self, error: Exception) -> None:
        with self._condition:
            inbox, self._inbox = self._inbox, []
        self._refusal = error
        for message in inbox:
            message()
        self._refusal = None
        for number in list(self._open):
            self._finish_request(number, "error", error)
        self._delivery.send()

    def _restart(self, error: Exception) -> None:
        """Replace a failed decoder, trying until one loads or the engine stops."""
        if not isinstance(error, AnyAccelError):
            logger.exception("the engine has failed")
        logger.error("the engine has failed, and is started again: %s", error)
        self._ready = False
        total = self._earlier + self._scheduler.stats(0)
        self._earlier = replace(total, running=0, waiting=0, cache_used=0, cache_total=0)  # keep the counters only
        self._scheduler = Scheduler(self._scheduler.limits)
        self._unsaved.clear()
        self._fail_all(EngineStoppedError(f"the engine has failed, and is started again: {error}"))
        self._decoder.close()
        wait, longest = _RESTART_S
        while not self._stopping:
            try:
                self._decoder = self._load(self._raise_if_stopping)
                break
            except (AnyAccelError, OSError, MemoryError) as reason:
                logger.error("the engine cannot be started: %s; the next attempt is in %g s", reason, wait)
            deadline = time.monotonic() + wait
            while not self._stopping and (left := deadline - time.monotonic()) > 0:
                with self._condition:
                    self._condition.wait(left)
                self._fail_all(EngineStoppedError("the engine is started again; come back later"))
            wait = min(2 * wait, longest)
        self._scheduler = self._new_scheduler()
        self._ready = not self._stopping

    def _new_scheduler(self) -> Scheduler:
        settings, decoder = self._settings, self._decoder
        limits = SchedulerLimits(
            settings.max_batch,
            settings.max_waiting,
            decoder.cache_pages,
            decoder.facts.context,
            settings.prefix_cache and decoder.shares,
            decoder.state_pages,
        )
        return Scheduler(limits, Rates(settings.step_s))


def _logprobs(scores: list[Score]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token, logprob, tuple(map(tuple, top))) for token, logprob, top in scores)  # type: ignore[arg-type]
