# SPDX-License-Identifier: Apache-2.0
"""What a terminal shows: its width, colours only where they belong, and the name that was meant."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path

import pytest

from anyaccel.cli import COMMANDS, main
from anyaccel.terminal import did_you_mean, fitted, marked, styled, table, terminal_width
from terminals import on_terminal

RED_ERROR = "\x1b[1;31merror:\x1b[0m"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "stream", "coloured"),
    [
        ({"TERM": "xterm"}, Terminal(), True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, Terminal(), False),
        ({"TERM": "dumb"}, Terminal(), False),
        ({}, Terminal(), False),
        ({"TERM": "xterm"}, io.StringIO(), False),
    ],
)
def test_colours_are_for_terminals(
    variables: dict[str, str], stream: io.StringIO, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    expected = RED_ERROR if coloured else "error:"
    assert styled("error:", "error", stream) == expected
    assert marked("error: full", stream) == f"{expected} full"
    assert marked("no error: full", stream) == "no error: full"


def test_the_width_is_that_of_the_terminal_unless_columns_says_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda number=1: os.terminal_size((61, 20)))
    monkeypatch.delenv("COLUMNS", raising=False)
    assert terminal_width() == 61
    monkeypatch.setenv("COLUMNS", "wide")
    assert terminal_width() == 61
    monkeypatch.setenv("COLUMNS", "90")
    assert terminal_width() == 90

    def no_terminal(number: int = 1) -> os.terminal_size:
        raise OSError

    monkeypatch.setattr(os, "get_terminal_size", no_terminal)
    monkeypatch.delenv("COLUMNS")
    assert terminal_width() == 80


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_fits_sixty_columns(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Examples stay as they are, since they are to be copied."""
    monkeypatch.setenv("COLUMNS", "60")
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 0
    text = capsys.readouterr().out.partition("examples:")[0]
    assert [line for line in text.splitlines() if len(line) > 60 and not re.search(r"\{\S{20}", line)] == []


def test_a_table_that_fits_keeps_its_columns() -> None:
    rows = [("op", "detail"), ("adam", "a longer detail of several words"), ("aio", "")]
    assert table(rows, 60) == table(rows, None) == "op    detail\nadam  a longer detail of several words\naio"


def test_a_table_that_does_not_fit_puts_the_last_cell_below() -> None:
    rows = [
        ("the check that is made", "result", "detail"),
        ("that memory grows with a tensor", "pass", "so it does, as far as we see"),
    ]
    assert table(rows, 30).splitlines() == [
        "the check that is made  result",
        "    detail",
        "that memory grows with  pass",
        "a tensor",
        "    so it does, as far as we",
        "    see",
    ]  # fmt: skip
    assert max(map(len, table(rows, None).splitlines())) == 69


def test_long_lines_go_on_below_their_last_column() -> None:
    text = (
        "title\n  chosen  cpu: "
        + "words " * 10
        + "\n  /a/path/that/is/longer/than/the/terminal/is/wide/and/stays/whole"
    )
    path = text.split()[-1]
    lines = fitted(text, 50).splitlines()
    assert lines[:2] == ["title", "  chosen  cpu: words words words words words words"]
    assert lines[2] == " " * 10 + "words words words words"
    assert lines[-1].strip() == path
    assert fitted(text, None) == text


@pytest.mark.parametrize(
    ("word", "said"),
    [("genrate", " (did you mean generate?)"), ("int9", " (did you mean int4 or int8?)"), ("xyz", "")],
)
def test_the_nearest_names(word: str, said: str) -> None:
    assert did_you_mean(word, ["generate", "int4", "int8", "bf16"]) == said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["genrate"], "unknown command 'genrate' (did you mean generate?); commands: "),
        (["run", "--bind_core_to_rank", "x.py"], "--bind_core_to_rank (did you mean --bind_cores_to_rank?); see "),
        (["generate", "x", "--dtype", "bf61"], "'bf61' (did you mean bf16?); choose from bf16, fp16, "),
        (["generate", "x", "--kv-cache", "itn8"], "'itn8' (did you mean int8?); choose from auto, bf16, "),
        (["generate", "x", "--draft", "ngrm"], "'ngrm' (did you mean ngram?): must be ngram, ngram:N"),
        (["quantize", "a", "b", "--format", "ggu"], "'ggu' (did you mean gguf?); choose from "),
        (["completion", "zhs"], "'zhs' (did you mean zsh?); choose from bash, "),
        (["run", "--mem-policy", "prefered", "x.py"], "'prefered' (did you mean preferred?); choose from "),
        (["run", "--launcher", "slrum", __file__], "'slrum' is not known (did you mean slurm?); choose one of ssh"),
        (["bench", "llm", "--model", __file__, "--against", "vlm"], "'vlm' (did you mean vllm?); peers: hf"),
        (["port", "--select", "AC101", __file__], "'AC101' (did you mean ACC101?); `anyaccel port --rules`"),
        (["ops", "list", "cpu_adm"], "'cpu_adm' (did you mean cpu_adam?); there are async_io"),
        (["report", "--xyz"], "unrecognized arguments: --xyz; see "),
    ],
)
def test_a_name_that_is_nearly_right(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "bench", "quantize"])
def test_the_name_of_a_model_that_is_nearly_right(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "SmolLM2-1.7B-Instruct").mkdir()
    (tmp_path / "SmolLM2-1.7B-Instruct" / "config.json").write_text("{}")
    (tmp_path / "SmolLM2-1.7B-Instrct.txt").touch()  # no model
    path = str(tmp_path / "SmolLM2-1.7B-Instrct")
    arguments = {"generate": ["x", "--model", path], "bench": ["llm", "--model", path], "quantize": [path, "out"]}
    assert main([command, *arguments[command]]) == 2
    assert f"{path}: no such folder or file (did you mean SmolLM2-1.7B-Instruct?); " in capsys.readouterr().err


ANYACCEL = (sys.executable, "-m", "anyaccel")


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"TERM": ""}, False)],
)
def test_an_error_on_a_terminal(variables: dict[str, str], coloured: bool) -> None:
    seen = on_terminal([*ANYACCEL, "genrate"], **variables)
    assert seen.code == 2
    assert seen.lines[0].startswith("anyaccel: error: unknown command 'genrate' (did you mean generate?)")
    assert ("\033[" in seen.raw) == coloured


def test_a_plan_and_a_failure_on_a_terminal(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text("import sys; sys.exit(3)")
    run = [*ANYACCEL, "run", "--num_accelerators", "1", str(script)]
    failed = on_terminal(run)
    assert failed.code == 3
    assert f"anyaccel: {RED_ERROR} rank 0 " in failed.raw
    plan = on_terminal([*run[:-1], "--dry-run", str(script)], columns=60)
    assert plan.raw.startswith("\033[36mtopology: ")
    assert any(line.startswith("plan: 1 worker") for line in plan.lines)


def breakable(line: str) -> bool:
    """Whether a space stands where the line could have been broken: a path that is too long stays whole."""
    return " " in line.strip()


@pytest.mark.parametrize("columns", [60, 100])
@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",), ("run", "--help"), ("topo",), ("topo", "--num_accelerators", "1", "--bind_cores_to_rank"),
        ("report",), ("ops",), ("conformance", "-k", "identity"), ("bind", "--local_size", "1", "--dry-run"),
        ("run", "--num_accelerators", "1", "--no_python", "--dry-run", "true"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_terminal_gets_no_line_that_is_wider(arguments: tuple[str, ...], columns: int) -> None:
    seen = on_terminal([*ANYACCEL, *arguments], columns=columns)
    assert seen.code == 0
    lines = "\n".join(seen.lines).partition("examples:")[0].splitlines()
    assert [line for line in lines if len(line) > columns and breakable(line)] == []


def test_a_pipe_gets_whole_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["ops"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert rows[0].split() == ["op", "builder", "status", "build", "detail"]
    assert all(len(row.split()) >= 4 for row in rows[1:])


def test_a_step_of_unknown_length_is_told_on_a_terminal_and_taken_away() -> None:
    code = """
import time
from anyaccel.cli._screen import waiting
with waiting("making tea"):
    time.sleep(1.5)
print("done")
"""
    seen = on_terminal([sys.executable, "-c", code])
    assert seen.raw.startswith("making tea ... 1 s\r")
    assert seen.lines[0] == "done"
    assert "making" not in on_terminal([sys.executable, "-c", code], TERM="dumb").raw


def test_loading_says_how_long_it_takes_until_the_weights_come(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import time
from anyaccel.cli._screen import Screen
screen = Screen(shown=True)
with screen.loading():
    screen.line("plan: one process", "plan")
    time.sleep(1.3)
    for done in range(5):
        screen.progress(done << 20, 4 << 20)
        time.sleep(0.2)
print("answer")
"""
    seen = on_terminal([sys.executable, "-c", code])
    assert "\033[36mplan: one process\033[0m\nloading ... 1 s\r" in seen.raw
    assert re.search(r"\rloading: [12] of 4 MiB \([25][05] %\)", seen.raw)
    assert [line[:24] for line in seen.lines[:3]] == ["plan: one process", "loading: 4 of 4 MiB in 0", "answer"]


def test_a_load_that_pauses_leaves_nothing_behind() -> None:
    code = """
import time
from anyaccel.cli._screen import Screen
screen = Screen(shown=True)
with screen.loading():
    for done, pause in ((1000, 0.4), (1001, 1.6), (1002, 1.4), (1003, 0.2), (1004, 1.5)):
        screen.progress(done << 20, 1004 << 20)
        time.sleep(pause)
print("answer")
"""
    seen = on_terminal([sys.executable, "-c", code])
    assert re.search(r"\rloading: 1001 of 1004 MiB \(99 %\) \.\.\. \d s\r", seen.raw)
    assert re.fullmatch(r"loading: 1004 of 1004 MiB in \d\.\d s", seen.lines[0])
    assert seen.lines[1] == "answer"
    assert max(part.count("loading") for part in re.split("[\r\n]", seen.raw)) == 1


def test_porting_draws_what_is_ported() -> None:
    code = """
import time
from anyaccel.cli.port import _progress
with _progress(3) as step:
    time.sleep(0.5)
    for _ in range(3):
        step()
        time.sleep(0.4)
print("found nothing")
"""
    seen = on_terminal([sys.executable, "-c", code], columns=100)
    assert re.search(r"\rporting: +\d+%\|.* [23]/3 ", seen.raw)
    assert seen.lines[0] == "found nothing"


def test_a_value_that_the_runtime_refuses_is_told_by_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--threads", "9999", "-q"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("anyaccel: error: --threads 9999: this machine has ")
    assert "0 takes as many as there are" in said


def test_a_list_in_a_description_keeps_its_entries(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    with pytest.raises(SystemExit):
        main(["ops", "--help"])
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines[: lines.index("positional arguments:")] if re.match(r"  \w", line)]
    assert names == ["list", "build", "clean"]
