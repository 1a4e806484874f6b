# SPDX-License-Identifier: Apache-2.0
"""Traces of requests: their attributes, and what a collector of OpenTelemetry gets."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from anyaccel.serve.api.traces import attributes_of
from serve_fakes import Client, FakeEngine
from serve_process import serving, wait_closed

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}


class Recorded:
    """In place of `Traces`: the attributes of each request."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []

    def record(self, scope: Any, path: str, status: int, seconds: float) -> None:
        self.spans.append(attributes_of(scope, path, status))


@pytest.mark.anyio
async def test_a_request_has_the_attributes_of_generative_models() -> None:
    traces = Recorded()
    client = Client(FakeEngine("Hello"), options={"traces": traces})
    asked = {**HI, "model": "other", "temperature": 0.5, "n": 2, "stop": ["x"], "max_tokens": 50, "seed": 7}
    assert (await client.post(CHAT, asked, headers={"x-request-id": "one"})).status == 200
    await client.post("/api/generate", {"prompt": "Hi", "options": {"temperature": 1, "num_predict": 2}})
    await client.post("/v1/embeddings", {"input": "abc"})
    await client.post(CHAT, {"messages": 1})
    await client.get("/health")
    chat, generate, embeddings, wrong = traces.spans
    assert chat.pop("gen_ai.response.time_to_first_chunk") >= 0
    assert chat == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "url.path": CHAT,
        "http.response.status_code": 200,
        "client.address": "127.0.0.1",
        "server.address": "127.0.0.1",
        "server.port": 8000,
        "anyaccel.request.id": "one",
        "gen_ai.provider.name": "anyaccel",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "other",
        "gen_ai.response.model": "fake",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stop_sequences": ["x"],
        "gen_ai.usage.input_tokens": len(b"<user>Hi\n<assistant>"),
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.usage.reasoning.output_tokens": 0,
        "gen_ai.response.finish_reasons": ["stop", "stop"],
    }
    assert generate["gen_ai.operation.name"] == "text_completion" and generate["gen_ai.request.temperature"] == 1
    assert embeddings["gen_ai.operation.name"] == "embeddings" and embeddings["gen_ai.usage.input_tokens"] == 3
    assert wrong["error.type"] == "400" and "gen_ai.usage.input_tokens" not in wrong
    assert "Hello" not in str(traces.spans)


@contextmanager
def collector(answers: threading.Event | None = None) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A receiver of OTLP over HTTP: its address, and the bodies that it gets; it answers at once, or with the event."""
    got: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append((self.path, body))
            if answers is not None:
                answers.wait(60)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", got
        finally:
            server.shutdown()
            thread.join(60)


def test_a_collector_gets_the_spans() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with collector() as (url, got):
        with serving("--otlp-endpoint", url) as server:
            for body, stream in ((HI, False), (HI, True), ({}, False)):
                request = urllib.request.Request(
                    server.url + CHAT,
                    json.dumps({**body, "stream": stream}).encode(),
                    {"content-type": "application/json", "traceparent": parent},
                )
                try:
                    urllib.request.urlopen(request, timeout=60).read()
                except urllib.error.HTTPError as error:
                    assert not body and error.code == 400
            server.process.terminate()
            server.end()
        assert {path for path, _ in got} == {"/v1/traces"}
        spans = []
        for _, data in got:
            for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                names = {each.key: each.value.string_value for each in resource.resource.attributes}
                assert names["service.name"] == "anyaccel"
                spans += [span for scope in resource.scope_spans for span in scope.spans]
    spans.sort(key=lambda span: span.start_time_unix_nano)
    assert [span.name for span in spans] == ["chat fake", "chat fake", f"POST {CHAT}"]
    for span in spans:
        assert span.trace_id.hex() == parent.split("-")[1] and span.parent_span_id.hex() == parent.split("-")[2]
        assert span.kind == span.SPAN_KIND_SERVER and 0 < span.start_time_unix_nano < span.end_time_unix_nano
    values = {each.key: each.value for each in spans[1].attributes}
    assert values["gen_ai.request.stream"].bool_value and values["gen_ai.usage.output_tokens"].int_value == 13
    assert [each.string_value for each in values["gen_ai.response.finish_reasons"].array_value.values] == ["stop"]


def test_a_collector_that_does_not_answer_holds_nothing_back() -> None:
    pytest.importorskip("opentelemetry.sdk")
    answers = threading.Event()
    with collector(answers) as (url, _), serving("--otlp-endpoint", url) as server:
        request = urllib.request.Request(
            server.url + CHAT, json.dumps(HI).encode(), {"content-type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=60).read()
        server.process.terminate()
        wait_closed(server, 50)
        answers.set()
