# SPDX-License-Identifier: Apache-2.0
"""All that a device is needed for, in one command of some minutes, for the day when one is at hand.

Stages: the conformance kit; tests/gpu; decoding of 1, 8 and 64 sequences and prompts of 512 and 8,000 tokens, of random
Llamas in bf16, int8 and int4, beside Hugging Face (eager, static cache, compiled); a server with 32 clients; programs
written for CUDA as they are, with `anyaccel run --as-cuda`, and ported: the same output. What is done is kept in a
file, a line a measurement, and not done again: a run that was cut off goes on where it was.

  python benchmarks/device_all.py                      eight minutes on a GPU with 80 GB
  python benchmarks/device_all.py --sizes tiny         on a CPU: only whether all of this runs
  python benchmarks/device_all.py --only speed serve --minutes 4 --record FILE
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _common import machine, note, table

HERE = Path(__file__).parent
ROOT = HERE.parent
_LEAST = 10.0  # seconds that a stage must have left to be begun


@dataclass
class Session:
    """What was found, and until when there is time."""

    record: Path
    end: float
    sizes: list[str]
    found: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.record.exists():
            self.found = [json.loads(line) for line in self.record.read_text().splitlines()]

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def has(self, stage: str) -> bool:
        return any(each.get("stage") == stage for each in self.found)

    def add(self, stage: str, **what: Any) -> None:
        self.found.append({"stage": stage, **what})
        with self.record.open("a") as file:
            file.write(json.dumps(self.found[-1]) + "\n")

    def run(self, *command: str, at_most: float = 600.0, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command with its children, until there is no more time.

        Raises:
            TimeoutError: there is none left.
        """
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | environment,
            start_new_session=True,
        )
        try:
            out, error = process.communicate(timeout=max(1.0, min(self.left, at_most)))
        except BaseException as stopped:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(stopped, subprocess.TimeoutExpired):
                raise TimeoutError(f"{' '.join(command)[:80]} had no more time") from None
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, error)


def last_lines(done: subprocess.CompletedProcess[str]) -> str:
    return " | ".join((done.stdout + done.stderr).strip().splitlines()[-3:])


def conformance(session: Session) -> None:
    done = session.run(sys.executable, "-m", "anyaccel", "conformance", "--json")
    outcomes = [each["outcome"] for each in json.loads(done.stdout)["results"]]
    session.add("conformance", **{name: outcomes.count(name) for name in sorted(set(outcomes))})


def gpu_tests(session: Session) -> None:
    done = session.run(sys.executable, "-m", "pytest", "-q", "tests/gpu", "-p", "no:cacheprovider", at_most=240)
    session.add("tests/gpu", exit=done.returncode, said=last_lines(done).rpartition(" | ")[2])


def speed(session: Session) -> None:
    for size in session.sizes:
        if session.has(f"speed {size}"):
            continue
        tiny = size == "tiny"
        batches, prompts, tokens = (["1", "8"], ["64"], "4") if tiny else (["1", "8", "64"], ["512", "8000"], "128")
        command = [sys.executable, str(HERE / "device.py"), "--speed", size, "--quantised", "int8", "int4", "--json"]
        command += ["--batch", *batches, "--prompts", *prompts, "--tokens", tokens, "--record", str(session.record)]
        done = session.run(*command)
        if done.returncode:
            raise RuntimeError(f"{size}: {last_lines(done)}")
        session.add(f"speed {size}", measured=len(json.loads(done.stdout)["results"]))


def serve(session: Session) -> None:
    clients, requests = ("3", "1") if session.sizes == ["tiny"] else ("32", "4")
    command = [sys.executable, str(HERE / "serve.py"), "--only", "load", "--clients", clients, "--requests", requests]
    done = session.run(*command, "--runtime", "device", "--rounds", "1", "--json")
    if done.returncode:
        raise RuntimeError(last_lines(done))
    (told,) = json.loads(done.stdout)["results"]["load"][clients]["anyaccel"]
    found = {"tokens/s": round(told["tokens_per_s"], 1), "failed": told["failed"]}
    for name in ("first_ms", "between_ms"):
        values = sorted(told[name])
        found |= {f"{name} p50": values[len(values) // 2], f"{name} p99": values[int(0.99 * (len(values) - 1))]}
    session.add("serve", clients=int(clients), **found)


_PROGRAM = """
import torch

torch.manual_seed(0)
stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
x = torch.randn(64, 64, pin_memory=torch.cuda.is_available()).cuda(non_blocking=True)
with torch.cuda.stream(stream):
    y = (x @ x.T).relu()
    event.record()
torch.cuda.synchronize()
layer = torch.nn.Linear(64, 8).to("cuda")
loss = layer(y).pow(2).mean()
loss.backward()
print(f"{y.sum().item():.1f} {loss.item():.3f} {layer.weight.grad.norm().item():.3f}", torch.cuda.device_count() > 0)
"""


def ported(session: Session) -> None:
    """A program for CUDA: as it is (where there is CUDA), by `run --as-cuda`, and ported."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "plain").with_suffix(".py"), Path(folder, "ported").with_suffix(".py")
        for path in (before, after):
            path.write_text(_PROGRAM)
        done = session.run(sys.executable, "-m", "anyaccel", "port", "--write", str(after))
        if after.read_text() == _PROGRAM:
            raise RuntimeError(f"port: {last_lines(done)}")
        program = str(before)
        ways = {
            "as cuda": (sys.executable, "-m", "anyaccel", "run", "--as-cuda", program),
            "ported": (sys.executable, str(after)),
        }
        if torch.cuda.is_available():
            ways["as it is"] = (sys.executable, program)
        said = {}
        for name, command in ways.items():
            done = session.run(*command)
            lines = re.findall(r"^(?:\[.*?\] ?)?(-?[\d.]+ [\d.]+ [\d.]+ True)$", done.stdout, re.MULTILINE)
            if done.returncode or not lines:
                raise RuntimeError(f"{name}: {last_lines(done)}")
            said[name] = lines[-1]
        session.add("ported", same=len(set(said.values())) == 1, said=said)


STAGES: dict[str, Callable[[Session], None]] = {
    "conformance": conformance,
    "tests/gpu": gpu_tests,
    "speed": speed,
    "serve": serve,
    "ported": ported,
}


def tables(session: Session) -> Iterator[str]:
    rows = [each for each in session.found if "contender" in each]
    names = ("prompt tokens/s", "tokens/s", "ms a step", "of bandwidth", "memory GB")
    if rows:
        yield table(
            ["model, sequences x prompt", *names],
            [
                [
                    f"{each['size']} {each['contender']}, {each['batch']} x {each['prompt']}",
                    *(f"{each[name]:.3g}" for name in names),
                ]
                for each in rows
            ],
        )
    for each in session.found:
        if "stage" in each and not each["stage"].startswith("speed"):
            yield json.dumps(each)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="after which it stops (default: 8)")
    parser.add_argument("--sizes", nargs="+", default=["1.2b", "8b"], help="of device.py --speed")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--record", type=Path, default=Path("device_all.jsonl"), help="(default: device_all.jsonl)")
    options = parser.parse_args()
    session = Session(options.record.resolve(), time.monotonic() + 60 * options.minutes, options.sizes)
    import anyaccel

    device = anyaccel.get_accelerator().device_name()
    if not session.has("machine"):
        session.add("machine", machine=machine(), device=device)
    failed = []
    for name in options.only:
        if session.has(name):
            note(f"{name}: done before")
            continue
        if session.left < _LEAST:
            failed.append(name)
            note(f"{name}: no time left; run this again to go on")
            continue
        begin = time.monotonic()
        try:
            STAGES[name](session)
            note(f"{name}: {time.monotonic() - begin:.0f} s")
        except (RuntimeError, TimeoutError, ValueError) as error:
            failed.append(name)
            note(f"{name}: {error}")
        session.found = Session(session.record, session.end, session.sizes).found
    print(machine(), f"device: {device}", *tables(session), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
