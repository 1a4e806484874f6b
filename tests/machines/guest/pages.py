# SPDX-License-Identifier: Apache-2.0
"""On which nodes the memory of processes lies, by /proc/PID/numa_maps.

    pages.py TEXT

Prints a line of JSON for each process whose environment has a RANK, or whose command has TEXT: its CPUs, and bytes by
node of what only it has (`own`), of what of that is in huge pages (`huge`), of mapped files of packed weights
(`weights`), and of each piece of shared memory.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

_MAPPING = re.compile(r"([0-9a-f]+)-[0-9a-f]+ ")
_NODE = re.compile(r" N(\d+)=(\d+)")


def _huge_by_begin(pid: str) -> dict[int, int]:
    """Bytes in huge pages of each mapping, by its first address, by /proc/PID/smaps."""
    found: dict[int, int] = {}
    begin = 0
    with Path(f"/proc/{pid}/smaps").open() as file:
        for line in file:
            if match := _MAPPING.match(line):
                begin = int(match[1], 16)
            elif line.startswith("AnonHugePages:"):
                found[begin] = int(line.split()[1]) << 10
    return found


def _of_process(pid: str) -> dict[str, Any]:
    own: Counter[int] = Counter()
    weights: Counter[int] = Counter()
    huge: Counter[int] = Counter()
    shared: dict[str, Counter[int]] = {}
    by_begin = _huge_by_begin(pid)
    with Path(f"/proc/{pid}/numa_maps").open() as file:
        for line in file:
            size = int(line.partition("kernelpagesize_kB=")[2] or 4) << 10
            nodes = Counter({int(node): int(count) * size for node, count in _NODE.findall(line)})
            name = line.partition("file=")[2].partition(" ")[0]
            if "/packed/" in name:
                weights += nodes
            elif "memfd" in name or "/dev/shm" in name:
                shared[name] = shared.get(name, Counter()) + nodes
            elif " anon=" in line and not name:
                own += nodes
                if nodes and (size := by_begin.get(int(line.split()[0], 16), 0)):
                    huge[max(nodes, key=nodes.__getitem__)] += size
    return {"own": own, "huge": huge, "weights": weights, "shared": shared}


def main() -> None:
    text = sys.argv[1].encode()
    for folder in Path("/proc").glob("[0-9]*"):
        pid = folder.name
        try:
            environment = dict(each.partition(b"=")[::2] for each in (folder / "environ").read_bytes().split(b"\0"))
            command = (folder / "cmdline").read_bytes()
            if int(pid) == os.getpid() or (b"RANK" not in environment and text not in command):
                continue
            found = {"pid": int(pid), "cpus": sorted(os.sched_getaffinity(int(pid))), **_of_process(pid)}
            found["rank"] = environment.get(b"RANK", b"").decode()
        except (OSError, ValueError):  # it has ended meanwhile
            continue
        print(json.dumps(found))


if __name__ == "__main__":
    main()
