# SPDX-License-Identifier: Apache-2.0
"""Time of accelerator calls on the CPU beside DeepSpeed's, and what the first get_accelerator() adds to a start.

    make bench-peers && .venv-bench/bin/python benchmarks/accelerator_calls.py

Both sides run in one process, in turns, so that a change of the machine's speed meets both. The first call is timed
in fresh processes, with compiled modules as an installed package has them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import timeit
from collections.abc import Callable
from typing import Any

from _common import machine, median, note, table

# Call -> how many times faster than DeepSpeed's it must be; None where nothing is asked.
GOALS = {
    "get_accelerator()": 1,
    "current_device_name()": 1,
    "memory_allocated()": 10,
    "device_count()": 10,
    "max_memory_allocated()": None,
    "current_device()": None,
    "total_memory()": None,
}
FIRST_CALL = """
import time
import torch
from {package} import get_accelerator
started = time.perf_counter()
get_accelerator()
print(time.perf_counter() - started)
"""


def microseconds(call: Callable[[], Any]) -> float:
    """One call, in a loop of about 50 ms."""
    timer = timeit.Timer("call()", globals={"call": call})
    number = max(1, timer.autorange()[0] // 4)
    return timer.timeit(number) / number * 1e6


def compare(rounds: int) -> list[list[str]]:
    """Rows of the table: ours, DeepSpeed's, the ratio of the medians, the goal."""
    os.environ.pop("LOCAL_SIZE", None)  # else DeepSpeed's device_count() only reads it
    from deepspeed.accelerator import get_accelerator as theirs

    from anyaccel.accelerator import get_accelerator as ours

    rows = []
    for name, goal in GOALS.items():
        if name == "get_accelerator()":
            calls = (ours, theirs)
        else:
            method = name.removesuffix("()")
            calls = (getattr(ours(), method), getattr(theirs(), method))
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for side, call in zip(times, calls, strict=True):
                side.append(microseconds(call))
        mine, peer = median(times[0]), median(times[1])
        rows.append([f"`{name}`", f"{mine:.3f}", f"{peer:.3f}", f"{peer / mine:.1f}", str(goal or "")])
        note(f"{name}: {mine:.3f} us, DeepSpeed {peer:.3f} us")
    return rows


def first_call(package: str, rounds: int) -> float:
    """Milliseconds of the first get_accelerator() in a process that has imported torch, as a median."""
    without = ("PYTHONDONTWRITEBYTECODE", "DS_ACCELERATOR")
    environment = {name: value for name, value in os.environ.items() if name not in without}
    times = []
    for _ in range(rounds + 1):  # the first one compiles
        command = [sys.executable, "-c", FIRST_CALL.format(package=package)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
        times.append(float(done.stdout.split()[-1]) * 1e3)
    return median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each measurement; the median counts")
    options = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    rows = compare(options.rounds)
    print(machine(), end="\n\n")
    print(table(["call", "anyaccel, us", "DeepSpeed, us", "times faster", "asked"], rows), end="\n\n")
    mine = first_call("anyaccel.accelerator", options.rounds)
    print(f"First get_accelerator() after `import torch`: {mine:.1f} ms (asked: below 50).")


if __name__ == "__main__":
    main()
