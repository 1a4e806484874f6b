# SPDX-License-Identifier: Apache-2.0
"""OpenAI's newer conversations: items in, items out, and the events that name them."""

from __future__ import annotations

from typing import Any

from anyaccel.serve.interface import EngineFullError, EngineStoppedError, Grammar
from serve_fakes import TEMPLATE, Answer, ByteTokenizer, FakeEngine, post

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
