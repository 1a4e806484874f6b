# SPDX-License-Identifier: Apache-2.0
"""tools/port_outcomes.py runs two programs of our own in all five ways: one demands CUDA, one takes what there is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TOOL = Path(__file__).parents[2] / "tools" / "port_outcomes.py"
DEMANDS = """
import torch
assert torch.cuda.is_available(), "needs a GPU"
model = torch.nn.Linear(4, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.rand(8, 4).to("cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
TAKES = """
import torch
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
print("loss", torch.rand(8, 4, device=device).square().mean().item())
"""
LIST = """
[commits]
"owner/name" = "{commit}"

[[program]]
about = "demands, GANs, owner/name"
run = "demands.py"
hand."demands.py" = [["assert torch.cuda.is_available()", "assert True"], [".cuda()", ""], ['"cuda"', '"cpu"']]

[[program]]
about = "takes, inference, owner/name"
demands = false
run = "takes.py"
numbers = 'loss (\\S+)'
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the program that demands CUDA runs as it is")
def test_five_ways(tmp_path: Path) -> None:
    source = tmp_path / "mirror" / "owner+name" / "repo"
    source.mkdir(parents=True)
    (source / "demands.py").write_text(DEMANDS)
    (source / "takes.py").write_text(TAKES)
    git = ["git", "-C", str(source), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (tmp_path / "programs.toml").write_text(LIST.format(commit=commit))
    options = [
        "--programs",
        tmp_path / "programs.toml",
        "--checkouts",
        tmp_path / "mirror",
        "--work",
        tmp_path / "work",
    ]
    written = ["--json", tmp_path / "results.json", "--markdown", tmp_path / "page.md"]
    command = [sys.executable, TOOL, *options, *written]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    programs = json.loads((tmp_path / "results.json").read_text())["programs"]
    outcomes = {name: [result["outcome"] for result in ways.values()] for name, ways in programs.items()}
    assert outcomes == {"demands": ["failed", *["same"] * 4], "takes": ["same"] * 5}
    assert programs["demands"]["as-is"]["note"] == "AssertionError: needs a GPU"
    assert len(programs["demands"]["as-cuda"]["numbers"]) == 3
    assert "| 1 demand CUDA | 0 (0 %) | 1 (100 %) | 1 (100 %) |" in (tmp_path / "page.md").read_text()
