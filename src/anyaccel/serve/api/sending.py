# SPDX-License-Identifier: Apache-2.0
"""Reads requests and sends responses within bounds on time and size, and notices when the client has gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from anyaccel.errors import AnyAccelError
from anyaccel.serve.protocol.errors import ApiError, api_error, invalid
from anyaccel.serve.protocol.json_text import DONE, event, from_json, to_json
from anyaccel.serve.protocol.limits import Limits

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)
logger = logging.getLogger("anyaccel.serve")

# The head of a stream is held back for so many seconds, so that an early error (a full queue) gets an HTTP status.
_HEAD_DELAY_S = 1.0
# An empty event, which clients ignore. Not a comment: vLLM's client strips trailing white space, which would join the
# comment and the first event in one line, and lose both.
_KEEP_ALIVE = b"\n"


class ClientGoneError(Exception):
    """The client has closed its connection."""


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer of JSON."""
    return Response(to_json(value), status, headers, "application/json")


def error_answer(error: BaseException) -> Response:
    """The response to a request that has failed; unexpected errors go to the log."""
    said = api_error(error)
    if said.status >= 500 and not isinstance(error, AnyAccelError | ApiError):
        logger.error("a request has failed", exc_info=error)
    headers = said.headers()
    if said.status in (401, 403, 408, 413, 415):
        headers["connection"] = "close"  # the rest of the body is not read
    return json_answer(said.body(), said.status, headers)


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body of a request.

    Raises:
        ApiError: it is too large, comes too slowly, or is not said to be JSON.
        ClientGoneError: it ends in the middle.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Browsers let the pages of other sites send other content types without a preflight request.
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, "the body must be JSON, with the header Content-Type: application/json")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", ""):
        raise ApiError(415, f"the body must come as it is, without Content-Encoding: {coding[:40]}")
    too_large = ApiError(413, f"the body is larger than {limits.body} bytes")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > limits.body:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                size += len(part)
                if size > limits.body:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {limits.body_seconds:g} s") from None
    except ClientDisconnect:
        raise ClientGoneError from None
    return b"".join(parts)


async def read(request: Request, shape: type[B], limits: Limits) -> B:
    """The body of a request, validated.

    Raises:
        ApiError: it is something else; the error names the field.
    """
    given = from_json(await read_body(request, limits))
    if not isinstance(given, dict):
        raise ApiError(400, "the body must be a JSON object")
    try:
        return shape.model_validate(given)
    except ValidationError as error:
        raise invalid(error, given) from None
    except RecursionError:
        raise ApiError(400, "the body is JSON that is nested too deep") from None


async def gone(receive: Receive) -> None:
    """Wait until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes.

    Raises:
        ClientGoneError: the client has gone.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        await _cancel(task, watch)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Events:
    """A response as a stream of server-sent events.

    The head is sent with the first event, so that an error before it gets an HTTP status. If no event comes soon, the
    head is sent without one, and blank lines keep proxies from closing the connection.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], limits: Limits, done: bytes = DONE) -> None:
        self._events = events
        self._limits = limits
        self._done = done
        self._begun = False
        self._sent_at = 0.0
        self._writing = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._send_part = scope.get("anyaccel.parts", send)
        pump = asyncio.create_task(self._pump())
        left = asyncio.create_task(gone(receive))
        watch = asyncio.create_task(self._keep_alive(scope.get("anyaccel.half") or asyncio.Event()))
        try:
            await asyncio.wait((pump, left, watch), return_when=asyncio.FIRST_COMPLETED)
            if left.done():
                return  # closing the events, below, ends the request in the engine
            if watch.done():
                await _cancel(pump)
                logger.info("a client took nothing of its answer for %g s", self._limits.send_seconds)
                scope.get("anyaccel.abort", lambda: left.cancel())()
                await asyncio.wait((left,))
                return
            await _cancel(watch)
            await self._finish(pump, scope, receive)
        finally:
            await _cancel(pump, left, watch)
            with suppress(Exception):
                await self._events.aclose()

    async def _finish(self, pump: asyncio.Task[None], scope: Scope, receive: Receive) -> None:
        """End the stream after the last event, or with an error."""
        error = pump.exception()
        if error is None:
            await self._write(b"", last=True)
        elif not self._begun:
            await error_answer(error)(scope, receive, self._send)
        else:
            if not isinstance(error, AnyAccelError | ApiError):
                logger.error("an answer has failed", exc_info=error)
            await self._write(event(api_error(error).body()) + self._done, last=True)

    async def _pump(self) -> None:
        async for data in self._events:
            await self._write(data)

    async def _keep_alive(self, half: asyncio.Event) -> None:
        """Send keep-alive lines while no event comes; return when the client does not receive any more.

        Args:
            half: set when the client has closed its sending side: only sending shows then whether it is still there.
        """
        limits = self._limits
        wait = min(_HEAD_DELAY_S, limits.send_seconds)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await half.wait()
            show = half.is_set()
            half = asyncio.Event() if show else half
            idle = time.monotonic() - self._sent_at
            if self._writing.locked():
                if idle >= limits.send_seconds:
                    return
                wait = limits.send_seconds - idle
                continue
            if show or idle >= limits.alive_seconds or not self._begun:
                with suppress(TimeoutError):
                    async with asyncio.timeout(limits.send_seconds):
                        await self._write(_KEEP_ALIVE)
                    idle = 0.0
                if idle:
                    return
            wait = min(limits.alive_seconds - idle, limits.send_seconds)

    async def _write(self, data: bytes, last: bool = False) -> None:
        async with self._writing:
            self._sent_at = time.monotonic()
            if not self._begun:
                self._begun = True
                headers = [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),  # otherwise nginx buffers events
                ]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send_part({"type": "http.response.body", "body": data, "more_body": not last})
