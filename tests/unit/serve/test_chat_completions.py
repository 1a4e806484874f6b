# SPDX-License-Identifier: Apache-2.0
"""Conversations: what a client gets, at once and as a stream, and what the engine was asked for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from anyaccel.serve.interface import Grammar
from anyaccel.serve.requests.answers import custom_input
from anyaccel.serve.requests.defaults import parse_defaults
from anyaccel.serve.requests.reasoning import REASONING_FORMATS
from serve_fakes import END, TEMPLATE, Answer, ByteTokenizer, Client, FakeEngine, chat, post, until


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [choice for each in events for choice in each["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_a_conversation_is_answered_in_openais_shape() -> None:
    engine = FakeEngine("Hello, you!")
    answer = chat(engine, {"unknown_field": 1, "model": "other"})
    assert answer.status == 200, answer.body
    result = answer.json
    (choice,) = result["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, you!"}
    assert (choice["finish_reason"], result["model"], result["object"]) == ("stop", "other", "chat.completion")
    (request,) = engine.requests
    assert bytes(request.prompt).decode() == "<user>Hi\n<assistant>"
    assert request.ends == {END}
    assert request.max_tokens == 2048 - len(request.prompt)  # what the context leaves
    assert result["usage"] == {
        "prompt_tokens": len(request.prompt),
        "completion_tokens": 12,  # with the token that ends it
        "total_tokens": len(request.prompt) + 12,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


@pytest.mark.parametrize("grouped", [1, 4])
def test_a_stream_tells_role_text_end_and_usage(grouped: int) -> None:
    engine = FakeEngine("Grüße, 世界!")
    engine.grouped = grouped
    answer = chat(engine, {"stream": True, "stream_options": {"include_usage": True}})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(events) == "Grüße, 世界!"
    assert not any("\ufffd" in str(event) for event in events)  # no half characters
    assert [choice["finish_reason"] for event in events for choice in event["choices"]][-1] == "stop"
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == len("Grüße, 世界!".encode()) + 1
    assert all(event["usage"] is None for event in events[:-1])
    assert len({event["id"] for event in events}) == 1


def test_a_stream_without_options_has_no_usage() -> None:
    assert not any("usage" in event for event in chat(FakeEngine(), {"stream": True}).events)


def test_a_length_cuts() -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        (choice,) = chat(FakeEngine("a long story"), {name: 6}).json["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("a long", "length")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("grouped", [1, 3, 50])
def test_a_stop_string_ends_an_answer_before_it(stream: bool, grouped: int) -> None:
    engine = FakeEngine("one two STOP three")
    engine.grouped = grouped
    answer = chat(engine, {"stop": ["never", " STOP"], "stream": stream})
    if stream:
        assert text_of(answer.events) == "one two"
        assert answer.events[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        (choice,) = answer.json["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("one two", "stop")
        assert answer.json["usage"]["completion_tokens"] == len("one two STOP")
    assert engine.ended in (["closed"], ["stop"])  # the engine need not go on


def test_a_stop_string_may_be_kept_and_waits_for_min_tokens() -> None:
    (choice,) = chat(FakeEngine("one. two."), {"stop": ".", "include_stop_str_in_output": True}).json["choices"]
    assert choice["message"]["content"] == "one."
    (choice,) = chat(FakeEngine("one. two."), {"stop": ".", "min_tokens": 6}).json["choices"]
    assert choice["message"]["content"] == "one. two"


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_have_seeds_of_their_own(stream: bool) -> None:
    engine = FakeEngine(lambda request: f"seed {request.sampling.seed}")
    answer = chat(engine, {"n": 3, "seed": 7, "stream": stream})
    wanted = ["seed 7", "seed 8", "seed 9"]
    if stream:
        assert [text_of(answer.events, index) for index in range(3)] == wanted
    else:
        assert [choice["message"]["content"] for choice in answer.json["choices"]] == wanted
        assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2]


def test_all_of_sampling_reaches_the_engine() -> None:
    engine = FakeEngine()
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1,
        "frequency_penalty": 0.2, "presence_penalty": -0.3, "seed": -5,
    }  # fmt: skip
    more = {"logit_bias": {"65": -100, "66": 2.5}, "min_tokens": 2, "timeout_s": 9, "stop_token_ids": [10]}
    assert chat(engine, {**given, **more}).status == 200
    (request,) = engine.requests
    assert {name: getattr(request.sampling, name) for name in given} == given
    assert request.sampling.logit_bias == {65: -100.0, 66: 2.5}
    assert (request.min_tokens, request.timeout_s, request.ends) == (2, 9, {END, 10})
    assert chat(engine, {"ignore_eos": True, "max_tokens": 20}).json["usage"]["completion_tokens"] == 20
    assert chat(engine, {"top_k": -1, "temperature": None, "top_p": 0}).status == 200
    last = engine.requests[-1].sampling
    assert (last.top_k, last.temperature, last.seed) == (0, 1.0, None)
    assert 0 < last.top_p < 1e-5


def test_log_probabilities_have_tokens_bytes_and_tops() -> None:
    result = chat(FakeEngine("é!"), {"logprobs": True, "top_logprobs": 2}).json
    content = result["choices"][0]["logprobs"]["content"]
    assert [each["bytes"] for each in content] == [[0xC3], [0xA9], [0x21]]  # the end of the answer is none of it
    assert content[2]["token"] == "!" and content[2]["logprob"] == -0.5
    assert [(each["token"], each["logprob"]) for each in content[2]["top_logprobs"]] == [("!", -0.5), ('"', -1.5)]
    result = chat(FakeEngine("ab"), {"logprobs": True, "stream": True}).events
    found = [
        each
        for event in result
        for choice in event["choices"]
        for each in (choice.get("logprobs") or {}).get("content", [])
    ]
    assert [each["token"] for each in found] == ["a", "b"]


def test_parts_of_text_are_joined_and_roles_translated() -> None:
    engine = FakeEngine()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat(engine, {"messages": [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts}]})
    assert bytes(engine.requests[0].prompt).decode() == "<system>Be kind.\n<user>one\ntwo\n<assistant>"


@pytest.mark.parametrize(
    ("template", "content", "prompt"),
    [
        (TEMPLATE, "The sky", "<user>Hi\n<assistant>The sky"),
        (TEMPLATE, "The sky ", "<user>Hi\n<assistant>The sky "),
        (TEMPLATE.replace("message.content", "message.content | trim"), " The sky ", "<user>Hi\n<assistant>The sky"),
    ],
)
def test_the_last_message_may_be_gone_on_with(template: str, content: str, prompt: str) -> None:
    """As transformers' apply_chat_template(continue_final_message=True) makes the prompt of these."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    engine = FakeEngine(" is blue.")
    for more in ({}, {"add_generation_prompt": False}):
        asked = {"messages": messages, "continue_final_message": True, **more}
        result = chat(engine, asked, tokenizer=ByteTokenizer(template)).json
        assert result["choices"][0]["message"]["content"] == " is blue."
        assert bytes(engine.requests[-1].prompt).decode() == prompt


def test_a_thought_may_be_gone_on_with() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>It is"}]
    answer = chat(
        FakeEngine(" late.</think>Bye"),
        {"messages": messages, "continue_final_message": True},
        reasoning=REASONING_FORMATS["think"],
    )
    message = answer.json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (" late.", "Bye")


def test_what_a_request_leaves_out_is_as_the_model_recommends() -> None:
    engine = FakeEngine()
    defaults = parse_defaults({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}, "")
    for more in ({}, {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1}):
        assert chat(engine, more, defaults=defaults).status == 200
    found = [(each.sampling.temperature, each.sampling.top_p, each.sampling.top_k) for each in engine.requests]
    assert found == [(0.6, 0.95, 20), (0.0, 1.0, 0)]
    assert [each.sampling.repetition_penalty for each in engine.requests] == [1.05, 1.0]
    assert [each.sampling.min_p for each in engine.requests] == [0.0, 0.1]
    result = post(engine, "/v1/responses", {"input": "Hi", "top_p": 0.5}, defaults=defaults).json
    assert (result["temperature"], result["top_p"]) == (0.6, 0.5)


def test_variables_of_the_template_may_be_given_but_not_ours() -> None:
    tokenizer = ByteTokenizer(TEMPLATE + "{% if not thoughts %}(none){% endif %}")
    engine = FakeEngine()
    assert chat(engine, {"chat_template_kwargs": {"thoughts": True}}, tokenizer=tokenizer).status == 200
    assert chat(engine, {"chat_template_kwargs": {"thoughts": False}}, tokenizer=tokenizer).status == 200
    assert [bytes(request.prompt).endswith(b"(none)") for request in engine.requests] == [False, True]
    for name in ("messages", "tools", "chat_template", "tokenize"):
        answer = chat(engine, {"chat_template_kwargs": {name: "x"}})
        assert (answer.status, answer.json["error"]["param"]) == (400, "chat_template_kwargs")


def test_a_template_cannot_reach_what_is_outside_of_it() -> None:
    tokenizer = ByteTokenizer("{{ messages.__class__.__mro__ }}")
    answer = chat(FakeEngine(), tokenizer=tokenizer)
    assert (answer.status, answer.json["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "integer"}}},
            Grammar("json_schema", '{"type": "integer"}'),
        ),
        ({"response_format": {"type": "text"}}, None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}},
            Grammar("json_schema", '{"type": "integer"}'),
        ),
        ({"guided_json": '{"type": "integer"}'}, Grammar("json_schema", '{"type": "integer"}')),
        ({"guided_regex": "[0-9]+"}, Grammar("regex", "[0-9]+")),
        ({"guided_choice": ["yes", 'n"o']}, Grammar("lark", 'start: "yes" | "n\\"o"')),
        ({"guided_grammar": "start: /a/"}, Grammar("lark", "start: /a/")),
        ({"structured_outputs": {"json": {"type": "null"}}}, Grammar("json_schema", '{"type": "null"}')),
        ({"structured_outputs": {"regex": "a|b"}}, Grammar("regex", "a|b")),
    ],
)
def test_what_an_answer_has_to_look_like(given: dict[str, Any], wanted: Grammar | None) -> None:
    engine = FakeEngine()
    answer = chat(engine, given)
    assert answer.status == 200, answer.body
    assert engine.requests[0].grammar == wanted


def test_thoughts_are_told_apart() -> None:
    tokenizer = ByteTokenizer(TEMPLATE + "{# <think> </think> #}")
    engine = FakeEngine("<think>\nHm, 2 < 3.\n</think>\n\nYes.")
    (choice,) = chat(engine, tokenizer=tokenizer).json["choices"]
    wanted = "\nHm, 2 < 3.\n"
    assert choice["message"] == {
        "role": "assistant", "content": "Yes.", "reasoning_content": wanted, "reasoning": wanted
    }  # fmt: skip
    result = chat(engine, tokenizer=tokenizer).json
    assert result["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<think>\nHm, 2 < 3.\n")}
    output = post(engine, "/v1/responses", {"input": "Hi"}, tokenizer=tokenizer).json["usage"]["output_tokens_details"]
    assert output == result["usage"]["completion_tokens_details"]
    events = chat(engine, {"stream": True}, tokenizer=tokenizer).events
    assert text_of(events) == "Yes."
    thoughts = [choice["delta"].get("reasoning_content", "") for each in events for choice in each["choices"]]
    assert "".join(thoughts) == "\nHm, 2 < 3.\n"
    inside = ByteTokenizer(TEMPLATE + "<think>\n")
    (choice,) = chat(FakeEngine("Hm.</think>Yes."), tokenizer=inside).json["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("Yes.", "Hm.")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_its_request(stream: bool) -> None:
    async def go() -> None:
        engine = FakeEngine("a long answer")
        engine.gate = asyncio.Semaphore(0)
        client, answer, leave = Client(engine), Answer(), asyncio.Event()
        value = {"messages": [{"role": "user", "content": "Hi"}], "n": 2, "stream": stream}
        asking = asyncio.create_task(client.post("/v1/chat/completions", value, leave=leave, answer=answer))
        engine.gate.release()
        engine.gate.release()
        await until(lambda: len(engine.requests) == 2 and engine.gate is not None and engine.gate.locked())
        if stream:
            await until(lambda: len(answer.parts) == 4)
        leave.set()
        await asking
        assert engine.ended == ["closed", "closed"]
        assert not answer.complete or answer.status == 499
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(go())


PATCH = {
    "type": "custom",
    "custom": {
        "name": "patch",
        "description": "Change a file.",
        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[+-].*"}},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALLED = '<tool_call>{"name": "patch", "arguments": {"input": "+ \\"a\\"\\nb"}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_custom_tools_take_a_text(stream: bool) -> None:
    engine = FakeEngine(CALLED + '<tool_call>{"name": "clock"}</tool_call>')
    answer = chat(engine, {"tools": [PATCH, CLOCK], "stream": stream})
    assert answer.status == 200, answer.body
    calls: list[dict[str, Any]] = []
    if stream:
        for event in answer.events:
            for part in event["choices"][0]["delta"].get("tool_calls", ()):
                if "id" in part:
                    calls.append(part)
                else:
                    calls[part["index"]]["custom"]["input"] += part["custom"]["input"]
    else:
        calls = answer.json["choices"][0]["message"]["tool_calls"]
    custom, function = calls
    assert custom["type"] == "custom" and custom["custom"] == {"name": "patch", "input": '+ "a"\nb'}
    assert function["type"] == "function" and function["function"] == {"name": "clock", "arguments": "{}"}
    shown = bytes(token for token in engine.requests[0].prompt if token < 256).decode()
    assert "Change a file." in shown and "[+-].*" in shown

    # The call comes back with its result.
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [{key: custom[key] for key in ("id", "type", "custom")}]},
        {"role": "tool", "tool_call_id": custom["id"], "content": "done"},
    ]
    engine = FakeEngine("Good.")
    assert chat(engine, {"tools": [PATCH], "messages": messages}).status == 200
    shown = bytes(token for token in engine.requests[0].prompt if token < 256).decode()
    assert '{"input": "+ \\"a\\"\\nb"}' in shown


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "custom": {"name": "patch"}}])
def test_a_custom_tool_that_is_required_is_held_to_its_regex(choice: Any) -> None:
    pytest.importorskip("llguidance")
    engine = FakeEngine(CALLED)
    answer = chat(engine, {"tools": [PATCH], "tool_choice": choice})
    (call,) = answer.json["choices"][0]["message"]["tool_calls"]
    assert call["custom"]["input"] == '+ "a"\nb'
    grammar = engine.requests[0].grammar
    assert grammar is not None and "[+-].*" in str(grammar)
    lark = {**PATCH["custom"], "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: A"}}}
    wrong = chat(FakeEngine(""), {"tools": [{"type": "custom", "custom": lark}], "tool_choice": choice})
    assert wrong.status == 400 and wrong.json["error"]["param"] == "tools[0].custom.format.grammar.syntax"
    assert chat(FakeEngine("Hi"), {"tools": [{"type": "custom", "custom": lark}]}).status == 200


def test_tools_of_one_name_are_refused() -> None:
    renamed = {**PATCH, "custom": {**PATCH["custom"], "name": "clock"}}
    answer = chat(FakeEngine(""), {"tools": [CLOCK, renamed]})
    assert answer.status == 400 and answer.json["error"]["param"] == "tools[1]"
    assert "another tool has the name 'clock'" in answer.json["error"]["message"]


def test_wrong_custom_tools_are_named() -> None:
    pytest.importorskip("llguidance")
    bad = {**PATCH["custom"], "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "(a"}}}
    engine = FakeEngine("")
    assert chat(engine, {"tools": [{"type": "custom", "custom": bad}], "tool_choice": "required"}).status == 200
    assert "tools[0].custom.format.grammar.definition" in repr(engine.requests[0].grammar)  # for the engine's error

    for tool in ({"type": "custom"}, {"type": "custom", "custom": {"name": "a b"}}, {"type": "custom", "custom": 5}):
        answer = chat(FakeEngine(""), {"tools": [tool]})
        assert answer.status == 400 and answer.json["error"]["param"].startswith("tools[0]"), answer.body
    flat = {"type": "grammar", "syntax": "regex", "definition": "a"}  # as in /v1/responses of OpenAI
    tool = {"type": "custom", "custom": {"name": "a", "format": flat}}
    error = chat(FakeEngine(""), {"tools": [tool]}).json["error"]
    assert error["message"] == "tools[0].custom.format.grammar: is required"


def test_the_input_of_a_cut_call_is_what_has_come() -> None:
    assert custom_input('{"input": "ab') == "ab"
    assert custom_input('{"path": "x"}') == '{"path": "x"}' and custom_input("{") == "{"
