# SPDX-License-Identifier: Apache-2.0
"""Who takes part, and how each is started: a fresh process a round, bound as ours is."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anyaccel import launch
from anyaccel.errors import AnyAccelError, UsageError
from anyaccel.terminal import did_you_mean

WORKER = Path(__file__).with_name("worker.py")
PEERS = ("hf", "deepspeed", "llama.cpp", "openvino", "vllm")
METRICS = {
    "decode": "tokens/s, one sequence",
    "prefill": "tokens/s of a long prompt",
    "batch_decode": "tokens/s of a batch",
    "cold_start": "s from the start of the process to the first token",
    "peak_memory_mb": "MB resident at most",
}


@dataclass(frozen=True)
class Contender:
    """One engine with the model in the form that it reads.

    Attributes:
        engine: "anyaccel" or one of PEERS.
        model: path of the model.
        dtype: of the weights; a model in the engine's own form has what it was converted to.
        label: printed instead of the dtype: the name of such a model.
        tp: ranks; 1 is one process with all cores.
        python: interpreter of the engine's environment.
        folder: where llama.cpp's programs are.
        options: more settings of the worker.
    """

    engine: str
    model: str
    dtype: str = "bf16"
    tp: int = 1
    python: str = sys.executable
    folder: str = ""
    label: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As it is printed."""
        return f"{self.engine} {self.label or self.dtype}" + (f" tp{self.tp}" if self.tp > 1 else "")


@dataclass(frozen=True)
class Sizes:
    """What is measured: lengths in tokens; `long` or `batch` 0 leave that figure out."""

    prompt: int = 64
    new: int = 128
    long: int = 1024
    batch: int = 8
    repeats: int = 3


def parse_peer(text: str, model: str, dtype: str, tp: int, pythons: dict[str, str]) -> Contender:
    """A peer from `NAME` or `NAME=MODEL`, the model in the peer's own form.

    Raises:
        UsageError: the name is unknown, or the peer needs a model in another form.
    """
    name, _, own_model = text.partition("=")
    if name not in PEERS:
        raise UsageError(
            f"--against {text}: unknown peer {name!r}{did_you_mean(name, PEERS)}; peers: {', '.join(PEERS)}"
        )
    path = own_model or model
    folder = ""
    if name == "llama.cpp":
        if not path.endswith(".gguf"):
            raise UsageError("--against llama.cpp needs a GGUF file of the model: llama.cpp=FILE.gguf")
        program = shutil.which("llama-bench", path=os.environ.get("LLAMACPP_BIN")) or shutil.which("llama-bench")
        if program is None:
            raise UsageError(
                "--against llama.cpp: no llama-bench on PATH; set LLAMACPP_BIN to the folder of its programs"
            )
        folder = str(Path(program).parent)
    if name == "openvino" and not own_model:
        raise UsageError("--against openvino needs the exported model: openvino=FOLDER (optimum-cli export openvino)")
    if name in ("hf", "deepspeed") and path.endswith(".gguf"):
        raise UsageError(
            f"--against {name} reads folders of Hugging Face, not {Path(path).name}: give one with --model, "
            f"or as {name}=FOLDER"
        )
    if own_model and not Path(own_model).exists():
        raise UsageError(f"--against {text}: there is no {own_model}")
    ranks = tp if name == "deepspeed" else 1
    return Contender(name, path, dtype, ranks, pythons.get(name, sys.executable), folder, Path(own_model).stem)


def runs_in(peer: str, dtype: str) -> bool:
    """Whether a peer can give a Hugging Face model's weights this precision itself."""
    return peer not in ("hf", "deepspeed", "vllm") or dtype not in ("int8", "int4")


def run(contender: Contender, sizes: Sizes, vocabulary: int) -> dict[str, list[float]]:
    """One round of one contender in a process of its own.

    Raises:
        AnyAccelError: it ended without a result; the message has the end of what it said.
        KeyboardInterrupt, SystemExit: Ctrl-C or another signal ended it, and is to end the command.
    """
    with tempfile.TemporaryDirectory(prefix="anyaccel-bench-") as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        settings = {
            **vars(sizes),
            "engine": contender.engine,
            "model": contender.model,
            "dtype": contender.dtype,
            "tp": contender.tp,
            "folder": contender.folder,
            "threads": 0,
            "vocabulary": vocabulary,
            "result": str(result),
            **contender.options,
        }
        file = Path(folder) / "settings.json"
        file.write_text(json.dumps(settings))
        code = _start([contender.python, str(WORKER), str(file)], contender, log)
        if code == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        if code in (128 + signal.SIGTERM, 128 + signal.SIGHUP):
            raise SystemExit(code)
        if code or not result.exists():
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            said = " | ".join(lines[-3:]) or "nothing"
            raise AnyAccelError(f"{contender.name} ended with exit code {code}; it said: {said[-500:]}")
        figures: dict[str, list[float]] = json.loads(result.read_text())
        return figures


def _start(command: Sequence[str], contender: Contender, log: Path) -> int:
    """Under our own launcher, so that every contender has the same cores and the same binding."""
    wanted = launch.LaunchOptions(
        script=str(WORKER), num_accelerators=contender.tp, bind_cores=contender.tp > 1, local_rank_argument=False
    )
    environment = {"ANYACCEL_BENCH_START": repr(time.time()), "LOCAL_SIZE": str(contender.tp)}
    plan = launch.make_plan(wanted, extra_env=environment)
    # The worker's words go to a file: an engine may print much.
    with log.open("wb") as file:
        saved = os.dup(1), os.dup(2)
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            return launch.launch_local(plan, list(command))
        finally:
            for number, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, number)
                os.close(copy)


def measure(
    contenders: Sequence[Contender], sizes: Sizes, rounds: int, vocabulary: int
) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """Every contender in turn, `rounds` times: their figures, and why some have none."""
    figures: dict[str, dict[str, list[float]]] = {}
    failures: dict[str, str] = {}
    for number in range(rounds):
        for contender in contenders:
            if contender.name in failures:
                continue
            _say(f"round {number + 1} of {rounds}: {contender.name}")
            try:
                found = run(contender, sizes, vocabulary)
            except AnyAccelError as error:
                failures[contender.name] = str(error)
                _say(f"left out: {error}")
                continue
            for metric, values in found.items():
                figures.setdefault(contender.name, {}).setdefault(metric, []).extend(values)
    return figures, failures


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
