# SPDX-License-Identifier: Apache-2.0
"""Calls of functions: each format of text, wherever an answer is cut into pieces; choices that a grammar forces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyaccel.serve.requests.reasoning import ReasoningParser
from anyaccel.serve.requests.tools.format import ParsedCall
from anyaccel.serve.requests.tools.formats import FORMATS, detect_format
from anyaccel.serve.requests.tools.parser import ToolCallArrayParser, ToolCallParser
from serve_fakes import TEMPLATE, ByteTokenizer, FakeEngine, chat

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/C"}},
            "$defs": {"C": {"type": "string"}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
PARIS = ParsedCall("weather", '{"city": "Paris"}')
NOON = ParsedCall("clock", "{}")

CASES = [
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [PARIS]),
    (
        "hermes",
        'Let me see.\n<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>\n'
        '<tool_call>{"name": "clock", "arguments": {}}</tool_call>',
        "Let me see.",
        [PARIS, NOON],
    ),
    ("hermes", '<tool_call>{"name": "clock"}', "", [NOON]),
    ("hermes", "<tool_call>{broken</tool_call> and more", "<tool_call>{broken</tool_call> and more", []),
    (
        "hermes",
        '<tool_call>{"name": "clock", "arguments": {"x": "a \\" </tool_call> b\\\\"}}</tool_call>\n'
        '<tool_call>{"name": "clock"}</tool_call>',
        "",
        [ParsedCall("clock", '{"x": "a \\" </tool_call> b\\\\"}'), NOON],
    ),
    (
        "hermes",
        '<tool_call>{"name: 1}</tool_call>\n<tool_call>{"name": "clock"}</tool_call>',
        '<tool_call>{"name: 1}</tool_call>',
        [NOON],
    ),
    ("hermes", "a <tool> b <tool_cal", "a <tool> b <tool_cal", []),
    ("hermes", "{}", "{}", []),
    ("llama3", '{"name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    ("llama3", '<|python_tag|>{"name": "clock", "parameters": {}}; {"name": "clock"}', "", [NOON, NOON]),
    ("llama3", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3", "plain", "plain", []),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}]', "", [PARIS]),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]clock{}', "", [PARIS, NOON]),
    ("mistral", 'Well.[TOOL_CALLS]clock[CALL_ID]a1b2c3d4e[ARGS]{}', "Well.", [NOON]),
]  # fmt: skip


def read(reader: Any, text: str, cuts: list[int]) -> tuple[str, list[ParsedCall]]:
    content, calls = "", []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        more, found = reader.add(text[start:end], end == len(text) and start != end)
        content, calls = content + more, calls + found
    return content, calls


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_formats(form: str, text: str, content: str, calls: list[ParsedCall]) -> None:
    assert read(ToolCallParser(FORMATS[form], ("weather", "clock")), text, []) == (content, calls)
    assert read(ToolCallParser(FORMATS[form], ("weather", "clock")), text, list(range(1, len(text)))) == (
        content,
        calls,
    )


@given(st.data())
def test_cuts_change_nothing(data: st.DataObject) -> None:
    form, text, content, calls = data.draw(st.sampled_from(CASES))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1))))
    assert read(ToolCallParser(FORMATS[form], ("weather", "clock")), text, cuts) == (content, calls)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "\n", "a", "<", "</th", " ink>"]), min_size=1, max_size=12),
    st.data(),
)
def test_thoughts_are_the_same_however_they_come(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    inside = data.draw(st.booleans())
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1)))) if len(text) > 1 else []
    pieces, whole = ReasoningParser(inside), ReasoningParser(inside)
    found = ["", ""]
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        for place, more in enumerate(pieces.add(text[start:end], end == len(text))):
            found[place] += more
    assert tuple(found) == whole.add(text, True)


@given(st.data())
def test_a_list_of_calls_however_it_comes(data: st.DataObject) -> None:
    text = '[{"name": "weather", "parameters": {"city": "Paris"}},\n {"name": "clock", "parameters": {}} ]'
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1))))
    assert read(ToolCallArrayParser(), text, cuts) == ("", [PARIS, NOON])


def test_a_format_is_told_by_its_template() -> None:
    for template, name in (
        ("x <tool_call> y", "hermes"),
        ("x [TOOL_CALLS] y", "mistral"),
        ("<|python_tag|>", "llama3"),
        ("<|start_header_id|> {{ tools }}", "llama3"),
        ("nothing", "hermes"),
    ):
        assert detect_format(template).name == name


def test_a_model_calls_if_it_wants_to() -> None:
    engine = FakeEngine(CASES[1][1])
    result = chat(engine, {"tools": [WEATHER, CLOCK]}).json
    (choice,) = result["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me see."
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [vars(PARIS), vars(NOON)]
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2
    # Its template has no tools: they are told in the system message.
    prompt = bytes(engine.requests[0].prompt).decode()
    assert prompt.startswith("<system>You may call") and '"name": "weather"' in prompt
    result = chat(engine, {"tools": [WEATHER], "parallel_tool_calls": False}).json
    assert len(result["choices"][0]["message"]["tool_calls"]) == 1
    result = chat(engine, {"tools": [WEATHER], "tool_choice": "none"}).json
    assert "tool_calls" not in result["choices"][0]["message"]
    assert b"weather" not in bytes(engine.requests[-1].prompt)


def test_a_stream_tells_calls_when_they_are_complete() -> None:
    events = chat(FakeEngine(CASES[1][1]), {"tools": [WEATHER, CLOCK], "stream": True}).events
    parts = [part for event in events for choice in event["choices"] for part in choice["delta"].get("tool_calls", ())]
    assert [(part["index"], part["function"]["name"]) for part in parts] == [(0, "weather"), (1, "clock")]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_marks_that_are_special_tokens_are_seen() -> None:
    tokenizer = ByteTokenizer(TEMPLATE + "{# [TOOL_CALLS] #}{{ tools and '' }}")
    result = chat(
        FakeEngine('[TOOL_CALLS][{"name": "clock", "arguments": {}}]'), {"tools": [CLOCK]}, tokenizer=tokenizer
    )
    (call,) = result.json["choices"][0]["message"]["tool_calls"]
    assert call["function"] == vars(NOON) and len(call["id"]) == 9


def test_a_function_by_name_leaves_its_arguments_to_a_grammar() -> None:
    engine = FakeEngine('{"city": "Oslo"}')
    value = {"tools": [WEATHER, CLOCK], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    (choice,) = chat(engine, value).json["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert choice["message"]["content"] is None
    grammar = engine.requests[0].grammar
    assert grammar is not None and json.loads(grammar.text) == {
        **WEATHER["function"]["parameters"],
        "additionalProperties": False,
    }
    events = chat(engine, {**value, "stream": True}).events
    parts = [part for event in events for choice in event["choices"] for part in choice["delta"].get("tool_calls", ())]
    assert parts[0]["function"]["name"] == "weather" and "id" in parts[0]
    assert "".join(part["function"]["arguments"] for part in parts) == '{"city": "Oslo"}'


def test_a_call_that_is_required_is_a_list_by_a_grammar() -> None:
    engine = FakeEngine('[{"name": "clock", "parameters": {}}]')
    result = chat(engine, {"tools": [WEATHER, CLOCK], "tool_choice": "required", "parallel_tool_calls": False}).json
    assert result["choices"][0]["message"]["tool_calls"][0]["function"] == vars(NOON)
    assert engine.requests[0].grammar is not None
    schema = json.loads(engine.requests[0].grammar.text)
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    parameters = schema["items"]["anyOf"][0]["properties"]["parameters"]
    assert parameters["properties"]["city"]["$ref"] == "#/items/anyOf/0/properties/parameters/$defs/C"


def test_json_that_names_no_function_is_an_answer() -> None:
    tokenizer = ByteTokenizer(TEMPLATE + "{# <|start_header_id|> #}{{ tools and '' }}")
    text = '{"name": "Ada", "age": 36}'
    (choice,) = chat(FakeEngine(text), {"tools": [CLOCK]}, tokenizer=tokenizer).json["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    (choice,) = chat(FakeEngine('{"name": "clock"}'), {"tools": [CLOCK]}, tokenizer=tokenizer).json["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == vars(NOON)


def test_calls_and_results_go_back_to_the_model() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": 1}'}}
    messages = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    engine = FakeEngine()
    knows_none = ByteTokenizer("{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}")
    assert chat(engine, {"messages": messages, "tools": [CLOCK]}, tokenizer=knows_none).status == 200
    prompt = bytes(engine.requests.pop().prompt).decode()
    assert '{"name": "clock", "arguments": {"zone": 1}}' in prompt and "<tool_response>\nnoon" in prompt
    assert (
        chat(engine, {"messages": messages}, tokenizer=knows_none).status == 200
    )  # the last question of an agent has no tools any more
    prompt = bytes(engine.requests.pop().prompt).decode()
    assert '{"name": "clock", "arguments": {"zone": 1}}' in prompt and "<tool_response>\nnoon" in prompt
    # A template that knows calls writes them itself, whether it knows tools or not.
    for tokenizer in (ByteTokenizer(), ByteTokenizer(TEMPLATE + "{{ tools and '' }}")):
        assert chat(engine, {"messages": messages, "tools": [CLOCK]}, tokenizer=tokenizer).status == 200
        prompt = bytes(engine.requests.pop().prompt).decode()
        assert '"arguments": {"zone": 1}' in prompt and "<tool>noon" in prompt  # an object, not its text
        assert prompt.startswith("<system>You may call") == ("tools" not in tokenizer.template())


_OBJECT = '{"city": "Oslo", "é": true}'
_HEAD = "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{% set f = c.function %}"
_TAIL = "{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize("given", [{}, {"content": None}, {"content": ""}, {"content": "Well, None."}])
@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{{ f.arguments | tojson }}", "object"),  # Qwen, Llama 3
        ("{{ f.arguments }}", "text"),  # DeepSeek
        ("{{ 'a' + f.arguments }}", "text"),
        ("{% if f.arguments is string %}S{{ f.arguments }}{% else %}O{{ f.arguments | tojson }}{% endif %}", "O"),
        ("{% for name, value in f.arguments | items %}{{ name }}={{ value }};{% endfor %}", "city=Oslo;é=True;"),
        ("{{ m['content'] + f.arguments | tojson }}", "object"),  # fails without content
        ("{{ m.content }}{{ f.arguments | tojson }}", "object"),  # would write None
        ("{% if m['content'] is none %}{{ f.arguments | tojson }}{% else %}{{ m['content'][0] }}{% endif %}", ""),
    ],
)  # fmt: skip
def test_a_template_gets_calls_in_the_form_that_it_wants(source: str, wanted: str, given: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": _OBJECT}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [call], **given},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    engine = FakeEngine()
    assert chat(engine, {"messages": messages}, tokenizer=ByteTokenizer(_HEAD + source + _TAIL)).status == 200
    prompt = bytes(engine.requests[0].prompt).decode()
    content = given.get("content") or ""
    if "is none" in source:
        # A text that was sent is left, though this template then writes it instead of the calls, as with transformers.
        assert prompt == ("Hi" + ("" if given == {"content": ""} else content[:1] or _OBJECT) + "rain")
    elif wanted in ("object", "text"):
        assert prompt.endswith(_OBJECT + "rain") and "None" not in prompt.replace(content or " ", "")
    else:
        assert prompt == "Hi" + (wanted + _OBJECT if wanted == "O" else wanted) + "rain"


def test_a_function_without_parameters_is_described_as_it_is() -> None:
    engine = FakeEngine()
    tokenizer = ByteTokenizer(TEMPLATE + "{{ tools | tojson }}")
    assert chat(engine, {"tools": [CLOCK]}, tokenizer=tokenizer).status == 200
    assert '"function": {"name": "clock"}' in bytes(engine.requests[0].prompt).decode()
