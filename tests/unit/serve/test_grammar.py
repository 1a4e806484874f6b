# SPDX-License-Identifier: Apache-2.0
"""Answers that must look like something, whatever a random model would rather say."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from anyaccel.errors import UsageError
from anyaccel.serve.engine.grammar import GrammarCompiler
from anyaccel.serve.interface import Grammar, GrammarError, SamplingParams
from anyaccel.serve.requests.structured import choice_grammar
from serving import VOCAB, answer, engine, native

pytest.importorskip("transformers")

pytestmark = pytest.mark.anyio
llguidance = pytest.importorskip("llguidance")

_END = 2


class Text:
    """A tokenizer of printable ASCII, a character a token."""

    end_tokens = (_END,)

    def __init__(self) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        characters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
        vocabulary = {name: number for number, name in enumerate(["<a>", "<b>", "<end>", *characters])}
        self._tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens(["<a>", "<b>", "<end>"])

    def text(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens)
        return text


@pytest.fixture(scope="module")
def llama() -> Any:
    return native()


_SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "maximum": 9}, "kind": {"enum": ["a", "b"]}},
    "required": ["size", "kind"],
    "additionalProperties": False,
}


async def test_constrained_answers_beside_free_ones(llama: Any) -> None:
    tokenizer = Text()
    grammars = [
        Grammar("regex", "(yes|no){2}[0-9]{3}"),
        Grammar("json_schema", json.dumps(_SCHEMA)),
        Grammar("lark", 'start: "ab" | "ac"'),
        None,
        Grammar("regex", "x{5}"),
    ]

    async with engine(llama, tokenizer) as made:
        answers = await asyncio.gather(
            *(
                answer(made, [40, 41, 42], 200, SamplingParams(seed=seed), grammar=grammar, ends=frozenset({_END}))
                for seed in range(3)
                for grammar in grammars
            )
        )
    for number, found in enumerate(answers):
        kind = number % 5
        if kind == 3:
            continue
        assert found.finish == "stop"
        text = tokenizer.text([token for token in found.tokens if token != _END])
        if kind == 1:
            value = json.loads(text)
            assert value.keys() == {"size", "kind"} and value["size"] <= 9 and value["kind"] in "ab"
        else:
            assert re.fullmatch(["(yes|no){2}[0-9]{3}", "", "ab|ac", "", "x{5}"][kind], text)


async def test_an_object_of_any_kind(llama: Any) -> None:
    tokenizer = Text()

    async with engine(llama, tokenizer) as made:
        # Short: a random model would go on for ever.
        sampling = SamplingParams(temperature=0.0, logit_bias={96: 20.0, 4: 8.0})
        found = await answer(made, [40], 60, sampling, grammar=Grammar("json_object"), ends=frozenset({_END}))
    assert tokenizer.text(found.tokens[:1]) == "{"
    assert max(found.tokens) < VOCAB


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("regex", "(unclosed"), "grammar: "),
        (Grammar("json_schema", "{"), "grammar: "),
        (Grammar("json_schema", "3"), "grammar: the schema must be an object"),
        (Grammar("json_schema", '{"type": "nothing"}'), "grammar: "),
        (Grammar("lark", "nonsense"), "grammar: "),
        (Grammar("regex", "x" * (1 << 19)), "grammar: 524288 bytes are more than"),
        (Grammar("json_schema", '{"const": "\ud800"}', "guided_json"), "guided_json: it has an unpaired surrogate"),
        # What nothing fits: the likeliest token would have been the end of the text, and the answer "".
        (Grammar("json_schema", '{"$ref": "#"}', "guided_json"), "guided_json: nothing fits it"),
        (Grammar("lark", "start: T\nT: /a+/ & /b+/"), "grammar: nothing fits it"),
    ],
)
async def test_a_wrong_grammar_is_refused(llama: Any, grammar: Grammar, words: str) -> None:
    async with engine(llama, Text()) as made:
        with pytest.raises(UsageError, match=words):
            await answer(made, [40], 5, grammar=grammar)


@pytest.mark.parametrize("most", [2, 20])
async def test_an_answer_whose_grammar_leads_nowhere_is_an_error(llama: Any, most: int) -> None:
    async with engine(llama, Text()) as made:
        grammar = Grammar("lark", 'start: "q" T\nT: /a+/ & /b+/', "guided_grammar")
        with pytest.raises(GrammarError, match="guided_grammar: nothing fits it after what the answer has"):
            await answer(made, [40], most, grammar=grammar, ends=frozenset({_END}))


async def test_an_expression_that_grows_too_large_is_the_requests_mistake(llama: Any) -> None:
    async with engine(llama, Text()) as made:
        grammar = Grammar("regex", "(a{1000}){1000}", "guided_regex")
        with pytest.raises(GrammarError, match="guided_regex: lexer error: too many expressions"):
            await answer(made, [40], 5, grammar=grammar, ends=frozenset({_END}))
        assert len((await answer(made, [40], 5, ignore_end=True)).tokens) == 5


async def test_blanks_in_json_have_an_end() -> None:
    grammars = GrammarCompiler("", Text())
    grammars.vocabulary, grammars.ends = VOCAB, frozenset({_END})
    try:
        matcher = (await grammars.constraint(Grammar("json_object"))).matcher
        brace, space, line = 3 + ord("{") - 33, 97, 98
        assert matcher.try_consume_tokens([brace, line, *[space] * 40]) == 42
        assert matcher.try_consume_tokens([line]) == 0
    finally:
        grammars.close()


def test_every_choice_can_be_written() -> None:
    choices = [chr(code) for code in (*range(32), *range(0x7F, 0xA1), 0x2028, 0xFEFF, 0x1F600)] + [
        '"',
        "\\",
        "%",
        "/a/",
    ]
    assert (
        llguidance.LLMatcher.validate_grammar(
            llguidance.LLMatcher.grammar_from_lark(choice_grammar(choices, "guided_choice").text)
        )
        == ""
    )
