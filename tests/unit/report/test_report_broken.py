# SPDX-License-Identifier: Apache-2.0
"""`anyaccel report` where something is broken: that is what it is for; and what other commands say then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from anyaccel.report import collect as collecting
from anyaccel.report.render import render

# Imports of one module fail as they do in a damaged installation; then commands run, one after another.
BROKEN = """
import importlib.abc, importlib.util, json, sys

name, problem, commands = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])


class Broken(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == name:
            if problem == "missing":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return importlib.util.spec_from_loader(fullname, self)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        raise {
            "library": OSError("libtorch_cpu.so: cannot open shared object file"),
            "exit": SystemExit("no licence"),
            "symbol": ImportError("undefined symbol: _ZN3foo", name=name),
        }[problem]


sys.meta_path.insert(0, Broken())
from anyaccel.cli import main

for command in commands:
    print("exit", main(command))
"""


def outcomes(name: str, problem: str, *commands: list[str]) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", BROKEN, name, problem, json.dumps(commands)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("missing", "torch is not installed in this environment: pip install 'anyaccel[torch]'"),
        ("library", "torch is installed and cannot be imported (OSError: libtorch_cpu.so: cannot open shared object"),
        ("exit", "torch is installed and cannot be imported (SystemExit: no licence); pip install --force-reinstall"),
    ],
)
def test_without_a_torch_that_works(problem: str, reason: str) -> None:
    output, errors = outcomes("torch", problem, ["report"], ["report", "--json"], ["ops"], ["ops"])
    text, data = output.split("exit 1\n")[:2]
    assert f"error   {reason}" in text
    assert "\ntopology\n" in text
    assert "kernels" in text
    report = json.loads(data)
    assert report["accelerator"]["name"] is None
    assert report["accelerator"]["error"].startswith(reason)
    assert report["topology"]["nodes"]
    assert output.endswith("exit 1\nexit 1\n")
    assert [line.startswith(f"anyaccel: error: {reason}") for line in errors.splitlines()] == [True, True]


@pytest.mark.parametrize("module", ["anyaccel._native", "anyaccel._llm"])
def test_with_a_broken_native_module(module: str) -> None:
    output, errors = outcomes(module, "symbol", ["report", "--no-torch"], ["report", "--no-torch", "--json"])
    text, data = output.split("exit 1\n")[:2]
    assert "error  the native part of anyaccel cannot be loaded: ImportError: undefined symbol: _ZN3foo" in text
    assert "node 0" in text
    report = json.loads(data)
    assert report["cpu"] == {"isa": None, "features": {}, "error": "ImportError: undefined symbol: _ZN3foo"}
    assert errors == ""


def test_what_commands_say_of_a_broken_native_module() -> None:
    output, errors = outcomes("anyaccel._native", "symbol", ["run", "script.py"])
    assert output == "exit 1\n"
    said = "the native part of anyaccel cannot be loaded (undefined symbol: _ZN3foo); install anyaccel again"
    assert errors == f"anyaccel: error: {said}\n"


def test_one_part_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable() -> Any:
        raise PermissionError(13, "Permission denied", "/sys/devices/system/cpu")

    def damaged(package: str) -> str:
        raise KeyError("Version")

    monkeypatch.setattr(collecting, "read_machine", unreadable)
    monkeypatch.setattr(metadata, "version", damaged)
    report = collecting.collect(with_torch=False)
    assert report["topology"]["error"] == "PermissionError: [Errno 13] Permission denied: '/sys/devices/system/cpu'"
    assert report["versions"]["torch"] == "unknown (KeyError: 'Version')"
    text = render(report)
    assert "topology\n  error  PermissionError" in text
    assert "kernels" in text


def test_a_missing_package_is_one_line_and_a_mistake_of_ours_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from anyaccel.cli import main

    def raising(error: ImportError) -> Any:
        def command(_argv: list[str]) -> int:
            raise error

        return command

    monkeypatch.setattr("anyaccel.cli._dispatch", raising(ModuleNotFoundError("No module named 'gguf'", name="gguf")))
    assert main([]) == 1
    assert capsys.readouterr().err == (
        "anyaccel: error: the package gguf is missing (No module named 'gguf'): pip install 'anyaccel[native]'\n"
    )
    for name in ("anyaccel.cli.nothing", "json", None):
        monkeypatch.setattr("anyaccel.cli._dispatch", raising(ImportError("cannot import name 'x'", name=name)))
        with pytest.raises(ImportError, match="cannot import name"):
            main([])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("", "is not torch, or not all of it: it has no Tensor); pip install --force-reinstall torch"),
        (
            "class Odd(BaseException): pass\nraise Odd('no licence')",
            "torch is installed and cannot be imported (Odd: no licence); pip install --force-reinstall torch",
        ),
    ],
    ids=["hollow", "base"],
)
def test_another_torch_that_is_found_first(source: str, reason: str, tmp_path: Path) -> None:
    other = tmp_path / "torch"
    other.mkdir()
    (other / "__init__.py").write_text(source)
    before = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    code = (
        before + "from anyaccel.cli import main\nfor name in ('report', 'ops', 'ops'):\n    print('exit', main([name]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    text = done.stdout.split("exit 1\n")[0]
    assert reason in text and "\ntopology\n" in text
    assert f"{other} is imported, not the installed {metadata.version('torch')}" in text
    assert done.stdout.endswith("exit 1\nexit 1\nexit 1\n")
    assert [line.startswith("anyaccel: error: ") and reason in line for line in done.stderr.splitlines()] == [True] * 2


def test_the_version_is_that_of_what_an_import_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gguf", raising=False)
    shown = collecting.collect(with_torch=False)["versions"]["gguf"]
    assert shown.startswith(f"unknown ({tmp_path / 'gguf'} is imported, not the installed ")
    (tmp_path / "gguf-9.8.7.dist-info").mkdir()
    (tmp_path / "gguf-9.8.7.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: gguf\nVersion: 9.8.7\n")
    assert collecting.collect(with_torch=False)["versions"]["gguf"] == "9.8.7"


ENDINGS = {
    "os.kill(os.getpid(), signal.SIGSEGV)": "by SIGSEGV",
    "os.abort()": "by SIGABRT",
    "os._exit(0)": "by an exit with code 0",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_torch_that_ends_the_process(ending: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"import os, signal\n{ending}\n")
    said = f"ended the process that tried it ({ENDINGS[ending]})"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "anyaccel", *arguments]
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)

    text, data, ops = run("report"), run("report", "--json"), run("ops", "--json")
    assert (text.returncode, text.stderr) == (1, "")
    assert said in text.stdout
    assert "\ntopology\n" in text.stdout
    report = json.loads(data.stdout)
    assert said in report["accelerator"]["error"]
    assert report["topology"]["nodes"]
    assert (ops.returncode, ops.stdout) == (1, "")
    assert ops.stderr == f"anyaccel: error: importing torch {said}\n"
