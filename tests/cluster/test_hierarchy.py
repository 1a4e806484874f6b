# SPDX-License-Identifier: Apache-2.0
"""Groups of backend shm that span hosts: shared memory inside each, gloo between them."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_hosts import Hosts, lines

COLLECTIVES = Path(__file__).parent / "collectives.py"
# What differs from one host to several: the way of the data, not the arithmetic.
QUICK = ("float32", "bool", "barrier", "async", "futures", "tags", "any", "coalescing", "objects")
QUICK += ("functional", "random", "rounding", "groups", "nonblocking", "batched")


def collectives(hosts: Hosts, tmp_path: Path, slots: list[int], *words: str, **variables: str) -> dict[str, object]:
    file = hosts.hostfile(tmp_path, slots=slots, hosts=len(slots))
    done = hosts.run("ssh", file, COLLECTIVES, *words, timeout=280, variables=variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    line: dict[str, object] = lines(done.stdout)[0]
    assert line["group"] == "HierarchicalGroup"
    assert line["hosts"] == [f"node{host + 1}" for host, count in enumerate(slots) for _ in range(count)]
    return line


@pytest.mark.slow
def test_two_hosts_of_two_ranks(hosts: Hosts, tmp_path: Path) -> None:
    line = collectives(hosts, tmp_path, [2, 2], *QUICK)
    assert not line["wrong"]
    assert line["cases"] > 80


@pytest.mark.slow
@pytest.mark.parametrize("slots", [[2, 2], [3, 1], [1, 1], [1, 2, 1]], ids=str)
def test_every_case_over_hosts(hosts: Hosts, tmp_path: Path, slots: list[int]) -> None:
    assert not collectives(hosts, tmp_path, slots)["wrong"]
