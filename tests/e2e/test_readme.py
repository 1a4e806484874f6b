# SPDX-License-Identifier: Apache-2.0
"""The Python of the README runs as it stands there; what all pages write as `anyaccel.a.b` is found by that name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import doc_commands
from warm import WarmPython

ROOT = Path(__file__).parents[2]


def python_blocks(page: Path) -> list[str]:
    return [b.body for b in doc_commands.blocks(page.read_text(encoding="utf-8")) if b.language == "python"]


SNIPPETS = python_blocks(ROOT / "README.md")

# Runs one snippet. It brings its imports; what a reader has of their own is here. No name of ours or of torch is.
RUN = """
import sys


def own():
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()
    return {"model": model, "input_ids": torch.tensor([[1, 2, 3]])}


names = {name: value for name, value in own().items() if name in sys.argv[2]}
for name in [name for name in sys.modules if name.partition(".")[0] == "anyaccel"]:
    del sys.modules[name]  # a .pth file may have imported some
exec(compile(sys.argv[2], "README.md", "exec"), names)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    """Each snippet has a process of its own, which has imported nothing of ours."""
    with WarmPython(os.environ, tmp_path_factory.mktemp("python"), preload="torch, transformers") as warm:
        yield warm


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    folder = tmp_path_factory.mktemp("tiny")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_the_readme_has_snippets() -> None:
    assert len(SNIPPETS) >= 4


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda text: re.sub(r"\W+", "-", text.splitlines()[-1])[:40])
def test_a_snippet_runs_after_the_imports_that_it_shows(
    snippet: str, python: WarmPython, tiny_model: Path, tmp_path: Path
) -> None:
    # Its two ranks are the reader's launcher's; elsewhere ranks are tested.
    text = snippet.replace("path/to/model", str(tiny_model)).replace('{"tp_size": 2}', '{"tp_size": 1}')
    done = python.run("-c", RUN, "", text, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_names_on_all_pages_are_found_after_import_anyaccel() -> None:
    names = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for block in python_blocks(page):
            code = re.sub(r"^\s*(?:from|import) .*$|#.*$", "", block, flags=re.MULTILINE)
            names |= set(re.findall(r"(?<![\w.\"'/])anyaccel(?:\.\w+)+", code))
    assert "anyaccel.ops.adam.CPUAdam" in names
    look = (
        "import anyaccel, functools, sys\n"
        "for name in sys.argv[1:]:\n"
        "    try: functools.reduce(getattr, name.split('.')[1:], anyaccel)\n"
        "    except AttributeError as error: print(name, error)"
    )
    for name in ("ops.adam", "ops.adagrad", "ops.aio", "ops.builders", "ops.lion", "interop", "topology", "launch"):
        names.add(f"anyaccel.{name}")
    done = subprocess.run(
        [sys.executable, "-c", look, *sorted(names)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == ""
