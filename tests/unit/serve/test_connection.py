# SPDX-License-Identifier: Apache-2.0
"""What arrives at a connection is what was sent, wherever it is cut into segments."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from anyaccel.serve.protocol.limits import HttpLimits

pytest.importorskip("httptools")
pytest.importorskip("uvicorn")

pytestmark = pytest.mark.anyio

OFFER = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
BODY = b'{"x":"a\nUpgrade: now\r\nupgrade : b"}'


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closing = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = close

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    said = json.dumps(
        [scope["method"], scope["path"], sorted(name.decode() for name, _ in scope["headers"]), body.decode()]
    )
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(said))]})
    await send({"type": "http.response.body", "body": said.encode()})


async def answers(segments: list[bytes]) -> bytes:
    """All that a connection answers to these segments."""
    from uvicorn import Config
    from uvicorn.server import ServerState

    from anyaccel.serve.api.connection import bounded

    config = Config(_echo, ws="none", log_config=None, access_log=False, date_header=False, server_header=False)
    config.load()
    made: Any = bounded(HttpLimits(), 10)
    protocol = made(config=config, server_state=ServerState(), app_state={}, _loop=asyncio.get_running_loop())
    transport = Transport()
    protocol.connection_made(transport)
    for segment in segments:
        protocol.data_received(segment)
        await asyncio.sleep(0)
    while protocol.tasks:
        await asyncio.gather(*protocol.tasks)
        await asyncio.sleep(0)
    protocol.connection_lost(None)
    return transport.written


def request(headers: str = "", chunks: list[bytes] | None = None, path: str = "/v1/chat/completions") -> bytes:
    size = "Transfer-Encoding: chunked" if chunks else f"Content-Length: {len(BODY)}"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}{size}\r\n\r\n".encode()
    return head + (b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in chunks) + b"0\r\n\r\n" if chunks else BODY)


@pytest.mark.parametrize("offer", ["", OFFER])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_arrives_as_it_was_sent_whatever_the_cuts(offer: str, chunked: bool) -> None:
    at = BODY.index(b"Upgrade:")
    sent = request(offer, [BODY[:at], BODY[at:]] if chunked else None) + request(path="/second")

    for cut in range(1, len(sent)):
        result = await answers([sent[:cut], sent[cut:]])
        found = [json.loads(b"[" + part.partition(b"\r\n\r\n[")[2]) for part in result.split(b"HTTP/1.1 200 OK")[1:]]
        assert [each[1] for each in found] == ["/v1/chat/completions", "/second"], (cut, result)
        assert all(each[3] == BODY.decode() for each in found), (cut, result)
    for size in (1, 2, 7):
        result = await answers([sent[place : place + size] for place in range(0, len(sent), size)])
        assert result.count(b"HTTP/1.1 200 OK") == 2


async def test_a_last_request_may_offer_another_protocol() -> None:
    offer = "Upgrade: h2c\r\n"

    last = [
        request(f"{offer}Connection: close, Upgrade\r\n"),
        request(f"{offer}Connection: Upgrade\r\nConnection: close\r\n", [BODY[:5], BODY[5:]]),
        request(f"{offer}Connection: Upgrade\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"),
    ]
    for each in last:
        result = await answers([request(OFFER) + each, b"what is not read"])
        assert result.count(b"HTTP/1.1 200 OK") == 2 and result.count(json.dumps(BODY.decode()).encode()) == 2, result


async def test_an_offer_alone_is_not_seen_and_what_is_no_offer_is() -> None:
    result = (await answers([request(OFFER)])).decode()
    assert '"upgrade"' not in result and '"http2-settings"' in result
    assert '"upgrade"' in (await answers([request("Upgrade: h2c\r\n")])).decode()  # no offer without Connection
    result = (
        await answers([b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"])
    ).decode()
    assert result.startswith("HTTP/1.1 200")


def test_a_tunnel_is_not_parsed() -> None:
    result = asyncio.run(answers([b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n" + request()]))
    assert result.count(b"HTTP/1.1") <= 1
