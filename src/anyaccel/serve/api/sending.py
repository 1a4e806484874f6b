# SPDX-License-Identifier: Apache-2.0
"""Reads requests and sends responses within bounds on time and size, and notices when the client has gone."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from anyaccel.errors import AnyAccelError
from anyaccel.serve.protocol.errors import ApiError, api_error, invalid
from anyaccel.serve.protocol.limits import HttpLimits

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)
logger = logging.getLogger("anyaccel.serve")

DONE = b"data: [DONE]\n\n"
# The head of a stream is held back for so many seconds, so that an early error (a full queue) gets an HTTP status.
_HEAD_DELAY_S = 1.0
_DISCARD_S = 2.0  # a refused client may send on for this long


@dataclass(frozen=True)
class Dialect:
    """How an API writes errors and streams.

    Attributes:
        error: the body of a response to a request that has failed.
        cut: what ends a stream that an error has cut, made of that body.
        media_type: of a stream.
        keep_alive: what is sent while no event comes. An empty event, which clients ignore, by default. Not a comment:
            vLLM's client strips trailing white space, which would join the comment and the first event in one line, and
            lose both.
        request_id: the header that has the request's id.
        root: what the API's addresses begin with. Whatever does is refused in the API's shape, also if there is no such
            address: a client that knows more of the API than this server reads no other.
    """

    error: Callable[[ApiError], Any]
    cut: Callable[[Any], bytes]
    media_type: str = "text/event-stream"
    keep_alive: bytes = b"\n"
    request_id: str = "x-request-id"
    root: str = "/"


class ClientGoneError(Exception):
    """The client has closed its connection."""


# JSON -----------------------------------------------------------------------------------------------------


def to_json(value: Any) -> bytes:
    """A value as JSON, in UTF-8."""
    try:
        return pydantic_core.to_json(value, inf_nan_mode="null")  # takes a fifth of json.dumps' time
    except ValueError:  # a lone surrogate, which UTF-8 cannot have but a JSON escape can
        return json.dumps(value, separators=(",", ":")).encode()


def event(value: Any, name: str = "") -> bytes:
    """Encode one event of a stream (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""
    head = f"event: {name}\n".encode() if name else b""
    return b"%bdata: %b\n\n" % (head, to_json(value))


OPENAI = Dialect(ApiError.body, lambda body: event(body) + DONE)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _parse_json(body: bytes) -> Any:
    try:
        return json.loads(body, parse_constant=_refuse_constant)  # NaN and Infinity
    except RecursionError:
        raise ApiError(400, "the body is JSON that is nested too deep") from None
    except ValueError as error:  # UnicodeDecodeError and numbers of thousands of digits too
        raise ApiError(400, f"the body is no JSON ({str(error)[:200]})") from None


# Requests -------------------------------------------------------------------------------------------------


async def read_body(request: Request, limits: HttpLimits, form: bool = False) -> bytes:
    """The body of a request.

    Args:
        form: whether it is a form (multipart/form-data) instead of JSON.

    Raises:
        ApiError: it is too large, comes too slowly, or is not declared as JSON.
        ClientGoneError: it ends in the middle.
    """
    try:
        _check_body_headers(request, limits, form)
    except ApiError:
        await discard_body(request.scope, request.receive, limits)
        raise
    parts: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(limits.body_seconds):
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                parts.append(message.get("body", b""))
                size, more = size + len(parts[-1]), message.get("more_body", False)
                if size > limits.body:
                    break
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {limits.body_seconds:g} s") from None
    if size > limits.body:
        if more:
            await discard_body(request.scope, request.receive, limits)
        raise _body_too_large(limits)
    return b"".join(parts)


_OF_CURL = "application/x-www-form-urlencoded"


def _check_body_headers(request: Request, limits: HttpLimits, form: bool) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if form:
        if kind != "multipart/form-data":
            raise ApiError(415, "the body must be a form, with the header Content-Type: multipart/form-data")
    # Browsers let the pages of other sites send other content types without a preflight request, with their origin.
    elif kind in ("", _OF_CURL) and not {"origin", "sec-fetch-site"}.intersection(request.headers):
        pass  # `curl -d` says this of everything, and some of Ollama's clients declare nothing
    elif kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, "the body must be JSON, with the header Content-Type: application/json")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", ""):
        raise ApiError(415, f"the body must come as it is, without Content-Encoding: {coding[:40]}")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > limits.body:
        raise _body_too_large(limits)


def _body_too_large(limits: HttpLimits) -> ApiError:
    return ApiError(413, f"the body is larger than {limits.body} bytes")


async def discard_body(scope: Scope, receive: Receive, limits: HttpLimits) -> None:
    """Read the rest of a refused request's body, within bounds, before its response.

    To close the connection while the client sends would reset it, and the client might lose the response.
    """
    if any(name == b"expect" for name, _ in scope["headers"]):
        return  # the client waits for the response before it sends
    size = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            while size <= 4 * limits.body and (message := await receive()).get("more_body"):
                size += len(message["body"])


async def read(request: Request, shape: type[B], limits: HttpLimits) -> B:
    """The body of a request, validated.

    Raises:
        ApiError: it is something else; the error names the field.
    """
    given = _parse_json(await read_body(request, limits))
    if not isinstance(given, dict):
        raise ApiError(400, "the body must be a JSON object")
    try:
        request.scope["anyaccel.body"] = body = shape.model_validate(given)
        return body
    except ValidationError as error:
        raise invalid(error, given) from None
    except RecursionError:
        raise ApiError(400, "the body is JSON that is nested too deep") from None


# Responses ------------------------------------------------------------------------------------------------


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response of JSON."""
    return Response(to_json(value), status, headers, "application/json")


def error_answer(error: BaseException, dialect: Dialect = OPENAI) -> Response:
    """The response to a request that has failed; unexpected errors go to the log."""
    answer = api_error(error)
    if answer.status >= 500 and not isinstance(error, AnyAccelError | ApiError):
        logger.error("a request has failed", exc_info=error)
    body, headers = to_json(dialect.error(answer)), answer.headers()
    if answer.status in (408, 413, 415):  # the rest of the body is not read
        headers["connection"] = "close"
    return Response(body, answer.status, headers, "application/json")


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes.

    Raises:
        ClientGoneError: the client has gone.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        await _cancel(task, gone)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream:
    """A response as a stream of events.

    The head is sent with the first event, so that an error before it gets an HTTP status. If no event comes soon, the
    head is sent without one, and blank lines keep proxies from closing the connection.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], limits: HttpLimits, dialect: Dialect = OPENAI) -> None:
        self._events = events
        self._limits = limits
        self._dialect = dialect
        self._started = False
        self._sent_at = 0.0
        self._writing = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._send_part = scope.get("anyaccel.parts", send)
        pump = asyncio.create_task(self._pump())
        gone = asyncio.create_task(_wait_for_disconnect(receive))
        stuck = asyncio.create_task(self._keep_alive())
        try:
            await asyncio.wait((pump, gone, stuck), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return  # closing the events, below, ends the request in the engine
            if stuck.done():
                await _cancel(pump)
                logger.info("a client took nothing of its answer for %g s", self._limits.send_seconds)
                scope.get("anyaccel.abort", gone.cancel)()
                await asyncio.wait((gone,))
                return
            await _cancel(stuck)
            await self._finish(pump, scope, receive)
        finally:
            await _cancel(pump, gone, stuck)
            with suppress(Exception):
                await self._events.aclose()

    async def _finish(self, pump: asyncio.Task[None], scope: Scope, receive: Receive) -> None:
        """End the stream after the last event, or with an error."""
        error = pump.exception()
        if error is None:
            await self._write(b"", last=True)
        elif not self._started:
            await error_answer(error, self._dialect)(scope, receive, self._send)
        else:
            if not isinstance(error, AnyAccelError | ApiError):
                logger.error("an answer has failed", exc_info=error)
            await self._write(self._dialect.cut(self._dialect.error(api_error(error))), last=True)

    async def _pump(self) -> None:
        async for data in self._events:
            await self._write(data)

    async def _keep_alive(self) -> None:
        """Send blank lines while no event comes; return when the client does not receive any more."""
        limits = self._limits
        wait = min(_HEAD_DELAY_S, limits.send_seconds)
        while True:
            await asyncio.sleep(wait)
            idle = time.monotonic() - self._sent_at
            if self._writing.locked():
                if idle >= limits.send_seconds:
                    return
                wait = limits.send_seconds - idle
                continue
            if idle >= limits.alive_seconds or not self._started:
                try:
                    async with asyncio.timeout(limits.send_seconds):
                        await self._write(self._dialect.keep_alive)
                except TimeoutError:
                    return
                idle = 0.0
            wait = min(limits.alive_seconds - idle, limits.send_seconds)

    async def _write(self, data: bytes, last: bool = False) -> None:
        async with self._writing:
            self._sent_at = time.monotonic()
            if not self._started:
                self._started = True
                headers = [
                    (b"content-type", f"{self._dialect.media_type}; charset=utf-8".encode()),
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),  # otherwise nginx buffers events
                ]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send_part({"type": "http.response.body", "body": data, "more_body": not last})
