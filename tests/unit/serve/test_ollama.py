# SPDX-License-Identifier: Apache-2.0
"""Ollama's API: lines of JSON, and what its clients ask of a server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from anyaccel.serve.interface import EngineFullError
from anyaccel.serve.protocol.limits import HttpLimits
from serve_fakes import TEMPLATE, Answer, ByteTokenizer, Client, FakeEngine, post, until

CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": 1}}\n</tool_call>'
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {}}}},
}
THINKS = TEMPLATE + "{# <think> #}"


def ask(engine: FakeEngine, more: dict[str, Any] | None = None, **client: Any) -> Answer:
    value = {"model": "fake:latest", "messages": [{"role": "user", "content": "Hi"}], **(more or {})}
    return post(engine, "/api/chat", value, **client)


def lines(answer: Answer) -> list[Any]:
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(each) for each in answer.body.decode().splitlines()]


def test_a_conversation_streams_lines_unless_it_should_not() -> None:
    engine = FakeEngine("Hello!")
    found = lines(ask(engine))
    assert "".join(each["message"]["content"] for each in found) == "Hello!"
    assert [each["done"] for each in found] == [False] * 6 + [True]
    last = found[-1]
    assert (last["done_reason"], last["eval_count"]) == ("stop", 7)
    assert last["prompt_eval_count"] == len(engine.requests[0].prompt) and last["total_duration"] > 0
    whole = ask(engine, {"stream": False}).json
    assert whole["message"] == {"role": "assistant", "content": "Hello!"} and whole["done"] is True
    assert whole.keys() == last.keys() and whole["model"] == "fake:latest"


def test_options_have_ollamas_names() -> None:
    engine = FakeEngine("Hello!")
    options = {
        "num_predict": 4, "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "seed": 3, "repeat_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.4, "num_ctx": 4096, "stop": ["zz"],
    }  # fmt: skip
    assert lines(ask(engine, {"options": options, "keep_alive": "5m"}))[-1]["done_reason"] == "length"
    (request,) = engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed) == (
        0.5,
        40,
        0.9,
        0.1,
        3,
    )
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.2, 0.3, 0.4)
    assert request.max_tokens == 4
    for predicted in (-1, -2, 0, 99_999):
        assert ask(engine, {"options": {"num_predict": predicted}}).status == 200
        assert engine.requests[-1].max_tokens == 2048 - len(request.prompt)


def test_thoughts_and_calls() -> None:
    said = f"<think>Hm.</think>I look.\n{CALL}"
    tokenizer = ByteTokenizer(THINKS)
    found = lines(ask(FakeEngine(said), {"tools": [CLOCK], "think": True}, tokenizer=tokenizer))
    assert "".join(each["message"].get("thinking", "") for each in found) == "Hm."
    assert "".join(each["message"]["content"] for each in found) == "I look."
    (call,) = [call for each in found for call in each["message"].get("tool_calls", ())]
    assert call["function"] == {"index": 0, "name": "clock", "arguments": {"zone": 1}}
    whole = ask(FakeEngine(said), {"tools": [CLOCK], "stream": False}, tokenizer=tokenizer).json["message"]
    assert whole["thinking"] == "Hm." and whole["tool_calls"][0]["function"] == call["function"]


@pytest.mark.parametrize(("think", "seen"), [(None, "-"), (False, "False"), (True, "True"), ("high", "True")])
def test_thinking_is_told_to_the_template(think: Any, seen: str) -> None:
    engine = FakeEngine()
    assert ask(engine, {"think": think}, tokenizer=ByteTokenizer("{{ enable_thinking | default('-') }}")).status == 200
    assert bytes(engine.requests[0].prompt).decode() == seen


def test_a_conversation_of_an_agent() -> None:
    engine = FakeEngine()
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "When?"},
        {
            "role": "assistant",
            "content": "",
            "thinking": "Hm.",
            "tool_calls": [{"function": {"name": "clock", "arguments": {"zone": 1}}}],
        },
        {"role": "tool", "tool_name": "clock", "content": "noon"},
    ]
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{{ m.reasoning_content or '' }}{{ m.name or '' }}"
        "{% for c in m.tool_calls %}[{{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}{{ tools and '' }}"
    )
    assert ask(engine, {"messages": messages, "tools": [CLOCK]}, tokenizer=ByteTokenizer(template)).status == 200
    seen = '<system>Be kind.<user>When?<assistant>Hm.[{"zone": 1}]<tool>noonclock'
    assert bytes(engine.requests[0].prompt).decode() == seen


def test_a_text_is_answered_with_and_without_the_template() -> None:
    engine = FakeEngine("Hello!")
    value = {"model": "fake", "prompt": "Hi", "system": "Be kind."}
    found = lines(post(engine, "/api/generate", value))
    assert "".join(each["response"] for each in found) == "Hello!" and found[-1]["done_reason"] == "stop"
    assert bytes(engine.requests[0].prompt).decode() == "<system>Be kind.\n<user>Hi\n<assistant>"
    whole = post(engine, "/api/generate", {**value, "raw": True, "stream": False}).json
    assert (whole["response"], whole["done"], bytes(engine.requests[1].prompt)) == ("Hello!", True, b"Hi")


def test_formats_are_held() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    for given, kind in (("json", "json_object"), (schema, "json_schema"), ("", None)):
        for path, more in (
            ("/api/chat", {"messages": [{"role": "user", "content": "x"}]}),
            ("/api/generate", {"prompt": "x"}),
        ):
            engine = FakeEngine("{}")
            assert post(engine, path, {"model": "fake", "format": given, **more}).status == 200
            grammar = engine.requests[0].grammar
            assert (grammar.kind if grammar else None) == kind


def test_nothing_to_answer_is_how_clients_load_a_model() -> None:
    for path, empty in (("/api/generate", {}), ("/api/chat", {"messages": []})):
        engine = FakeEngine()
        (last,) = lines(post(engine, path, {"model": "fake", "keep_alive": -1, **empty}))
        assert (last["done"], last["done_reason"]) == (True, "load") and not engine.requests


def test_embeddings() -> None:
    engine = FakeEngine()
    found = post(engine, "/api/embed", {"model": "fake", "input": ["ab", "x" * 3000]}).json
    assert [vector[3] for vector in found["embeddings"]] == [2.0, 2048.0] and found["prompt_eval_count"] == 2050
    assert post(engine, "/api/embed", {"model": "fake", "input": "abc"}).json["embeddings"][0][3] == 3.0
    assert post(engine, "/api/embed", {"model": "fake", "input": []}).json["embeddings"] == []
    assert post(engine, "/api/embeddings", {"model": "fake", "prompt": "abcd"}).json["embedding"][3] == 4.0
    for more, words in (({"truncate": False}, "3000 tokens"), ({"dimensions": 2}, "have 4 values")):
        answer = post(engine, "/api/embed", {"model": "fake", "input": "x" * 3000, **more})
        assert answer.status == 400 and words in answer.json["error"]


def test_what_clients_ask_about_the_model() -> None:
    async def run() -> None:
        client = Client(FakeEngine(), ByteTokenizer(THINKS), root="fake.gguf")
        listed = (await client.get("/api/tags")).json["models"]
        assert [(each["name"], each["model"]) for each in listed] == [("fake", "fake"), ("other", "other")]
        assert len({each["digest"] for each in listed}) == 2 and listed[0]["details"]["format"] == "gguf"
        running = (await client.get("/api/ps")).json["models"]
        assert running[0]["context_length"] == 2048
        shown = (await client.post("/api/show", {"model": "fake:latest"})).json
        assert {"completion", "tools", "thinking"} <= set(shown["capabilities"])
        assert shown["model_info"][f"{shown['model_info']['general.architecture']}.context_length"] == 2048
        assert (await client.get("/api/version")).json["version"].count(".") == 2
        assert (await client.post("/api/show", {})).status == 400
        assert (await client.post("/api/show", {"name": "no"})).json["error"].startswith("model: no model 'no'")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "more", "words"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["x"]}]}, "images: are not supported"),
        ("/api/generate", {"prompt": "x", "context": [1, 2]}, "context: is not supported"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix: this model has no tokens"),
        ("/api/generate", {"prompt": "x", "template": "y"}, "template: is not supported"),
        ("/api/generate", {"prompt": "x" * 3000}, "together at most 2048"),
        ("/api/chat", {"options": {"temperature": 9}}, "options.temperature: "),
    ],
)
def test_errors_have_ollamas_shape(path: str, more: dict[str, Any], words: str) -> None:
    answer = post(FakeEngine(), path, {"model": "fake", **more})
    assert answer.status == 400 and words in answer.json["error"], answer.body


def test_an_error_in_a_stream_is_its_last_line() -> None:
    engine = FakeEngine("Hello!")
    engine.error = (3, EngineFullError("full", 1.0))
    assert lines(ask(engine))[-1] == {"error": "full"}


def test_white_space_keeps_a_stream_alive_within_a_line() -> None:
    async def run() -> None:
        engine = FakeEngine("Hi")
        engine.gate = asyncio.Semaphore(0)
        client = Client(engine, limits=HttpLimits(send_seconds=0.2))
        answer = Answer()
        value = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
        asking = asyncio.create_task(client.post("/api/chat", value, answer=answer))
        await until(lambda: engine.requests)
        async with asyncio.timeout(10):
            while not answer.parts:
                await asyncio.sleep(0.05)
        assert set(answer.parts) == {b" "}
        for _ in range(3):
            engine.gate.release()
        await asking
        assert "".join(each["message"]["content"] for each in lines(answer)) == "Hi"

    asyncio.run(run())
