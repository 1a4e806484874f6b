# SPDX-License-Identifier: Apache-2.0
"""What a newcomer meets first: workflows, templates, the container of the demo and the files beside the README."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from anyaccel.cli.generate import build_parser

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
YAML = [*sorted((ROOT / ".github").rglob("*.yml")), ROOT / "CITATION.cff"]


@pytest.mark.parametrize("file", YAML, ids=lambda file: file.name)
def test_it_is_yaml(file: Path) -> None:
    assert isinstance(yaml.safe_load(file.read_text()), dict)


def test_workflows_and_the_dev_container_run_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    files = [*(ROOT / ".github" / "workflows").glob("*.yml"), ROOT / ".devcontainer" / "devcontainer.json"]
    called = {name for file in files for name in re.findall(r"\bmake ([a-z0-9-]+)", file.read_text())}
    assert called >= {"test", "docs", "setup"}
    assert called <= targets
    json.loads(files[-1].read_text())


def test_workflows_may_only_read() -> None:
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        assert yaml.safe_load(file.read_text())["permissions"] == {"contents": "read"}, file.name


def test_workflows_do_not_make_files_of_root() -> None:
    """`sudo make` would make .venv as root, and a later step could not write into it."""
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        assert "sudo make" not in file.read_text(), file.name


def test_the_container_runs_the_demo_with_an_extra_that_there_is() -> None:
    text = (ROOT / "Dockerfile").read_text()
    (extra,) = re.findall(r"\[(\w+)\]\"", text)
    assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    command, *arguments = json.loads(re.findall(r"^CMD (.*)$", text, re.MULTILINE)[0])
    assert command == "generate"
    assert build_parser().parse_args(arguments).tp == 2
    served = (ROOT / "deploy" / "Dockerfile").read_text()
    bases = {re.findall(r"^FROM (\S+)", each, re.MULTILINE)[0] for each in (text, served)}
    assert len(bases) == 1


def test_the_files_of_a_project_are_there() -> None:
    for name in ("LICENSE", "SECURITY.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff"):
        assert (ROOT / name).is_file(), name
