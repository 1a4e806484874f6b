# SPDX-License-Identifier: Apache-2.0
"""What `anyaccel bench llm --against` refuses before anything is measured, and how a measurement is ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from anyaccel.bench import worker
from anyaccel.bench.contenders import parse_peer, runs_in
from anyaccel.errors import UsageError


@pytest.mark.parametrize("name", ["hf", "deepspeed"])
def test_a_peer_that_reads_folders_only_is_given_no_gguf(name: str, tmp_path: Path) -> None:
    """The default model is a GGUF file; transformers would call it invalid JSON."""
    with pytest.raises(UsageError, match=rf"--against {name} reads folders .*, not m.gguf: .* --model, or as {name}="):
        parse_peer(name, "/models/m.gguf", "bf16", 1, {})
    contender = parse_peer(f"{name}={tmp_path}", "/models/m.gguf", "bf16", 1, {})
    assert contender.model == str(tmp_path)
    assert parse_peer(name, "/models/m", "bf16", 1, {}).name == f"{name} bf16"


def test_a_peer_that_needs_a_form_of_its_own_says_which() -> None:
    for text, words in (
        ("nope", "unknown peer 'nope'"),
        ("llama.cpp", "llama.cpp=FILE.gguf"),
        ("openvino", "openvino=FOLDER"),
        ("hf=/nowhere/m", "there is no /nowhere/m"),
    ):
        with pytest.raises(UsageError, match=words):
            parse_peer(text, "/models/m", "bf16", 1, {})


def test_what_cannot_quantise_runs_in_floating_point_only() -> None:
    assert runs_in("hf", "bf16")
    assert not runs_in("hf", "int8")
    assert runs_in("llama.cpp=m.gguf", "int4")


_TWO = """
import os, sys
from anyaccel.bench.contenders import Contender, Sizes
from anyaccel.bench.contenders import measure
os.environ["LAUNCHER"] = str(os.getpid())
try:
    measure([Contender(name, "m", python=sys.argv[1]) for name in ("hf", "vllm")], Sizes(), 1, 100)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(("name", "code"), [("INT", 130), ("TERM", 143)])
def test_a_signal_ends_the_command_and_not_only_one_contender(name: str, code: int, tmp_path: Path) -> None:
    engine = tmp_path / "python"
    engine.write_text(f'#!/bin/sh\nkill -{name} "$LAUNCHER"\nexec sleep 50\n')
    engine.chmod(0o700)
    done = subprocess.run([sys.executable, "-c", _TWO, engine], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == "round 1 of 1: hf bf16\n"
    assert done.returncode == code


def test_rates_of_a_batch_that_cannot_be_are_noise() -> None:
    assert worker._possible([840.4, 50.0, 86.0], 8, [10.7, 10.8]) == [50.0, 86.0]
    assert worker._possible([840.4], 8, []) == [840.4]
