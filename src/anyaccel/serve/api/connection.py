# SPDX-License-Identifier: Apache-2.0
"""uvicorn's HTTP/1.1 connection with the bounds on size and time that it lacks, and with errors as JSON."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from anyaccel.serve.protocol.errors import ApiError
from anyaccel.serve.protocol.json_text import to_json
from anyaccel.serve.protocol.limits import Limits

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_TOO_LARGE = "the head of the request is larger than {} bytes"
_POLL_S = 0.25  # between two checks whether a client that has closed its sending side still listens
_LINGER_S = 2.0  # a refused client may send on for this long; closing at once could lose it the response
_TCP_CLOSE = 7  # linux/tcp.h: the state of a connection that the other side has reset


class _Parser(HttpRequestParser):
    """httptools' parser, which ignores an offer of another protocol, as a server may.

    After the head of a request with `Upgrade: h2c` (Java's client, curl --http2) httptools stops, and takes the body
    for that protocol's. So the same head, without the offer, is parsed before the rest.
    https://www.rfc-editor.org/rfc/rfc9110#section-7.8
    """

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        super().__init__(protocol)
        self._protocol = protocol
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def feed_data(self, data: Any) -> None:
        parser: HttpRequestParser = self
        while True:
            try:
                HttpRequestParser.feed_data(parser, data)
                return
            except HttpParserUpgrade as error:
                if parser.get_method() == b"CONNECT":
                    raise
                data = _head_of(self._protocol, parser) + data[error.args[0] :]
                # A new one: after the head of a last request (`Connection: close`, HTTP/1.0) httptools takes no other.
                parser = self._protocol.parser = _Parser(self._protocol)


def _head_of(protocol: HttpToolsProtocol, parser: HttpRequestParser) -> bytes:
    """The head that was parsed last, without the offer."""
    first = parser.get_method() + b" " + protocol.url + b" HTTP/" + parser.get_http_version().encode()
    kept = [name + b": " + value for name, value in protocol.headers if name != b"upgrade"]
    return b"\r\n".join([first, *kept, b"", b""])


class _RefusedError(Exception):
    """Raised in a callback of the parser, as nothing else stops it."""


def bounded(limits: Limits, most: int) -> type[asyncio.Protocol]:
    """The asyncio protocol for a server's connections.

    Args:
        most: connections at once; a further one gets an error, and is closed.
    """

    class Bounded(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None  # runs while the head of a request is incomplete
        _received = 0  # bytes since that timer started, or since the last response was written
        _head = 0  # bytes of the head that are parsed
        _hosts = 0  # Host headers of the request
        _refusal: ApiError | None = None
        _offers = False  # the head offers another protocol
        _ended = False  # the last response is written; what still comes is discarded
        _active: RequestResponseCycle | None = None  # what the application answers now; `cycle` is the newest
        _half_closed = False  # the client has closed its sending side
        _polling: asyncio.TimerHandle | None = None

        def _start_timer(self) -> None:
            self._cancel_timer()
            self._received = 0
            self._timer = self.loop.call_later(limits.header_seconds, self._abort)

        def _cancel_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _abort(self) -> None:
            if not self.transport.is_closing():
                self.transport.abort()

        # The parser's events

        def on_message_begin(self) -> None:
            self._offers = False
            super().on_message_begin()
            self.scope["anyaccel.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
            self.scope["anyaccel.half"] = asyncio.Event()  # type: ignore[typeddict-unknown-key]
            self._head = self._hosts = 0
            self._start_timer()

        def _count_head(self, size: int) -> None:
            self._head += size
            if self._head > limits.head:
                self._refuse(431, _TOO_LARGE.format(limits.head))

        def on_url(self, url: bytes) -> None:
            self._count_head(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count_head(len(name) + len(value) + 4)
            self._hosts += name.lower() == b"host"
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
                self._offers = True  # the head comes again without the offer: see `_Parser`
                return
            self._cancel_timer()
            # https://www.rfc-editor.org/rfc/rfc9112#section-3.2
            if self._hosts > 1 or (self._hosts == 0 and self.parser.get_http_version() == "1.1"):
                self._refuse(400, f"the request has {self._hosts} Host headers: HTTP/1.1 needs one")
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            if not self._offers:
                super().on_message_complete()

        def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
            self._active = cycle
            cycle.transport = _ResponseTransport(self.transport, self._end)  # type: ignore[assignment]
            super()._start_asgi_task(cycle, app)

        def _refuse(self, status: int, message: str) -> None:
            self._refusal = ApiError(status, message)
            raise _RefusedError

        # The connection's

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.parser = _Parser(self)
            if len(self.connections) > most:
                said = ApiError(503, "too many connections", None, "overloaded", "server_error", retry_after_s=2)
                self._write_error(said)
                return
            self._start_timer()

        def data_received(self, data: bytes) -> None:
            if self._refusal is not None or self._ended:
                self._received += len(data)
                if self._received > 4 * limits.body:
                    self._abort()
                return
            timer = self._timer
            super().data_received(data)
            if timer is None or timer is not self._timer or self._refusal is not None:
                return
            self._received += len(data)
            if self._received > limits.head:
                self._refusal = ApiError(431, _TOO_LARGE.format(limits.head))
                self.send_400_response("")

        def send_400_response(self, msg: str) -> None:
            """Answer invalid HTTP with an error; if a response is being sent, only close the connection after it."""
            refusal = self._refusal = self._refusal or ApiError(400, "what was sent is no request of HTTP")
            self._cancel_timer()
            cycle = self.cycle
            if cycle is not None and not cycle.response_complete:
                if not cycle.more_body:
                    cycle.keep_alive = False
                    return
                cycle.disconnected = True  # the body will never be complete
                cycle.message_event.set()
                if cycle.response_started or cycle is not self._active:
                    self.transport.abort()
                    return
            self._write_error(refusal)

        def _write_error(self, error: ApiError) -> None:
            """Write an error response for bytes that did not become a request."""
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
            self._end(True)

        def _end(self, unread: bool = False) -> None:
            """Close the connection after the response.

            While the client still sends, first close only our sending side: closing both would reset the connection,
            and the client might lose the response.
            """
            cycle = self.cycle
            if self._half_closed or not (unread or (cycle is not None and cycle.more_body)):
                self.transport.close()
                return
            if self._ended or self.transport.is_closing():
                return
            self._ended = True
            self._received = 0
            self.pipeline.clear()  # requests after the last one that is answered
            self.flow.resume_reading()
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._cancel_timer()
            self._timer = self.loop.call_later(_LINGER_S, self._abort)

        def eof_received(self) -> bool:  # type: ignore[override]
            """Keep the connection open (return True) for a client that has closed only its sending side.

            A client that has closed both sides looks the same until something is sent to it. So an interim response is
            sent: every HTTP/1.1 client ignores it, and the host of a client that is gone answers with a reset.
            """
            cycle = self.cycle
            if (
                self.scheme == "https"
                or not hasattr(socket, "TCP_INFO")
                or cycle is None
                or self._active is None
                or (self._active.response_complete and not self.pipeline)
                or cycle.more_body
                or cycle.scope["http_version"] != "1.1"
                or self._timer is not None
            ):
                return False
            if not self._half_closed:
                self._half_closed = True
                cycle.keep_alive = False
                if self._active.response_started:
                    self._active.scope["anyaccel.half"].set()  # type: ignore[typeddict-item]
                else:
                    self.transport.write(_CONTINUE)
                self._polling = self.loop.call_later(_POLL_S, self._poll)
            return True

        def _poll(self) -> None:
            known = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
            if known[0] == _TCP_CLOSE:
                self._abort()
            else:
                self._polling = self.loop.call_later(_POLL_S, self._poll)

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel_timer()
            if self._polling is not None:
                self._polling.cancel()
            if self._active is not None and not self._active.response_complete:  # uvicorn notifies the newest only
                self._active.disconnected = True
                self._active.message_event.set()
            super().connection_lost(exc)

    return Bounded


class _ResponseTransport:
    """The transport that uvicorn's response writes to, with our way of closing it."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close
