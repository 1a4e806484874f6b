# SPDX-License-Identifier: Apache-2.0
"""Structured outputs: from the fields of a request to the grammar of its whole answer.

The answer may begin with the model's reasoning, and may be tool calls instead of what the request asks for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from anyaccel.serve.interface import Grammar
from anyaccel.serve.json_schema import EMPTY_OBJECT, prepare
from anyaccel.serve.protocol import limits
from anyaccel.serve.protocol.common import ResponseFormat, SamplingFields, StructuredOutputs, Tool
from anyaccel.serve.protocol.errors import wrong
from anyaccel.serve.requests.reasoning import ReasoningFormat
from anyaccel.serve.requests.tools.format import Function, Rules, ToolFormat, lark_text

_BUDGET = "thinking_token_budget"


# Fields of a request --------------------------------------------------------------------------------------


def request_grammar(request: SamplingFields) -> Grammar | None:
    """The one constraint that a request has, if it has any.

    Raises:
        ApiError: it has several, or one that cannot be used.
    """
    guided = StructuredOutputs.model_construct(
        json_value=request.guided_json,
        regex=request.guided_regex,
        choice=request.guided_choice,
        grammar=request.guided_grammar,
    )
    found = [
        *_outputs_grammars(request.structured_outputs, "structured_outputs."),
        *_outputs_grammars(guided, "guided_"),
        *([text_grammar(request.grammar, "grammar")] if request.grammar is not None else []),
    ]
    response_format = response_format_grammar(request.response_format)
    if response_format is not None:
        found.append(response_format)
    if len(found) > 1:
        raise wrong(
            "structured_outputs" if response_format is None else "response_format",
            "only one of response_format, structured_outputs, guided_* and grammar can say what an answer looks like",
        )
    return found[0] if found else None


def _outputs_grammars(outputs: StructuredOutputs | None, prefix: str) -> Iterator[Grammar]:
    if outputs is None:
        return
    if outputs.json_value is not None:
        yield schema_grammar(outputs.json_value, f"{prefix}json")
    if outputs.json_object:
        yield Grammar("json_object", param=f"{prefix}json_object")
    if outputs.regex is not None:
        yield Grammar("regex", outputs.regex, f"{prefix}regex")
    if outputs.choice is not None:
        yield choice_grammar(outputs.choice, f"{prefix}choice")
    if outputs.grammar is not None:
        yield text_grammar(outputs.grammar, f"{prefix}grammar")


def response_format_grammar(wanted: ResponseFormat | None, param: str = "response_format") -> Grammar | None:
    """The grammar of OpenAI's field `response_format`.

    Raises:
        ApiError: json_schema is missing or cannot be used.
    """
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object" and wanted.object_schema is not None:
        return schema_grammar(wanted.object_schema, f"{param}.schema")
    if wanted.type == "json_object":
        return Grammar("json_object", param=param)
    if wanted.json_schema is None or wanted.json_schema.json_schema is None:
        raise wrong(f"{param}.json_schema", "is required, with the schema in its field schema")
    return schema_grammar(wanted.json_schema.json_schema, f"{param}.json_schema.schema")


def text_grammar(text: str, param: str) -> Grammar:
    """A grammar in llguidance's Lark, or in llama.cpp's GBNF, whose rules are written with ::=.

    Raises:
        ApiError: it is no GBNF.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    if is_lark_syntax(text) or "::=" not in text:
        return Grammar("lark", text, param)
    try:
        return Grammar("lark", gbnf_to_lark(text), param)
    except RecursionError:
        raise wrong(param, "the grammar is nested too deep") from None
    except Exception as error:  # noqa: BLE001  the converter raises some as such
        raise wrong(param, f"no GBNF grammar ({' '.join(str(error).split())[:200]})") from None


def choice_grammar(choices: Sequence[str], param: str) -> Grammar:
    """A grammar for exactly one of these texts."""
    return Grammar("lark", "start: " + " | ".join(map(lark_text, choices)), param)


def schema_grammar(schema: Any, param: str) -> Grammar:
    """A grammar of a JSON schema from a request.

    Raises:
        ApiError: it is too large, too deep, or refers to something outside itself.
    """
    if isinstance(schema, str):
        if len(schema) > limits.MOST_SCHEMA:
            raise wrong(param, f"the schema has more than {limits.MOST_SCHEMA} characters")
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise wrong(param, f"the schema is no JSON ({error})") from None
    if not isinstance(schema, Mapping | bool):
        raise wrong(param, "the schema must be an object")
    for depth, key, value in _walk(schema):
        if depth > limits.MOST_DEPTH:
            raise wrong(param, f"the schema is nested more than {limits.MOST_DEPTH} deep")
        # A reference to another document would have to be fetched.
        if key == "$ref" and isinstance(value, str) and not value.startswith("#"):
            raise wrong(param, "$ref must point into the schema itself, as in #/$defs/name")
    text = json.dumps(prepare(schema), ensure_ascii=False)
    if len(text) > limits.MOST_SCHEMA:
        raise wrong(param, f"the schema has more than {limits.MOST_SCHEMA} characters")
    return Grammar("json_schema", text, param)


def _walk(value: Any) -> Iterator[tuple[int, str | None, Any]]:
    """Each value with its depth and its name, without recursion, as a client chooses the depth."""
    todo: list[tuple[int, str | None, Any]] = [(0, None, value)]
    while todo:
        depth, key, value = todo.pop()
        yield depth, key, value
        if isinstance(value, Mapping):
            todo += [(depth + 1, name, each) for name, each in value.items()]
        elif isinstance(value, list):
            todo += [(depth + 1, None, each) for each in value]


def nesting_depth(value: Any) -> int:
    """The depth to which objects and lists are nested."""
    return max(depth for depth, _, _ in _walk(value))


# Tool calls -----------------------------------------------------------------------------------------------


def callable_functions(tools: Sequence[Tool]) -> list[Function]:
    """The functions that may be called; one without parameters has none, as with OpenAI.

    Raises:
        ApiError: a schema cannot be used, or two tools have one name.
    """
    found: dict[str, Function] = {}
    for place, tool in enumerate(tools):
        name, schema = tool.function.name, tool.function.parameters or EMPTY_OBJECT
        param = f"tools[{place}].function.parameters"
        if tool.custom is not None and tool.custom.format is not None:
            param = f"tools[{place}].custom.format.grammar.definition"
        if name in found:
            raise wrong(f"tools[{place}]", f"another tool has the name {name!r} already")
        kind = schema.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise wrong(
                param, f"type is {json.dumps(kind)[:40]}: arguments are an object; put it into one of its properties"
            )
        found[name] = Function(name, schema_grammar(schema, param))
    return [*found.values()]


# The whole answer -----------------------------------------------------------------------------------------


def answer_grammar(
    wanted: Grammar | None,
    token_id: Callable[[str], int | None],
    *,
    thoughts: ReasoningFormat | None = None,
    is_open: bool = False,
    budget: int | None = None,
    form: ToolFormat | None = None,
    functions: Sequence[Function] = (),
    several: bool = True,
) -> Grammar | None:
    """What a request asks for, after the model's thoughts and beside calls in the model's own format.

    Args:
        wanted: None: the answer consists of calls, or without `form` of anything.
        token_id: see `Rules`.
        thoughts: None: the model writes none, or the prompt is after them.
        is_open: whether the prompt has opened the thoughts.
        budget: the most tokens that the thoughts may have.
        form: the format of the calls that the answer may be instead; None: it may be none.

    Raises:
        ApiError: thoughts cannot be bounded.
    """
    if thoughts is None and form is None:
        return wanted
    rules = Rules(token_id)
    before = ""
    if thoughts is not None:
        before = _thoughts(rules, thoughts, is_open, budget)
    answers = []
    if wanted is not None:
        opening, closing = thoughts.answer if thoughts else ("", "")
        begin = rules.text(f"{opening}\n") if opening else ""
        end = rules.text(f"\n{closing}") if closing else ""
        inner = rules.part(wanted)
        if begin and thoughts is not None and not thoughts.is_answer_marked:
            answers.append(inner)
        answers.append(f"{begin} {inner} {end}")
    if form is not None:
        answers.append(form.lark(rules, functions, several))
    if not answers:
        answers.append(_anything(rules, thoughts, is_open))
    start = f"start: {before} ({' | '.join(answers)})"
    param = "tools" if wanted is None else wanted.param
    return Grammar("lark", "\n".join([start, *rules.lines]), param, tuple(rules.parts))


def _thoughts(rules: Rules, form: ReasoningFormat, is_open: bool, budget: int | None) -> str:
    """The rule for thoughts at the beginning of an answer."""
    end = form.end[0]
    if budget is None:
        text = rules.until(end)
    elif not rules.ends_with_token(end):
        raise wrong(_BUDGET, f"this model has no token for {end}, so its thoughts cannot be bounded")
    else:
        text = f"{rules.rule('ANY', f'[max_tokens={budget}]') if budget else ''} {rules.mark(end)}"
    after = f" {rules.mark(form.after)}" if form.after else ""
    inside = rules.rule(f"{text}{after} LINES")
    return inside if is_open else f"({rules.mark(form.begin[0])} {inside})?"


def _anything(rules: Rules, form: ReasoningFormat | None, is_open: bool) -> str:
    """Any answer that does not begin with thoughts."""
    if is_open or form is None:
        return "<[*]>*"
    begin = rules.token_id(form.begin[0])
    if begin is None:
        raise wrong(_BUDGET, f"this model has no token for {form.begin[0]}, so its thoughts cannot be bounded")
    return f"(<[^{begin}]> <[*]>*)?"
