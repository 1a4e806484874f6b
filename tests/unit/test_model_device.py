# SPDX-License-Identifier: Apache-2.0
"""tools/model_device.py: launches and bytes of a step of the device runtime."""

from __future__ import annotations

import pytest

import model_device as tool

SMALL = tool.LLAMA_8B | {"num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 4096}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.mark.parametrize("dtype", tool.FORMATS)
def test_one_token_reads_each_weight_once(dtype: str) -> None:
    counted, held, keys = tool.step(dtype, 1, SMALL)
    assert keys == tool.CONTEXT * 2 * 2 * 128 * 2 * 2  # keys and values of two layers, two bytes each
    assert held <= counted.bytes["product"] < 1.02 * held
    assert keys <= counted.bytes["attend"] < 1.5 * keys
    assert counted.launches["product"] == 4 * 2 + 1
    assert counted.launches["norm"] == 1  # the last one: those before products are part of them


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("batch", [8, 64])
def test_several_sequences_read_each_weight_once(dtype: str, batch: int) -> None:
    counted, held, _ = tool.step(dtype, batch, SMALL)
    assert counted.bytes["dequantised"] == counted.bytes["mm"] == 0
    assert held <= counted.bytes["product"] < 1.35 * held  # of 64 tokens what goes in and out is a part of it


def test_a_matrix_that_has_to_be_dequantised_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    few, held, _ = tool.step("int4", 8, SMALL)
    monkeypatch.setattr(tool, "MOST_TOKENS", 1)
    more, _, _ = tool.step("int4", 8, SMALL)
    assert few.bytes["dequantised"] == 0
    assert more.bytes["dequantised"] > 2 * held
    assert tool.seconds(more, 1e12, tool.GAP) > 2 * tool.seconds(few, 1e12, tool.GAP)


@pytest.mark.slow
def test_the_page_is_what_the_tool_says() -> None:
    assert tool.page() in tool.PAGE_OF_RESULTS.read_text()
