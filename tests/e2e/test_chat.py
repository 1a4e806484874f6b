# SPDX-License-Identifier: Apache-2.0
"""`anyaccel chat` with the real SmolLM2: from a pipe, and on a terminal with Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rank_processes import ranks_below
from waiting import wait_asleep

COMMAND = (sys.executable, "-m", "anyaccel", "chat")


def piped(lines: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """With one thread: two wait for each other most of the time when other tests have the cores."""
    command = [*COMMAND, "--threads", "1", *arguments]
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=110)


def test_answers_from_a_pipe_and_what_was_said_before(smollm2: Path) -> None:
    done = piped(
        "Say hello.\n\nAgain, please.\n/clear\nWhat is \\\nthe capital of France?\n",
        "--model",
        str(smollm2),
        "--dtype",
        "fp32",
        "--max-new-tokens",
        "24",
        "--quiet",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) >= 3
    assert "Paris" in done.stdout.splitlines()[-1]
    assert "<|im" not in done.stdout


def test_a_line_that_is_not_utf8_is_refused_and_the_chat_goes_on(smollm2: Path) -> None:
    command = [*COMMAND, "--model", str(smollm2), "--max-new-tokens", "4", "--quiet"]
    done = subprocess.run(
        command,
        input=b"caf\xff\nSay hello.\n",
        capture_output=True,
        timeout=110,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
    )
    assert done.returncode == 0
    assert done.stderr.decode() == "(the text is not valid UTF-8: byte 0xff after 'caf')\n"
    assert len(done.stdout.splitlines()) == 1


def test_second_turn_has_the_tokens_of_a_whole_conversation(smollm2: Path) -> None:
    """What the cache keeps between turns changes nothing: the same answer as from the conversation at once."""
    script = (
        "import argparse, sys\n"
        "from anyaccel.cli import _model_options, _screen, chat\n"
        "from pathlib import Path\n"
        "from anyaccel.inference.ranks import backends\n"
        "from anyaccel.inference.generate import Generation\n"
        "options = chat.build_parser().parse_args(['--model', sys.argv[1], '--dtype', 'fp32', '--kv-cache', 'fp32',"
        " '--threads', '1'])\n"
        "backend = backends.open_backend(Path(options.model), _model_options.model_of(options),"
        " _screen.Screen(False))\n"
        "assert backend.runtime == 'native' and 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "assert 'numpy' not in sys.modules\n"
        "how, talk = _model_options.sampling_of(options), []\n"
        "for text in ('Name a colour.', 'Another one?'):\n"
        "    talk.append({'role': 'user', 'content': text})\n"
        "    ids = backend.tokenizer.chat(talk)\n"
        "    with_cache = list(backend.tokens(ids, 12, how, Generation()))\n"
        "    before = backend.native.model.cache_used_bytes\n"
        "    talk.append({'role': 'assistant', 'content': backend.tokenizer.decode(with_cache)})\n"
        "backend.clear_cache()\n"
        "assert before > 0 and backend.native.model.cache_used_bytes == 0\n"
        "assert list(backend.tokens(ids, 12, how, Generation())) == with_cache\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(smollm2)], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr


def test_system_prompt_stop_text_and_commands(smollm2: Path) -> None:
    done = piped(
        "/help\n/nonsense\nWhat is the capital of France?\n/exit\nnever read\n",
        "--model",
        str(smollm2),
        "--system",
        "You are a helpful assistant.",
        "--stop",
        " Paris",
        "--max-new-tokens",
        "16",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of France is\n"
    assert "/clear" in done.stderr
    assert "no command /nonsense" in done.stderr


@pytest.mark.slow
def test_oldest_messages_go_when_the_context_is_full(smollm2: Path, tmp_path: Path) -> None:
    for file in smollm2.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((smollm2 / "config.json").read_text()) | {"max_position_embeddings": 160}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("--model", str(tmp_path), "--max-new-tokens", "24")
    done = piped("Say something about the weather, please.\n" * 4, *arguments)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().splitlines()) >= 4
    assert "messages are forgotten: the context is 160 tokens" in done.stderr
    done = piped("word " * 200 + "\nHi!\n", *arguments, "--quiet")
    assert done.returncode == 0
    assert re.search(r"the message has \d+ tokens with its template, the context is 160", done.stderr)
    assert done.stdout.strip()


def test_ctrl_c_in_a_pipe_ends_the_answer_only(smollm2: Path, tmp_path: Path) -> None:
    """Of a model whose answers do not end by themselves."""
    for file in smollm2.iterdir():
        (tmp_path / file.name).symlink_to(file)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((smollm2 / name).read_text()) | {"eos_token_id": 5}
        (tmp_path / name).unlink()
        (tmp_path / name).write_text(json.dumps(config))
    with subprocess.Popen(
        [*COMMAND, "--model", str(tmp_path), "--quiet", "--max-new-tokens", "4000", "--stop", "Paris"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write("Write a very long story about a dragon.\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        wait_asleep(process.pid)  # for the next message
        process.stdin.write("/clear\nWhat is the capital of France?\n")
        process.stdin.close()
        rest, errors = process.stdout.read(), process.stderr.read()
        assert process.wait(60) == 0
    assert "Traceback" not in errors
    assert rest.splitlines()[-1].rstrip() == "The capital of France is"
    assert len(rest) < 8000  # about half of 4,000 tokens


def test_model_without_a_chat_template_is_refused(smollm2: Path, tmp_path: Path) -> None:
    for file in smollm2.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    done = piped("hi\n", "--model", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].endswith("has no chat template; use `anyaccel generate`")


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "dumb"
            os.execv(COMMAND[0], [*COMMAND, *arguments])
        self.text = ""

    def until(self, pattern: str, timeout: float = 60) -> None:
        """Read until the pattern appears in what is new."""
        start, deadline = len(self.text), time.monotonic() + timeout
        while not re.search(pattern, self.text[start:]):
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} did not come: {self.text[start:]!r}"
            if select.select([self._descriptor], [], [], left)[0]:
                try:
                    self.text += os.read(self._descriptor, 4096).decode(errors="replace")
                except OSError:  # it has ended
                    assert re.search(pattern, self.text[start:]), self.text[start:]

    def interrupt(self) -> None:
        """Ctrl-C once it waits for a line: Python loses one that comes between the prompt and that."""
        wait_asleep(self.pid)
        self.type("\x03")

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def end(self) -> int:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if select.select([self._descriptor], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    self.text += os.read(self._descriptor, 4096).decode(errors="replace")
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                os.close(self._descriptor)
                self._descriptor = -1
                return os.waitstatus_to_exitcode(status)
        raise AssertionError(f"did not end: {self.text[-500:]!r}")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self._descriptor)


@pytest.fixture
def terminal(smollm2: Path) -> Iterator[Terminal]:
    terminal = Terminal("--model", str(smollm2), "--max-new-tokens", "3000")
    yield terminal
    terminal.close()


def test_ctrl_c_on_a_terminal_stops_the_answer_and_twice_leaves(terminal: Terminal) -> None:
    terminal.until(r"> $")
    terminal.type("Write a very long story about a dragon.\n")
    terminal.until(r"dragon\.\r\n\w+ \w+ \w+ ")
    terminal.type("\x03")
    terminal.until(r"> $")
    terminal.type("What is the capital of France?\n")
    terminal.until(r"\n> $")
    terminal.interrupt()
    terminal.until(r"Ctrl-C again[^>]*> $")
    terminal.interrupt()
    assert terminal.end() == 0
    assert "Traceback" not in terminal.text


@pytest.fixture
def two_ranks(smollm2: Path) -> Iterator[Terminal]:
    terminal = Terminal("--model", str(smollm2), "--max-new-tokens", "3000", "--tp", "2")
    yield terminal
    terminal.close()


def test_two_ranks_on_a_terminal_stop_an_answer_and_go_on(two_ranks: Terminal) -> None:
    """Ctrl-C at any token: were the ranks not at the same one, the next answer would fail or be another text."""
    terminal = two_ranks
    terminal.until(r"> $")
    for _ in range(3):
        terminal.type("Write a very long story about a dragon.\n")
        terminal.until(r"dragon\.\r\n\w+ \w+ \w+ ")
        terminal.type("\x03")
        terminal.until(r"> $")
    terminal.type("/clear\n")
    terminal.until(r"> $")
    terminal.type("What is the capital of France?\n")
    terminal.until(r"The capital of France is Paris\.\r\n> $")
    terminal.interrupt()
    terminal.until(r"Ctrl-C again[^>]*> $")
    assert len(ranks_below(terminal.pid)) == 2
    terminal.type("\x04")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.text


def test_a_rank_that_dies_ends_the_chat_that_waits_for_a_message(two_ranks: Terminal) -> None:
    terminal = two_ranks
    terminal.until(r"> $")
    os.kill(ranks_below(terminal.pid)[1], signal.SIGKILL)
    assert terminal.end() == 137
    assert re.search(r"rank 1 \(process \d+\) was killed by SIGKILL", terminal.text)
    assert "the ranks have ended" in terminal.text
    assert "Traceback" not in terminal.text


@pytest.mark.slow  # two conversations in fp32; the next tests have two ranks as well
def test_two_ranks_say_what_one_process_says(smollm2: Path) -> None:
    lines = "What is the capital of France?\nAnd of Spain?\n/clear\n/system Answer in one word.\nName a colour.\n"
    options = ("--model", str(smollm2), "--dtype", "fp32", "--max-new-tokens", "16", "--stop", "Madrid", "--quiet")
    one, two = piped(lines, *options), piped(lines, *options, "--tp", "2")
    assert (two.returncode, two.stdout, two.stderr) == (0, one.stdout, "")
    device = piped(lines, *options, "--tp", "2", "--runtime", "device")
    assert (device.returncode, device.stdout, device.stderr) == (0, one.stdout, "")
    assert "Paris" in two.stdout
    assert "Madrid" not in two.stdout


def test_ctrl_d_leaves(terminal: Terminal) -> None:
    terminal.until(r"> $")
    terminal.type("\x04")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.text
