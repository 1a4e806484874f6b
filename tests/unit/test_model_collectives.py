# SPDX-License-Identifier: Apache-2.0
"""tools/model_collectives.py: what an all-reduce moves between NUMA nodes, counted and by its formulas."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import model_collectives as tool

ROOT = Path(__file__).parents[2]


def test_one_rank_a_node_moves_the_least() -> None:
    for sockets in (2, 4, 8):
        assert tool.divided(sockets, 1).crossing == tool.least(sockets, 1)
        assert tool.divided(2 * sockets, 2).crossing == 2 * tool.least(2 * sockets, 2)
        assert tool.two_levels(2 * sockets, 2).crossing == tool.least(2 * sockets, 2)


def test_the_page_has_the_tables() -> None:
    assert tool.page() in (ROOT / "benchmarks" / "results" / "collectives.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="qemu-x86_64 is not installed: apt install qemu-user")
@pytest.mark.skipif(not list((ROOT / "build").glob("*/libanyaccel_core.a")), reason="the library is not built here")
def test_the_bytes_that_ranks_read_of_each_other_are_those_of_the_formulas() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "model_collectives.py"), "--count"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
