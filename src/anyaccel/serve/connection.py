# SPDX-License-Identifier: Apache-2.0
"""One connection: uvicorn's HTTP/1.1 with bounds, where uvicorn itself takes all, waits for ever, or says no JSON."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from anyaccel.serve.api_errors import ApiError
from anyaccel.serve.json_text import to_json
from anyaccel.serve.limits import Limits

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_TOO_LARGE = "the head of the request is larger than {} bytes"
_LOOK_S = 0.25  # between two looks whether a client that sends no more still listens
_LINGER_S = 2.0  # a client whose request is refused may go on to send, or would not see why
# Of who offers HTTP/2 in this header (Java's client, curl --http2), the parser would leave out the body of the request.
# Nothing else that comes has these bytes: in JSON, no line begins so.
_UPGRADE = re.compile(rb"(?i)\nupgrade(?=[ \t]*:)")
_CLOSED = 7  # TCP_CLOSE (linux/tcp.h): what the other side's reset makes of a connection


class _RefusedError(Exception):
    """Ends the parser, which has no other way to be told."""


def bounded(limits: Limits, most: int) -> type[asyncio.Protocol]:
    """The protocol of a server.

    Args:
        most: connections at once; one more is told so, and closed.
    """

    class Bounded(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None  # while a head is waited for
        _received = 0  # bytes since it is, or since all was said
        _head = 0  # bytes of the head, as far as it is parsed
        _hosts = 0
        _refusal: ApiError | None = None
        _ended = False  # everything that was to be said is said
        _active: RequestResponseCycle | None = None  # `cycle` is the newest, which may wait for it
        _half = False  # the client sends no more
        _looking: asyncio.TimerHandle | None = None

        def _wait(self) -> None:
            self._has_come()
            self._received = 0
            self._timer = self.loop.call_later(limits.header_seconds, self._give_up)

        def _has_come(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _give_up(self) -> None:
            if not self.transport.is_closing():
                self.transport.abort()

        # The parser's events

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope["anyaccel.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
            self.scope["anyaccel.half"] = asyncio.Event()  # type: ignore[typeddict-unknown-key]
            self._head = self._hosts = 0
            self._wait()

        def _count(self, size: int) -> None:
            self._head += size
            if self._head > limits.head:
                self._refuse(431, _TOO_LARGE.format(limits.head))

        def on_url(self, url: bytes) -> None:
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(len(name) + len(value) + 4)
            self._hosts += name.lower() == b"host"
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._has_come()
            # https://www.rfc-editor.org/rfc/rfc9112#section-3.2
            if self._hosts > 1 or (self._hosts == 0 and self.parser.get_http_version() == "1.1"):
                self._refuse(400, f"the request has {self._hosts} Host headers: HTTP/1.1 needs one")
            super().on_headers_complete()

        def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
            self._active = cycle
            cycle.transport = _Answering(self.transport, self._end)  # type: ignore[assignment]
            super()._start_asgi_task(cycle, app)

        def _refuse(self, status: int, message: str) -> None:
            self._refusal = ApiError(status, message)
            raise _RefusedError

        # The connection's

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                said = ApiError(503, "too many connections", None, "overloaded", "server_error", retry_after_s=2)
                self._say(said)
                return
            self._wait()

        def data_received(self, data: bytes) -> None:
            if self._refusal is not None or self._ended:
                self._received += len(data)
                if self._received > 4 * limits.body:
                    self._give_up()
                return
            timer = self._timer
            super().data_received(_UPGRADE.sub(b"\nx-upgrade", data))
            if timer is None or timer is not self._timer or self._refusal is not None:
                return
            self._received += len(data)
            if self._received > limits.head:
                self._refusal = ApiError(431, _TOO_LARGE.format(limits.head))
                self.send_400_response("")

        def send_400_response(self, msg: str) -> None:
            """Answer what is no request; after an answer that is under way, the connection is only closed."""
            refusal = self._refusal = self._refusal or ApiError(400, "what was sent is no request of HTTP")
            self._has_come()
            cycle = self.cycle
            if cycle is not None and not cycle.response_complete:
                if not cycle.more_body:
                    cycle.keep_alive = False
                    return
                cycle.disconnected = True  # its body is broken
                cycle.message_event.set()
                if cycle.response_started or cycle is not self._active:
                    self.transport.abort()
                    return
            self._say(refusal)

        def _say(self, error: ApiError) -> None:
            """Answer what has not become a request."""
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
            """Close the connection after what was written.

            One that is closed while the client sends is reset, which may take the answer away from the client.
            """
            cycle = self.cycle
            if self._half or not (unread or (cycle is not None and cycle.more_body)):
                self.transport.close()
                return
            if self._ended or self.transport.is_closing():
                return
            self._ended = True
            self._received = 0
            self.pipeline.clear()  # what came after a request that was to be the last
            self.flow.resume_reading()
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._has_come()
            self._timer = self.loop.call_later(_LINGER_S, self._give_up)

        def eof_received(self) -> bool:  # type: ignore[override]
            """Whether the connection stays open, for the answer to one who has asked all.

            One who closes all the same looks no different, until something is sent: so an interim answer is, which
            every client of HTTP/1.1 passes over, and which the system of one who is gone answers with a reset.
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
            if not self._half:
                self._half = True
                cycle.keep_alive = False
                if self._active.response_started:
                    self._active.scope["anyaccel.half"].set()  # type: ignore[typeddict-item]
                else:
                    self.transport.write(_CONTINUE)
                self._looking = self.loop.call_later(_LOOK_S, self._look)
            return True

        def _look(self) -> None:
            known = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
            if known[0] == _CLOSED:
                self._give_up()
            else:
                self._looking = self.loop.call_later(_LOOK_S, self._look)

        def connection_lost(self, exc: Exception | None) -> None:
            self._has_come()
            if self._looking is not None:
                self._looking.cancel()
            if self._active is not None and not self._active.response_complete:  # uvicorn tells the newest alone
                self._active.disconnected = True
                self._active.message_event.set()
            super().connection_lost(exc)

    return Bounded


class _Answering:
    """A connection as uvicorn's answer to one request knows it."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close
