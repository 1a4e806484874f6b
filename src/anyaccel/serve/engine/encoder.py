# SPDX-License-Identifier: Apache-2.0
"""The engine of an encoder: embeddings of texts, or their classes and scores of pairs. Torch-free.

What waits is computed together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from anyaccel.errors import UsageError
from anyaccel.inference.encoders.classifier import has_classifier
from anyaccel.inference.encoders.embedder import Embedder, TextClassifier, embedding_cuts
from anyaccel.inference.encoders.opening import config_of
from anyaccel.inference.encoders.pooling import normalized as unit_rows
from anyaccel.serve.engine.settings import EngineSettings
from anyaccel.serve.interface import (
    Chunk,
    DeadlineError,
    EngineFullError,
    EngineStoppedError,
    GenerationRequest,
    ModelFacts,
    Stats,
)

if TYPE_CHECKING:
    from anyaccel.inference.options import ModelOptions
    from anyaccel.inference.ranks.backends import Reporter

T = TypeVar("T")

_RUN_TOKENS = 16384  # of texts that are computed together, unless one request has more
_RETRY_S = 1.0


@dataclass
class _Job:
    """What one request wants.

    Attributes:
        texts: tokens of each.
        types: of the tokens; None: all are 0.
        compute: makes a row for each text; jobs with the same one are computed together.
    """

    texts: Sequence[Sequence[int]]
    types: Sequence[Sequence[int]] | None
    compute: Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]]], Any]
    result: asyncio.Future[Any]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


class EncoderEngine:
    """See `Engine` and `TextEncoder`; an encoder generates nothing.

    Args:
        path: of the model's folder.

    Raises:
        UsageError: an option is not for encoders.
        ModelError: the model cannot be read.
    """

    def __init__(self, path: Path, options: ModelOptions, screen: Reporter, settings: EngineSettings) -> None:
        if settings.replicas != 1:
            raise UsageError("replicas: an encoder has one, which uses all cores")
        self._settings = settings
        self._classifier: TextClassifier | None = None
        self._embedder: Embedder | None = None
        made: TextClassifier | Embedder
        if has_classifier(config_of(path)):
            made = self._classifier = TextClassifier(path, options, progress=screen.progress)
            size = len(made.labels)
            what = "scores of pairs of texts" if size == 1 else f"texts sorted into {size} classes"
        else:
            made = self._embedder = Embedder(path, options, progress=screen.progress)
            size, what = made.size, f"embeddings by the {'+'.join(made.pooling.modes)} of hidden states"
        model = made.encoder if isinstance(made, TextClassifier) else made.states
        tokenizer = made.tokenizer
        self.facts = ModelFacts(
            context=tokenizer.longest,
            vocabulary=model.vocabulary,
            ends=frozenset(),
            hidden=size,
            dtype=options.dtype,
            plan=(f"plan: an encoder on {model.threads} threads, {what}",),
            weight_bytes=model.weight_bytes,
            pooling="+".join(self._embedder.pooling.modes) if self._embedder else "",
            cuts=embedding_cuts(path, size) if self._embedder else (),
        )
        self._pool = ThreadPoolExecutor(1, "anyaccel-encoder")
        self._waiting: list[_Job] = []
        self._running: list[_Job] = []
        self._worker: asyncio.Task[None] | None = None
        self._stopped = False
        self._computed = self._steps = 0

    def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Refuse it: raises UsageError."""
        raise UsageError("prompt: this model is an encoder, which generates no text; use /v1/embeddings or /v1/rerank")

    async def embed(
        self, prompts: Sequence[Sequence[int]], pooling: Literal["mean", "last"], key: str = ""
    ) -> list[list[float]]:
        """Embeddings as the model's own files say; `pooling` is for models that generate."""
        vectors = await self._computed_of(prompts, None, self._embeddings)
        return [vector.tolist() for vector in vectors]

    async def embed_each(self, prompts: Sequence[Sequence[int]], normalized: bool) -> list[list[list[float]]]:
        """See `TextEncoder`."""
        rows = await self._computed_of(prompts, None, self._states)
        return [(unit_rows(states) if normalized else states).tolist() for states in rows]

    async def classify(self, prompts: Sequence[Sequence[int]], activated: bool) -> list[dict[str, float]]:
        """See `TextEncoder`."""
        classifier = self._classes("classifies no texts; use /v1/embeddings")
        rows = await self._computed_of(prompts, None, self._logits)
        rows = classifier.probabilities(rows) if activated else rows
        return [dict(zip(classifier.labels, row, strict=True)) for row in rows.tolist()]

    async def score(self, query: str, texts: Sequence[str]) -> tuple[list[float], int]:
        """See `TextEncoder`."""
        classifier = self._classes("scores no pairs; use /v1/embeddings")
        if len(classifier.labels) != 1:
            raise UsageError("model: this one sorts texts into classes and scores no pairs; use /v1/classify")
        loop = asyncio.get_running_loop()
        ids, types = await loop.run_in_executor(None, classifier.pairs, query, texts)
        rows = await self._computed_of(ids, types, self._logits)
        return classifier.scores(rows).tolist(), sum(map(len, ids))

    def _classes(self, instead: str) -> TextClassifier:
        if self._classifier is None:
            raise UsageError(f"model: this one makes embeddings and {instead}")
        return self._classifier

    def _vectors(self) -> Embedder:
        if self._embedder is None:
            raise UsageError(
                "input: this model classifies texts and makes no embeddings; use /v1/classify or /v1/rerank"
            )
        return self._embedder

    def _logits(self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]]) -> Any:
        return self._classes("").logits(texts, types)

    def _embeddings(self, texts: Sequence[Sequence[int]], _types: Any) -> Any:
        return self._vectors().embed_tokens(texts)

    def _states(self, texts: Sequence[Sequence[int]], _types: Any) -> Any:
        return self._vectors().embed_each(texts)

    async def _computed_of(
        self,
        texts: Sequence[Sequence[int]],
        types: Sequence[Sequence[int]] | None,
        compute: Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]]], Any],
    ) -> Any:
        """A row of the result for each text."""
        if self._stopped:
            raise EngineStoppedError("the server is stopping")
        if len(self._waiting) >= self._settings.max_waiting:
            raise EngineFullError(f"{len(self._waiting)} requests are waiting", _RETRY_S)
        loop = asyncio.get_running_loop()
        job = _Job(texts, types, compute, loop.create_future())
        self._waiting.append(job)
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        try:
            return await asyncio.wait_for(job.result, self._settings.timeout_s)
        except TimeoutError:
            raise DeadlineError from None
        finally:
            if job in self._waiting:  # its client has gone
                self._waiting.remove(job)

    async def _work(self) -> None:
        """Compute what waits until nothing does."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            self._running = [self._waiting.pop(0)]
            total = self._running[0].tokens
            first = self._running[0].compute
            while (
                self._waiting and self._waiting[0].compute == first and total + self._waiting[0].tokens <= _RUN_TOKENS
            ):
                total += self._waiting[0].tokens
                self._running.append(self._waiting.pop(0))
            try:
                rows = await loop.run_in_executor(self._pool, self._compute, self._running)
            except Exception as error:  # noqa: BLE001  of the requests, not of the server
                for job in self._running:
                    if not job.result.done():
                        job.result.set_exception(error)
            else:
                at = 0
                for job in self._running:
                    if not job.result.done():
                        job.result.set_result(rows[at : at + len(job.texts)])
                    at += len(job.texts)
            self._computed += total
            self._steps += 1
            self._running = []

    def _compute(self, jobs: Sequence[_Job]) -> Any:
        texts = [text for job in jobs for text in job.texts]
        types = [kind for job in jobs for kind in job.types or [[0] * len(text) for text in job.texts]]
        return jobs[0].compute(texts, types)

    def stats(self) -> Stats:
        """What is running and waiting now, and what has been computed."""
        return Stats(
            running=len(self._running),
            waiting=len(self._waiting),
            prompt_tokens=self._computed,
            steps=self._steps,
        )

    def ready(self) -> bool:
        """Whether requests are taken."""
        return not self._stopped

    def alive(self) -> bool:
        """As `ready`."""
        return not self._stopped

    async def drain(self, seconds: float) -> None:
        """Take no new requests, and wait for the open ones."""
        self._stopped = True
        if self._worker is not None and not self._worker.done():
            await asyncio.wait((self._worker,), timeout=seconds)

    async def close(self) -> None:
        """End the thread; requests that wait get EngineStoppedError."""
        self._stopped = True
        for job in self._waiting:
            if not job.result.done():
                job.result.set_exception(EngineStoppedError("the server has stopped"))
        self._waiting.clear()
        await _in_thread(lambda: self._pool.shutdown(wait=True, cancel_futures=True))

    def shut_down(self) -> None:
        """As `close`, without an event loop."""
        self._pool.shutdown(wait=True, cancel_futures=True)


async def _in_thread(call: Callable[[], T]) -> T:
    return await asyncio.to_thread(call)
