# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyaccel.errors import UsageError
from anyaccel.inference.spec.partition import HeadShard, split_evenly, split_features, split_heads


def test_smollm2_on_two_ranks() -> None:
    assert split_heads(9, 3, 2) == [HeadShard(range(6), range(2)), HeadShard(range(6, 9), range(2, 3))]


def test_more_ranks_than_kv_heads_replicates_them() -> None:
    shards = split_heads(9, 3, 4)
    assert [(s.query, s.key_value) for s in shards] == [
        (range(2), range(1)),
        (range(2, 3), range(1)),
        (range(3, 6), range(1, 2)),
        (range(6, 9), range(2, 3)),
    ]


@given(st.integers(1, 16), st.integers(1, 12), st.integers(1, 64))
def test_heads_are_divided_without_gap_and_each_with_its_kv_head(kv_heads: int, group: int, parts: int) -> None:
    heads = kv_heads * group
    if parts > heads:
        with pytest.raises(UsageError, match=f"only {heads} attention heads"):
            split_heads(heads, kv_heads, parts)
        return
    shards = split_heads(heads, kv_heads, parts)
    assert [head for shard in shards for head in shard.query] == list(range(heads))
    for shard in shards:
        assert len(shard.query) > 0
        # The kernels repeat each KV head equally often, so every query head must meet its own.
        repeat, remainder = divmod(len(shard.query), len(shard.key_value))
        assert remainder == 0
        for place, head in enumerate(shard.query):
            assert shard.key_value[place // repeat] == head // group


@given(st.integers(1, 5000), st.integers(1, 64))
def test_features_are_divided_without_gap_and_in_whole_units(total: int, parts: int) -> None:
    if parts > total:
        with pytest.raises(UsageError, match="features"):
            split_features(total, parts)
        return
    ranges = split_features(total, parts)
    assert [i for r in ranges for i in r] == list(range(total))
    assert all(len(r) > 0 for r in ranges)
    if total % 64 == 0 and total // 64 >= parts:
        assert all(r.start % 64 == 0 for r in ranges)


@given(st.integers(0, 100), st.integers(1, 20))
def test_even_split_is_even(total: int, parts: int) -> None:
    lengths = [len(r) for r in split_evenly(total, parts)]
    assert sum(lengths) == total
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def test_heads_that_form_no_groups() -> None:
    with pytest.raises(UsageError, match="multiple"):
        split_heads(7, 2, 2)
