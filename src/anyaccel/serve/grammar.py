# SPDX-License-Identifier: Apache-2.0
"""Constrained decoding with llguidance, which is imported when the first grammar comes.

Grammars are compiled in a thread of their own, so that neither the event loop nor a step waits. A few threads together
compute the token masks of all constrained requests of a step.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from anyaccel.errors import AnyAccelError, ModelError
from anyaccel.serve.contract import Grammar, GrammarError

_MOST_BYTES = 1 << 18  # of a grammar
# White space between the parts of JSON. It is bounded, as a small model may otherwise generate nothing else.
_BLANKS = r"[ \t]{0,8}(\r?\n[ \t]{0,64})?"


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


class Grammars:
    """Makes constraints for one model.

    Args:
        path: of the model.
        tokenizer: `load_text_tokenizer` of it, where it is there already.
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
            size = len(grammar.text.encode())
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
        whole = buffer.raw
        found = {}
        for place, (number, constraint) in enumerate(constraints.items()):
            if constraint.matcher.is_error():  # its mask allows the end of the text only
                constraint.problem = constraint.matcher.get_error()
            else:
                found[number] = whole[place * size :][:size]
        return found

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _compile(self, grammar: Grammar) -> Constraint:
        if self._tokenizer is None:
            self._build()
        from llguidance import LLMatcher

        defaults: Any = {"whitespace_pattern": _BLANKS}
        try:
            if grammar.kind == "json_object":
                text = LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=defaults)
            elif grammar.kind == "json_schema":
                schema = json.loads(grammar.text)
                if not isinstance(schema, dict | bool):
                    raise GrammarError(grammar.param, "the schema must be an object")
                text = LLMatcher.grammar_from_json_schema(grammar.text, defaults=defaults)
            elif grammar.kind == "regex":
                text = LLMatcher.grammar_from_regex(grammar.text)
            else:
                text = LLMatcher.grammar_from_lark(grammar.text)
        except GrammarError:
            raise
        except (ValueError, RecursionError) as error:
            raise GrammarError(grammar.param, str(error)) from None
        matcher = LLMatcher(self._tokenizer, text, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds out whether an answer can begin
        if matcher.is_error():
            raise GrammarError(grammar.param, _short(matcher.get_error()))
        return Constraint(matcher, grammar.param)

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


def _short(problem: str) -> str:
    """llguidance's message in one line, without the state of its parser."""
    if problem.startswith("NoExtensionBias"):
        return "nothing fits it after what the answer has"
    return " ".join(problem.partition("<state>")[0].split())[:500]
