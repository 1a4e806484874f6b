# SPDX-License-Identifier: Apache-2.0
"""The engine: one thread that plans steps, has the decoder take them, and tells asyncio what came of them. Torch-free.

Nothing that is called in the loop waits for a step: requests go into an inbox, which the thread looks into between two
steps, and answers come back by `Outbox`, once a step. The decoder is in this process, or on ranks (`ranks.py`); when it
fails, open requests end with EngineStoppedError, and it is loaded again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal

from anyaccel.errors import AnyAccelError, ModelError, UsageError
from anyaccel.serve.ahead import LONGEST_S, Feeding, Outbox, Receiver
from anyaccel.serve.checks import check_prompt, check_request, native_options
from anyaccel.serve.contract import (
    Chunk,
    DeadlineError,
    EngineStoppedError,
    GenerationRequest,
    ModelFacts,
    Stats,
)
from anyaccel.serve.decoders import open_decoder
from anyaccel.serve.facts import Decoder
from anyaccel.serve.grammar import Grammars
from anyaccel.serve.opened import Open, logprobs_of
from anyaccel.serve.plans import End, Plan, Start
from anyaccel.serve.rates import Rates
from anyaccel.serve.replicas import Replicas, Silent
from anyaccel.serve.scheduler import Entry, Limits, Scheduler
from anyaccel.serve.settings import EngineSettings
from anyaccel.serve.slots import Ahead, Outcome, work_of
from anyaccel.serve.streams import Piece, Stream, chunk_of

if TYPE_CHECKING:
    from anyaccel.inference.ranks.loading import Watcher
    from anyaccel.inference.ranks.options import ModelOptions

logger = logging.getLogger(__name__)

_RESTART_S = (0.5, 30.0)  # before the decoder is loaded again: the first time, and at most
_IDLE_S = 1.0  # between two looks at a decoder that has nothing to do
_COUNTERS = (
    "prefix_hits",
    "prefix_queries",
    "prompt_tokens",
    "generation_tokens",
    "preemptions",
    "steps",
    "drafted",
    "accepted",
)
assert {field.name for field in fields(Stats)} >= set(_COUNTERS)


class ServingEngine:
    """See `contract.Engine`.

    Args:
        load: gives a decoder that is ready, in the engine's thread; called again when one has failed. Its argument is
            what it is to call now and then.
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
        self._open: dict[int, Open] = {}  # the thread's own
        self._before = Stats()  # what earlier decoders have done
        self._refusal: Exception | None = None  # of requests that come while there is no decoder
        self._feeding = Feeding()
        self._outbox = Outbox(self._feeding)
        self._decoder: Decoder
        self._scheduler: Scheduler
        self._thread = threading.Thread(target=self._serve, name="anyaccel-engine", daemon=True)
        loaded = threading.Event()
        problem: list[BaseException] = []
        self._loaded = (loaded, problem)
        self._thread.start()
        try:
            loaded.wait()
        except BaseException:  # Ctrl-C: the thread notices that it is to end
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
        self._feeding.watch(stream.loop)
        opened = Open(entry, options, stream, constraint)
        self._post(lambda: self._submit(opened))
        ended = False
        try:
            while not ended:
                piece = await stream.next()
                ended = piece.finish is not None
                yield chunk_of(piece)
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
            opened = Open(entry, {"goal": pooling}, Stream(entry.deadline), None)
            self._post(lambda opened=opened: self._submit(opened))  # type: ignore[misc]
            numbers.append(number)
            streams.append(opened.stream)
        try:
            found = []
            for stream in streams:
                embedding = (await stream.next()).embedding
                assert embedding is not None
                found.append(embedding)
            numbers.clear()
            return found
        finally:
            for number in numbers:
                self._post(lambda number=number: self._scheduler.cancel(number), quiet=True)  # type: ignore[misc]

    def stats(self) -> Stats:
        now = self._scheduler.stats(self._decoder.page_bytes)
        return replace(now, **{name: getattr(now, name) + getattr(self._before, name) for name in _COUNTERS})

    @property
    def cache_pages(self) -> int:
        """How many the cache has room for."""
        return self._scheduler.limits.cache_pages

    def ready(self) -> bool:
        return self.alive() and not self._decoder.late()

    def alive(self) -> bool:
        """The same also while a step is late."""
        return self._ready and not self._draining

    async def drain(self, seconds: float) -> None:
        self._draining = True
        deadline = time.monotonic() + seconds
        while (self._open or self._inbox) and time.monotonic() < deadline and self._thread.is_alive():
            await asyncio.sleep(0.01)
        self._post(self._abort, quiet=True)
        while (self._open or self._inbox) and self._thread.is_alive():
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.shut_down)

    def shut_down(self) -> None:
        """The same, waiting for it."""
        with self._condition:
            self._stopping = self._draining = True
            self._feeding.stop()
            self._condition.notify()
        self._thread.join()
        self._feeding.close()
        self._grammars.close()

    def _deadline(self, seconds: float | None) -> float:
        return time.monotonic() + (self._settings.timeout_s if seconds is None else seconds)

    def _post(self, message: Callable[[], None], quiet: bool = False) -> None:
        with self._condition:
            if self._stopping or not self._thread.is_alive():
                if quiet:
                    return
                raise EngineStoppedError("the server is about to end")
            self._inbox.append(message)
            self._feeding.stop()
            self._condition.notify()

    # --- the thread

    def _check(self) -> None:
        if self._stopping:
            raise EngineStoppedError("the server is about to end")

    def _serve(self) -> None:
        loaded, problem = self._loaded
        try:
            self._decoder = self._load(self._check)
            self._scheduler = self._new_scheduler()
            self._ready = True
        except BaseException as error:  # noqa: BLE001  raised where the engine is made
            problem.append(error)
            return
        finally:
            loaded.set()
        try:
            while not self._stopping:
                try:
                    self._turn()
                except Exception as error:  # noqa: BLE001  whatever it is, the server goes on with a new decoder
                    self._restart(error)
        finally:
            self._ready = False
            self._end_all(EngineStoppedError("the server has ended"))
            self._decoder.close()

    def _turn(self) -> None:
        """What has come in, and a step if there is something to do."""
        with self._condition:
            while not self._inbox and not self._stopping and self._scheduler.idle:
                if not self._condition.wait(_IDLE_S):
                    self._decoder.check()
            inbox, self._inbox = self._inbox, []
            self._feeding.stop(self._stopping)
        if self._stopping:
            return
        for message in inbox:
            message()
        plan = self._scheduler.plan(time.monotonic())
        for number, why in plan.ended:
            self._close(number, why)
        if plan.run or plan.changes:
            self._step(plan)
        self._outbox.send()
        if not plan.run and self._scheduler.open:  # never, if all is well; and never in a hurry
            time.sleep(0.01)

    def _step(self, plan: Plan) -> None:
        start = time.monotonic()
        starting = {}
        for change in plan.changes:
            if isinstance(change, Start):
                opened = self._open[change.id]
                opened.queued_s = start - opened.came
                starting[change.id] = (opened.entry.tokens[: opened.entry.prompt], opened.options)
        work = work_of(plan, starting, self._masks(plan))
        ahead = self._ahead(plan)
        outcome = self._decoder.apply(work) if ahead is None else self._decoder.apply(work, ahead)
        if ahead is not None:
            self._feeding.over(ahead)
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
                self._tell(number, token, outcome, ended.get(number))

    def _ahead(self, plan: Plan) -> Ahead | None:
        """Leave for more than one step, where nothing has to be decided or told between them but tokens."""
        seconds = self._scheduler.rates.decode_seconds(plan.answers)
        if not self._decoder.goes_ahead or seconds == 0.0:
            return None
        most = min(self._scheduler.ahead(plan), int(LONGEST_S / seconds))
        opened = [self._open[number] for number in plan.run]
        if most < 2 or any(each.constraint is not None or each.tells_more for each in opened):
            return None
        return self._feeding.begin(most, [Receiver(each.stream, each.entry.cached, each.queued_s) for each in opened])

    def _masks(self, plan: Plan) -> dict[int, bytes]:
        """Of the constrained requests that will choose a token."""
        wanted = {}
        for number, count in plan.run.items():
            opened = self._open[number]
            if opened.constraint is not None and opened.entry.left == count:
                wanted[number] = opened.constraint
        return self._grammars.masks(wanted) if wanted else {}

    def _tell(self, number: int, token: int, outcome: Outcome, why: End | None) -> None:
        name, opened = str(number), self._open[number]
        if why == "error":
            self._close(number, why, ModelError(outcome.errors[name]))
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
                self._close(number, "error", error)
                return
        told = outcome.prompt_scores.get(name)
        piece = Piece(
            tokens,
            logprobs_of(outcome.scores.get(name, [])),
            None if told is None else logprobs_of(told),
            opened.entry.cached,
            outcome.embeddings.get(name),
            queued_s=opened.queued_s,
            drafts=opened.drafts,
        )
        if why is not None:
            self._close(number, why, piece=piece)
        elif tokens or told is not None:
            self._outbox.add(opened.stream, piece)

    def _submit(self, opened: Open) -> None:
        try:
            if self._refusal is not None:
                raise self._refusal
            if self._draining:
                raise EngineStoppedError("the server takes no more requests: it is about to end")
            self._scheduler.submit(opened.entry)
        except Exception as error:  # noqa: BLE001  for whoever waits
            self._outbox.add(opened.stream, Piece(error=error))
            return
        self._open[opened.entry.id] = opened

    def _close(self, number: int, why: End, error: Exception | None = None, piece: Piece | None = None) -> None:
        opened = self._open.pop(number)
        piece = piece or Piece(cached_tokens=opened.entry.cached)
        if why == "deadline":
            error = DeadlineError()
        if error is not None:
            piece.error = error
        elif why in ("stop", "length", "abort"):
            piece.finish = why
        else:  # cancelled: nobody waits
            return
        self._outbox.add(opened.stream, piece)

    def _abort(self) -> None:
        for number in list(self._open):
            self._scheduler.finish(number, "abort")
            self._close(number, "abort")

    def _end_all(self, error: Exception) -> None:
        with self._condition:
            inbox, self._inbox = self._inbox, []
        self._refusal = error
        for message in inbox:
            message()
        self._refusal = None
        for number in list(self._open):
            self._close(number, "error", error)
        self._outbox.send()

    def _restart(self, error: Exception) -> None:
        """The decoder is of no use any more: another one, as often as it takes."""
        if not isinstance(error, AnyAccelError):
            logger.exception("the engine has failed")
        logger.error("the engine has failed, and is started again: %s", error)
        self._ready = False
        before, now = self._before, self._scheduler.stats(0)
        self._before = replace(before, **{name: getattr(before, name) + getattr(now, name) for name in _COUNTERS})
        self._scheduler = Scheduler(self._scheduler.limits)  # what it has counted is in `before`
        self._end_all(EngineStoppedError(f"the engine has failed, and is started again: {error}"))
        self._decoder.close()
        wait, longest = _RESTART_S
        while not self._stopping:
            try:
                self._decoder = self._load(self._check)
                break
            except (AnyAccelError, OSError, MemoryError) as reason:
                logger.error("the engine cannot be started: %s; the next attempt is in %g s", reason, wait)
            deadline = time.monotonic() + wait
            while not self._stopping and (left := deadline - time.monotonic()) > 0:
                with self._condition:
                    self._condition.wait(left)
                self._end_all(EngineStoppedError("the engine is started again; come back later"))
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
