# SPDX-License-Identifier: Apache-2.0
"""How long `anyaccel port` takes for 1,000 files on two cores.

    python benchmarks/port.py DIR    with checkouts of projects below DIR

Files are drawn at random below DIR. "with CUDA" draws only from those in which the word stands. The processor time of
the command and its workers stands beside the wall time: where other work shares the cores, it is what counts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _common import emit_json, median, table


def measure(files: list[Path], cores: int, rounds: int) -> dict[str, float]:
    """Medians over the rounds of `anyaccel port --check` on copies of these files."""
    wall, cpu = [], []
    found: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, file in enumerate(files):  # folders of a hundred, as in a repository
            place = Path(folder) / f"part{number // 100}"
            place.mkdir(exist_ok=True)
            shutil.copy(file, place / f"m{number}.py")
        command = [sys.executable, "-m", "anyaccel", "port", ".", "--json"]
        allowed = sorted(os.sched_getaffinity(0))[:cores]
        for _ in range(rounds):
            before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, allowed)
            )
            wall.append(time.perf_counter() - start)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            found = json.loads(done.stdout)["summary"]
    lines = sum(file.read_bytes().count(b"\n") for file in files)
    return {
        "files": len(files),
        "lines": lines,
        "with_cuda": found["files"] - found["without_cuda"],
        "found": found["found"],
        "wall_s": median(wall),
        "cpu_s": median(cpu),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", choices=("any", "with CUDA"), help="one of the two draws; default: both")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    every = sorted(path for path in options.folder.rglob("*.py") if path.is_file())
    draws = {"any": every, "with CUDA": [path for path in every if b"cuda" in path.read_bytes().lower()]}
    results = {}
    for name, files in draws.items():
        if options.only in (None, name):
            drawn = random.Random(8).sample(files, min(options.files, len(files)))
            results[name] = measure(drawn, options.cores, options.rounds)
    if options.json:
        emit_json(results)
        return 0
    header = ["files drawn from", "files", "lines", "with CUDA", "found", "wall s", "processor s"]
    rows = [
        [
            name,
            *(f"{row[key]:,}" for key in ("files", "lines", "with_cuda", "found")),
            f"{row['wall_s']:.1f}",
            f"{row['cpu_s']:.1f}",
        ]
        for name, row in results.items()
    ]
    print(f"anyaccel port --check on {options.cores} cores\n\n{table(header, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
