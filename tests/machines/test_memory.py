# SPDX-License-Identifier: Apache-2.0
"""Weights, keys and values, and shared memory of a model's ranks: each on the node of its rank, counted by page."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from architecture import GUEST
from binding import COMMAND, WHERE, on
from machine import Machine, Running

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


@on("four-nodes")
def test_huge_pages_are_on_the_node_too(machine: Machine) -> None:
    """Weights that are packed in memory: the kernel gives them huge pages, and these are counted where they lie."""
    running = machine.start([*GENERATE, "--tp", "4"], seconds=400, env={"ANYACCEL_PACKED_CACHE_BYTES": "0"})
    found = snapshot(machine, running, 4, "no other process")
    assert running.result().status == 0
    for line in found:
        node = [int(line["rank"])]
        assert share_on(line["own"], node) >= 0.99, line
        assert share_on(line["huge"], node) == 1.0, line
        assert sum(line["huge"].values()) >= 0.5 * sum(line["own"].values()), line


@on("four-nodes")
def test_each_copy_of_a_model_that_is_served_is_on_its_own_node(machine: Machine) -> None:
    """Weights and cache of each replica, after requests that all of them answered."""
    port = "8123"
    server = machine.start([COMMAND, "serve", "--replicas", "auto", "--port", port, "-q"], seconds=500)
    ready = f"until curl -sf http://127.0.0.1:{port}/ready; do sleep 1; done"
    machine.check(["sh", "-c", ready], seconds=300)
    body = '{"prompt": "Item \'$i\': ' + "word " * 4 + '", "max_tokens": 2}'
    ask = f"curl -sf -H 'Content-Type: application/json' -d '{body}' http://127.0.0.1:{port}/v1/completions"
    machine.check(["sh", "-c", f"for i in 1 2 3 4 5 6 7 8; do {ask} > /run/answer$i & done; wait"], seconds=300)
    answers = machine.check(["sh", "-c", "cat /run/answer*"]).out
    lines = machine.check([sys.executable, GUEST / "pages.py", "no other process"]).json_lines()
    machine.check(["pkill", "-TERM", "-o", "-f", "anyaccel serve"])
    assert server.result().status == 0
    assert answers.count("text_completion") == 8, answers
    ranks = [line for line in lines if sum(line["own"].values()) + sum(line["weights"].values()) > _LEAST]
    assert sorted(line["cpus"] for line in ranks) == [[2 * node, 2 * node + 1] for node in range(4)], lines
    for line in ranks:
        node = [line["cpus"][0] // 2]
        assert share_on(Counter(line["own"]) + Counter(line["weights"]), node) >= 0.99, line


@on("eight-nodes")
def test_what_is_larger_than_a_node_takes_memory_of_others_where_it_may(machine: Machine) -> None:
    """Nodes have 512 MiB. `preferred` fills the rank's own first; bound, it is killed, and a line says so."""
    one = ("run", "--bind_core_list", "4,5", "--num_accelerators", "1")
    found = machine.anyaccel(*one, "--mem-policy", "preferred", WHERE, "--megabytes", "900")
    assert found.status == 0, found
    (line,) = found.json_lines()
    assert (line["policy"], line["nodes"]) == ("preferred", [2])
    assert line["pages"]["2"] == max(line["pages"].values()) >= 300 << 8, line
    assert len(line["pages"]) > 1, line
    bound = machine.anyaccel(*one, WHERE, "--megabytes", "900")
    assert bound.status == 128 + 9, bound
    assert "the kernel does when memory runs out" in bound.err, bound
