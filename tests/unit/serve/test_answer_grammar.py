# SPDX-License-Identifier: Apache-2.0
"""What an answer may be: schemas as clients write them, and calls of functions and thoughts beside a format."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyaccel.serve.api.chat import add_call
from anyaccel.serve.engine.grammar import GrammarCompiler
from anyaccel.serve.interface import Grammar, GrammarError
from anyaccel.serve.json_schema import FORMATS as TEXT_FORMATS
from anyaccel.serve.json_schema import find_problem, prepare
from anyaccel.serve.requests.structured import (
    answer_grammar,
    call_array_schema,
    parameter_grammars,
    required_calls,
    schema_grammar,
)
from anyaccel.serve.requests.tools.format import ParsedCall
from anyaccel.serve.requests.tools.formats import FORMATS
from anyaccel.serve.requests.tools.parser import ToolCallParser
from serve_fakes import TEMPLATE, ByteTokenizer, FakeEngine, chat, post

llguidance = pytest.importorskip("llguidance")

MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>"]


class Text:
    """A tokenizer of bytes.

    Args:
        marks: texts that are tokens.
    """

    end_tokens = (256,)

    def __init__(self, marks: list[str]) -> None:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        self._tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens(["<end>"])
        self._tokenizer.add_tokens([AddedToken(mark, special=mark.startswith("[")) for mark in marks])
        self.token_of = self._tokenizer.token_to_id
        self.vocabulary: int = self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids


class Taker:
    """Whether texts fit grammars."""

    def __init__(self, marks: list[str]) -> None:
        self.text = Text(marks)
        self._grammars = GrammarCompiler("", self.text)
        self._grammars.vocabulary, self._grammars.ends = self.text.vocabulary, frozenset(self.text.end_tokens)

    def fits(self, grammar: Grammar, text: str) -> bool:
        async def go() -> Any:
            return (await self._grammars.constraint(grammar)).matcher

        try:
            matcher = asyncio.run(go())
        finally:
            self._grammars.close()
            self._grammars._pool = None
        ids = self.text.encode(text)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.fixture(scope="module", params=[[], MARKS], ids=["texts", "tokens"])
def taker(request: pytest.FixtureRequest) -> Taker:
    return Taker(request.param)


@pytest.fixture(scope="module")
def plain() -> Taker:
    return Taker([])


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **({"parameters": parameters} if parameters else {})}}


WEATHER = tool(
    "weather", {"type": "object", "properties": {"city": {"$ref": "#/$defs/C"}}, "$defs": {"C": {"enum": ["Oslo"]}}}
)
CLOCK = tool("clock")
FORMAT = schema_grammar(
    {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}, "response_format"
)

CALLS = {
    "hermes": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call>',
    ),
    "llama3": (
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}',
        '{"name": "weather", "parameters": {"town": "Oslo"}}',
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]',
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"town": "Oslo"}}]',
    ),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("thoughts", [None, False, True])
def test_tools_can_be_called_beside_a_format(taker: Taker, form: str, thoughts: bool | None) -> None:
    grammar = answer_grammar(FORMAT, thoughts, taker.text.token_of, FORMATS[form], [WEATHER, CLOCK])
    right, wrong = CALLS[form]
    begin = "Hm, {1}.</think>\n\n" if thoughts else ""
    for text, fits in (('{"x": 1}', True), ('{"y": 1}', False), ("Hello", False), (right, True), (wrong, False)):
        assert taker.fits(grammar, begin + text) == fits, text
    if not thoughts:
        assert taker.fits(grammar, f"<think>Hm, {{1}}.</think>\n\n{right}") == (thoughts is False)
    # What fits is what the parser of answers reads.
    content, calls = ToolCallParser(FORMATS[form], ("weather", "clock")).add(right, True)
    assert (content, calls) == ("", [ParsedCall("weather", '{"city": "Oslo"}')])


def test_mistrals_newer_calls(taker: Taker) -> None:
    grammar = answer_grammar(FORMAT, None, taker.text.token_of, FORMATS["mistral"], [WEATHER, CLOCK])
    assert taker.fits(grammar, '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]clock{}')
    assert not taker.fits(grammar, '[TOOL_CALLS]clock[ARGS]{"city": "Oslo"}')


@pytest.mark.parametrize("form", FORMATS)
def test_several_calls_or_one(taker: Taker, form: str) -> None:
    one = CALLS[form][0]
    two = one + ("; " if form == "llama3" else "\n" if form == "hermes" else "") + one
    for several in (True, False):
        grammar = answer_grammar(FORMAT, None, taker.text.token_of, FORMATS[form], [WEATHER], several)
        assert taker.fits(grammar, one) and taker.fits(grammar, two) == several


def test_any_kind_of_format_stands_beside_calls(taker: Taker) -> None:
    for wanted, text in (
        (Grammar("regex", "a/b+"), "a/bb"),
        (Grammar("lark", "start: word\nword: /q+/"), "qq"),
        (Grammar("json_object"), '{"a": [1]}'),
    ):
        grammar = answer_grammar(wanted, False, taker.text.token_of, FORMATS["hermes"], [CLOCK])
        assert taker.fits(grammar, text) and taker.fits(grammar, f"<think>x</think>\n{text}")
        assert taker.fits(grammar, '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>')
        assert not taker.fits(grammar, f"{text}!")


def test_parameters_point_to_their_own_definitions(plain: Taker) -> None:
    def sided(name: str, side: str) -> dict[str, Any]:
        node = {"type": "object", "properties": {"next": {"$ref": "#"}, "side": {"$ref": "#/$defs/Side"}}}
        return tool(name, {**node, "$defs": {"Side": {"enum": [side]}}})

    def call(name: str, side: str) -> dict[str, Any]:
        return {"name": name, "parameters": {"next": {"side": side}}}

    def fits(tools: list[Any], calls: list[Any]) -> bool:
        schema = call_array_schema(tools, parameter_grammars(tools), "parameters", None)
        return plain.fits(schema_grammar(schema, "tools"), json.dumps(calls))

    both, one = [sided("a", "left"), sided("b", "right")], [sided("a", "left")]
    assert fits(both, [call("a", "left"), call("b", "right")]) and fits(one, [call("a", "left")])
    for name, side in (("a", "right"), ("b", "left")):
        assert not fits(both, [call(name, side)]) and not fits(one, [call(name, side)])


def test_a_function_without_parameters_takes_none(plain: Taker) -> None:
    for function in (CLOCK, tool("clock", {"type": "object", "properties": {}})):
        grammar = required_calls([function], 1)
        assert plain.fits(grammar, '[{"name": "clock", "parameters": {}}]')
        assert not plain.fits(grammar, '[{"name": "clock", "parameters": {"zone": 1}}]')


_A, _B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "object", **_A}, ['{"a": 1}', "{}"], ['{"a": 1, "b": 2}']),
        ({"type": "object", **_A, "additionalProperties": True}, ['{"a": 1, "b": "x"}'], []),
        ({"type": "object", **_A, "additionalProperties": {"type": "null"}}, ['{"a": 1, "b": null}'], ['{"b": 2}']),
        ({"type": "object"}, ['{"b": 2}'], []),
        ({"type": "object", "required": ["b"], **_A}, ['{"a": 1, "b": 2}'], ['{"a": 1}']),
        ({"type": "object", "patternProperties": {"^x": {}}}, ['{"x1": 2}'], ['{"y": 2}']),
        ({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": _A}, "type": "object"}, ['{"a": 1}'], ['{"b": "x"}']),
        (
            {"allOf": [{"$ref": "#/$defs/A"}, _B], "$defs": {"A": _A}, "type": "object"},
            ['{"a": 1, "b": 2}'],
            ['{"c": 1}', '{"a": "x"}'],
        ),
        ({"type": "object", **_A, "anyOf": [_B]}, ['{"a": 1, "b": 2}'], ['{"c": 1}', '{"b": "x"}']),
        # Parts of parts; one that is open leaves the whole open.
        (
            {"allOf": [{"allOf": [_A, _B]}, {"properties": {"c": {}}}], "required": ["b"]},
            ['{"b": 1, "c": 2}'],
            ['{"b": 1, "d": 2}', '{"c": 2}'],
        ),
        ({"allOf": [_A, {**_B, "additionalProperties": True}]}, ['{"a": 1, "d": 2}'], ['{"a": "x"}']),
        ({"allOf": [_A, {"patternProperties": {"^x": {}}}]}, ['{"a": 1, "x1": 2}', '{"d": 2}'], ['{"a": "x"}']),
        # The same definition as a part and alone.
        (
            {
                "type": "object",
                "properties": {"one": {"$ref": "#/$defs/AB"}, "two": {"$ref": "#/$defs/B"}},
                "$defs": {"B": _B, "AB": {"allOf": [{"$ref": "#/$defs/B"}, _A]}},
            },
            ['{"one": {"b": 2, "a": 1}, "two": {"b": 1}}'],
            ['{"one": {"c": 1}}'],
        ),
        (
            {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "object", **_B}], "$defs": {"A": {"type": "object", **_A}}},
            ['{"a": 1}', '{"b": 2}'],
            ['{"a": 1, "b": 2}'],
        ),
        ({"type": "array", "items": {"type": "object", **_A}}, ['[{"a": 1}]'], ['[{"b": 1}]']),
        # What is no schema stays as it is.
        ({"const": {"properties": {}}}, ['{"properties": {}}'], ["{}"]),
        ({"type": "object", "properties": {"properties": {"type": "integer"}}}, ['{"properties": 1}'], []),
        ({"type": "string", "format": "password"}, ['"x"'], ["1"]),
        ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, ["[1, 2]"], ["[3]", "[1, 2, 1]"]),
        (
            {"type": "array", "items": {"$ref": "#/$defs/B"}, "uniqueItems": True, "$defs": {"B": {"type": "boolean"}}},
            ["[]", "[true, false]"],
            ["[true, true, true]"],
        ),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, ["[1, 1, 1]"], []),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, ['{"a": null}'], ["[]", '{"b": 1}']),
        (
            {
                "type": "object",
                "propertyNames": {"$ref": "#/$defs/N"},
                "additionalProperties": {"type": "null"},
                "required": ["a"],
                "$defs": {"N": {"enum": ["a", "b"]}},
            },
            ['{"a": null}', '{"a": null, "b": null}'],
            ['{"a": null, "c": null}', '{"b": null}', '{"a": 1}'],
        ),
        ({"type": "object", "propertyNames": {"maxLength": 2}}, ['{"abc": null}'], ["[]"]),
        ({"type": "string", "format": "email", "pattern": "^(?!x).*$"}, ['"a@b.org"'], ['"b"']),
        # What pydantic 2.12 says of a Decimal.
        (
            {"anyOf": [{"type": "number"}, {"pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}, {"type": "null"}]},
            ["1.5", "null"],
            ['"1.5"', '"x"'],
        ),
        # Of formats, what programs read; small models would write digits without end.
        ({"format": "time"}, ['"12:00:59Z"', '"12:00:00.123456+01:00"'], ['"12:00:60Z"', '"12:00:00.1234567Z"']),
        (
            {"format": "date-time"},
            ['"2024-02-29T12:00:00.1Z"', '"1990-01-01T00:00:00-10:00"'],
            ['"0000-01-01T00:00:00Z"', '"2024-02-29T12:00:00.1234567Z"', '"2024-02-29T12:00:60Z"'],
        ),
        ({"format": "date", "type": "string"}, ['"2000-01-31"', '"0476-09-04"'], ['"0000-01-01"']),
        ({"format": "duration"}, ['"P1DT12H"', '"P2W"', '"PT0S"'], ['"P12345D"']),
        ({"format": "email"}, [f'"{"a" * 64}@b.org"'], [f'"{"a" * 65}@b.org"']),
        ({"format": "date-time", "pattern": "^2"}, ['"2024-02-29T12:00:00Z"'], ['"1990-01-01T00:00:00Z"']),
    ],
)  # fmt: skip
def test_schemas_as_clients_write_them(plain: Taker, schema: Any, right: list[str], wrong: list[str]) -> None:
    grammar = schema_grammar(schema, "response_format")
    assert [plain.fits(grammar, text) for text in [*right, *wrong]] == [True] * len(right) + [False] * len(wrong)


def test_a_schema_is_not_changed_where_it_came_from() -> None:
    schema = {"type": "object", **_A}
    assert "additionalProperties" in prepare(schema) and "additionalProperties" not in schema


def test_references_without_end_are_followed_once() -> None:
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(2000)}
    assert prepare({"allOf": [{"$ref": "#/$defs/d0"}, _A], "$defs": chain})["$defs"] == chain
    loop = {"allOf": [{"$ref": "#"}, {"$ref": "#/nothing"}], **_A}
    assert prepare(loop) == loop


_WORDS = [
    "$ref", "$defs", "allOf", "anyOf", "oneOf", "if", "not", "items", "prefixItems", "properties", "patternProperties",
    "propertyNames", "required", "enum", "const", "pattern", "format", "uniqueItems", "maxItems", "dependentSchemas",
    "additionalProperties", "type",
]  # fmt: skip
_LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9),
    st.sampled_from(["#", "#/$defs/a", "#/allOf/0", "#/allOf/999999999999999", "object", "array", "(?=a)", "email"]),
)  # fmt: skip
_ANYTHING = st.recursive(
    _LEAVES,
    lambda below: st.one_of(
        st.lists(below, max_size=3), st.dictionaries(st.sampled_from([*_WORDS, "a"]), below, max_size=4)
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(_WORDS), _ANYTHING, max_size=5))
def test_what_is_no_schema_is_left_to_llguidance(schema: Any) -> None:
    kept = json.dumps(schema)
    prepare(schema)
    assert find_problem(schema, lambda each: "wrong" if each == schema else "") == ("", "wrong")
    assert json.dumps(schema) == kept


def test_the_formats_that_are_held() -> None:
    """llguidance refuses a format that it does not know, unless it reads leniently."""
    for name in (*TEXT_FORMATS, "password"):
        text = llguidance.LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "format": name}))
        assert (llguidance.LLMatcher.validate_grammar(text) == "") == (name in TEXT_FORMATS)


_LOOK = {"type": "string", "pattern": "^(?=a)b$"}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (_LOOK, r"^response_format: a pattern with look-around"),
        ({"type": "object", "properties": {"a": _A, "b": _LOOK}}, r"^response_format: b: a pattern with look-around"),
        (
            {
                "type": "object",
                "properties": {"orders": {"type": "array", "items": {"$ref": "#/$defs/a~1b"}}},
                "$defs": {"a/b": {"anyOf": [{"type": "null"}, {"properties": {"mail": _LOOK}}]}},
            },
            r"^response_format: orders\[\].mail: a pattern with look-around",
        ),
        (
            {"type": "object", "properties": {"n": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}},
            r"^response_format: n: alternatives of oneOf that one value may fit together",
        ),
    ],
)
def test_what_cannot_be_held_names_its_property(plain: Taker, schema: Any, words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        plain.fits(schema_grammar(schema, "response_format"), "")
    parameters = {"type": "object", "properties": {"deep": schema}, "$defs": schema.get("$defs", {})}
    described = [CLOCK, tool("f", parameters)]
    words = words.removeprefix("^response_format: ")
    for grammar in (
        required_calls(described, 1),
        *(answer_grammar(FORMAT, None, plain.text.token_of, form, described) for form in FORMATS.values()),
    ):
        with pytest.raises(GrammarError, match=rf"^tools\[1\]\.function\.parameters: deep\.?{words}|deep: {words}"):
            plain.fits(grammar, "")


# Requests -------------------------------------------------------------------------------------------------

_CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
_JSON = {"response_format": {"type": "json_object"}}


def test_a_request_with_tools_and_a_format() -> None:
    for said, content, calls in ((_CALL, None, 1), ('{"x": 1}', '{"x": 1}', 0)):
        engine = FakeEngine(said)
        (choice,) = chat(engine, {"tools": [CLOCK], **_JSON}).json["choices"]
        assert (choice["message"]["content"], len(choice["message"].get("tool_calls", ()))) == (content, calls)
        grammar = engine.requests[0].grammar
        assert grammar is not None and grammar.kind == "lark" and dict(grammar.parts)["wanted"].kind == "json_object"
        events = chat(engine, {"tools": [CLOCK], "stream": True, **_JSON}).events
        parts = [choice["delta"] for event in events for choice in event["choices"]]
        assert "".join(part.get("content") or "" for part in parts) == (content or "")
        assert sum(len(part.get("tool_calls", ())) for part in parts) == calls
        flat = {"type": "function", "name": "clock", "parameters": None}
        value = {"input": "x", "tools": [flat], "text": {"format": {"type": "json_object"}}}
        kinds = [item["type"] for item in post(engine, "/v1/responses", value).json["output"]]
        assert kinds == (["function_call"] if calls else ["message"])
        assert engine.requests[-1].grammar == grammar


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "clock"}}])
def test_a_call_that_is_required_beside_a_format_is_made(choice: Any) -> None:
    said = '[{"name": "clock", "parameters": {}}]' if choice == "required" else "{}"
    engine = FakeEngine(said)
    (made,) = chat(engine, {"tools": [CLOCK], "tool_choice": choice, **_JSON}).json["choices"]
    assert made["message"]["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"}
    assert engine.requests[0].grammar is not None and engine.requests[0].grammar.kind == "json_schema"


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}])
def test_arguments_are_an_object(choice: Any) -> None:
    """OpenAI refuses others too: clients read arguments as an object, and a call without one was lost."""
    for kind, status in (
        ("array", 400),
        (["string", "null"], 400),
        (5, 400),
        ("object", 200),
        (["object", "null"], 200),
    ):
        answer = chat(FakeEngine("{}"), {"tools": [CLOCK, tool("f", {"type": kind})], "tool_choice": choice})
        assert answer.status == status, (kind, answer.json)
        if status == 400:
            assert answer.json["error"]["param"] == "tools[1].function.parameters"


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "clock"}}, None])
@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_come_before_what_a_grammar_holds(choice: Any, stream: bool) -> None:
    said = {"auto": _CALL, "required": '[{"name": "clock", "parameters": {}}]'}.get(str(choice), "{}")
    tokenizer = ByteTokenizer(TEMPLATE + "{# <think> #}")
    engine = FakeEngine(f"<think>Hm.</think>\n\n{said}")
    value = {**_JSON, "stream": stream, **({} if choice is None else {"tools": [CLOCK], "tool_choice": choice})}
    answer = chat(engine, value, tokenizer=tokenizer)
    if stream:
        parts = [choice["delta"] for event in answer.events for choice in event["choices"]]
        thoughts = "".join(part.get("reasoning_content", "") for part in parts)
        made: list[dict[str, Any]] = []
        for part in parts:
            for call in part.get("tool_calls", ()):
                add_call(made, call)
        calls = [call["function"] for call in made]
        content = "".join(part.get("content") or "" for part in parts)
    else:
        message = answer.json["choices"][0]["message"]
        thoughts, content = message["reasoning_content"], message["content"] or ""
        calls = [call["function"] for call in message.get("tool_calls", ())]
    assert thoughts == "Hm."
    assert (content, calls) == (("{}", []) if choice is None else ("", [{"name": "clock", "arguments": "{}"}]))


def test_a_required_call_is_one_unless_several_are_asked_for() -> None:
    for parallel, most in ((None, 1), (False, 1), (True, None)):
        engine = FakeEngine('[{"name": "clock", "parameters": {}}]')
        more = {} if parallel is None else {"parallel_tool_calls": parallel}
        assert chat(engine, {"tools": [CLOCK], "tool_choice": "required", **more}).status == 200
        assert engine.requests[0].grammar is not None
        assert json.loads(engine.requests[0].grammar.text).get("maxItems") == most
