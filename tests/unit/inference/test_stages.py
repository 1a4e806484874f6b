# SPDX-License-Identifier: Apache-2.0
"""How layers are divided among the stages of pipeline parallelism, and what each stage holds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

import family_cases
import native_models
from anyaccel.errors import UsageError
from anyaccel.inference.families.registry import family_of
from anyaccel.inference.native.shard import bytes_by_layer, split_layers, stage_spec
from anyaccel.inference.spec.decoder import each_weight

pytest.importorskip("transformers")


def sizes(layers: Sequence[int], first: int, last: int, parts: Sequence[range]) -> list[int]:
    found = [sum(layers[part.start : part.stop]) for part in parts]
    found[0] += first
    found[-1] += last
    return found


@pytest.mark.parametrize(
    ("layers", "first", "last", "stages"),
    [
        ([10] * 8, 0, 0, 4),
        ([10] * 30, 80, 80, 2),
        ([10] * 12, 45, 5, 3),
        ([1, 9, 1, 9, 1, 30], 4, 2, 3),
        ([5, 5], 90, 0, 2),
    ],
)
def test_the_largest_stage_is_as_small_as_it_can_be(layers: list[int], first: int, last: int, stages: int) -> None:
    parts = split_layers(layers, first, last, stages)
    assert [layer for part in parts for layer in part] == list(range(len(layers)))
    assert all(len(part) for part in parts)
    best = min(
        max(sizes(layers, first, last, [range(*ends) for ends in itertools.pairwise([0, *cuts, len(layers)])]))
        for cuts in itertools.combinations(range(1, len(layers)), stages - 1)
    )
    assert max(sizes(layers, first, last, parts)) == best


def test_equal_layers_are_divided_evenly() -> None:
    assert split_layers([10] * 8, 0, 0, 4) == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert split_layers([10] * 7, 0, 0, 2) == [range(4), range(4, 7)]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(UsageError, match="pipeline_parallel size=3: the model has only 2 layers"):
        split_layers([1, 1], 0, 0, 3)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt2", "gemma2"])
def test_stages_have_all_weights_once(name: str) -> None:
    _, spec, values = native_models.whole(name)
    layers, first, last = bytes_by_layer(spec, [(each, value.numel()) for each, value in values.items()])
    parts = split_layers(layers, first, last, 2)
    found = [{each.name for each in each_weight(stage_spec(spec, parts, stage))} for stage in range(2)]
    assert found[0] | found[1] == {each.name for each in each_weight(spec)}
    assert found[0] & found[1] == ({"embed"} if spec.tied else set())
    assert sum(layers) + first + last == sum(value.numel() for value in values.values()) + (
        values["embed"].numel() if spec.tied else 0
    )


@pytest.mark.parametrize(
    ("case", "said"), [("gemma4_text", "need the embedding"), ("gemma4_text-large", "which another stage has")]
)
def test_layers_that_need_what_another_stage_has_are_not_divided(case: str, said: str) -> None:
    config = family_cases.build(case).config.to_dict() | {"num_kv_shared_layers": 3}
    spec = family_of(config).spec(config)
    with pytest.raises(UsageError, match=said):
        for stage in range(2):
            stage_spec(spec, [range(3), range(3, 6)], stage)
