# SPDX-License-Identifier: Apache-2.0
"""A conversation of `anyaccel chat`: what is kept of it, and its commands."""

from __future__ import annotations

import argparse
import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from anyaccel.cli._screen import Screen
from anyaccel.cli.chat import Conversation, _talk
from anyaccel.cli.generate import build_parser
from anyaccel.errors import UsageError
from anyaccel.inference.text.tokenizer import TextTokenizer

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"  # a token a word


class Recording:
    """A backend that keeps what it is asked and answers with one word."""

    context = 16

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.asked: list[list[int]] = []

    def tokens(self, ids: list[int], wanted: int, how: Any, result: Any) -> Generator[int, None, None]:
        self.asked.append(ids)
        yield 1

    def forget(self) -> None:
        pass


class Typed:
    """Messages as if they were typed."""

    interactive = False

    def __init__(self, *lines: str) -> None:
        self._lines: Iterator[str] = iter(lines)

    def next(self) -> str | None:
        return next(self._lines, None)


@pytest.fixture
def backend(tmp_path: Path) -> Recording:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = ["?", "yes", *(f"{who}{number}" for who in "abs" for number in range(40))]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return Recording(TextTokenizer(tmp_path))


@pytest.fixture
def conversation(backend: Recording) -> Conversation:
    options: argparse.Namespace = build_parser().parse_args(["unused", "--max-new-tokens", "8"])
    return Conversation(backend, options, Screen(shown=True))  # type: ignore[arg-type]


def words(prefix: str, count: int) -> str:
    return " ".join(f"{prefix}{number}" for number in range(count))


def said(backend: Recording) -> str:
    return backend.tokenizer.decode(backend.asked[-1])


def test_a_message_that_is_too_long_leaves_the_conversation_as_it_was(
    backend: Recording, conversation: Conversation
) -> None:
    conversation.answer("a0 a1")
    with pytest.raises(UsageError, match=r"has 40 tokens .* the context is 16; send a shorter one"):
        conversation.answer(words("b", 40))
    conversation.answer("a2")
    assert said(backend) == "a0 a1 yes a2"


def test_what_the_template_refuses_leaves_the_conversation_as_it_was(
    backend: Recording, conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation.answer("a0 a1")
    conversation.answer("a2")
    render = backend.tokenizer.chat

    def refuse_short(messages: Any) -> list[int]:
        if len(messages) < 4:
            raise UsageError("refused")
        return render(messages)

    with monkeypatch.context() as patch, pytest.raises(UsageError, match="refused"):
        patch.setattr(backend.tokenizer, "chat", refuse_short)
        conversation.answer(words("b", 15))
    conversation.answer("a3")
    assert said(backend) == "a0 a1 yes a2 yes a3"


def test_the_oldest_messages_go_when_a_long_one_fits(
    backend: Recording, conversation: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation.answer("a0 a1")
    conversation.answer("a2")
    conversation.answer(words("b", 14))
    assert said(backend) == words("b", 14)
    assert "(the oldest 4 messages are forgotten: the context is 16 tokens)" in capsys.readouterr().err
    conversation.answer("a3")
    assert said(backend) == "a3"


def test_system_without_a_text_says_what_it_needs(
    backend: Recording, conversation: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Typed("a0", "/system", "a1", "/system s0 s1", "a2", "/nonsense", "/system  ")
    assert _talk(conversation, lines) == 0  # type: ignore[arg-type]
    assert [backend.tokenizer.decode(ids) for ids in backend.asked] == ["a0", "a0 yes a1", "s0 s1 a2"]
    needs = "(/system needs a text, as in: /system Answer in French.)\n"
    assert capsys.readouterr().err == f"{needs}(no command /nonsense; /help lists them)\n{needs}"
