# SPDX-License-Identifier: Apache-2.0
"""A conversation of `anyaccel chat`: what is kept of it, and its commands."""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from anyaccel.cli._model_options import set_chat_template
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
        self.answer, self.ends = [1], [0]

    def tokens(self, ids: list[int], wanted: int, how: Any, result: Any) -> Generator[int, None, None]:
        self.asked.append(ids)
        for token in self.answer[:wanted]:
            result.tokens.append(token)
            yield token

    def clear_cache(self) -> None:
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


def test_a_chat_template_of_a_file_replaces_the_models_own(backend: Recording, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("s7 {{ messages[-1].content }}")
    options = build_parser().parse_args(["unused", "--chat-template", str(file)])
    set_chat_template(options, backend.tokenizer)
    Conversation(backend, options, Screen(shown=True)).answer("a0")  # type: ignore[arg-type]
    assert said(backend) == "s7 a0"


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
    fresh = "(a new conversation with this system prompt)\n"
    assert capsys.readouterr().err == f"{needs}{fresh}(no command /nonsense; /help lists them)\n{needs}"


def test_clearing_is_confirmed(
    backend: Recording, conversation: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _talk(conversation, Typed("a0", "/clear", "a1")) == 0  # type: ignore[arg-type]
    assert [backend.tokenizer.decode(ids) for ids in backend.asked] == ["a0", "a1"]
    assert capsys.readouterr().err == "(a new conversation: what was said is forgotten)\n"


@pytest.mark.parametrize(
    ("answer", "most", "said"),
    [
        ([1, 1], 8, ""),
        ([1, 1, 1], 3, "(the answer ends here: --max-new-tokens 3 allows no more)\n"),
        ([1, 1, 0], 3, ""),  # it ends by itself with the last token that it may have
        ([1] * 9, 20, "(the answer ends here: the model's context of 10 tokens is full)\n"),
    ],
)
def test_an_answer_that_is_cut_says_so(
    answer: list[int], most: int, said: str, backend: Recording, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.answer, backend.ends, backend.context = answer, [0], 10
    options = build_parser().parse_args(["unused", "--max-new-tokens", str(most)])
    Conversation(backend, options, Screen(shown=True)).answer("a0")  # type: ignore[arg-type]
    assert capsys.readouterr().err == said


LINES = """
import contextlib, json
from anyaccel.cli.chat import _Lines

class Backend:
    idle = contextlib.nullcontext

lines = _Lines(Backend())
while (line := lines.next()) is not None:
    print(json.dumps(line), flush=True)
"""


def test_a_pasted_text_of_several_lines_is_one_message() -> None:
    """As a terminal sends it that was asked to mark what is pasted."""
    readline = pytest.importorskip("readline")
    if "libedit" in (readline.__doc__ or ""):
        pytest.skip("this Python's readline is libedit, which does not know pasted texts")
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm-256color", "INPUTRC": "/dev/null"}
        os.execv(sys.executable, [sys.executable, "-c", LINES])
    text = ""

    def until(pattern: str) -> None:
        nonlocal text
        deadline = time.monotonic() + 60
        while re.search(pattern, text, re.DOTALL) is None:
            assert select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0], text
            text += os.read(terminal, 4096).decode()

    # What is typed before readline has taken the terminal over is the terminal's own: an end of file would be lost.
    ready = ".*" + re.escape("\033[?2004h")
    try:
        until(ready)
        os.write(terminal, b"\033[200~one\ntwo\n\nthree\033[201~ and\r")
        until(re.escape(json.dumps("one\ntwo\n\nthree and")) + ready)
        os.write(terminal, b"\033[200~/clear\nis no command\033[201~\r")
        until(re.escape(json.dumps("/clear\nis no command")) + ready)
        os.write(terminal, b"\004")
        os.waitpid(pid, 0)
        pid = 0
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(terminal)
