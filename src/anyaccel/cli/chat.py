# SPDX-License-Identifier: Apache-2.0
"""`anyaccel chat`: a conversation with a local model, on the terminal or from a pipe."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from anyaccel.cli._model_options import (
    add_host_options,
    add_lora_option,
    add_memory_option,
    add_model_options,
    add_sampling_options,
    add_tp_option,
    check_numbers,
    choose_model,
    cluster_of,
    model_of,
    naming_options,
    sampling_of,
    set_chat_template,
    warn_of_unused_drafts,
)
from anyaccel.cli._parser import Parser
from anyaccel.cli._screen import AnswerStream, Screen, keep_bytes, show
from anyaccel.errors import ModelError, UsageError
from anyaccel.terminal import moves_cursor

if TYPE_CHECKING:
    from anyaccel.inference.ranks.backends import Backend

_EXAMPLES = """\
  anyaccel chat
  anyaccel chat --model ~/models/Qwen3-0.6B --dtype int8 --temperature 0.7 --top-p 0.9
  anyaccel chat --system "You are a pirate." --kv-cache int8
  anyaccel chat --tp 2 --model ~/models/SmolLM2-1.7B-Instruct
  printf 'Hello!\\nWhat did I just say?\\n' | anyaccel chat --quiet"""
_HELP = """\
  /clear         forget the conversation
  /system TEXT   begin a new one with this system prompt
  /help          this list
  /exit          leave; so does Ctrl-D, or Ctrl-C twice
A line that ends with \\ goes on with the next one; a pasted text is one message. Ctrl-C stops an answer."""
_PROMPT = "> "


def build_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        "chat",
        "Talk with a model. Each line is a message. Answers go to standard output as they are generated, all else to "
        "standard error. Ctrl-C stops an answer, Ctrl-D leaves.",
        _EXAMPLES,
    )
    add_model_options(parser)
    add_memory_option(parser)
    add_lora_option(parser)
    add_tp_option(parser)
    add_sampling_options(parser, max_new_tokens=1024)
    parser.add_argument("-q", "--quiet", action="store_true", help="print no accelerator, plan, progress and hints")
    add_host_options(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = build_parser().parse_args(argv)
    check_numbers(options)
    choose_model(options)
    screen = Screen(shown=not options.quiet)
    with screen.loading(), naming_options(options):
        opened = _open(options, screen)
    with contextlib.closing(opened) as backend:
        warn_of_unused_drafts(options, backend, screen)
        set_chat_template(options, backend.tokenizer)
        if not backend.tokenizer.has_chat_template:
            raise ModelError(f"{options.model}: the model has no chat template; use `anyaccel generate`")
        if sys.stdin.isatty():
            screen.line("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves")
        return _talk(Conversation(backend, options, screen), _Lines(backend))


def _open(options: argparse.Namespace, screen: Screen) -> Backend:
    cluster = cluster_of(options)
    if cluster is None and options.tp * options.pp == 1:
        from anyaccel.inference.ranks.backends import open_backend

        return open_backend(Path(options.model), model_of(options), screen)
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise UsageError(
            f"--tp {options.tp} --pp {options.pp}: a chat starts its workers itself; run it without a launcher"
        )
    from anyaccel.inference.ranks.command import start

    return start(Path(options.model), model_of(options), screen, cluster=cluster)


class Conversation:
    """The messages so far, and the backend that answers them."""

    def __init__(self, backend: Backend, options: argparse.Namespace, screen: Screen) -> None:
        self._backend = backend
        self._options = options
        self._screen = screen
        self._system = options.system
        self._sampling = sampling_of(options)
        self.clear()

    def clear(self, system: str | None = None) -> None:
        """Forget all messages, and set a new system prompt where `system` is one."""
        self._system = self._system if system is None else system
        self._start = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._messages: list[dict[str, str]] = []
        self._backend.clear_cache()

    def say(self, text: str) -> None:
        """Tell the user something that is no answer."""
        self._screen.line(text)

    def answer(self, text: str) -> None:
        """Print the answer to a message; Ctrl-C ends it early, and the part that was printed is kept.

        Raises:
            UsageError: the message alone does not fit the model's context.
        """
        from anyaccel.inference.generate import Generation

        self._messages.append({"role": "user", "content": text})
        try:
            ids, room = self._fit()
        except BaseException:
            self._messages.pop()
            raise
        stream = AnswerStream(self._backend.tokenizer.decode, self._options.stop, show)
        result = Generation()
        cut = False
        try:
            with contextlib.closing(self._backend.tokens(ids, room, self._sampling, result)) as tokens:
                for token in tokens:
                    stream.add(token)
                    if stream.ended:
                        break
            stream.finish()
            cut = not stream.ended and result.was_cut(room, self._backend.ends)
        except KeyboardInterrupt:
            pass  # the user knows why it ends
        finally:
            self._messages.append({"role": "assistant", "content": stream.text})
        show("\n")
        if cut and room < self._options.max_new_tokens:
            self._screen.line(f"(the answer ends here: the model's context of {self._backend.context} tokens is full)")
        elif cut:
            self._screen.line(f"(the answer ends here: --max-new-tokens {room} allows no more)")

    def _fit(self) -> tuple[list[int], int]:
        """Drop the oldest messages until the conversation fits. Returns its tokens, and the most tokens of the answer.

        Raises:
            UsageError: its last message alone is too long; nothing is dropped then.
        """
        context = self._backend.context
        wanted = self._options.max_new_tokens
        left = list(self._messages)
        while True:
            ids = self._backend.tokenizer.chat([*self._start, *left])
            if not context or len(ids) + wanted <= context:
                break
            if len(left) == 1:
                if len(ids) >= context:
                    raise UsageError(
                        f"the message has {len(ids)} tokens with its template, the context is {context}; "
                        "send a shorter one; the conversation so far is kept"
                    )
                wanted = context - len(ids)
                break
            # With half of the context left, the answer is shortened before more messages are dropped.
            if len(ids) <= context // 2:
                wanted = context - len(ids)
                break
            del left[:2]
        forgotten = len(self._messages) - len(left)
        self._messages = left
        if forgotten:
            self._screen.line(f"(the oldest {forgotten} messages are forgotten: the context is {context} tokens)")
        return ids, wanted


class _Lines:
    """Reads messages from the terminal, with line editing, or from a pipe."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.interactive = keep_bytes(sys.stdin).isatty()
        if self.interactive:
            with contextlib.suppress(ImportError):
                import readline  # input() uses it

                # Python turns it off. With it the lines of a pasted text stay together until Enter is pressed.
                if moves_cursor(sys.stdout):
                    readline.parse_and_bind("set enable-bracketed-paste on")

    def next(self) -> str | None:
        """The next message; None at the end.

        Raises:
            KeyboardInterrupt: Ctrl-C instead of a message.
        """
        parts: list[str] = []
        while True:
            line = self._line("... " if parts else _PROMPT)
            if line is None:
                return "\n".join(parts) if parts else None
            if not line.endswith("\\"):
                parts.append(line)
                return "\n".join(parts)
            parts.append(line[:-1])

    def _line(self, prompt: str) -> str | None:
        with self._backend.idle():
            if not self.interactive:
                line = sys.stdin.readline()
                return line.rstrip("\n") if line else None
            try:
                return input(prompt)
            except EOFError:
                print()
                return None


def _talk(conversation: Conversation, lines: _Lines) -> int:
    interrupted = False
    while True:
        try:
            text = lines.next()
        except KeyboardInterrupt:
            if interrupted or not lines.interactive:
                print()
                return 0 if lines.interactive else 130
            interrupted = True
            print("\n(Ctrl-C again, Ctrl-D or /exit leaves)", file=sys.stderr)
            continue
        interrupted = False
        if text is None:
            return 0
        word, _, rest = text.strip().partition(" ")
        if not word:
            continue
        if word in ("/exit", "/quit"):
            return 0
        if word == "/help":
            print(_HELP, file=sys.stderr)
        elif word == "/clear":
            conversation.clear()
            conversation.say("(a new conversation: what was said is forgotten)")
        elif word == "/system":
            if rest.strip():
                conversation.clear(rest.strip())
                conversation.say("(a new conversation with this system prompt)")
            else:
                print("(/system needs a text, as in: /system Answer in French.)", file=sys.stderr)
        elif word.startswith("/") and word[1:].isalpha():
            print(f"(no command {word}; /help lists them)", file=sys.stderr)
        else:
            try:
                conversation.answer(text)
            except UsageError as error:
                print(f"({error})", file=sys.stderr)
