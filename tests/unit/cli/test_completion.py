# SPDX-License-Identifier: Apache-2.0
"""What shells complete after `anyaccel completion`, asked of the shells themselves."""

import shutil
import subprocess
import sys

import pytest

from anyaccel.cli import COMMANDS

# What is typed -> some of what is offered, and what is not.
CASES = [
    (["anyaccel", "co"], {"compat", "completion", "conformance"}, {"run"}),
    (["anyaccel", "run", "--bind"], {"--bind_cores_to_rank", "--bind_core_list"}, {"--smt"}),
    (["anyaccel", "run", "--mem-policy", ""], {"auto", "interleave"}, {"run", "--smt"}),
    (["anyaccel", "run", "--launcher", "s"], {"ssh", "slurm"}, {"impi"}),
    (["anyaccel", "ops", ""], {"list", "build", "clean"}, {"run"}),
    (["anyaccel", "completion", "f"], {"fish"}, {"bash"}),
    (["anyaccel", "run", "tra"], {"train it.py"}, {"run"}),
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train it.py").touch()
    return tmp_path


def script(shell):
    command = [sys.executable, "-m", "anyaccel", "completion", shell]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def ask(command, cwd, text=""):
    done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=cwd, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("typed", "offered", "others"),
    CASES,
    ids=lambda words: " ".join(sorted(words) if isinstance(words, set) else words)[:30],
)
def test_bash(folder, typed, offered, others):
    words = " ".join(f"'{word}'" for word in typed)
    asked = f"COMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; _shtab_anyaccel; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    found = set(ask(["bash", "-eu", "-s"], folder, f"{script('bash')}\n{asked}\n").splitlines())
    assert offered <= found
    assert not others & found


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed: apt install fish")
@pytest.mark.parametrize(
    ("typed", "offered", "others"),
    CASES,
    ids=lambda words: " ".join(sorted(words) if isinstance(words, set) else words)[:30],
)
def test_fish(folder, typed, offered, others):
    (folder / "anyaccel.fish").write_text(script("fish"))
    line = " ".join(typed)
    said = ask(["fish", "--no-config", "-c", f"source anyaccel.fish; complete -C {line!r}"], folder)
    found = {row.partition("\t")[0].replace("\\ ", " ") for row in said.splitlines()}
    assert offered <= found
    assert not others & found


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed: apt install zsh")
@pytest.mark.parametrize("command", ["run", "ops", "bench", "port"])
def test_zsh_reads_it_and_knows_each_option(folder, command):
    """_arguments itself needs a terminal; here its specifications are printed."""
    asked = f"compdef() {{ : }}\n{script('zsh')}\nprint -rl -- $_shtab_anyaccel_{command}_options\n"
    found = ask(["zsh", "-f", "-s"], folder, asked).splitlines()
    from importlib import import_module

    parser = import_module(f"anyaccel.cli.{command}").build_parser()
    for action in parser._actions:
        if action.option_strings and action.help != "==SUPPRESS==":
            assert any(name in line for line in found for name in action.option_strings), action


def test_every_command_is_in_every_shells_script():
    for shell in ("bash", "zsh", "fish"):
        text = script(shell)
        assert all(name in text for name in COMMANDS)
