# SPDX-License-Identifier: Apache-2.0
"""tools/model_steps.py: a step's time from its bytes, barriers and exchanges."""

from __future__ import annotations

from pathlib import Path

import pytest

import model_steps as tool

ROOT = Path(__file__).parents[2]


def test_one_thread_only_reads() -> None:
    alone = tool.Machine("one core", 1, 1, 10e9, core=1e12)
    step = tool.decode_step(alone, tool.LLAMA_8B, 1, 2.0)
    layers = 32 * (6144 * 4096 + 4096 * 4096 + 28672 * 4096 + 4096 * 14336)
    assert step.reading == pytest.approx((layers + 128256 * 4096) * 2.0 / (10e9 * tool.READ * tool.GEMV))
    assert step.imbalance == step.barriers == step.exchanges == 0


def test_a_matrix_with_fewer_blocks_than_threads_waits_for_one_core() -> None:
    machine = tool.Machine("many cores", 1, 64, 1e15, core=10e9)
    even, more = tool.product(machine, 1, 16, 4096, 2.0)
    assert even + more == pytest.approx(16 * 4096 * 2.0 / 10e9)


def test_keys_and_values_are_read_too() -> None:
    short, long = (tool.decode_step(tool.XEON_4, tool.LLAMA_8B, 2, 0.58, depth) for depth in (0, 100_000))
    read = 32 * 2048 * 2 * 100_000 / 2
    assert long.reading - short.reading == pytest.approx(read / (tool.XEON_4.memory * tool.READ))


def test_the_page_has_the_tables() -> None:
    assert tool.page() in (ROOT / "benchmarks" / "results" / "steps.md").read_text()
