# SPDX-License-Identifier: Apache-2.0
"""uvicorn's HTTP/1.1 connection with what docs/serving.md promises of connections, and with errors as JSON.

uvicorn knows no limit on the head of a request, neither in bytes nor in time, and it closes the connection when the
client closes its sending side.
"""

from __future__ import annotations

import asyncio
import select
from http import HTTPStatus
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from anyaccel.serve.api.sending import to_json
from anyaccel.serve.protocol.errors import ApiError
from anyaccel.serve.protocol.limits import HttpLimits

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_EMPTY_EVENT = b"1\r\n\n\r\n"  # a line break, in chunked encoding
_POLL_S = 0.25  # between two checks whether a client that has closed its sending side still listens
_LINGER_S = 2.0  # a refused client may send on for this long; closing at once could lose it the response


class BoundedProtocol(HttpToolsProtocol):
    """One connection; `bounded` sets the class attributes."""

    limits = HttpLimits()
    max_connections = 1000
    _timer: asyncio.TimerHandle | None = None  # runs while the head of a request is incomplete
    _received = 0  # bytes of that head, or after a refusal
    _problem: ApiError | None = None  # of the head that was parsed last
    _refused = False  # what still comes is discarded
    _half_closed = False  # the client has closed its sending side
    _polling: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._new_parser()
        if len(self.connections) > self.max_connections:
            error = ApiError(503, "too many connections", None, "overloaded", "server_error", retry_after_s=2)
            self._write_error(error)
        else:
            self._start_timer(self.limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        if self._polling is not None:
            self._polling.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._received += len(data)
            if self._received > 4 * self.limits.body:
                self._abort()
            return
        self._unset_keepalive_if_required()
        timer = self._timer
        try:
            self._parse(data)
        except HttpParserError:
            self.send_400_response("")
            return
        if timer is not None and timer is self._timer:  # the head was incomplete before, and still is
            self._received += len(data)
            if self._received > self.limits.head:
                self._write_error(self._head_too_large())

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with an error; if a response is being sent, only close the connection after it."""
        self._cancel_timer()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:
                self._refused = True
                cycle.keep_alive = False
                return
            cycle.disconnected = True  # the body will never be complete
            cycle.message_event.set()
            if cycle.response_started or self.pipeline:
                self._abort()
                return
        self._write_error(self._problem or ApiError(400, "what was sent is no request of HTTP"))

    def _write_error(self, error: ApiError) -> None:
        """Write an error response for bytes that did not become a request, and close the connection.

        First only our sending side is closed: to close both while the client sends would reset the connection, and the
        client might lose the response.
        """
        body = to_json(error.body())
        headers = {
            **error.headers(),
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        head = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
        head += [f"{name}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._refused = True
        self._start_timer(_LINGER_S)

    def _start_timer(self, seconds: float) -> None:
        self._cancel_timer()
        self._received = 0
        self._timer = self.loop.call_later(seconds, self._abort)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _abort(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()

    # Parsing

    def _new_parser(self) -> None:
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def _parse(self, data: bytes) -> None:
        """Parse, ignoring offers of another protocol, as a server may.

        After the head of a request with `Upgrade: h2c` (Java's client, curl --http2) httptools stops, and takes the
        body for that protocol's. So the same head, without the offer, is parsed before the rest. The parser is a new
        one: after the head of a last request (`Connection: close`, HTTP/1.0) httptools takes no other.
        https://www.rfc-editor.org/rfc/rfc9110#section-7.8
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except HttpParserUpgrade as offer:
                method = self.parser.get_method()
                if method == b"CONNECT":
                    raise HttpParserError("a tunnel") from None
                first = method + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()
                headers = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
                data = b"\r\n".join([first, *headers, b"", b""]) + data[offer.args[0] :]
                self._new_parser()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["anyaccel.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        self._start_timer(self.limits.header_seconds)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._cancel_timer()
        self._problem = self._check_head()
        if self._problem is not None:
            raise HttpParserError(self._problem.message)
        super().on_headers_complete()

    def _check_head(self) -> ApiError | None:
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > self.limits.head:
            return self._head_too_large()
        hosts = sum(name == b"host" for name, _ in self.headers)
        # https://www.rfc-editor.org/rfc/rfc9112#section-3.2
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            return ApiError(400, f"the request has {hosts} Host headers: HTTP/1.1 needs one")
        return None

    def _head_too_large(self) -> ApiError:
        return ApiError(431, f"the head of the request is larger than {self.limits.head} bytes")

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    # A client that sends no more

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open (return True) for a client that has closed only its sending side.

        A client that has closed both sides looks the same until something is sent to it. So an interim response or an
        empty event is sent, which clients ignore, and the host of a client that is gone answers with a reset.
        """
        cycle = self.cycle
        if (
            self.scheme == "https"
            or self._timer is not None
            or cycle is None
            or cycle.response_complete
            or cycle.more_body
            or cycle.scope["http_version"] != "1.1"
        ):
            return False
        if not self._half_closed:
            self._half_closed = True
            cycle.keep_alive = False
            if cycle.chunked_encoding:
                self.transport.write(_EMPTY_EVENT)
            elif not cycle.response_started and not self.pipeline:
                self.transport.write(_CONTINUE)
            self._polling = self.loop.call_later(_POLL_S, self._poll)
        return True

    def _poll(self) -> None:
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), 0)
        if poll.poll(0):  # hung up: both sides are closed
            self._abort()
        else:
            self._polling = self.loop.call_later(_POLL_S, self._poll)


def bounded(limits: HttpLimits, max_connections: int) -> type[BoundedProtocol]:
    """The protocol for a server's connections.

    Args:
        max_connections: a further one gets an error, and is closed.
    """
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": limits, "max_connections": max_connections})
