# SPDX-License-Identifier: Apache-2.0
"""Collectives and optimizers give the bits that were recorded before their kernels were written anew."""

from __future__ import annotations

import json

import pytest

import ranks
import recorded_bits

RECORDED = json.loads(recorded_bits.FILE.read_text())


@pytest.mark.parametrize("world_size", recorded_bits.WORLD_SIZES)
def test_collectives_give_the_recorded_bits(world_size: int) -> None:
    assert ranks.run(recorded_bits.collectives, world_size) == RECORDED[f"{world_size} ranks"]


def test_optimizers_give_the_recorded_bits() -> None:
    assert recorded_bits.optimizers() == RECORDED["optimizers"]
