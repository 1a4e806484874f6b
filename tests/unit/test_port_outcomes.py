# SPDX-License-Identifier: Apache-2.0
"""tools/port_outcomes.py: its list, its changes by hand, what it compares and how it tells; no program is run."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

import port_outcomes as tool

TOOLS = Path(__file__).parents[2] / "tools"


LIST = TOOLS / "port_programs" / "programs.toml"
COMMITS = '[commits]\n"owner/name" = "abc"\n'


def program(**fields: object) -> object:
    needed = {"name": "one", "kind": "GANs", "repository": "owner/name", "commit": "abc", "run": "train.py"}
    return tool.Program(**{**needed, **fields})


def test_the_list() -> None:
    programs = tool.read_programs(LIST)
    kinds = {each.kind for each in programs}
    assert len(programs) >= 40
    assert len(kinds) == 10
    assert sum(not each.demands for each in programs) >= 6
    for each in programs:
        assert re.fullmatch(r"[0-9a-f]{40}", each.commit), each.name
        of_repository = [other for other in programs if other.repository == each.repository]
        assert len(of_repository) <= 10
        assert sum(other.kind == each.kind for other in of_repository) <= 6
        if each.numbers not in ("losses", "outputs"):
            assert re.compile(each.numbers).groups == 1


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ('[[program]]\nabout = "a, GANs, owner/name"\nrun = "a.py"\n', "no change by hand: a"),
        ('[[program]]\nabout = "a, GANs, owner/name"\nrun = "a.py"\ndemands = false\n' * 2, "listed twice: a"),
    ],
)
def test_a_list_that_is_wrong(tmp_path: Path, entries: str, text: str) -> None:
    path = tmp_path / "programs.toml"
    path.write_text(COMMITS + entries)
    with pytest.raises(SystemExit, match=text):
        tool.read_programs(path)


def test_changes_apply_as_often_as_the_list_says(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("a.cuda()\nb.cuda()\nnccl\n")
    tool.change(tmp_path, {"train.py": [[".cuda()", "", 2], ["nccl", "gloo"]]})
    assert path.read_text() == "a\nb\ngloo\n"
    for replacements in ([["gloo", "x", 2]], [["nccl", "x"]]):
        with pytest.raises(SystemExit, match="occurs"):
            tool.change(tmp_path, {"train.py": replacements})
    assert path.read_text() == "a\nb\ngloo\n"


NAN = math.nan


@pytest.mark.parametrize(
    ("ours", "theirs", "outcome", "note"),
    [
        ((1.0, 2.0), (1.0, 2.0), "same", ""),
        ((1.000005, 1e-7), (1.0, 0.0), "same", ""),
        ((1.0, NAN), (1.0, NAN), "same", ""),
        ((1.0001,), (1.0,), "wrong", "number 0 of 1 is 1.0001, by hand 1"),
        ((1.0,), (NAN,), "wrong", "by hand nan"),
        ((1.0,), (1.0, 2.0), "wrong", "1 numbers instead of 2"),
    ],
)
def test_what_counts_as_the_same(ours: tuple[float, ...], theirs: tuple[float, ...], outcome: str, note: str) -> None:
    judged = tool.compare(tool.Result("same", numbers=ours), tool.Result("same", numbers=theirs))
    assert judged.outcome == outcome
    assert note in judged.note


def test_a_failure_stays_one() -> None:
    failed = tool.Result("failed", "RuntimeError: no")
    assert tool.compare(failed, tool.Result("same", numbers=(1.0,))) == failed


def test_numbers_of_losses_and_of_what_is_printed(tmp_path: Path) -> None:
    (tmp_path / ".numbers").write_text("7 3.0\n7 1.0\n")
    assert tool.numbers_of(program(), tmp_path, "") == (3.0, 1.0)
    (tmp_path / ".numbers").write_text("7 3.0\n8 2.0\n7 1.0\n")  # two processes write in any order
    assert tool.numbers_of(program(), tmp_path, "") == (1.0, 2.0, 3.0)
    assert tool.numbers_of(program(numbers=r"loss (\S+)"), tmp_path, "loss 2e-1\nlost 3\nloss nan")[0] == 0.2


def test_the_line_that_names_an_error() -> None:
    traceback = "Traceback (most recent call last):\n  File x\n{}\nmore\n"
    assert (
        tool.first_error(traceback.format("torch.cuda.OutOfMemoryError: full")) == "torch.cuda.OutOfMemoryError: full"
    )
    spawned = traceback.format("torch.multiprocessing.spawn.ProcessRaisedException: \n\nValueError: cause")
    assert tool.first_error(spawned) == "ValueError: cause"
    assert tool.first_error("usage: x\nx: error: no such option\n") == "x: error: no such option"
    assert tool.first_error("") == "no output"


def test_files_of_a_commit(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "pack").mkdir(parents=True)
    (source / "pack" / "model.py").write_text("first\n")
    (source / "notes.md").write_text("notes\n")
    git = ["git", "-C", str(source), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (source / "pack" / "model.py").write_text("later\n")
    tool.extract(source / ".git", commit, ["pack"], tmp_path / "copy")
    assert (tmp_path / "copy" / "pack" / "model.py").read_text() == "first\n"
    assert not (tmp_path / "copy" / "notes.md").exists()


def test_the_page() -> None:
    programs = [program(), program(name="two", demands=False)]
    good, bad = tool.Result("same", numbers=(1.0,)), tool.Result("failed", "E: `x`")
    table = {"one": {"as-is": bad, "as-cuda": good}, "two": {"as-is": good, "as-cuda": bad}}
    page = tool.markdown(programs, table, ("as-is", "as-cuda"), "today")
    assert "| 1 demand CUDA | 0 (0 %) | 1 (100 %) |" in page
    assert "| 1 run on a CPU as they are | 1 (100 %) | 0 (0 %) |" in page
    assert "| [one](https://github.com/owner/name/tree/abc) | GANs | failed | same |" in page
    assert "- two, as-cuda: `E: 'x'`" in page
    assert "- one, as-is" not in page  # that it fails as it is, is why it is in the list


@pytest.mark.slow  # some seconds
def test_what_stands_in_for_packages_and_data(tmp_path: Path) -> None:
    """The stand-ins in a process of their own, as programs have them."""
    script = (
        "import importlib.util, wandb, wandb.sdk\n"
        "assert importlib.util.find_spec('torch')\n"
        "import torch\n"
        "wandb.init(project='x').log({})\n"
        "print(float(torch.rand(1)))\n"
        "(torch.ones(2, requires_grad=True) * 3).sum().backward()\n"
    )
    settings = {
        "PYTHONPATH": str(TOOLS / "port_programs"), "PORT_NUMBERS": str(tmp_path / "numbers"), "PORT_KIND": "losses",
        "PORT_ABSENT": "wandb wandb.sdk",
    }  # fmt: skip
    outputs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env={"PATH": "", **settings}
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]  # seeded
    assert [line.split()[1] for line in (tmp_path / "numbers").read_text().splitlines()] == ["6.0", "6.0"]


def test_unknown_ways_and_programs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, text in (
        (["--ways", "sideways"], "sideways: choose from as-is"),
        (["no-such-program"], "not in the list"),
    ):
        with pytest.raises(SystemExit):
            tool.main(argv)
        assert text in capsys.readouterr().err
