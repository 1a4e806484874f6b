# SPDX-License-Identifier: Apache-2.0
"""What tests/data/census.json says of transformers' causal language models, which docs/models.md lists."""

from __future__ import annotations

import json

import pytest

import census
from anyaccel.inference.families.registry import FAMILIES
from anyaccel.inference.families.text_part import READS

RECORDED = json.loads(census.FILE.read_text())


def test_each_model_of_transformers_is_listed() -> None:
    assert list(RECORDED) == census.names()


def test_what_is_native_is_a_family() -> None:
    native = {name for name, found in RECORDED.items() if found["way"] == "native"}
    assert native <= FAMILIES.keys() | READS.keys() | {"gpt-sw3"}  # whose configuration is GPT-2's


@pytest.mark.slow
@pytest.mark.parametrize("model_type", RECORDED)
def test_each_model_runs_as_it_is_listed(model_type: str) -> None:
    found, difference = census.take(model_type)
    ways = {RECORDED[model_type]["way"]} | ({"native"} if model_type in FAMILIES else set())
    assert found.way in ways, found.why
    assert difference <= 1e-4
