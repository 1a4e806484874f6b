# SPDX-License-Identifier: Apache-2.0
"""Constrained decoding with llguidance, which is imported with the first grammar.

Grammars are compiled in a thread of their own, so that neither the event loop nor a step waits. A few threads together
compute the token masks of all constrained requests of a step.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from anyaccel.errors import AnyAccelError, ModelError
from anyaccel.serve.interface import Grammar, GrammarError
from anyaccel.serve.json_schema import find_problem

_MOST_BYTES = 1 << 18  # of a grammar
# White space between the parts of JSON. It is bounded, as a small model may otherwise generate nothing else.
_BLANKS = r"[ \t]{0,8}(\r?\n[ \t]{0,64})?"
_OVERLAPPING = (
    "alternatives of oneOf that one value may fit together cannot be enforced; use anyOf or distinguish them by a const"
)


class Constraint:
    """A grammar, and the state of one answer in it."""

    def __init__(self, matcher: Any, param: str = "grammar") -> None:
        self.matcher = matcher
        self.param = param
        self.problem = ""

    def take(self, token: int) -> bool:
        """Advance by a token; returns whether the answer is complete.

        Raises:
            GrammarError: no token can follow, or the grammar has reached llguidance's limits.
            ModelError: the grammar does not allow the token here.
        """
        if self.problem:
            raise GrammarError(self.param, _short(self.problem))
        if not self.matcher.consume_token(token):
            problem = self.matcher.get_error() or f"token {token} may not come here"
            if "lexer error" in problem:  # the token was allowed, but has made the expression too large
                raise GrammarError(self.param, _short(problem))
            raise ModelError(f"the grammar: {_short(problem)}")
        return bool(self.matcher.is_stopped())


class GrammarCompiler:
    """Makes constraints for one model.

    Args:
        path: of the model.
        tokenizer: `load_text_tokenizer` of it, if it is loaded already.
    """

    def __init__(self, path: str, tokenizer: Any = None) -> None:
        self.vocabulary = 0
        self.ends: frozenset[int] = frozenset()
        self._path = path
        self._text_tokenizer = tokenizer
        self._tokenizer: Any = None
        self._executor: Any = None
        self._pool: ThreadPoolExecutor | None = None

    async def constraint(self, grammar: Grammar) -> Constraint:
        """A fresh constraint.

        Raises:
            GrammarError: the grammar is wrong or too large, or nothing fits it.
            AnyAccelError: llguidance is not installed, or does not know the tokenizer.
        """
        try:
            size = sum(len(each.text.encode()) for _, each in _named(grammar))
        except UnicodeEncodeError:  # an escape in JSON can write it
            raise GrammarError(grammar.param, "it has an unpaired surrogate, which no answer can have") from None
        if size > _MOST_BYTES:
            raise GrammarError(grammar.param, f"{size} bytes are more than {_MOST_BYTES}")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "anyaccel-grammar")
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._compile, grammar)

    def masks(self, constraints: Mapping[int, Constraint]) -> dict[int, bytes]:
        """The token mask of each request, but for those whose grammar has reached its limits, which end the request."""
        try:
            return self._masks(constraints)
        except Exception as error:  # noqa: BLE001  llguidance's errors have no common base class
            if len(constraints) == 1:
                next(iter(constraints.values())).problem = str(error) or type(error).__name__
                return {}
        found: dict[int, bytes] = {}
        for number, constraint in constraints.items():
            found |= self.masks({number: constraint})
        return found

    def _masks(self, constraints: Mapping[int, Constraint]) -> dict[int, bytes]:
        size = (self.vocabulary + 31) // 32 * 4
        buffer = ctypes.create_string_buffer(size * len(constraints))
        matchers = [(each.matcher, place) for place, each in enumerate(constraints.values())]
        self._executor.unsafe_compute_mask_ptr(matchers, ctypes.addressof(buffer), size, len(matchers))
        masks = buffer.raw
        found = {}
        for place, (number, constraint) in enumerate(constraints.items()):
            if constraint.matcher.is_error():  # its mask allows the end of the text only
                constraint.problem = constraint.matcher.get_error()
            else:
                found[number] = masks[place * size :][:size]
        return found

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _compile(self, grammar: Grammar) -> Constraint:
        if self._tokenizer is None:
            self._build()
        matcher, problem = self._matcher(grammar)
        if problem:
            raise self._error(grammar, problem)
        return Constraint(matcher, grammar.param)

    def _matcher(self, grammar: Grammar) -> tuple[Any, str]:
        """llguidance's matcher, and what is wrong with the grammar, or "".

        Raises:
            GrammarError: its text is not of its kind.
        """
        from llguidance import LLMatcher

        sources = [{"name": name, **_source(each)} for name, each in _named(grammar)]
        matcher = LLMatcher(self._tokenizer, json.dumps({"grammars": sources}), log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds out whether an answer can begin
        if matcher.is_error():
            return matcher, _short(matcher.get_error())
        # In lenient mode these become alternatives, of which an answer may then fit several.
        overlapping = any(each.startswith("oneOf") for each in matcher.get_grammar_warnings())
        return matcher, _OVERLAPPING if overlapping else ""

    def _error(self, grammar: Grammar, problem: str) -> GrammarError:
        """The error about the part of a grammar, and the property of a schema, that cannot be used."""
        for _, part in grammar.parts:
            if part_problem := self._matcher(part)[1]:
                return self._error(part, part_problem)
        if grammar.kind == "json_schema":
            path, problem = find_problem(
                json.loads(grammar.text), lambda schema: self._matcher(Grammar("json_schema", json.dumps(schema)))[1]
            )
            problem = f"{path}: {problem}" if path else problem
        return GrammarError(grammar.param, problem)

    def _build(self) -> None:
        try:
            from llguidance import LLExecutor, LLTokenizer
        except ImportError as error:
            raise AnyAccelError(f"a grammar needs more packages: pip install 'anyaccel[serve]' ({error})") from None
        from anyaccel.inference.text.tokenizer import load_text_tokenizer, tokenizer_json

        text = self._text_tokenizer or load_text_tokenizer(Path(self._path))
        ends = sorted(self.ends) or text.end_tokens
        try:
            self._tokenizer = LLTokenizer(tokenizer_json(text), n_vocab=self.vocabulary, eos_token=ends or None)
        except (ValueError, TypeError) as error:
            raise ModelError(f"llguidance does not take this model's tokenizer ({error})") from error
        self._executor = LLExecutor(num_threads=min(4, len(os.sched_getaffinity(0))))


def _named(grammar: Grammar, name: str = "answer") -> Iterator[tuple[str, Grammar]]:
    """A grammar by its name for llguidance, and the grammars that it refers to, and those that these refer to."""
    yield name, grammar
    if grammar.kind == "lark":
        for part_name, part in grammar.parts:
            yield from _named(part, part_name)


def _schema_source(schema: Any) -> dict[str, Any]:
    """A schema in llguidance's form.

    Its lenient mode ignores formats that it does not know and keywords that it cannot enforce.
    """
    options = {"whitespace_pattern": _BLANKS, "lenient": True}
    return {"json_schema": {**schema, "x-guidance": options} if isinstance(schema, dict) else schema}


def _source(grammar: Grammar) -> dict[str, Any]:
    """A grammar in llguidance's form.

    Raises:
        GrammarError: its text is no schema, or no expression.
    """
    if grammar.kind == "json_object":
        return _schema_source({"type": "object"})
    if grammar.kind == "json_schema":
        try:
            schema = json.loads(grammar.text)
        except (ValueError, RecursionError) as error:
            raise GrammarError(grammar.param, f"the schema is no JSON ({error})") from None
        if not isinstance(schema, dict | bool):
            raise GrammarError(grammar.param, "the schema must be an object")
        return _schema_source(schema)
    if grammar.kind == "regex":
        from llguidance import LLMatcher

        made: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(grammar.text))["grammars"][0]
        return {"lark_grammar": made["lark_grammar"]}
    return {"lark_grammar": grammar.text}


def _short(problem: str) -> str:
    """llguidance's message in one line, without the state of its parser."""
    if problem.startswith("NoExtensionBias"):
        return "nothing fits it after what the answer has"
    if "look-around" in problem:
        return "a pattern with look-around ((?=, (?!, (?<=, (?<!) cannot be enforced; leave it out, or write it without"
    return " ".join(problem.partition("<state>")[0].split())[:500]
