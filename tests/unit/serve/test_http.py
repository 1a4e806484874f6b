# SPDX-License-Identifier: Apache-2.0
"""What is the same for all addresses: errors and their status, limits, keys, pages of other sites, metrics."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import shutil
import struct
import subprocess
from typing import Any

import pytest

from anyaccel.errors import ModelError, UsageError
from anyaccel.serve.api import sending
from anyaccel.serve.api.chat import ChatRequest, prepare
from anyaccel.serve.interface import DeadlineError, EngineFullError, EngineStoppedError, TooLongError
from anyaccel.serve.protocol.limits import HttpLimits
from anyaccel.serve.requests.defaults import SamplingDefaults
from serve_fakes import Answer, ByteTokenizer, Client, FakeEngine, chat, post, until

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}


def got(path: str, engine: FakeEngine | None = None, method: str = "GET", headers: Any = None, **more: Any) -> Answer:
    return asyncio.run(Client(engine or FakeEngine(), **more).send(method, path, headers=headers))


def test_what_a_server_says_of_itself() -> None:
    result = got("/v1/models").json
    assert [model["id"] for model in result["data"]] == ["fake", "other"]
    usual = result["data"][1]["default_sampling_params"]
    assert usual == {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    own = got("/v1/models/fake", defaults=SamplingDefaults(0.6, 0.95, 20)).json["default_sampling_params"]
    assert own == usual | {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert got("/v1/models/other").json["id"] == "other"
    assert got("/v1/models/a/b").status == 404
    assert got("/health").status == got("/ready").status == 200
    assert "version" in got("/version").json
    engine = FakeEngine()
    engine.live = False
    answer = got("/ready", engine)
    assert (answer.status, answer.headers["retry-after"]) == (503, "2")
    assert got("/health", engine).status == 200


def test_a_path_is_a_name_that_is_taken_and_not_told() -> None:
    path = "/home/me/models/fake"
    assert path.encode() not in got("/v1/models", aliases=[path]).body
    assert chat(FakeEngine(), {"model": path}, aliases=[path]).status == 200
    answer = chat(FakeEngine(), {"model": "gpt-4"}, aliases=[path])
    assert answer.status == 404 and path.encode() not in answer.body
    engine = FakeEngine()
    engine.error = (0, EngineStoppedError(f"the engine has failed: {path}/model.safetensors: gone"))
    answer = chat(engine)
    assert answer.status == 503 and path.encode() not in answer.body


def test_unknown_addresses_methods_and_models_have_openais_shape() -> None:
    for answer, status in (
        (got("/v1/nothing"), 404),
        (got(CHAT), 405),
        (chat(FakeEngine(), {"model": "gpt-4"}), 404),
    ):
        assert answer.status == status
        assert answer.json["error"].keys() == {"message", "type", "param", "code"}
    assert answer.json["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("options", [{}, {"keys": ["secret"]}])
def test_what_an_api_does_not_have_is_refused_in_its_shape(options: dict[str, Any]) -> None:
    for path, status in (("/api/pull", 404), ("/api/chat", 405)):
        answer = got(path, options=options)
        assert answer.status == (401 if options else status)
        assert answer.json.keys() == {"error"} and isinstance(answer.json["error"], str)
    for path, status in (("/v1/messages/batches", 404), ("/v1/messages", 405)):
        answer = got(path, options=options)
        assert answer.status == (401 if options else status) and answer.headers["request-id"]
        assert answer.json["type"] == "error" and answer.json["error"].keys() == {"type", "message"}


@pytest.mark.parametrize(
    ("error", "status", "code", "header"),
    [
        (EngineFullError("full", 2.2), 429, "rate_limit_exceeded", "3"),
        (EngineStoppedError("dead"), 503, "engine_stopped", "2"),
        (DeadlineError("late"), 504, "timeout", None),
        (TooLongError("long"), 400, "context_length_exceeded", None),
        (UsageError("max_tokens=3: odd"), 400, None, None),
        (ModelError("the logits are NaN"), 500, None, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_engine_have_a_status(
    error: Exception, status: int, code: str | None, header: str | None, stream: bool
) -> None:
    engine = FakeEngine()
    engine.error = (0, error)
    answer = chat(engine, {"stream": stream})
    assert (answer.status, answer.headers.get("retry-after")) == (status, header)
    assert answer.json["error"]["code"] == code and answer.json["error"]["message"] == str(error)
    if isinstance(error, UsageError):
        assert answer.json["error"]["param"] == "max_tokens"


def test_an_error_in_a_stream_is_its_last_event() -> None:
    engine = FakeEngine()
    engine.error = (2, EngineStoppedError("dead"))
    answer = chat(engine, {"stream": True})
    assert answer.status == 200 and answer.events[-1]["error"]["code"] == "engine_stopped"


def test_what_nobody_expected_tells_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    engine.error = (0, ZeroDivisionError("secret"))
    with caplog.at_level(logging.ERROR):
        answer = chat(engine)
    assert answer.status == 500 and b"secret" not in answer.body
    assert "secret" in caplog.text


def test_a_length_is_told_once() -> None:
    result = chat(FakeEngine(), {"guided_choice": ["x"] * 513}).json["error"]["message"]
    assert result == "guided_choice: list should have at most 512 items, not 513"


def test_nothing_is_fetched_for_a_request() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]
    answer = chat(FakeEngine(), {"messages": [{"role": "user", "content": parts}]})
    assert (answer.status, answer.json["error"]["param"]) == (400, "messages[0].content[0]")
    assert "image_url" in answer.json["error"]["message"]


NESTED = b"[" * 100_000


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"[]", {}, 400),
        (b"\xff\xfe", {}, 400),
        (b'{"messages": NaN}', {}, 400),
        (b'{"seed": 1' + b"0" * 5000 + b"}", {}, 400),
        (NESTED, {}, 400),
        (b'{"a": ' + NESTED, {}, 400),
        (b"x" * 2000, {"content-length": "2000"}, 413),
        ([b"x" * 600, b"x" * 600], {}, 413),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"{", {"content-type": "application/x-www-form-urlencoded"}, 400),
        (b"{", {"content-type": "application/x-www-form-urlencoded", "origin": "http://127.0.0.1:8000"}, 415),
        (b"{", {"content-type": "application/x-www-form-urlencoded", "sec-fetch-site": "cross-site"}, 415),
        (b"{}", {"content-type": "", "origin": "http://127.0.0.1:8000"}, 415),
        (b"{}", {"content-type": ""}, 400),  # taken as JSON: no page sends it
        (b"{}", {"content-encoding": "gzip"}, 415),
        (json.dumps({**HI, "stop": "\ud800"}).encode(), {}, 400),
        (json.dumps({"messages": [{"role": "user", "content": "\ud800"}]}).encode(), {}, 400),
        (json.dumps({**HI, "model": "\ud800"}).encode(), {}, 404),
    ],
)
async def test_bodies_that_are_not_what_they_should_be(body: Any, headers: dict[str, str], status: int) -> None:
    limit = 1000 if status == 413 else 1_000_000

    class Strict(ByteTokenizer):
        def encode(self, text: str, special: bool = True) -> list[int]:
            from anyaccel.inference.text.tokenizer import _check_text

            _check_text(text)
            return super().encode(text, special)

    client = Client(FakeEngine(), Strict(), limits=HttpLimits(body=limit))
    answer = await client.send("POST", CHAT, body=body, headers=headers)
    assert answer.status == status, answer.body
    assert answer.json


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    client = Client(FakeEngine(), limits=HttpLimits(body_seconds=0.01))

    async def receive() -> Any:
        await asyncio.Event().wait()

    answer = Answer()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): text.decode() for name, text in message["headers"]}

    headers = [(b"content-type", b"application/json"), (b"content-length", b"5")]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": CHAT,
        "headers": headers,
        "query_string": b"",
        "root_path": "",
    }
    await client.app({**scope, "client": None, "server": None, "scheme": "http"}, receive, send)
    assert (answer.status, answer.headers["connection"]) == (408, "close")


@pytest.mark.parametrize("begun", [False, True])
async def test_a_reader_that_takes_nothing_ends_its_stream(begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that never took anything, and one that took the head of the answer, and then no sign of life."""
    monkeypatch.setattr(sending, "_HEAD_DELAY_S", 0.0)

    engine = FakeEngine("a long answer")
    engine.gate = asyncio.Semaphore(0 if begun else 99)
    left = asyncio.Event()
    sent: list[str] = []

    async def receive() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if not begun or len(sent) > 1:
            await asyncio.Event().wait()

    limits = HttpLimits(send_seconds=0.01)
    prepared = await prepare(Client(engine).frontend, ChatRequest.model_validate(HI), "")
    stream = sending.EventStream(prepared.stream(), limits)
    await stream({"anyaccel.abort": left.set}, receive, send)
    assert left.is_set()
    assert engine.ended == ["closed"]
    assert sent == ["http.response.start", "http.response.body"][: 1 + begun]


async def test_a_stream_shows_signs_of_life_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_HEAD_DELAY_S", 0.0)

    engine = FakeEngine("a")
    engine.gate = asyncio.Semaphore(0)
    client, answer = Client(engine), Answer()
    asking = asyncio.create_task(client.post(CHAT, {**HI, "stream": True}, answer=answer))
    for _ in range(100):  # a sleep of 0 s of the loop's clock
        if answer.parts:
            break
        await asyncio.sleep(0.001)
    for _ in range(9):
        engine.gate.release()
    await asking
    assert answer.parts[0] == b"\n" and answer.complete
    # As vLLM's benchmark client reads: the ends of what comes are stripped, and what is left is put together.
    read, left = [], ""
    for part in answer.parts:
        left += part.decode().strip()
        if left.startswith("data: "):
            read.append(left)
            left = ""
    assert len(read) == len(answer.events) + 1 and not left
    assert answer.events[-1]["choices"][0]["finish_reason"] == "stop"


# Who may ask ------------------------------------------------------------------------------------------------


def keyed(headers: dict[str, str] | None = None, path: str = "/v1/models") -> Answer:
    return got(path, headers=headers, options={"keys": ["one", "zwö"]})


def test_keys_open_what_computes() -> None:
    assert keyed().status == 401 and keyed().headers["www-authenticate"] == "Bearer"
    assert keyed({"authorization": "Bearer three"}).json["error"]["code"] == "invalid_api_key"
    assert keyed({"authorization": "Basic one"}).status == 401
    for headers in ({"authorization": "Bearer one"}, {"authorization": "bearer  one"}, {"x-api-key": "one"}):
        assert keyed(headers).status == 200
    for path in ("/health", "/ready", "/metrics", "/version", "/", "/openapi.json", "/docs"):
        assert keyed(path=path).status == 200
    posts = ("/tokenize", CHAT, "/v1/embeddings", "/v1/responses", "/v1/completions", "/v1/messages", "/api/chat")
    for path in (*posts, "/detokenize", "/v1/messages/count_tokens", "/api/generate", "/api/embed", "/api/show"):
        assert got(path, method="POST", options={"keys": ["one"]}).status == 401
    for path in ("/v1/models", "/v1/responses/x", "/api/tags", "/api/ps"):
        assert got(path, options={"keys": ["one"]}).status == 401


async def test_a_key_is_neither_logged_nor_handed_on(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    client = Client(engine, options={"keys": ["sesame"]})
    with caplog.at_level(logging.DEBUG):
        assert (await client.post(CHAT, HI, headers={"authorization": "Bearer sesame"})).status == 200
    assert "sesame" not in caplog.text and engine.requests[0].key not in ("", "sesame")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_log_says_how_long_an_answer_took_and_its_tokens(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    client = Client(FakeEngine("abc"))
    with caplog.at_level(logging.INFO, "anyaccel.serve.access"):
        for path, value in ((CHAT, HI), ("/v1/completions", {"prompt": "Hi"}), ("/v1/responses", {"input": "Hi"})):
            await client.post(path, {**value, "stream": stream})
        await client.post("/v1/embeddings", {"input": ["Hi", "you"]})
        await client.post(CHAT, {})
        await client.get("/no/such\n%0a")
        gone = asyncio.Event()
        client.engine.gate = asyncio.Semaphore(0)
        sending = asyncio.create_task(client.send("POST", CHAT, HI, leave=gone))
        while len(client.engine.requests) < 4:
            await asyncio.sleep(0)
        gone.set()
        await sending
    fields = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert [(each["status"], each.get("prompt_tokens"), each.get("completion_tokens")) for each in fields] == [
        (200, len("<user>Hi\n<assistant>"), 4),
        (200, len("Hi"), 4),
        (200, len("<user>Hi\n<assistant>"), 4),
        (200, len("Hi") + len("you"), 0),
        (400, None, None),
        (404, None, None),
        (499, len("<user>Hi\n<assistant>"), 0),
    ]
    first, *_, odd, _ = caplog.messages
    assert re.fullmatch(rf'127.0.0.1:50000 - "POST {CHAT} HTTP/1.1" 200, \d\.\d{{3}} s, 20 \+ 4 tokens', first)
    assert "\n" not in odd and "such%0A%250a" in odd


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        (None, "127.0.0.1:8000", True),
        ("http://127.0.0.1:8000", "127.0.0.1:8000", True),
        ("http://localhost:8000", "localhost:8000", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("https://evil.example", "127.0.0.1:8000", False),
        ("http://evil.example:8000", "evil.example:8000", False),  # whose name leads here
        ("null", "127.0.0.1:8000", False),
        ("http://[", "127.0.0.1:8000", False),
        ("https://chat.example", "127.0.0.1:8000", True),  # allowed
        ("http://llm.example", "127.0.0.1:8000", True),  # the server's own name, behind nginx without settings
        ("https://LLM.example:8443", "llm.example:8443", True),
        ("https://not-llm.example", "not-llm.example", False),
    ],
)
def test_pages_of_other_sites_may_not_ask(origin: str | None, host: str, allowed: bool) -> None:
    headers = {"host": host, **({"origin": origin} if origin else {})}
    options = {"origins": ["https://chat.example"], "hosts": ["llm.example"]}
    answer = got("/v1/models", headers=headers, options=options)
    assert answer.status == (200 if allowed else 403)
    if not allowed:
        assert "--allowed-hosts" in answer.json["error"]["message"]


def test_cors_is_off_unless_asked_for() -> None:
    ask = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in got(CHAT, method="OPTIONS", headers=ask).headers
    answer = got(CHAT, method="OPTIONS", headers=ask, options={"origins": ["https://chat.example"]})
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"


# What Chromium asks for before a request of OpenAI's client 6 for JavaScript (dangerouslyAllowBrowser).
OPENAI_JS = (
    "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
    "x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout"
)


@pytest.mark.parametrize("wanted", [OPENAI_JS, OPENAI_JS + ",openai-organization,openai-beta", "x-my-own"])
def test_an_allowed_page_may_send_the_headers_of_its_client(wanted: str) -> None:
    ask = {"access-control-request-method": "POST", "access-control-request-headers": wanted}
    options = {"origins": ["https://chat.example"]}
    answer = got(CHAT, method="OPTIONS", headers={"origin": "https://chat.example", **ask}, options=options)
    assert answer.status == 200
    assert set(answer.headers["access-control-allow-headers"].lower().replace(" ", "").split(",")) >= {
        *wanted.split(",")
    }
    answer = got(CHAT, method="OPTIONS", headers={"origin": "https://evil.example", **ask}, options=options)
    assert answer.status == 400 and "access-control-allow-origin" not in answer.headers
    answer = got("/v1/models", headers={"origin": "https://chat.example"}, options=options)
    assert "retry-after" in answer.headers["access-control-expose-headers"].split(", ")


def test_answers_tell_browsers_to_be_careful() -> None:
    headers = got("/").headers
    assert headers["x-content-type-options"] == "nosniff" and "default-src 'self'" in headers["content-security-policy"]


def test_the_page_can_be_left_out() -> None:
    assert got("/").headers["content-type"].startswith("text/html")
    assert got("/", options={"page": False}).status == 404
    assert got("/page/../../http.py").status == 404


# Small requests ---------------------------------------------------------------------------------------------


def test_embeddings_as_lists_and_as_bytes() -> None:
    engine = FakeEngine()
    result = post(engine, "/v1/embeddings", {"input": ["ab", "abc"], "model": "fake"}).json
    assert [each["embedding"][3] for each in result["data"]] == [2.0, 3.0] and result["usage"]["prompt_tokens"] == 5
    result = post(engine, "/v1/embeddings", {"input": [97, 98], "encoding_format": "base64", "pooling": "last"}).json
    values = struct.unpack("<4f", base64.b64decode(result["data"][0]["embedding"]))
    assert values == (0.5, -0.5, 0.5, 2.0)
    assert [pooling for _, pooling in engine.embedded] == ["mean", "last"]
    for value, param in (
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [300]}, "input"),
        ({"input": ["a", "a" * 3000]}, "input[1]"),
        ({"input": "a", "dimensions": 3}, "dimensions"),
    ):
        answer = post(engine, "/v1/embeddings", value)
        assert (answer.status, answer.json["error"]["param"]) == (400, param), answer.body


def test_texts_to_tokens_and_back() -> None:
    engine = FakeEngine()
    result = post(engine, "/tokenize", {"prompt": "é!", "return_token_strs": True}).json
    assert result["tokens"] == [0xC3, 0xA9, 0x21] and result["count"] == 3 and result["max_model_len"] == 2048
    assert result["token_strs"][2] == "!"
    result = post(engine, "/tokenize", HI).json
    assert bytes(result["tokens"]) == b"<user>Hi\n<assistant>"
    assert post(engine, "/tokenize", {}).status == post(engine, "/tokenize", {**HI, "prompt": "x"}).status == 400
    assert post(engine, "/detokenize", {"tokens": [0xC3, 0xA9, 256]}).json == {"prompt": "é<|end|>"}
    assert post(engine, "/detokenize", {"tokens": [1000]}).status == 400
    result = got("/tokenizer_info").json
    assert result["eos_token"] == "<|end|>" and "messages" in result["chat_template"]


async def test_metrics_are_prometheus_text_with_vllms_names() -> None:
    client = Client(FakeEngine("abc"))
    await client.post(CHAT, HI)
    await client.post(CHAT, {"messages": 1})
    await client.get("/no/such/path")
    lines = (await client.get("/metrics")).body.decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    label = '{model_name="fake"}'
    assert values[f"anyaccel_num_requests_running{label}"] == "2"
    assert values[f"anyaccel_kv_cache_usage_perc{label}"] == "0.25"
    assert values[f"anyaccel_generation_tokens_total{label}"] == "7"
    assert values[f"anyaccel_time_to_first_token_seconds_count{label}"] == "1"
    assert values[f"anyaccel_request_queue_time_seconds_count{label}"] == "1"
    assert values[f"anyaccel_inter_token_latency_seconds_count{label}"] == "3"
    assert values['anyaccel_request_generation_tokens_bucket{model_name="fake",le="+Inf"}'] == "1"
    assert values['anyaccel_request_success_total{model_name="fake",finished_reason="stop"}'] == "1"
    assert values[f'anyaccel_http_requests_total{{method="POST",path="{CHAT}",status="400"}}'] == "1"
    assert values['anyaccel_http_requests_total{method="GET",path="other",status="404"}'] == "1"
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: apt-get install prometheus")
async def test_promtool_finds_nothing_wrong_with_the_metrics() -> None:
    client = Client(FakeEngine("abc"))
    await client.post(CHAT, HI)
    await client.get("/no/such/path")
    text = (await client.get("/metrics")).body
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_openapi_document_is_complete() -> None:
    result = got("/openapi.json").json
    text = json.dumps(result)
    for reference in {part.split('"')[0] for part in text.split('"$ref": "#/')[1:]}:
        value: Any = result
        for name in reference.split("/"):
            value = value[name]
    assert result["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for path, methods in result["paths"].items():
        for described in methods.values():
            assert [each["name"] for each in described.get("parameters", ())] == re.findall(r"\{(\w+)\}", path)
            assert path.count("{") == path.count("}") == len(described.get("parameters", ()))
    assert set(result["paths"]["/v1/responses/{response}"]) == {"get", "delete"}
    assert "application/x-ndjson" in result["paths"]["/api/chat"]["post"]["responses"]["200"]["content"]


def test_a_request_ends_by_its_deadline_or_the_servers() -> None:
    engine = FakeEngine()
    chat(engine, timeout_s=5.0)
    chat(engine, {"timeout_s": 2}, timeout_s=5.0)
    assert [request.timeout_s for request in engine.requests] == [5.0, 2.0]


async def test_requests_wait_for_nobody_else() -> None:
    engine = FakeEngine("ab")
    engine.gate = asyncio.Semaphore(0)
    client, first = Client(engine), Answer()
    asking = asyncio.create_task(client.post(CHAT, {**HI, "stream": True}, answer=first))
    await until(lambda: engine.requests)
    assert (await client.get("/health")).status == 200 and not first.complete
    for _ in range(9):
        engine.gate.release()
    await asking
    assert first.complete


async def test_each_request_has_an_id(caplog: pytest.LogCaptureFixture) -> None:
    client = Client(FakeEngine())
    with caplog.at_level(logging.INFO, "anyaccel.serve.access"):
        for given, kept in (({}, False), ({"x-request-id": "a-1.b:2"}, True), ({"x-request-id": "a b"}, False)):
            answer = await client.post(CHAT, HI, headers=given)
            found = answer.headers["x-request-id"]
            assert (found == given.get("x-request-id")) == kept and len(found) > 4
            assert caplog.records[-1].fields["request_id"] == found  # type: ignore[attr-defined]
    assert (await client.get("/no/such")).headers["x-request-id"].startswith("req_")
    answer = await client.post("/v1/messages", HI | {"max_tokens": 3}, headers={"x-request-id": "mine"})
    assert answer.headers["request-id"] == "mine"  # Anthropic's name
