# SPDX-License-Identifier: Apache-2.0
"""The server as a process, over real sockets: streams, clients that go or dawdle, signals, TLS, a proxy's path."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from serve_process import Server, serving

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with serving() as server:
        yield server


def body(text: str, **more: Any) -> str:
    return json.dumps({"messages": [{"role": "user", "content": text}], **more})


@contextlib.contextmanager
def connection(server: Server, context: ssl.SSLContext | None = None) -> Iterator[http.client.HTTPConnection]:
    found = urlsplit(server.url)
    assert found.hostname and found.port
    made = (
        http.client.HTTPConnection(found.hostname, found.port, timeout=60)
        if context is None
        else http.client.HTTPSConnection(found.hostname, found.port, timeout=60, context=context)
    )
    with contextlib.closing(made):
        yield made


@contextlib.contextmanager
def asked(server: Server, text: str, **more: Any) -> Iterator[http.client.HTTPResponse]:
    with connection(server) as made:
        made.request("POST", CHAT, body(text, **more), {"content-type": "application/json"})
        with made.getresponse() as answer:
            yield answer


def raw(server: Server) -> socket.socket:
    found = urlsplit(server.url)
    assert found.hostname and found.port
    return socket.create_connection((found.hostname, found.port), timeout=60)


def test_answers_come_over_a_connection_that_stays_open(shared: Server) -> None:
    with connection(shared) as made:
        for text in ("one", "two"):
            made.request("POST", CHAT, body(text), {"content-type": "application/json"})
            answer = made.getresponse()
            assert answer.status == 200 and answer.getheader("server") is None
            assert json.loads(answer.read())["choices"][0]["message"]["content"] == f"You said: {text}"
            assert [shared.line(), shared.line()] == ["begin", "end"]


def test_a_client_that_goes_ends_its_request(shared: Server) -> None:
    with asked(shared, "forever", stream=True) as answer:
        assert answer.status == 200 and b"assistant" in answer.readline()
        assert shared.line() == "begin"
    assert shared.line() == "end"  # it would not come by itself
    with raw(shared) as client:  # the same before anything was answered
        text = body("forever").encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        )
        client.sendall(head.encode() + text)
        assert shared.line() == "begin"
    assert shared.line() == "end"


def posted(text: str, more: str = "") -> bytes:
    value = body(text).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{more}Content-Type: application/json\r\n"
    return f"{head}Content-Length: {len(value)}\r\n\r\n".encode() + value


def read_all(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(65_536), b""))


def test_a_client_that_sends_no_more_is_answered(shared: Server) -> None:
    with raw(shared) as client:
        client.sendall(posted("one") + posted("two"))
        client.shutdown(socket.SHUT_WR)
        result = read_all(client).decode()
    assert result.count("HTTP/1.1 200 OK") == 2
    assert result.index("You said: one") < result.index("You said: two")
    assert [shared.line() for _ in range(4)] == ["begin", "end"] * 2
    with raw(shared) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        assert read_all(client).endswith(b'{"status":"ok"}')


def test_a_client_that_sends_no_more_and_goes_ends_its_request(shared: Server) -> None:
    with raw(shared) as client:
        client.sendall(posted("forever"))
        client.shutdown(socket.SHUT_WR)
        assert shared.line() == "begin"
    assert shared.line() == "end"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /health HTTP/1.0\r\n\r\n", 200),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: x\r\n" * 20_000 + b"\r\n", 431),
        (b"GET /health?" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (posted("x", "Transfer-Encoding: chunked\r\n"), 400),
        (posted("x", "Content-Length: 3\r\n"), 400),
    ],
)
def test_what_is_no_request_is_refused(shared: Server, sent: bytes, status: int) -> None:
    with raw(shared) as client:
        client.sendall(sent)
        head, _, result = read_all(client).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()) and b"connection: close" in head
    assert json.loads(result)["status" if status == 200 else "error"]


def test_what_comes_after_a_last_request_is_left(shared: Server) -> None:
    with raw(shared) as client:
        client.sendall(posted("one", "Connection: close\r\n") + posted("two")[:-1])
        result = read_all(client)
    assert b"You said: one" in result and result.count(b"HTTP/1.1") == 1
    assert [shared.line(), shared.line()] == ["begin", "end"]


def test_an_offer_of_http_2_is_passed_over(shared: Server) -> None:
    """As Java's client makes it, and `curl --http2`."""
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    with raw(shared) as client:
        client.sendall(posted("one", offer) + posted("two", "Connection: close\r\n"))
        result = read_all(client)
    assert b"You said: one" in result and b"You said: two" in result
    assert [shared.line() for _ in range(4)] == ["begin", "end"] * 2


def test_one_connection_too_many_is_told_so() -> None:
    with serving("--connections", "1") as server, connection(server) as first:
        for _ in range(2):
            first.request("GET", "/health")
            with first.getresponse() as answer:
                assert answer.status == 200 and answer.read()
            with raw(server) as second:
                result = read_all(second)
            assert (
                result.startswith(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 2\r\n") and b"overloaded" in result
            )


def test_a_refusal_reaches_a_client_that_still_sends(shared: Server) -> None:
    for kind, status in (("application/json", 413), ("text/plain", 415)):
        with connection(shared) as made:
            made.request("POST", CHAT, b"x" * (9 << 20), {"content-type": kind})
            with made.getresponse() as answer:
                assert answer.status == status and json.loads(answer.read())["error"]


def test_a_client_that_dawdles_or_has_too_much_to_say_is_sent_away() -> None:
    with serving("--header-seconds", "0.1") as server:
        for part in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\n"):
            with raw(server) as client:
                client.sendall(part)
                assert client.recv(100) == b""
        with raw(server) as client, pytest.raises(OSError):
            client.sendall(b"GET /health HTTP/1.1\r\nX: ")
            while True:
                client.sendall(b"x" * 100_000)


def test_a_signal_lets_open_requests_end_and_logs_have_no_key() -> None:
    """Below a proxy, which takes the path away that it adds."""
    headers = {"authorization": "Bearer sesame", "content-type": "application/json"}
    with serving("--key", "sesame", "--root-path", "/llm") as server, connection(server) as made:
        assert server.url.endswith("/llm")
        for path in ("/v1/models", "/", "/page/app.js", "/openapi.json"):
            made.request("GET", path, headers=headers)
            answer = made.getresponse()
            assert answer.status == 200, path
            result = answer.read()
        assert json.loads(result)["servers"] == [{"url": "/llm"}]
        made.request("POST", CHAT, body("wait", stream=True), headers)
        with made.getresponse() as answer:
            assert answer.readline() and server.line() == "begin"
            server.process.send_signal(signal.SIGTERM)
            rest = answer.read().decode()
        text = "".join(
            choice["delta"].get("content", "")
            for line in rest.splitlines()
            if line.startswith("data: {")
            for choice in json.loads(line[6:])["choices"]
        )
        assert text == "You said: wait" and rest.endswith("data: [DONE]\n\n")
        assert [server.line(), server.line()] == ["end", "closed"]
        said = server.end()
    assert server.process.returncode == 0, said
    lines = [json.loads(line)["message"] for line in said.splitlines()]
    assert any("/v1/models" in line for line in lines) and any("stopping" in line for line in lines)
    assert "sesame" not in said


def test_what_was_sent_before_a_signal_is_answered() -> None:
    with serving() as server, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connection(server)) for _ in range(16)]
        clients[0].request("GET", "/health")
        clients[0].getresponse().read()  # its connection stays open
        for client in clients:
            client.request("POST", CHAT, body("Hi"), {"content-type": "application/json"})
        server.process.send_signal(signal.SIGTERM)
        assert [client.getresponse().status for client in clients] == [200] * 16


def test_a_second_signal_does_not_wait() -> None:
    with serving() as server, asked(server, "forever", stream=True) as answer:
        assert answer.readline() and server.line() == "begin"
        server.process.send_signal(signal.SIGINT)
        assert server.process.stderr is not None
        while "stopping" not in server.process.stderr.readline():
            pass
        server.process.send_signal(signal.SIGINT)
        said = server.end()
    assert server.process.returncode == 0, said


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_does_not_end_does_not_keep_the_process(stream: bool) -> None:
    with serving("--stuck", "--drain-seconds", "0") as server, connection(server) as made:
        made.request("POST", CHAT, body("forever", stream=stream), {"content-type": "application/json"})
        assert server.line() == "begin"
        if stream:
            answer = made.getresponse()
            assert answer.readline()
        server.process.send_signal(signal.SIGTERM)
        if stream:
            with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                answer.read()
        else:
            with made.getresponse() as answer:
                assert answer.status == 503 and json.loads(answer.read())["error"]["code"] == "engine_stopped"
        said = server.end()
    assert server.process.returncode == 1 and "the engine does not end" in said and "Traceback" not in said


def test_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "server.sock")
    with serving("--uds", path) as server:
        sent = body("Hi").encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-Forwarded-For: 10.1.2.3\r\n"
        whole = f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent
        for closes in (False, True):  # whether the client says that it sends no more
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(60)
                client.connect(path)
                client.sendall(whole)
                if closes:
                    client.shutdown(socket.SHUT_WR)
                received = b""
                while b"You said: Hi" not in received and (part := client.recv(65536)):
                    received += part
                assert b"200 OK" in received and b"You said: Hi" in received
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            client.sendall(
                whole.replace(b"Hi", b"forever").replace(b"Length: %d" % len(sent), b"Length: %d" % (len(sent) + 5))
            )
            while server.line() != "begin":
                pass
        while server.line() != "end":  # a client that goes ends its request
            pass
        server.process.send_signal(signal.SIGTERM)
        said = server.end()
    assert server.process.returncode == 0 and not Path(path).exists()
    assert "10.1.2.3:0 - " in said  # the proxy's client


def test_https(tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    subprocess.run(
        [
            *made,
            "-subj",
            "/CN=127.0.0.1",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            key,
            "-out",
            certificate,
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    with serving("--ssl", key, certificate) as server:
        assert server.url.startswith("https://")
        with connection(server, ssl.create_default_context(cafile=certificate)) as client:
            client.request("GET", "/health")
            assert client.getresponse().status == 200
