# SPDX-License-Identifier: Apache-2.0
"""The models of a server: loaded when a request names them, and unloaded for others or when nobody has used them.

All that is used stays in memory. Models are loaded one after another, so that each can be planned with what the others
have left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

from starlette.requests import Request
from starlette.types import ASGIApp

from anyaccel import host_memory
from anyaccel.errors import AnyAccelError
from anyaccel.serve.api.sending import unless_gone
from anyaccel.serve.interface import DeadlineError, EngineStoppedError, Stats
from anyaccel.serve.protocol.errors import ApiError
from anyaccel.serve.protocol.limits import HttpLimits
from anyaccel.serve.requests.files import FileStore
from anyaccel.serve.requests.frontend import Frontend
from anyaccel.serve.requests.metrics import HttpMetrics, Metrics
from anyaccel.serve.requests.stored import AnswerStore

logger = logging.getLogger("anyaccel.serve")

_TAG = ":latest"  # which Ollama's clients add to a name
_GIB = 2**30

# Loads a model, given the bytes of its cache (0: as many as it takes by itself) and a function that raises when the
# load is to end.
Load = Callable[[int, Callable[[], None]], Frontend]


class ServedModel:
    """A model that requests may name.

    Args:
        names: responses use the first.
        aliases: further names that requests may use; they are never shown, as a path reveals what is on this machine.
        root: the name of its file or folder.
        parent: the name of the model that it is with an adapter; "": it is none of that kind.
        size: bytes of its files.
        has_experts: whether those of its experts that do not fit in memory may stay on the disk; None: they may not.

    Attributes:
        frontend: None while it is not loaded.
        weights: bytes of its weights in memory; those of its files until it has been loaded.
        memory: bytes of its weights and its cache while it is loaded.
        users: requests that have it, or wait for it.
        keep_s: seconds that it stays without a request; None: for ever.
    """

    def __init__(
        self,
        names: Sequence[str],
        aliases: Sequence[str] = (),
        *,
        root: str = "",
        parent: str = "",
        size: int = 0,
        load: Load | None = None,
        frontend: Frontend | None = None,
        has_experts: Callable[[], bool] | None = None,
    ) -> None:
        self.names = names
        self.aliases = aliases
        self.root = root
        self.parent = parent
        self.size = size
        self.load = load
        self.has_experts = has_experts
        self.frontend: Frontend | None = None
        self.created = int(time.time())
        self.weights = size
        self.memory = 0
        self.users = 0
        self.used_at = time.monotonic()
        self.keep_s: float | None = None
        self.loading: asyncio.Task[None] | None = None
        self.expiry: asyncio.TimerHandle | None = None
        self.leaves: asyncio.Event | None = None  # while it is unloaded; set at the end of that
        self.unused = asyncio.Event()
        self._metrics: Metrics | None = None
        self._earlier = Stats()
        if frontend is not None:
            self.loaded(frontend)

    def loaded(self, frontend: Frontend) -> None:
        """Take requests from now on."""
        if self._metrics is not None:
            frontend.metrics = self._metrics
        self._metrics = frontend.metrics
        facts = frontend.engine.facts
        self.weights = facts.weight_bytes or self.size
        self.memory = self.weights + facts.cache_bytes
        self.frontend = frontend

    def unloaded(self) -> None:
        """Take no requests until it is loaded again; what was counted stays."""
        total = self.stats()
        self._earlier = replace(total, running=0, waiting=0, cache_used=0, cache_total=0)
        self.frontend = None
        self.memory = 0

    def stats(self) -> Stats:
        return self._earlier if self.frontend is None else self._earlier + self.frontend.engine.stats()

    @property
    def metrics(self) -> Metrics:
        if self._metrics is None:
            self._metrics = Metrics()
        return self._metrics

    def seconds_left(self) -> float | None:
        """Until it is unloaded, if nobody uses it; None: it stays."""
        return None if self.expiry is None else max(0.0, self.expiry.when() - asyncio.get_running_loop().time())

    @property
    def status(self) -> str:
        """In the words of llama.cpp's server."""
        if self.frontend is not None:
            return "loaded"
        return "unloaded" if self.loading is None else "loading"

    def is_named(self, name: str) -> bool:
        known = (*self.names, *self.aliases)
        return name in known or name.removesuffix(_TAG) in known


class Background(Protocol):
    """Work beside requests."""

    async def close(self) -> None:
        """End it."""


class Models:
    """The models that requests may name.

    Args:
        models: those that were given; a request without a name gets the first.
        found: further models, looked up again when a name is not known.
        memory: bytes that all of them may take together; 0: there is one model, which stays.
        cache_bytes: of each model's keys and values; 0: a quarter of what is left when it is loaded.
        idle_s: seconds after which a model without requests is unloaded; 0: never.
        wait_s: the longest that a request waits for its model.
        files: those that clients upload; None: they cannot.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        found: Callable[[], Iterable[ServedModel]] = tuple,
        memory: int = 0,
        cache_bytes: int = 0,
        idle_s: float = 0.0,
        wait_s: float = 600.0,
        limits: HttpLimits | None = None,
        files: FileStore | None = None,
    ) -> None:
        self._given = models
        self._found = found
        self._more: dict[str, ServedModel] = {}
        self._memory = memory
        self._cache_bytes = cache_bytes
        self._idle_s = idle_s
        self._wait_s = wait_s
        self.limits = limits or HttpLimits()
        self.files = files
        self.inner: ASGIApp | None = None  # the endpoints, for requests of the server's own
        self.batches: Background | None = None
        self.answers = AnswerStore()
        self.requests = HttpMetrics()
        self._stopping = self._draining = False
        self._one_load = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, "anyaccel-models")
        for model in models:
            if model.frontend is not None:
                model.frontend.answers = self.answers

    @classmethod
    def of(cls, frontend: Frontend) -> Models:
        """One model, which is loaded and stays."""
        model = ServedModel(frontend.names, frontend.aliases, root=frontend.root, frontend=frontend)
        return cls([model], limits=frontend.limits)

    # Names ------------------------------------------------------------------------------------------------

    def listed(self) -> list[ServedModel]:
        """All of them, as they are now."""
        now = {model.names[0]: model for model in self._found()}
        kept = {name: model for name, model in self._more.items() if name in now or model.frontend is not None}
        self._more = {**now, **kept}
        return [*self._given, *self._more.values()]

    def loaded(self) -> list[ServedModel]:
        """Those that are in memory."""
        return [model for model in (*self._given, *self._more.values()) if model.frontend is not None]

    def named(self, name: str | None) -> ServedModel:
        """The model of this name, or without one the first.

        Raises:
            ApiError: there is none.
        """
        if name is None:
            return self._unnamed()
        known = [*self._given, *self._more.values()]
        found = next((model for model in known if model.is_named(name)), None)
        found = found or next((model for model in self.listed() if model.is_named(name)), None)
        if found is None:
            names = ", ".join(each for model in self.listed() for each in model.names)
            raise ApiError(
                404,
                f"model: no model {name[:200]!r} here; there is {names[:2000] or 'none'}",
                "model",
                "model_not_found",
                "not_found_error",
            )
        return found

    def _unnamed(self) -> ServedModel:
        if self._given:
            return self._given[0]
        choice = self.loaded() or self.listed()
        if len(choice) != 1:
            names = ", ".join(model.names[0] for model in self.listed())
            raise ApiError(400, f"model: is required here; there is {names[:2000] or 'none'}", "model")
        return choice[0]

    # Requests ---------------------------------------------------------------------------------------------

    async def serving(self, request: Request, name: str | None, keep_s: float | None = None) -> Frontend:
        """The model of this name, loaded, and kept until the request has ended.

        Args:
            keep_s: seconds that it stays after this request, where the request says so; infinite: for ever.

        Raises:
            ApiError: there is none of this name, or it has no room.
            AnyAccelError: it cannot be loaded, or not in time.
        """
        model = self.named(name)
        if model.frontend is None or model.leaves is not None:
            try:
                async with asyncio.timeout(self._wait_s):
                    await unless_gone(request.receive, self._begin(model))
            except TimeoutError:
                raise DeadlineError from None
        else:
            self._use(model)
        request.scope["anyaccel.held"].callback(self._end, model)
        if keep_s is not None:
            model.keep_s = keep_s
        assert model.frontend is not None
        request.scope["anyaccel.model"] = model.frontend.model
        return model.frontend

    def _use(self, model: ServedModel) -> None:
        model.users += 1
        model.unused.clear()
        if model.expiry is not None:
            model.expiry.cancel()
            model.expiry = None

    def _end(self, model: ServedModel) -> None:
        model.users -= 1
        model.used_at = time.monotonic()
        if model.users:
            return
        model.unused.set()
        keep_s = model.keep_s if model.keep_s is not None else self._idle_s or None
        if model.frontend is None or model.load is None or keep_s is None or keep_s == float("inf"):
            return
        loop = asyncio.get_running_loop()
        model.expiry = loop.call_later(keep_s, lambda: self._start(self._unload_unused(model)))

    async def _begin(self, model: ServedModel) -> None:
        """Wait until the model is loaded, as one of its users."""
        while model.leaves is not None:
            await model.leaves.wait()
        self._use(model)
        try:
            if model.frontend is None:
                model.loading = model.loading or self._start(self._load(model))
                await asyncio.shield(model.loading)
        except BaseException:
            self._end(model)
            raise

    # Loading ----------------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits for it gets it; there may be nobody any more

    def _check(self) -> None:
        if self._stopping or self._draining:
            raise EngineStoppedError("the server is shutting down")

    async def _load(self, model: ServedModel) -> None:
        assert model.load is not None
        load, name = model.load, model.names[0]
        try:
            async with self._one_load:
                self._check()
                cache = await self._make_room(model)
                logger.info("loading %s", name)
                start = time.monotonic()
                loop = asyncio.get_running_loop()
                frontend = await loop.run_in_executor(self._thread, lambda: load(cache, self._check))
                if self._stopping:
                    await frontend.engine.close()
                    self._check()
                frontend.answers = self.answers
                model.loaded(frontend)
                logger.info("loaded %s in %.1f s; it takes %s", name, time.monotonic() - start, _size(model.memory))
                await self._free_excess(model)
        except AnyAccelError as error:
            if not isinstance(error, EngineStoppedError):
                logger.error("%s cannot be loaded: %s", name, error)
            raise
        finally:
            model.loading = None

    async def _make_room(self, model: ServedModel) -> int:
        """Unload others until there is room for a model; returns the bytes of its cache.

        Raises:
            ApiError: there is not enough room even without the others.
        """
        while True:
            room = self._memory - sum(each.memory for each in self.loaded())
            cache = self._cache_bytes or max(room, 0) // 4
            if model.weights + cache <= room:
                return cache
            if not await self._unload_oldest(model):
                if model.has_experts is not None and model.has_experts():
                    return cache  # those that do not fit stay on the disk
                raise ApiError(
                    503,
                    f"model {model.names[0]!r} does not fit: its weights take about {_size(model.weights)}, its keys "
                    f"and values {_size(cache)}, and all models together may take {_size(self._memory)} (--memory)",
                    "model",
                    "model_does_not_fit",
                    "server_error",
                )

    async def _free_excess(self, model: ServedModel) -> None:
        """Unload others where a model takes more than its files let expect."""
        while sum(each.memory for each in self.loaded()) > self._memory:
            if not await self._unload_oldest(model):
                logger.warning("%s takes %s, more than --memory", model.names[0], _size(model.memory))
                return

    async def _unload_oldest(self, but: ServedModel) -> bool:
        """Unload the model that was unused for longest; whether there was one."""
        others = [each for each in self.loaded() if each is not but and each.load is not None]
        if not others:
            return False
        await self._unload(min(others, key=lambda each: (each.users > 0, each.used_at)))
        return True

    async def _unload_unused(self, model: ServedModel) -> None:
        async with self._one_load:
            if model.frontend is not None and not model.users and not self._draining:
                await self._unload(model)

    async def _unload(self, model: ServedModel) -> None:
        """Unload a model once its requests have ended; new ones wait for it to be loaded again."""
        assert model.frontend is not None
        model.leaves = asyncio.Event()
        try:
            while model.users:
                await model.unused.wait()
            engine = model.frontend.engine
            model.unloaded()
            await engine.close()
            await asyncio.get_running_loop().run_in_executor(self._thread, host_memory.release_free_memory)
            logger.info("unloaded %s", model.names[0])
        finally:
            model.leaves.set()
            model.leaves = None
            model.keep_s = None

    def frontends(self) -> list[Frontend]:
        """Those of the models that are loaded."""
        return [each.frontend for each in self.loaded() if each.frontend is not None]

    def plan(self) -> list[str]:
        """Lines that tell the user what is loaded when."""
        lines = [f"memory: all loaded models together may take {_size(self._memory)}; they compute in turn"]
        for model in self.listed():
            when = "when a request names it" if model.frontend is None else "now"
            size = f"about {_size(model.weights)} of weights" if model.frontend is None else _size(model.memory)
            lines.append(f"model: {model.names[0]}, {size}, loaded {when}")
        return lines

    # The whole server -------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether a request that is sent now would be computed, or its model loaded."""
        return not self._draining and all(each.engine.ready() for each in self.frontends())

    def metrics(self) -> str:
        """The text of /metrics."""
        counted = [(each.names[0], each.metrics, each.stats()) for each in (*self._given, *self._more.values())]
        return Metrics.text(counted, self.requests)

    async def drain(self, seconds: float) -> None:
        """Take no new requests, and wait for the open ones, at most `seconds`."""
        self._draining = True
        if self.batches is not None:
            await self.batches.close()
        await asyncio.gather(*(each.engine.drain(seconds) for each in self.frontends()))

    async def close(self) -> None:
        """End all engines."""
        self._stopping = True
        if self.batches is not None:
            await self.batches.close()
        tasks = [*self._tasks]
        loading = [each.loading for each in (*self._given, *self._more.values()) if each.loading is not None]
        for task in tasks:
            if task not in loading:  # a load ends by itself, and closes what it has opened
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(each.engine.close() for each in self.frontends()))
        self._thread.shutdown(wait=False)


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / 2**20:.0f} MiB"
