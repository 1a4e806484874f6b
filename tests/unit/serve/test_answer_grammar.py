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
from anyaccel.serve.protocol.common import Tool
from anyaccel.serve.protocol.errors import ApiError
from anyaccel.serve.requests.reasoning import REASONING_FORMATS, ReasoningFormat
from anyaccel.serve.requests.structured import answer_grammar, callable_functions, schema_grammar
from anyaccel.serve.requests.tools.formats import FORMATS
from serve_fakes import TEMPLATE, ByteTokenizer, FakeEngine, chat, post
from tool_cases import WRITTEN

llguidance = pytest.importorskip("llguidance")

THINK = REASONING_FORMATS["think"]
HARMONY = REASONING_FORMATS["harmony"]
MARKS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>", "</parameter>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<seed:tool_call>", "</seed:tool_call>",
    "<|tool_call_begin|>", "<|tool_call_end|>", "<｜tool▁sep｜>", "<｜tool▁calls▁begin｜>", "<|channel|>",
    "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", '<|"|>', "<escape>", "<|START_ACTION|>", "<|/tool_call|>",
    "｜DSML｜",
]  # fmt: skip


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

DETAILS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"$ref": "#/$defs/D"},
        "unit": {"enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "days"],
    "$defs": {"D": {"type": "integer"}},
}


def calls_of(form: str, *functions: Any, wanted: Grammar | None = None, several: bool = False, **more: Any) -> Any:
    """The grammar of answers that call these functions, or are what is wanted."""

    def make(taker: Taker) -> Grammar:
        found = answer_grammar(
            wanted,
            taker.text.token_of,
            form=FORMATS[form],
            functions=callable_functions([Tool.model_validate(each) for each in functions]),
            several=several,
            **more,
        )
        assert found is not None
        return found

    return make


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("thoughts", [None, False, True])
def test_tools_can_be_called_beside_a_format(taker: Taker, form: str, thoughts: bool | None) -> None:
    mark = FORMATS[form].is_messages
    think: ReasoningFormat | None = HARMONY if mark else THINK
    more = {} if thoughts is None else {"thoughts": think, "is_open": thoughts}
    grammar = calls_of(form, WEATHER, CLOCK, wanted=FORMAT, **more)(taker)
    right = WRITTEN[form][0].removesuffix("<|call|>")  # a token that ends the answer
    assert think is not None
    end = f"Hm, {{1}}.{think.end[0]}{think.after}" + ("" if mark else "\n\n")
    begin = end if thoughts else ""
    answer = think.answer[0] if mark and more else ""
    for text, fits in (
        (f'{answer}{{"x": 1}}', True),
        (f'{answer}{{"y": 1}}', False),
        ("Hello", False),
        (right, True),
        (right.replace("city", "town"), False),
        (right.replace("weather", "wether"), False),
    ):
        assert taker.fits(grammar, begin + text) == fits, text
    if not thoughts:
        assert taker.fits(grammar, f"{think.begin[0]}{end}{right}") == (thoughts is False)


@pytest.mark.parametrize("form", FORMATS)
def test_calls_that_are_required(taker: Taker, form: str) -> None:
    one, two = (text.replace("<|call|>", "") for text in WRITTEN[form])
    grammar = calls_of(form, WEATHER, CLOCK)(taker)
    assert taker.fits(grammar, one) and not taker.fits(grammar, "Hello") and not taker.fits(grammar, two)
    if form not in ("harmony", "phi-4"):  # a call ends an answer; the other form is of another version
        assert taker.fits(calls_of(form, WEATHER, CLOCK, several=True)(taker), two)
    # Only the function that is named.
    assert not taker.fits(calls_of(form, CLOCK)(taker), one)


_DETAILED = {
    "qwen3-coder": "<function=weather>\n<parameter=city>\na\n<b>\n</parameter>\n<parameter=days>\n{}\n</parameter>\n"
    '<parameter=unit>\nC\n</parameter>\n<parameter=tags>\n["x"]\n</parameter>\n</function>',
    "glm-4.5": "<tool_call>weather<arg_key>city</arg_key><arg_value>a\n<b></arg_value><arg_key>days</arg_key>"
    '<arg_value>{}</arg_value><arg_key>unit</arg_key><arg_value>C</arg_value><arg_key>tags</arg_key><arg_value>["x"]</arg_value>'
    "</tool_call>",
    "deepseek-v3.2": '<｜DSML｜function_calls><｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">a\n<b></｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">{}</｜DSML｜parameter>'
    '<｜DSML｜parameter name="unit" string="true">C</｜DSML｜parameter>'
    '<｜DSML｜parameter name="tags" string="false">["x"]</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>',
    "gemma": "<start_function_call>call:weather{{city:<escape>a\n<b><escape>,days:{},unit:<escape>C<escape>,"
    "tags:[<escape>x<escape>]}}<end_function_call>",
    "pythonic": '[weather(city="a\\n<b>", days={}, unit="C", tags=["x"])]',
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{{"city": "a\\n<b>", "days": {}, "unit": "C", "tags": ["x"]}}<|tool_call_end|><|tool_calls_section_end|>',
}


@pytest.mark.parametrize("form", _DETAILED)
def test_arguments_fit_their_schema_in_each_kind_of_format(taker: Taker, form: str) -> None:
    grammar = calls_of(form, tool("weather", DETAILS))(taker)
    right = _DETAILED[form].format("3")
    assert taker.fits(grammar, right)
    assert not taker.fits(grammar, _DETAILED[form].format('"x"')) and not taker.fits(grammar, right.replace("C", "K"))
    # What is not required may be missing, and nothing may be that the schema has not.
    optional = calls_of(form, tool("weather", {**DETAILS, "required": []}))(taker)
    assert taker.fits(optional, right)
    for name in DETAILS["properties"]:
        fewer = {key: value for key, value in DETAILS["properties"].items() if key != name}
        assert not taker.fits(calls_of(form, tool("weather", {**DETAILS, "properties": fewer}))(taker), right)


@pytest.mark.parametrize("thoughts", [False, True])
def test_thoughts_have_a_budget(taker: Taker, thoughts: bool) -> None:
    def grammar(budget: int, **more: Any) -> Grammar:
        found = answer_grammar(
            more.pop("wanted", None), taker.text.token_of, thoughts=THINK, is_open=thoughts, budget=budget, **more
        )
        assert found is not None
        return found

    if taker.text.token_of("</think>") is None:
        with pytest.raises(ApiError, match="no token for </think>"):
            grammar(3)
        return
    begin = "" if thoughts else "<think>"
    for budget, text, fits in (
        (3, "abc</think>Yes.<tool_call>", True),
        (3, "</think>", True),
        (3, "abcd</think>Yes.", False),
        (0, "</think>Yes.", True),
        (0, "a</think>Yes.", False),
    ):
        assert taker.fits(grammar(budget), begin + text) == fits, text
    assert thoughts or taker.fits(grammar(0), "Yes.")
    assert taker.fits(grammar(3, wanted=FORMAT), f'{begin}abc</think>\n{{"x": 1}}')
    assert not taker.fits(grammar(3, wanted=FORMAT), f'{begin}abcd</think>\n{{"x": 1}}')


def test_marks_around_an_answer_are_allowed(taker: Taker) -> None:
    grammar = answer_grammar(FORMAT, taker.text.token_of, thoughts=REASONING_FORMATS["hunyuan"])
    assert grammar is not None
    for text in ('{"x": 1}', '<answer>\n{"x": 1}\n</answer>', '<think>Hm.</think>\n<answer>{"x": 1}</answer>'):
        assert taker.fits(grammar, text)


def test_mistrals_newer_calls(taker: Taker) -> None:
    grammar = calls_of("mistral", WEATHER, CLOCK, wanted=FORMAT, several=True)(taker)
    assert taker.fits(grammar, '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]clock{}')
    assert not taker.fits(grammar, '[TOOL_CALLS]clock[ARGS]{"city": "Oslo"}')


def test_any_kind_of_format_stands_beside_calls(taker: Taker) -> None:
    for wanted, text in (
        (Grammar("regex", "a/b+"), "a/bb"),
        (Grammar("lark", "start: word\nword: /q+/"), "qq"),
        (Grammar("json_object"), '{"a": [1]}'),
    ):
        grammar = calls_of("hermes", CLOCK, wanted=wanted, thoughts=THINK)(taker)
        assert taker.fits(grammar, text) and taker.fits(grammar, f"<think>x</think>\n{text}")
        assert taker.fits(grammar, '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>')
        assert not taker.fits(grammar, f"{text}!")


@pytest.mark.parametrize("form", ["nemotron", "hermes", "gemma", "qwen3-coder", "pythonic"])
def test_parameters_point_to_their_own_definitions(plain: Taker, form: str) -> None:
    def sided(name: str, side: str) -> dict[str, Any]:
        node = {"type": "object", "properties": {"next": {"$ref": "#"}, "side": {"$ref": "#/$defs/Side"}}}
        return tool(name, {**node, "$defs": {"Side": {"enum": [side]}}})

    def call(name: str, side: str) -> str:
        inner = json.dumps({"side": side})
        return {
            "nemotron": f'<TOOLCALL>[{{"name": "{name}", "arguments": {{"next": {inner}}}}}]</TOOLCALL>',
            "hermes": f'<tool_call>{{"name": "{name}", "arguments": {{"next": {inner}}}}}</tool_call>',
            "gemma": f"<start_function_call>call:{name}{{next:{{side:<escape>{side}<escape>}}}}<end_function_call>",
            "qwen3-coder": f"<function={name}>\n<parameter=next>\n{inner}\n</parameter>\n</function>",
            "pythonic": f"[{name}(next={inner})]",
        }[form]

    both, one = [sided("a", "left"), sided("b", "right")], [sided("a", "left")]
    assert plain.fits(calls_of(form, *both)(plain), call("b", "right"))
    assert plain.fits(calls_of(form, *one)(plain), call("a", "left"))
    for name, side in (("a", "right"), ("b", "left")):
        assert not plain.fits(calls_of(form, *both)(plain), call(name, side))


def test_a_function_without_parameters_takes_none(plain: Taker) -> None:
    for function in (tool("clock"), tool("clock", {"type": "object", "properties": {}})):
        grammar = calls_of("hermes", function)(plain)
        assert plain.fits(grammar, '<tool_call>{"name": "clock", "arguments": {}}</tool_call>')
        assert not plain.fits(grammar, '<tool_call>{"name": "clock", "arguments": {"zone": 1}}</tool_call>')


def test_parameters_of_any_name(plain: Taker) -> None:
    grammar = calls_of("qwen3-coder", tool("f", {"type": "object"}))(plain)
    assert plain.fits(
        grammar, "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n</function>"
    )


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
    for form in ("hermes", "nemotron", "kimi-k2", "mistral", "pythonic"):  # the others write texts without quotes
        with pytest.raises(GrammarError, match=rf"^tools\[1\]\.function\.parameters: deep\.?{words}|deep: {words}"):
            plain.fits(calls_of(form, *described)(plain), "")


# Requests -------------------------------------------------------------------------------------------------

_CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
_JSON = {"response_format": {"type": "json_object"}}


def test_a_request_with_tools_and_a_format() -> None:
    for said, content, calls in ((_CALL, None, 1), ('{"x": 1}', '{"x": 1}', 0)):
        engine = FakeEngine(said)
        (choice,) = chat(engine, {"tools": [CLOCK], **_JSON}).json["choices"]
        assert (choice["message"]["content"], len(choice["message"].get("tool_calls", ()))) == (content, calls)
        grammar = engine.requests[0].grammar
        assert grammar is not None and grammar.kind == "lark" and grammar.parts[0][1].kind == "json_object"
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
    engine = FakeEngine(_CALL)
    (made,) = chat(engine, {"tools": [CLOCK], "tool_choice": choice, **_JSON}).json["choices"]
    assert made["message"]["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"}
    grammar = engine.requests[0].grammar
    assert grammar is not None and [part.kind for _, part in grammar.parts] == ["json_schema"]


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
    said = "{}" if choice is None else _CALL
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
    for parallel, several in ((None, False), (False, False), (True, True)):
        engine = FakeEngine(_CALL)
        more = {} if parallel is None else {"parallel_tool_calls": parallel}
        assert chat(engine, {"tools": [CLOCK], "tool_choice": "required", **more}).status == 200
        grammar = engine.requests[0].grammar
        assert grammar is not None and (")*" in grammar.text) == several


def test_a_budget_of_thoughts_is_held() -> None:
    class Thinker(ByteTokenizer):
        def token_of(self, text: str) -> int | None:
            return {"<think>": 10, "</think>": 11}.get(text)

    engine = FakeEngine("<think>Hm.</think>Yes.")
    tokenizer = Thinker(TEMPLATE + "{# <think> #}")
    assert chat(engine, {"thinking_token_budget": 7, "tools": [CLOCK]}, tokenizer=tokenizer).status == 200
    grammar = engine.requests[0].grammar
    assert grammar is not None and "[max_tokens=7]: ANY" in grammar.text and "<[^10]>" in grammar.text
    answer = chat(engine, {"thinking_token_budget": 7})
    assert (answer.status, answer.json["error"]["param"]) == (400, "thinking_token_budget")
