# SPDX-License-Identifier: Apache-2.0
"""Calls of functions: each format of text, wherever an answer is cut into pieces; choices that a grammar forces."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyaccel.inference.text.chat_template import ChatTemplate
from anyaccel.serve.requests.reasoning import REASONING_FORMATS, ReasoningParser, detect_reasoning
from anyaccel.serve.requests.tools.format import ParsedCall
from anyaccel.serve.requests.tools.formats import FORMATS, detect_format
from anyaccel.serve.requests.tools.harmony import HarmonyParser
from anyaccel.serve.requests.tools.parser import ToolCallParser
from serve_fakes import TEMPLATE, ByteTokenizer, FakeEngine, chat, post
from tool_cases import EDGES, MESSAGES, NOON, OSLO, SCHEMAS, TEMPLATES, THOUGHTS, WRITTEN

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
TWO = (
    'Let me see.\n<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>\n'
    '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
)


def plain(call: ParsedCall) -> dict[str, str]:
    """A call as an answer has it."""
    return {"name": call.name, "arguments": call.arguments}


Answer = tuple[str, str, list[ParsedCall]]


def read(parser: Any, text: str, cuts: Iterable[int] = ()) -> Answer:
    """The thoughts, the content and the calls that a parser finds in the pieces of a text."""
    found: list[Any] = ["", "", []]
    places = [0, *cuts, len(text)]
    for start, end in itertools.pairwise(places):
        parts = parser.add(text[start:end], end == len(text) and (start != end or not text))
        for place, part in enumerate(parts, len(found) - len(parts)):
            found[place] = found[place] + part
    return found[0], found[1], joined(found[2])


def joined(calls: list[ParsedCall]) -> list[ParsedCall]:
    """The calls, each with all of its arguments."""
    made: list[ParsedCall] = []
    for call in calls:
        if call.name:
            made.append(call)
        else:
            made[-1] = replace(made[-1], arguments=made[-1].arguments + call.arguments)
    return made


def parser_of(form: str, is_required: bool = False) -> Any:
    if FORMATS[form].is_messages:
        return HarmonyParser(True, True, is_required)
    return ToolCallParser(FORMATS[form], SCHEMAS, is_required)


def kimi(form: str, calls: list[ParsedCall]) -> list[ParsedCall]:
    """The calls with the ids that Kimi gives them."""
    numbered = [replace(call, identity=f"functions.{call.name}:{place}") for place, call in enumerate(calls)]
    return numbered if form == "kimi-k2" else calls


ANSWERS: list[tuple[str, str, Answer]] = [
    *((form, one, ("", "", kimi(form, [OSLO]))) for form, (one, _) in WRITTEN.items()),
    *((form, two, ("", "", kimi(form, [OSLO, NOON]))) for form, (_, two) in WRITTEN.items()),
    *(
        (form, f"Let me see.\n{one}", ("", "Let me see.", kimi(form, [OSLO])))
        for form, (one, _) in WRITTEN.items()
        if form not in ("harmony", "pythonic")
    ),
    *((form, text, ("", content, calls)) for form, text, content, calls in EDGES),
    *(("harmony", text, (thoughts, content, calls)) for text, thoughts, content, calls in MESSAGES),
]


@pytest.mark.parametrize(("form", "text", "answer"), ANSWERS)
def test_formats(form: str, text: str, answer: Answer) -> None:
    """Streaming and whole answers give the same: cut once at each place, and everywhere."""
    assert read(parser_of(form), text) == answer
    assert read(parser_of(form), text, range(1, len(text))) == answer
    for cut in range(1, len(text)):
        assert read(parser_of(form), text, [cut]) == answer


@pytest.mark.parametrize("form", [form for form, each in FORMATS.items() if each.section[1]])
@pytest.mark.parametrize("is_required", [False, True])
def test_what_is_left_of_the_mark_behind_the_calls_is_no_text(form: str, is_required: bool) -> None:
    whole, end = WRITTEN[form][0], FORMATS[form].section[1].strip()
    assert whole.endswith(end)
    for left in range(1, len(end)):
        text = whole[:-left]
        for cuts in ([], range(1, len(text))):
            assert read(parser_of(form, is_required), text, cuts) == ("", "", kimi(form, [OSLO]))


@given(st.data())
def test_cuts_change_nothing(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(list(FORMATS)))
    texts = [text for name, text, _ in ANSWERS if name == form]
    pieces = [text[: len(text) // 2] for text in texts] + texts + ["\n", " ", "x", "<", "{", "}", "[", "]", '"']
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), min_size=1, max_size=4)))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=12))) if len(text) > 1 else []
    assert read(parser_of(form), text, cuts) == read(parser_of(form), text)


@pytest.mark.parametrize("form", FORMATS)
def test_required_calls_come_while_they_are_written(form: str) -> None:
    for text, calls in zip(WRITTEN[form], ([OSLO], [OSLO, NOON]), strict=True):
        for cuts in ([], range(1, len(text))):
            assert read(parser_of(form, True), text, cuts) == ("", "", kimi(form, calls))
    one = WRITTEN[form][0]
    place = one.index("Oslo") + 2
    _, content, calls = read(parser_of(form, True), one[:place], range(1, place))
    assert read(parser_of(form, True), one[:place]) == ("", content, calls)
    two = WRITTEN[form][1]
    if two.startswith(one) and form != "kimi-k2":  # nothing is said of a further call that was cut at its beginning
        assert read(parser_of(form, True), two[: len(one) + 9]) == ("", "", [OSLO])
    if calls:  # what max_tokens has cut, as far as it came
        assert (content, [(call.name, call.arguments) for call in calls]) == ("", [("weather", '{"city": "Os')])
    else:
        assert content == one[:place]


@pytest.mark.parametrize(("form", "inside", "text", "thoughts", "rest"), THOUGHTS)
def test_thoughts(form: str, inside: bool, text: str, thoughts: str, rest: str) -> None:
    for cuts in ([], range(1, len(text)), *([cut] for cut in range(1, len(text)))):
        found = ["", ""]
        parser = ReasoningParser(REASONING_FORMATS[form], inside)
        for start, end in itertools.pairwise([0, *cuts, len(text)]):
            for place, more in enumerate(parser.add(text[start:end], end == len(text))):
                found[place] += more
        assert found == [thoughts, rest]


@given(
    st.sampled_from(["think", "ernie", "granite"]),
    st.lists(
        st.sampled_from(
            ["<think>", "</think>", "\n", "a", "<", "</th", " ink>", "<response>", "</response>", "Here is "]
        ),
        min_size=1,
        max_size=12,
    ),
    st.data(),
)
def test_thoughts_are_the_same_however_they_come(form: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    inside = data.draw(st.booleans())
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1)))) if len(text) > 1 else []
    pieces, whole = (ReasoningParser(REASONING_FORMATS[form], inside) for _ in range(2))
    found = ["", ""]
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        for place, more in enumerate(pieces.add(text[start:end], end == len(text))):
            found[place] += more
    assert tuple(found) == whole.add(text, True)


@pytest.mark.parametrize("form", FORMATS)
def test_what_a_template_writes_is_read_back(form: str) -> None:
    source = f"{{% for m in messages %}}{{% for call in m.tool_calls %}}{{% set c = call.function %}}{TEMPLATES[form]}"
    template = ChatTemplate(source + "{% endfor %}{% endfor %}", {})
    assert detect_format(source).name == form
    arguments = {"city": "São <b>", "days": 3, "tags": ["x, y"], "exact": None, "where": {"lat": 1.5, "unit": "C"}}
    call = {"function": {"name": "weather", "arguments": arguments}}
    text = template.render([{"role": "assistant", "tool_calls": [call]}])
    thoughts, content, (found,) = read(parser_of(form), text)
    assert (thoughts, content, found.name, json.loads(found.arguments)) == ("", "", "weather", arguments)


def test_a_format_is_told_by_its_template() -> None:
    for template, name in (("<|python_tag|>", "llama3"), ("<|start_header_id|> {{ tools }}", "llama3"), ("", "hermes")):
        assert detect_format(template).name == name
    for template, name in (
        ("<think>", "think"),
        ("a</think>b", "think"),
        ("[THINK]", "mistral"),
        ("<|channel|><|message|>", "harmony"),
        ("<|START_THINKING|>", "cohere"),
        ("<think></think><response></response>", "ernie"),
        ("</think><answer>", "hunyuan"),
        ("<|channel>thought <channel|>", "gemma-4"),
    ):
        found = detect_reasoning(template)
        assert found is not None and found.name == name
    assert detect_reasoning("plain") is None


def test_a_model_calls_if_it_wants_to() -> None:
    engine = FakeEngine(TWO)
    result = chat(engine, {"tools": [WEATHER, CLOCK]}).json
    (choice,) = result["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me see."
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [plain(PARIS), plain(NOON)]
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
    events = chat(FakeEngine(TWO), {"tools": [WEATHER, CLOCK], "stream": True}).events
    parts = [part for event in events for choice in event["choices"] for part in choice["delta"].get("tool_calls", ())]
    assert [(part["index"], part["function"]["name"]) for part in parts] == [(0, "weather"), (1, "clock")]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_marks_that_are_special_tokens_are_seen() -> None:
    tokenizer = ByteTokenizer(TEMPLATE + "{# [TOOL_CALLS] #}{{ tools and '' }}")
    result = chat(
        FakeEngine('[TOOL_CALLS][{"name": "clock", "arguments": {}}]'), {"tools": [CLOCK]}, tokenizer=tokenizer
    )
    (call,) = result.json["choices"][0]["message"]["tool_calls"]
    assert call["function"] == plain(NOON) and len(call["id"]) == 9


def test_a_function_by_name_is_called_in_the_models_own_format() -> None:
    engine = FakeEngine('<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>')
    value = {"tools": [WEATHER, CLOCK], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    (choice,) = chat(engine, value).json["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
    grammar = engine.requests[0].grammar
    assert grammar is not None and '"<tool_call>"' in grammar.text and len(grammar.parts) == 1
    schema = json.loads(grammar.parts[0][1].text)["properties"]
    assert schema["name"]["enum"] == ["weather"] and schema["arguments"]["additionalProperties"] is False
    assert schema["arguments"]["properties"]["city"]["$ref"] == "#/properties/arguments/$defs/C"
    events = chat(engine, {**value, "stream": True}).events
    parts = [part for event in events for choice in event["choices"] for part in choice["delta"].get("tool_calls", ())]
    assert parts[0]["function"]["name"] == "weather" and "id" in parts[0]
    assert "".join(part["function"]["arguments"] for part in parts) == '{"city": "Oslo"}' and len(parts) > 5


def test_harmony_ends_an_answer_after_a_call() -> None:
    tokenizer = ByteTokenizer(TEMPLATE + "{# <|channel|><|message|> #}{{ tools and '' }}")
    thoughts = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    said = f"{thoughts}<|channel|>commentary to=functions.clock<|message|>{{}}"
    engine = FakeEngine(said)
    (choice,) = chat(engine, {"tools": [CLOCK]}, tokenizer=tokenizer).json["choices"]
    assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["tool_calls"][0]["function"] == plain(NOON) and choice["finish_reason"] == "tool_calls"
    # Answers without functions have channels, too.
    (choice,) = chat(FakeEngine(f"{thoughts}<|channel|>final<|message|>Yes."), tokenizer=tokenizer).json["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("Yes.", "Hm.")


def test_the_format_of_thoughts_can_be_set() -> None:
    for form, thoughts in ((REASONING_FORMATS["mistral"], "Hm."), (None, None)):
        (choice,) = chat(FakeEngine("[THINK]Hm.[/THINK]Yes."), reasoning=form).json["choices"]
        assert choice["message"].get("reasoning") == thoughts
        assert choice["message"]["content"] == ("Yes." if thoughts else "[THINK]Hm.[/THINK]Yes.")


@pytest.mark.parametrize(
    ("variable", "given", "seen"),
    [
        ("reasoning_effort", {"reasoning_effort": "high"}, "high"),
        ("reasoning_effort", {"reasoning_effort": "none"}, "low"),
        ("enable_thinking", {"reasoning_effort": "none"}, "False"),
        ("thinking", {"reasoning_effort": "medium"}, "True"),
        ("thinking_budget", {"reasoning_effort": "none"}, "0"),
        ("thinking_budget", {"reasoning_effort": "high"}, ""),
        ("enable_thinking", {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": 7}}, "7"),
    ],
)
def test_the_effort_is_told_to_the_template(variable: str, given: Any, seen: str) -> None:
    engine = FakeEngine()
    tokenizer = ByteTokenizer(f"-{{{{ {variable} }}}}")
    assert chat(engine, given, tokenizer=tokenizer).status == 200
    assert bytes(engine.requests[0].prompt).decode() == f"-{seen}"
    value = {"input": "x", "reasoning": {"effort": given["reasoning_effort"]}, **given}
    assert post(engine, "/v1/responses", value, tokenizer=tokenizer).status == 200
    assert bytes(engine.requests[1].prompt).decode() == f"-{seen}"


def test_json_that_names_no_function_is_an_answer() -> None:
    tokenizer = ByteTokenizer(TEMPLATE + "{# <|start_header_id|> #}{{ tools and '' }}")
    text = '{"name": "Ada", "age": 36}'
    (choice,) = chat(FakeEngine(text), {"tools": [CLOCK]}, tokenizer=tokenizer).json["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    (choice,) = chat(FakeEngine('{"name": "clock"}'), {"tools": [CLOCK]}, tokenizer=tokenizer).json["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == plain(NOON)


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


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_tools_may_be_allowed(mode: str) -> None:
    said = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    named = {"type": "function", "function": {"name": "clock"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
    engine = FakeEngine(said)
    (made,) = chat(engine, {"tools": [WEATHER, CLOCK], "tool_choice": choice}).json["choices"]
    assert made["message"]["tool_calls"][0]["function"] == plain(NOON)
    flat = [{"type": "function", "name": "weather"}, {"type": "function", "name": "clock"}]
    value = {"input": "x", "tools": flat, "tool_choice": {"type": "allowed_tools", "mode": mode, "tools": flat[1:]}}
    result = post(engine, "/v1/responses", value).json
    assert [item["type"] for item in result["output"]] == ["function_call"]
    assert result["tool_choice"] == value["tool_choice"]
    for request in engine.requests:
        assert b"weather" not in bytes(request.prompt) and b'"clock"' in bytes(request.prompt)
        assert (request.grammar is not None) == (mode == "required")
    wrong = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [{**named, "function": {"name": "no"}}]}}
    answer = chat(engine, {"tools": [CLOCK], "tool_choice": wrong})
    assert answer.status == 400 and answer.json["error"]["param"] == "tool_choice"


@pytest.mark.parametrize(
    ("template", "pattern"),
    [
        ("", "call_[0-9a-f]+"),
        ("{# [TOOL_CALLS] #}", "[a-zA-Z0-9]{9}"),
        ("{# <|tool_call_begin|> #}", r"functions\.(clock:0|weather:1)"),
    ],
    ids=["any", "short", "counted"],
)
@pytest.mark.parametrize("ids", [("toolu_1", "toolu_2"), ("", "")], ids=["given", "missing"])
def test_results_have_the_ids_of_their_calls(template: str, pattern: str, ids: tuple[str, str]) -> None:
    """Mistral's templates take ids of nine characters only, Kimi's name calls by them, Ollama's clients send none."""
    names = ("clock", "weather")
    calls = [
        {"function": {"name": name, "arguments": "{}"}, **({"id": id} if id else {})}
        for name, id in zip(names, ids, strict=True)
    ]
    results = [
        {"role": "tool", "content": name, **({"tool_call_id": id} if id else {"name": name})}
        for name, id in zip(names, ids, strict=True)
    ]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": calls}, *reversed(results)]
    source = (
        template + "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name }}={{ c.id }};{% endfor %}"
    )
    source += "{% if m.role == 'tool' %}{{ m.content }}={{ m.tool_call_id }};{% endif %}{% endfor %}"
    engine = FakeEngine()
    assert chat(engine, {"messages": messages}, tokenizer=ByteTokenizer(source)).status == 200
    written = bytes(engine.requests[0].prompt).decode().removesuffix(";").split(";")
    pairs = [each.split("=") for each in written]
    assert [name for name, _ in pairs] == ["clock", "weather", "weather", "clock"]
    assert pairs[0][1] == pairs[3][1] != pairs[1][1] == pairs[2][1]
    for _, identity in pairs:
        assert re.fullmatch(pattern, identity) or (not template and identity in ids)
