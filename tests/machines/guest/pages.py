# SPDX-License-Identifier: Apache-2.0
"""On which nodes the memory of processes lies, by /proc/PID/numa_maps.

    pages.py TEXT

Prints a line of JSON for each process whose environment has a RANK, or whose command has TEXT: its CPUs, and bytes by
node of what only it has (`own`), of mapped files of packed weights (`weights`), and of each piece of shared memory.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

_NODE = re.compile(r" N(\d+)=(\d+)")


def _of_process(pid: str) -> dict[str, Any]:
    own: Counter[int] = Counter()
    weights: Counter[int] = Counter()
    shared: dict[str, Counter[int]] = {}
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
    return {"own": own, "weights": weights, "shared": shared}


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
