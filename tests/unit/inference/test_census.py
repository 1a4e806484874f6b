# SPDX-License-Identifier: Apache-2.0
"""What tests/data/census*.json say of transformers' models, which docs/models.md and docs/encoders.md list."""

from __future__ import annotations

import json

import pytest

import census
from anyaccel.inference.families.registry import ENCODERS, FAMILIES
from anyaccel.inference.families.text_part import READS

RECORDED = json.loads(census.FILE.read_text())
OF_TEXTS = json.loads(census.TEXTS_FILE.read_text())


def test_each_model_of_transformers_is_listed() -> None:
    assert list(RECORDED) == census.names()


def test_each_encoder_and_classifier_of_transformers_is_listed() -> None:
    assert list(OF_TEXTS) == census.names(texts=True)
    assert {name for name, found in OF_TEXTS.items() if found["way"] == "native"} <= ENCODERS.keys()
    assert not [name for name, found in OF_TEXTS.items() if found["way"] == "fails"]


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


@pytest.mark.slow
@pytest.mark.parametrize("model_type", OF_TEXTS)
def test_each_encoder_and_classifier_runs_as_it_is_listed(model_type: str) -> None:
    found, difference = census.take(model_type, texts=True)
    assert found.way == OF_TEXTS[model_type]["way"], found.why
    assert difference <= 1e-4
