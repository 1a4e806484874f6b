# SPDX-License-Identifier: Apache-2.0
"""OpenAI's newer conversations: items in, items out, and the events that name them."""

from __future__ import annotations

from typing import Any

import pytest

from anyaccel.serve.interface import EngineFullError, EngineStoppedError, Grammar
from anyaccel.serve.protocol.common import ChatMessage
from anyaccel.serve.requests.stored import AnswerStore, StoredAnswer
from serve_fakes import TEMPLATE, Answer, ByteTokenizer, Client, FakeEngine, post

pytestmark = pytest.mark.anyio

CLOCK = {"type": "function", "name": "clock", "parameters": {"type": "object"}}


def respond(engine: FakeEngine, client: dict[str, Any] | None = None, **value: Any) -> Answer:
    return post(engine, "/v1/responses", {"input": "Hi", **value}, **(client or {}))


def test_a_text_is_answered_by_a_message() -> None:
    engine = FakeEngine("Hello!")
    result = respond(engine, instructions="Be kind.").json
    (item,) = result["output"]
    assert (item["type"], item["status"], result["status"]) == ("message", "completed", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hello!", "annotations": []}]
    assert result["usage"]["output_tokens"] == 7 and result["usage"]["input_tokens_details"] == {"cached_tokens": 3}
    assert bytes(engine.requests[0].prompt) == b"<system>Be kind.\n<user>Hi\n<assistant>"


def test_an_answer_that_is_cut_says_so() -> None:
    result = respond(FakeEngine("Hello!"), max_output_tokens=2).json
    assert (result["status"], result["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_a_stream_names_its_events_in_order() -> None:
    tokenizer = ByteTokenizer(TEMPLATE + "{# <think> #}")
    answer = respond(FakeEngine("<think>Hm</think>Hi!"), {"tokenizer": tokenizer}, stream=True)
    events = answer.events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [line[7:] for line in answer.body.decode().splitlines() if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    once = [name for place, name in enumerate(names) if names[place - 1 : place] != [name]]
    ends = ["response.content_part.done", "response.output_item.done"]
    begins = ["response.output_item.added", "response.content_part.added"]
    assert once == [
        "response.created", "response.in_progress",
        *begins, "response.reasoning_text.delta", "response.reasoning_text.done", *ends,
        *begins, "response.output_text.delta", "response.output_text.done", *ends,
        "response.completed",
    ]  # fmt: skip
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == "Hi!"
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "message"]


def test_calls_and_their_results_are_items() -> None:
    engine = FakeEngine('<tool_call>{"name": "clock", "arguments": {"zone": 1}}</tool_call>')
    result = respond(engine, tools=[CLOCK]).json
    (item,) = result["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "clock", '{"zone": 1}')
    again = [
        {"role": "user", "content": [{"type": "input_text", "text": "What time is it?"}]},
        item,
        {"type": "function_call_output", "call_id": item["call_id"], "output": "noon"},
    ]
    assert respond(engine, input=again, tools=[CLOCK]).status == 200
    assert "<tool>noon" in bytes(engine.requests[-1].prompt).decode()
    events = respond(engine, tools=[CLOCK], stream=True).events
    assert [event["type"] for event in events if "function_call" in event["type"]] == [
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
    ]


def test_a_format_is_a_grammar() -> None:
    engine = FakeEngine("{}")
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    assert respond(engine, text={"format": form}).status == 200
    assert engine.requests[0].grammar == Grammar("json_schema", '{"type": "object"}')


def test_errors_before_and_in_the_answer() -> None:
    engine = FakeEngine()
    engine.error = (0, EngineFullError("full", 1))
    assert respond(engine, stream=True).status == 429
    engine.error = (2, EngineStoppedError("dead"))
    last = respond(engine, stream=True).events[-1]
    assert last["type"] == "response.failed" and last["response"]["error"]["message"] == "dead"


async def test_a_conversation_goes_on_with_an_answer_that_is_kept() -> None:
    engine = FakeEngine('<tool_call>{"name": "clock", "arguments": {}}</tool_call>')
    client = Client(engine)
    first = (await client.post("/v1/responses", {"input": "When?", "instructions": "Be kind.", "tools": [CLOCK]})).json
    engine.script = lambda _: "It is noon."
    item = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "noon"}
    more = {"input": [item], "previous_response_id": first["id"], "stream": True}
    second = (await client.post("/v1/responses", more)).events[-1]["response"]
    assert second["previous_response_id"] == first["id"] and second["store"] is True
    prompt = bytes(engine.requests[1].prompt).decode()
    assert prompt.startswith("<user>When?\n<assistant>") and "clock" in prompt and "<tool>noon\n" in prompt
    again = {"input": "And now?", "previous_response_id": second["id"], "instructions": "Be brief.", "store": False}
    third = (await client.post("/v1/responses", again)).json
    prompt = bytes(engine.requests[2].prompt).decode()
    assert prompt.startswith("<system>Be brief.\n<user>When?") and prompt.endswith(
        "<assistant>It is noon.\n<user>And now?\n<assistant>"
    )
    assert (await client.get(f"/v1/responses/{second['id']}")).json == second
    assert (await client.send("DELETE", f"/v1/responses/{second['id']}")).json["deleted"] is True
    for identity in (second["id"], third["id"], "no"):
        assert (await client.get(f"/v1/responses/{identity}")).status == 404
        answer = await client.post("/v1/responses", {"input": "x", "previous_response_id": identity})
        assert (answer.status, answer.json["error"]["param"]) == (400, "previous_response_id")


async def test_an_answer_is_kept_for_whom_it_is() -> None:
    client = Client(FakeEngine(), options={"keys": ["one", "two"]})
    made = (await client.post("/v1/responses", {"input": "Hi"}, headers={"x-api-key": "one"})).json
    for key, status in (("one", 200), ("two", 404)):
        assert (await client.get(f"/v1/responses/{made['id']}", headers={"x-api-key": key})).status == status


def test_answers_are_kept_within_bounds() -> None:
    store = AnswerStore(most_bytes=100)
    messages = [ChatMessage(role="user", content="x")]
    for number in range(5):
        store.put("me", str(number), StoredAnswer({}, messages, 40))
    assert [number for number in range(5) if store.get("me", str(number))] == [3, 4]
    store.put("me", "large", StoredAnswer({}, messages, 101))
    assert store.get("me", "large") is None and store.get("me", "4") is not None
    assert store.remove("me", "4") and not store.remove("me", "4") and not store.remove("you", "3")
    store.put("me", "5", StoredAnswer({}, messages, 60))
    assert store.get("me", "3") is not None and store.get("me", "5") is not None
