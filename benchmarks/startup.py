# SPDX-License-Identifier: Apache-2.0
"""Wall time of starting two empty workers, and how soon their end is noticed: `anyaccel run` against its peers.

Each worker writes down when it ends; "end noticed" is the time from the later one to the end of the launcher, with the
end of both interpreters in it. MPIEXEC names mpiexec.hydra of Intel MPI.

Whole commands take turns, round by round; a figure is the median over the rounds. Byte code is cached, as for a user.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _common import emit_json, machine, median, table

# perf_counter() is CLOCK_MONOTONIC, the same for all processes.
_WORKER = "import os, time; open(f'{os.getpid()}.end', 'w').write(str(time.perf_counter()))\n"


def commands(script: str) -> dict[str, list[str]]:
    """Name -> command; peers that are not installed are left out."""
    programs = Path(sys.executable).parent
    # The launchers as modules of this interpreter: .venv-bench has the packages of .venv but not its scripts.
    ours = ["run", "--num_accelerators", "2", "--bind_cores_to_rank", script]
    found = {"anyaccel run": [sys.executable, "-m", "anyaccel", *ours]}
    found["torchrun"] = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script]
    if (programs / "deepspeed").exists():
        found["deepspeed"] = [str(programs / "deepspeed"), "--num_accelerators", "2", "--bind_cores_to_rank", script]
    mpiexec = os.environ.get("MPIEXEC")
    if mpiexec:
        found["mpiexec"] = [mpiexec, "-n", "2", sys.executable, script]
    found["python alone"] = [sys.executable, script]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', '')}"
    times: dict[str, list[float]] = {}
    noticed: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "noop.py"
        script.write_text(_WORKER)
        for round_number in range(-1, options.rounds):  # the first round only warms caches
            for name, command in commands(str(script)).items():
                for mark in Path(folder).glob("*.end"):
                    mark.unlink()
                start = time.perf_counter()
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=folder)
                if done.returncode:
                    failed[name] = f"exit code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
                elif round_number >= 0:
                    end = time.perf_counter()
                    times.setdefault(name, []).append(end - start)
                    marks = [float(mark.read_text()) for mark in Path(folder).glob("*.end")]
                    noticed.setdefault(name, []).append(end - max(marks))
    if options.json:
        emit_json({"machine": machine(), "seconds": times, "noticed": noticed, "failed": failed})
        return 0
    print(f"starting two empty workers, {options.rounds} rounds\n{machine()}\n")
    ours = median(times["anyaccel run"])
    rows = [
        [
            name,
            f"{median(v):.3f}",
            f"{min(v):.3f}",
            f"{max(v):.3f}",
            f"{ours / median(v):.3f}",
            f"{median(noticed[name]):.3f}",
        ]
        for name, v in times.items()
    ]
    print(table(["command", "median s", "min", "max", "ours / it", "end noticed s"], rows))
    for name, why in failed.items():
        print(f"\n{name} left out: {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
