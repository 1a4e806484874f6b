# SPDX-License-Identifier: Apache-2.0
"""The engine: one thread that plans steps, runs them on the decoder, and sends their results to asyncio. Torch-free.

Nothing that is called in the event loop waits for a step: messages go into an inbox that the thread empties between two
steps, and results come back through `Outbox`, once a step. The decoder runs in this process or on ranks (`ranks.py`);
when it fails, open requests end with EngineStoppedError, and it is loaded again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from anyaccel.errors import AnyAccelError, ModelError, UsageError
from anyaccel.serve.engine.checks import check_prompt, check_request, native_options
from anyaccel.serve.engine.decoders import open_decoder
from anyaccel.serve.engine.facts import Decoder
from anyaccel.serve.engine.grammar import Grammars
from anyaccel.serve.engine.multi_step import LONGEST_CALL_S, Outbox, Subscriber, TokenDispatcher
from anyaccel.serve.engine.plans import End, Plan, Start
from anyaccel.serve.engine.rates import Rates
from anyaccel.serve.engine.replicas import Replicas, Silent
from anyaccel.serve.engine.request_state import OpenRequest, logprobs_of
from anyaccel.serve.engine.scheduler import Entry, Limits, Scheduler
from anyaccel.serve.engine.settings import EngineSettings
from anyaccel.serve.engine.slots import MultiStep, Outcome, work_of
from anyaccel.serve.engine.streams import Stream
from anyaccel.serve.interface import (
    Chunk,
    DeadlineError,
    EngineStoppedError,
    GenerationRequest,
    ModelFacts,
    Stats,
)

if TYPE_CHECKING:
    from anyaccel.inference.ranks.loading import Watcher
    from anyaccel.inference.ranks.options import ModelOptions

logger = logging.getLogger(__name__)

_RESTART_S = (0.5, 30.0)  # the first and the longest delay before the decoder is loaded again
_IDLE_S = 1.0  # between two health checks of an idle decoder


class ServingEngine:
    """See `contract.Engine`.

    Args:
        load: returns a loaded decoder; called in the engine's thread, and again when a decoder has failed. It must call
            its argument now and then, which raises when the engine is to stop.
        grammars: makes constraints of what requests ask for.
    """

    def __init__(
        self, load: Callable[[Callable[[], object]], Decoder], settings: EngineSettings, grammars: Grammars
    ) -> None:
        self._load = load
        self._settings = settings
        self._grammars = grammars
        self._numbers = itertools.count()
        self._condition = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._stopping = self._draining = self._ready = False
        self._open: dict[int, OpenRequest] = {}  # changed by the engine's thread only
        self._earlier = Stats()  # the counters of decoders that have failed
        self._refusal: Exception | None = None  # for requests that come while there is no decoder
        self._dispatcher = TokenDispatcher()
        self._outbox = Outbox(self._dispatcher)
        self._decoder: Decoder
        self._scheduler: Scheduler
        self._thread = threading.Thread(target=self._run, name="anyaccel-engine", daemon=True)
        loaded = threading.Event()
        problem: list[BaseException] = []
        self._loaded = (loaded, problem)
        self._thread.start()
        try:
            loaded.wait()
        except BaseException:  # Ctrl-C: `_raise_if_stopping` ends the load
            self._stopping = True
            self._thread.join()
            raise
        if problem:
            self._thread.join()
            raise problem[0]
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
        number = next(self._numbers)
        entry = Entry(
            number,
            list(request.prompt),
            len(request.prompt),
            request.max_tokens,
            frozenset() if request.ignore_end else request.ends,
            request.key,
            shares=request.prompt_logprobs is None,
            deadline=self._deadline(request.timeout_s),
        )
        stream = Stream(entry.deadline)
        self._dispatcher.attach(stream.loop)
        opened = OpenRequest(entry, options, stream, constraint)
        self._post(lambda: self._submit(opened))
        ended = False
        try:
            while not ended:
                chunk = await stream.next()
                assert isinstance(chunk, Chunk)
                ended = chunk.finish is not None
                yield chunk
        finally:
            if not ended:
                self._post(lambda: self._scheduler.cancel(number), quiet=True)

    async def embed(
        self, prompts: Sequence[Sequence[int]], pooling: Literal["mean", "last"], key: str = ""
    ) -> list[list[float]]:
        for prompt in prompts:
            check_prompt(prompt, self.facts)
        if pooling not in ("mean", "last"):
            raise UsageError(f"pooling={pooling!r}: must be 'mean' or 'last'")
        numbers, streams = [], []
        for prompt in prompts:
            number = next(self._numbers)
            entry = Entry(
                number, list(prompt), len(prompt), 0, key=key, shares=pooling == "last", deadline=self._deadline(None)
            )
            opened = OpenRequest(entry, {"goal": pooling}, Stream(entry.deadline), None)
            self._post(lambda opened=opened: self._submit(opened))  # type: ignore[misc]
            numbers.append(number)
            streams.append(opened.stream)
        try:
            embeddings = []
            for stream in streams:
                embedding = await stream.next()
                assert isinstance(embedding, list)
                embeddings.append(embedding)
            numbers.clear()
            return embeddings
        finally:
            for number in numbers:
                self._post(lambda number=number: self._scheduler.cancel(number), quiet=True)  # type: ignore[misc]

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
            self._dispatcher.stop()
            self._condition.notify()
        self._thread.join()
        self._dispatcher.close()
        self._grammars.close()

    def _deadline(self, seconds: float | None) -> float:
        return time.monotonic() + (self._settings.timeout_s if seconds is None else seconds)

    def _post(self, message: Callable[[], None], quiet: bool = False) -> None:
        with self._condition:
            if self._stopping or not self._thread.is_alive():
                if quiet:
                    return
                raise EngineStoppedError("the server is shutting down")
            self._inbox.append(message)
            self._dispatcher.stop()
            self._condition.notify()

    # --- the thread

    def _raise_if_stopping(self) -> None:
        if self._stopping:
            raise EngineStoppedError("the server is shutting down")

    def _run(self) -> None:
        loaded, problem = self._loaded
        try:
            self._decoder = self._load(self._raise_if_stopping)
            self._scheduler = self._new_scheduler()
            self._ready = True
        except BaseException as error:  # noqa: BLE001  the constructor raises it
            problem.append(error)
            return
        finally:
            loaded.set()
        try:
            while not self._stopping:
                try:
                    self._run_once()
                except Exception as error:  # noqa: BLE001  after any error the server goes on with a new decoder
                    self._restart(error)
        finally:
            self._ready = False
            self._fail_all(EngineStoppedError("the server has ended"))
            self._decoder.close()

    def _run_once(self) -> None:
        """Handle the messages in the inbox, and run a step if there is anything to compute."""
        with self._condition:
            while not self._inbox and not self._stopping and self._scheduler.idle:
                if not self._condition.wait(_IDLE_S):
                    self._decoder.check()
            inbox, self._inbox = self._inbox, []
            self._dispatcher.stop(self._stopping)
        if self._stopping:
            return
        for message in inbox:
            message()
        plan = self._scheduler.plan(time.monotonic())
        for number, why in plan.ended:
            self._finish_request(number, why)
        if plan.run or plan.changes:
            self._step(plan)
        self._outbox.send()
        if not plan.run and self._scheduler.open:  # should not happen; without a pause it would be a busy loop
            time.sleep(0.01)

    def _step(self, plan: Plan) -> None:
        start = time.monotonic()
        starting = {}
        for change in plan.changes:
            if isinstance(change, Start):
                opened = self._open[change.id]
                opened.queued_s = start - opened.submitted_at
                starting[change.id] = (opened.entry.tokens[: opened.entry.prompt], opened.options)
        work = work_of(plan, starting, self._masks(plan))
        multi_step = self._plan_multi_step(plan)
        outcome = self._decoder.apply(work, multi_step)
        if multi_step is not None:
            self._dispatcher.finish_call(multi_step)
        if not plan.run:
            return
        for name, drafts in outcome.drafts.items():
            opened = self._open[int(name)]
            self._scheduler.count_drafts(drafts[0] - opened.drafts[0], drafts[1] - opened.drafts[1])
            opened.drafts = (drafts[0], drafts[1])
        now = time.monotonic()
        steps = [*outcome.before, outcome.tokens]
        wrong = {int(name) for name in outcome.errors}
        for place, tokens in enumerate(steps):
            ended = dict(self._scheduler.done(plan, tokens, (now - start) / len(steps), now, wrong))
            for number, token in zip(plan.run, tokens, strict=True) if place >= outcome.fed else ():
                self._publish(number, token, outcome, ended.get(number))

    def _plan_multi_step(self, plan: Plan) -> MultiStep | None:
        """A call of several steps, where nothing between them needs a decision or has results other than tokens."""
        seconds = self._scheduler.rates.decode_seconds(plan.decodes)
        if not self._decoder.multi_step or seconds == 0.0:
            return None
        most = min(self._scheduler.steps_without_decision(plan), int(LONGEST_CALL_S / seconds))
        opened = [self._open[number] for number in plan.run]
        if most < 2 or any(each.constraint is not None or each.wants_logprobs for each in opened):
            return None
        subscribers = [Subscriber(each.stream, each.entry.cached, each.queued_s) for each in opened]
        return self._dispatcher.start_call(most, subscribers)

    def _masks(self, plan: Plan) -> dict[int, bytes]:
        """The token masks of the constrained requests that sample a token in this step."""
        wanted = {}
        for number, count in plan.run.items():
            opened = self._open[number]
            if opened.constraint is not None and opened.entry.left == count:
                wanted[number] = opened.constraint
        return self._grammars.masks(wanted) if wanted else {}

    def _publish(self, number: int, token: int, outcome: Outcome, why: End | None) -> None:
        """Send what a step has computed for a request to its stream, and end the request if `why` says so."""
        name, opened = str(number), self._open[number]
        if why == "error":
            self._finish_request(number, why, ModelError(outcome.errors[name]))
            return
        tokens = (token,) if token >= 0 and opened.entry.max_tokens > 0 else ()
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
        if name in outcome.embeddings:
            del self._open[number]
            self._outbox.add(opened.stream, outcome.embeddings[name])
            return
        prompt_scores = outcome.prompt_scores.get(name)
        chunk = Chunk(
            tokens,
            logprobs_of(outcome.scores.get(name, [])),
            None if prompt_scores is None else logprobs_of(prompt_scores),
            opened.entry.cached,
            None,
            opened.queued_s,
            opened.drafts,
        )
        if why is not None:
            self._finish_request(number, why, chunk=chunk)
        elif tokens or prompt_scores is not None:
            self._outbox.add(opened.stream, chunk)

    def _submit(self, opened: OpenRequest) -> None:
        try:
            if self._refusal is not None:
                raise self._refusal
            if self._draining:
                raise EngineStoppedError("the server takes no more requests: it is shutting down")
            self._scheduler.submit(opened.entry)
        except Exception as error:  # noqa: BLE001  raised where the stream is read
            self._outbox.add(opened.stream, error)
            return
        self._open[opened.entry.id] = opened

    def _finish_request(
        self, number: int, why: End, error: Exception | None = None, chunk: Chunk | None = None
    ) -> None:
        opened = self._open.pop(number)
        if why == "deadline":
            error = DeadlineError()
        if error is not None:
            self._outbox.add(opened.stream, error)
        elif why in ("stop", "length", "abort"):
            last = chunk or Chunk((), cached_tokens=opened.entry.cached)
            self._outbox.add(opened.stream, replace(last, finish=why))

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
        self._outbox.send()

    def _restart(self, error: Exception) -> None:
        """Replace a failed decoder, trying until one loads or the engine stops."""
        if not isinstance(error, AnyAccelError):
            logger.exception("the engine has failed")
        logger.error("the engine has failed, and is started again: %s", error)
        self._ready = False
        total = self._earlier + self._scheduler.stats(0)
        self._earlier = replace(total, running=0, waiting=0, cache_used=0, cache_total=0)  # keep the counters only
        self._scheduler = Scheduler(self._scheduler.limits)
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
        limits = Limits(
            settings.max_batch,
            settings.max_waiting,
            decoder.cache_pages,
            decoder.facts.context,
            settings.prefix_cache and decoder.shares,
        )
        return Scheduler(limits, Rates(settings.step_s))


def open_engine(
    options: ModelOptions, screen: Watcher, settings: EngineSettings | None = None, tokenizer: Any = None
) -> ServingEngine | Replicas:
    """Load a model and begin to serve it.

    Args:
        tokenizer: of the model (`load_text_tokenizer`), where the caller has it already; for grammars.

    Raises:
        UsageError: the native runtime does not have this model, or settings are wrong.
        AnyAccelError: the model cannot be read.
    """
    chosen = settings or EngineSettings()
    if chosen.replicas == 0:
        from anyaccel.topology import read_machine

        chosen = replace(chosen, replicas=len(read_machine().nodes_with_cores()))

    def one(replica: int) -> ServingEngine:
        watcher = screen if replica == 0 else Silent()
        return ServingEngine(
            lambda check: open_decoder(options, watcher, chosen, tokenizer, check, replica),
            chosen,
            Grammars(options.model, tokenizer),
        )

    if chosen.replicas == 1:
        return one(0)
    engines: list[ServingEngine] = []
    try:
        while len(engines) < chosen.replicas:
            engines.append(one(len(engines)))
    except BaseException:
        for engine in engines:
            engine.shut_down()
        raise
    return Replicas(engines, chosen.prefix_cache, chosen.timeout_s)
