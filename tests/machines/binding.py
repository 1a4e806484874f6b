# SPDX-License-Identifier: Apache-2.0
"""What a plan promises, beside what the kernel says of the ranks that ran by it."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from architecture import GUEST
from machine import Machine, Result

WHERE = GUEST / "where.py"
COMMAND = Path(sys.executable).parent / "anyaccel"


def on(*names: str) -> Any:
    """Run the test on these shapes only. By @ in the ids, tests/helpers/workers.py runs all of one in one process."""
    params = [pytest.param(name, id=f"@{name}") for name in names]
    return pytest.mark.parametrize("machine", params, indirect=True)


def plan(machine: Machine, options: Sequence[str], around: Sequence[str | Path] = ()) -> tuple[dict[str, Any], Result]:
    """The plan of `anyaccel run` there, {} where it refuses."""
    found = machine.run([*around, COMMAND, "run", *options, "--dry-run", "--json", WHERE])
    return (json.loads(found.out) if found.status == 0 else {}), found


def ranks(
    machine: Machine, options: Sequence[str], around: Sequence[str | Path] = (), seconds: float = 300
) -> list[Any]:
    """What the ranks of a run say, by their number."""
    found = machine.check([*around, COMMAND, "run", *options, WHERE], seconds=seconds)
    return sorted(found.json_lines(), key=_rank)


def _rank(line: dict[str, Any]) -> int:
    return int(line["env"]["RANK"])


def check(
    machine: Machine, options: Sequence[str], around: Sequence[str | Path] = (), seconds: float = 300
) -> dict[str, Any]:
    """Each rank of a run is where its plan says; a plan that is refused starts nothing. Returns the plan."""
    ran = machine.run([*around, sys.executable, GUEST / "planned.py", *options, WHERE], seconds=seconds)
    first, *found = ran.json_lines()
    planned: dict[str, Any] = first["plan"]
    if not planned:
        assert first["planning"] == ran.status == 2, ran
        assert first["said"] == ran.err, ran
        assert "Traceback" not in ran.err
        assert not found
        return {}
    assert ran.status == 0, ran
    assert len(found) == planned["world_size"]
    nodes = nodes_of_cpus(machine)
    for rank, line in zip(planned["ranks"], sorted(found, key=_rank), strict=True):
        check_rank(rank, line, nodes)
    cores = [core for rank in planned["ranks"] for core in rank["cores"]]
    assert len(cores) == len(set(cores)), "two ranks have a core together"
    return planned


def check_rank(rank: dict[str, Any], line: dict[str, Any], nodes: dict[int, int]) -> None:
    """A rank of a plan, and what the kernel says of it."""
    what = json.dumps({"planned": rank, "found": line})
    if rank["cores"]:
        assert line["cpus"] == line["thread"] == sorted(rank["cores"]), what
    memory = rank["memory"]
    pages = {int(node): count for node, count in line["pages"].items()}
    assert all(node >= 0 for node in pages), what
    if memory["policy"] == "default":
        assert line["policy"] == "default", what
        if rank["cores"] and len({nodes[core] for core in rank["cores"]}) == 1 and len(pages) > 1:
            raise AssertionError(what)
        return
    assert line["policy"] == memory["policy"], what
    assert line["nodes"] == sorted(memory["nodes"]), what
    assert set(pages) <= set(memory["nodes"]), what
    if memory["policy"] == "interleave":
        most, least = max(pages.values()), min(pages.values())
        assert set(pages) == set(memory["nodes"]), what
        assert most - least <= 64, what


@functools.cache
def nodes_of_cpus(machine: Machine) -> dict[int, int]:
    """The node of each CPU that was on line when it was first asked for, as the kernel's folders say."""
    script = "for n in /sys/devices/system/node/node[0-9]*; do echo ${n##*node} $(cat $n/cpulist); done"
    found: dict[int, int] = {}
    for line in machine.check(["sh", "-c", script]).out.splitlines():
        node, _, cpus = line.partition(" ")
        for cpu in numbers(cpus):
            found[cpu] = int(node)
    return found


def numbers(text: str) -> list[int]:
    """Those of a list of the kernel's, 0-3,8."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
