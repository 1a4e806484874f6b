# SPDX-License-Identifier: Apache-2.0
"""Anthropic's messages: what a client and Claude Code send, and what they get."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from anyaccel.serve.interface import EngineFullError, ModelFacts
from anyaccel.serve.protocol.limits import HttpLimits
from serve_fakes import END, TEMPLATE, Answer, ByteTokenizer, Client, FakeEngine, post

CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": 1}}\n</tool_call>'
CLOCK = {"name": "clock", "description": "Tells it.", "input_schema": {"type": "object", "properties": {"zone": {}}}}
HI = {"max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
THINKS = TEMPLATE + "{# <think> #}"


def ask(engine: FakeEngine, more: dict[str, Any] | None = None, **client: Any) -> Answer:
    return post(engine, "/v1/messages", {**HI, **(more or {})}, **client)


def events_of(answer: Answer) -> list[Any]:
    """The events of a stream, whose names are their types."""
    lines = answer.body.decode().splitlines()
    names = [line[7:] for line in lines if line.startswith("event: ")]
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert names == [event["type"] for event in events]
    return events


def test_an_answer_has_anthropics_shape() -> None:
    engine = FakeEngine("Hello!")
    answer = ask(
        engine, {"model": "other", "system": [{"type": "text", "text": "Be kind."}], "metadata": {"user_id": "u"}}
    )
    assert answer.status == 200, answer.body
    result = answer.json
    assert result.pop("id").startswith("msg_")
    prompt = len(engine.requests[0].prompt)
    assert result == {
        "type": "message",
        "role": "assistant",
        "model": "other",
        "content": [{"type": "text", "text": "Hello!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 7,
        },
    }
    assert bytes(engine.requests[0].prompt).decode() == "<system>Be kind.\n<user>Hi\n<assistant>"


def test_why_an_answer_ends() -> None:
    for more, said, reason, sequence in (
        ({"max_tokens": 2}, "Hello", "max_tokens", None),
        ({"stop_sequences": ["", "ll"]}, "Hello", "stop_sequence", "ll"),
        ({"tools": [CLOCK]}, CALL, "tool_use", None),
    ):
        result = ask(FakeEngine(said), {**more, **({} if "max_tokens" in more else {"max_tokens": 100})}).json
        assert (result["stop_reason"], result["stop_sequence"]) == (reason, sequence)
    # As Claude Code asks: more tokens than the context leaves.
    engine = FakeEngine()
    assert ask(engine, {"max_tokens": 32_000}).status == 200
    assert engine.requests[0].max_tokens == 2048 - len(engine.requests[0].prompt)
    assert ask(FakeEngine(facts=ModelFacts(0, 259, frozenset((END,)), 4, "fp32"))).status == 200


def test_a_stream_of_thoughts_text_and_calls() -> None:
    said = f"<think>Hm.</think>I look.\n{CALL}"
    more = {"tools": [CLOCK], "max_tokens": 200, "thinking": {"type": "enabled", "budget_tokens": 31_999}}
    whole = ask(FakeEngine(said), more, tokenizer=ByteTokenizer(THINKS)).json
    events = events_of(ask(FakeEngine(said), {**more, "stream": True}, tokenizer=ByteTokenizer(THINKS)))
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["usage"]["input_tokens"] > 0
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]) | {"json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            assert event["index"] == len(blocks) - 1
            if delta["type"] == "input_json_delta":
                blocks[-1]["json"] += delta["partial_json"]
            elif delta["type"] != "signature_delta":
                kind = delta["type"].removesuffix("_delta")
                blocks[-1][kind] += delta[kind]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    thinking, text, call = blocks
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hm.")
    assert (text["type"], text["text"]) == ("text", "I look.")
    assert (call["type"], call["name"], call["input"], json.loads(call["json"])) == (
        "tool_use",
        "clock",
        {},
        {"zone": 1},
    )
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][2]["input"] == {"zone": 1} and whole["usage"] == events[-2]["usage"]


def test_a_conversation_of_an_agent() -> None:
    engine = FakeEngine()
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "When?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": "toolu_1", "name": "clock", "input": {"zone": 1}},
                {"type": "tool_use", "id": "toolu_2", "name": "clock", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "noon"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no"}],
                },
                {"type": "text", "text": "And?"},
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a page"}},
            ],
        },
        {"role": "user", "content": "Well?"},
    ]
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{{ m.reasoning_content or '' }}"
        "{% for c in m.tool_calls %}[{{ c.id }} {{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}"
    )
    value = {"messages": messages, "tools": [CLOCK]}
    assert ask(engine, value, tokenizer=ByteTokenizer(template + "{{ tools and '' }}")).status == 200
    assert bytes(engine.requests[0].prompt).decode() == (
        '<user>When?<assistant>Hm.[toolu_1 {"zone": 1}][toolu_2 {}]<tool>noon<tool>no<user>And?\na page\n\nWell?'
    )
    counted = post(engine, "/v1/messages/count_tokens", value, tokenizer=ByteTokenizer(template + "{{ tools and '' }}"))
    assert counted.json == {"input_tokens": len(engine.requests[0].prompt)}


def test_an_answer_may_be_begun() -> None:
    engine = FakeEngine(" late.")
    result = ask(engine, {"messages": [*HI["messages"], {"role": "assistant", "content": "It is"}]}).json
    assert bytes(engine.requests[0].prompt).decode().endswith("<assistant>It is")
    assert result["content"] == [{"type": "text", "text": " late."}]


def test_choices_and_formats_are_held() -> None:
    for choice, calls in (
        ({"type": "any"}, True),
        ({"type": "tool", "name": "clock"}, True),
        ({"type": "auto"}, False),
    ):
        engine = FakeEngine(CALL)
        result = ask(engine, {"max_tokens": 100, "tools": [CLOCK], "tool_choice": choice}).json
        assert result["content"][0]["input"] == {"zone": 1}
        assert (engine.requests[0].grammar is not None) == calls
    none = ask(FakeEngine("Hm"), {"tools": [CLOCK], "tool_choice": {"type": "none"}})
    assert none.json["content"][0]["text"] == "Hm"
    engine = FakeEngine("{}")
    schema = {"type": "object", "properties": {}}
    assert ask(engine, {"output_config": {"format": {"type": "json_schema", "schema": schema}}}).status == 200
    assert engine.requests[0].grammar is not None and engine.requests[0].grammar.kind == "json_schema"


@pytest.mark.parametrize(
    ("thinking", "seen"),
    [(None, "-"), ({"type": "disabled"}, "False"), ({"type": "enabled", "budget_tokens": 1024}, "True")],
)
def test_thinking_is_told_to_the_template(thinking: Any, seen: str) -> None:
    engine = FakeEngine("</think>")
    tokenizer = ByteTokenizer("{{ enable_thinking | default('-') }}{# <think> #}")
    assert ask(engine, {} if thinking is None else {"thinking": thinking}, tokenizer=tokenizer).status == 200
    assert bytes(engine.requests[0].prompt).decode() == seen


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"messages": []}, "messages: list should have at least 1 item"),
        ({"max_tokens": 0}, "max_tokens: "),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "type 'image' is not supported",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "only tools with an input_schema"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "no"}}, "no function 'no'"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "prompt and answer together at most 2048"),
    ],
)
def test_errors_have_anthropics_shape(more: dict[str, Any], words: str) -> None:
    answer = ask(FakeEngine(), more)
    assert answer.status == 400 and answer.json["type"] == "error", answer.body
    assert answer.json["error"]["type"] == "invalid_request_error" and words in answer.json["error"]["message"]


def test_other_errors_have_anthropics_kinds() -> None:
    answer = ask(FakeEngine(), {"model": "claude"})
    assert (answer.status, answer.json["error"]["type"]) == (404, "not_found_error")
    engine = FakeEngine()
    engine.error = (0, EngineFullError("full", 1.0))
    for stream in (False, True):
        answer = ask(engine, {"stream": stream})
        assert (answer.status, answer.json["error"]["type"]) == (429, "rate_limit_error")
    engine = FakeEngine("Hello!")
    engine.error = (3, EngineFullError("full", 1.0))
    events = events_of(ask(engine, {"stream": True}))
    assert events[0]["type"] == "message_start"
    assert events[-1]["error"] == {"type": "rate_limit_error", "message": "full"}


def test_keys_and_models_as_anthropics_clients_send_and_read_them() -> None:
    async def run() -> None:
        client = Client(FakeEngine(), options={"keys": ["k"]})
        refused = await client.post("/v1/messages", HI)
        assert (refused.status, refused.json["error"]["type"]) == (401, "authentication_error")
        headers = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
        assert (await client.post("/v1/messages", HI, headers=headers)).status == 200
        listed = (await client.get("/v1/models", headers=headers)).json
        assert [model["id"] for model in listed["data"]] == ["fake", "other"] and listed["has_more"] is False
        assert (await client.get("/v1/models/fake", headers=headers)).json["type"] == "model"

    asyncio.run(run())


def test_pings_keep_a_stream_alive_before_its_first_token() -> None:
    async def run() -> None:
        engine = FakeEngine("Hi")
        engine.gate = asyncio.Semaphore(0)
        client = Client(engine, limits=HttpLimits(send_seconds=0.2))
        answer = Answer()
        asking = asyncio.create_task(client.post("/v1/messages", {**HI, "stream": True}, answer=answer))
        async with asyncio.timeout(10):
            while not answer.parts:
                await asyncio.sleep(0.05)
        for _ in range(3):
            engine.gate.release()
        await asking
        kinds = [event["type"] for event in events_of(answer)]
        assert kinds[0] == "ping" and kinds[-1] == "message_stop" and "message_start" in kinds

    asyncio.run(run())
