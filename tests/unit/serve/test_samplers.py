# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's samplers and grammars: what a request sends, what the engine gets, and what comes of it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

import serving
from anyaccel.serve.interface import SamplingParams
from anyaccel.serve.requests.tokenizer import ServerTokenizer
from serve_fakes import ByteTokenizer, FakeEngine, chat, post


def test_fields_of_dry_and_xtc_reach_the_engine_with_llama_cpps_defaults() -> None:
    engine = FakeEngine()
    assert chat(engine, {"dry_multiplier": 0.8, "xtc_probability": 0.5}).status == 200
    got = engine.requests[0].sampling
    assert (got.dry_multiplier, got.dry_base, got.dry_allowed_length, got.dry_last_n) == (0.8, 1.75, 2, -1)
    assert sorted(got.dry_breakers) == sorted([ord(mark)] for mark in '\n:"*')
    assert (got.xtc_probability, got.xtc_threshold) == (0.5, 0.1)
    fields = {"dry_multiplier": 1, "dry_base": 2, "dry_allowed_length": 3, "dry_penalty_last_n": 64}
    breakers = {"dry_sequence_breakers": ["ab"], "xtc_threshold": 0.2}
    assert chat(engine, {**fields, **breakers}).status == 200
    got = engine.requests[1].sampling
    assert (got.dry_multiplier, got.dry_base, got.dry_allowed_length, got.dry_last_n) == (1, 2, 3, 64)
    assert got.dry_breakers == [[ord("a"), ord("b")]] and got.xtc_threshold == 0.2
    assert chat(engine).status == 200
    assert engine.requests[2].sampling.dry_breakers == () and engine.requests[2].sampling.dry_multiplier == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("dry_multiplier", -1), ("dry_base", 0.5), ("dry_penalty_last_n", -2), ("xtc_probability", 1.5)],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    answer = chat(FakeEngine(), {name: value})
    assert answer.status == 400 and answer.json["error"]["param"] == name


class _Pieces(ByteTokenizer):
    """A vocabulary of longer tokens."""

    words = ("a", "b", "ab", "xa", "xabx", "bx", "c")

    def piece(self, token: int) -> str | None:
        return self.words[token] if token < len(self.words) else None

    def decode(self, tokens: list[int], special: bool = False) -> str:
        return "".join(self.words[token] for token in tokens)

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [self.words.index(mark) for mark in text]


def test_a_breaker_is_found_in_and_across_tokens() -> None:
    found = ServerTokenizer(_Pieces()).breakers(("ab",), 10)
    assert found == [[0, 1], [2], [3, 1], [4]]  # a + b, ab, xa + b, and the one that has it inside


GBNF = """root ::= answer
answer ::= ("yes" | "no") "!"? # one of them
"""


def test_a_grammar_in_gbnf_is_that_in_lark() -> None:
    engine = FakeEngine()
    lark = 'start: ("yes" | "no") "!"?'
    for value in ({"grammar": GBNF}, {"guided_grammar": GBNF}, {"structured_outputs": {"grammar": GBNF}}):
        assert chat(engine, value).status == 200
        grammar = engine.requests[-1].grammar
        assert grammar is not None and grammar.kind == "lark" and "start:" in grammar.text and "::=" not in grammar.text
    assert chat(engine, {"grammar": lark}).status == 200
    grammar = engine.requests[-1].grammar
    assert grammar is not None and grammar.text == lark


@pytest.mark.parametrize("text", ["root ::= (", "root ::= other", "root ::= " + '("a" ' * 20_000])
def test_what_is_no_gbnf_is_said(text: str) -> None:
    answer = chat(FakeEngine(), {"grammar": text})
    assert answer.status == 400 and answer.json["error"]["param"] == "grammar", answer.json


def test_two_grammars_are_refused() -> None:
    value = {"prompt": "x", "grammar": GBNF, "guided_regex": "a+"}
    answer = post(FakeEngine(), "/v1/completions", value)
    assert answer.status == 400 and "only one of" in answer.json["error"]["message"]


def test_dry_ends_a_repetition_and_a_breaker_lets_it_go_on() -> None:
    async def ask() -> tuple[list[int], list[int], list[int]]:
        async with serving.engine(serving.native()) as made:
            prompt = serving.prompt_of(random.Random(3), 6) * 4
            plain = await serving.answer(made, prompt, 40)
            # The bias makes the model repeat its prompt, which then only DRY can prevent.
            sampling = replace(serving.GREEDY, logit_bias={prompt[0]: 50.0})
            biased = await serving.answer(made, prompt, 1, sampling)
            dry = replace(sampling, dry_multiplier=5.0, dry_base=2.0)
            ended = await serving.answer(made, prompt, 1, dry)
            broken = await serving.answer(made, prompt, 1, replace(dry, dry_breakers=[[prompt[-1]]]))
            assert biased.tokens == [prompt[0]] and plain.tokens
            return biased.tokens, ended.tokens, broken.tokens

    biased, ended, broken = asyncio.run(ask())
    assert ended != biased and broken == biased


def test_xtc_leaves_out_the_likeliest_token() -> None:
    async def ask() -> tuple[set[int], int]:
        async with serving.engine(serving.native()) as made:
            prompt = serving.prompt_of(random.Random(5), 10)
            (first,) = (await serving.answer(made, prompt, 1)).tokens
            bias = {first: 3.0, (first + 1) % serving.VOCAB: 12.0, (first + 2) % serving.VOCAB: 12.0}
            (likeliest,) = (
                await serving.answer(made, prompt, 1, SamplingParams(temperature=0, logit_bias=bias))
            ).tokens
            found = set()
            for seed in range(20):
                sampling = SamplingParams(logit_bias=bias, seed=seed, xtc_probability=1.0, xtc_threshold=0.02)
                found |= set((await serving.answer(made, prompt, 1, sampling)).tokens)
            return found, likeliest

    found, likeliest = asyncio.run(ask())
    assert likeliest not in found and found
