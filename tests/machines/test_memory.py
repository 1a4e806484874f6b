# SPDX-License-Identifier: Apache-2.0
"""Weights, keys and values, and shared memory of a model's ranks: each on the node of its rank, counted by page."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from binding import COMMAND, on
from machine import GUEST, Machine, Running

PROMPT = "The history of computing begins"
GENERATE = (COMMAND, "generate", PROMPT, "--max-new-tokens", "6")
_LEAST = 16 << 20  # bytes of a rank whose weights are there


def snapshot(machine: Machine, running: Running, count: int, text: str) -> list[dict[str, Any]]:
    """The pages of that many processes once all of them compute."""
    last: list[dict[str, Any]] = []
    until = time.monotonic() + running.seconds
    while time.monotonic() < until and not running.done():
        lines = machine.check([sys.executable, GUEST / "pages.py", text]).json_lines()
        ready = [line for line in lines if sum(line["own"].values()) + sum(line["weights"].values()) > _LEAST]
        if len(ready) == count:
            last = ready
        elif last:
            break
        time.sleep(1)
    assert len(last) == count, (last, running.result())
    return last


def share_on(pages: dict[str, int], nodes: Sequence[int]) -> float:
    total = sum(pages.values())
    return sum(size for node, size in pages.items() if int(node) in nodes) / total if total else 1.0


@on("four-nodes")
@pytest.mark.parametrize("again", [False, True], ids=["packed", "from the cache"])
def test_each_rank_has_its_part_on_its_own_node(machine: Machine, again: bool) -> None:
    running = machine.start([*GENERATE, "--tp", "4"], seconds=400)
    found = snapshot(machine, running, 4, "no other process")
    assert running.result().status == 0
    for line in found:
        node = [int(line["rank"])]
        assert line["cpus"] == [2 * node[0], 2 * node[0] + 1]
        assert share_on(Counter(line["own"]) + Counter(line["weights"]), node) >= 0.99, line
        assert bool(line["weights"]) is again
        for name, pages in line["shared"].items():
            assert len(pages) <= 1, (name, pages)  # a segment lies on one node, that of the rank that writes it
    written = [Counter(node for pages in line["shared"].values() for node in pages) for line in found]
    assert all(set(nodes) == {"0", "1", "2", "3"} for nodes in written), written


@on("four-nodes")
def test_weights_that_another_node_has_in_its_cache_are_copied(machine: Machine) -> None:
    """The file's pages lie where the process is that wrote or read them first."""
    for node in (0, 3):
        around = ["numactl", f"--cpunodebind={node}", f"--membind={node}"]
        running = machine.start([*around, *GENERATE], seconds=400)
        (line,) = snapshot(machine, running, 1, PROMPT)
        assert running.result().status == 0
        assert share_on(Counter(line["own"]) + Counter(line["weights"]), [node]) >= 0.99, line
