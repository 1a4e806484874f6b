# SPDX-License-Identifier: Apache-2.0
"""Ranks on several hosts against the same ranks on one: the same bits. The hosts are threads of this process here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

import native_models
from anyaccel.errors import CommError, PeerLostError
from anyaccel.launch.cluster.address import addresses_for_others
from native_models import PROMPTS


def connected(models: Sequence[Any], hosts: Sequence[int], sockets: Sequence[int] = ()) -> Sequence[Any]:
    names = [
        model.create_segment(60.0, True, list(hosts), ["127.0.0.1"], socket=socket)
        for model, socket in zip(models, sockets or [-1] * len(models), strict=True)
    ]
    with ThreadPoolExecutor(len(models)) as pool:
        list(pool.map(lambda model: model.connect(names, [os.getpid()] * len(models)), models))
    for model in models:
        model.unlink()
    return models


def ranks(name: str, hosts: Sequence[int], sockets: Sequence[int] = (), **options: Any) -> Sequence[Any]:
    models = [native_models.rank_of(name, rank, len(hosts), **options) for rank in range(len(hosts))]
    return connected(models, hosts, sockets)


def computed(model: Any, vocab: int) -> tuple[torch.Tensor, list[list[int]]]:
    """Logits of prompts at once and of a step, and answers: greedy, sampled, with drafts."""
    sequences = [model.create() for _ in PROMPTS]
    logits = [native_models.logits_of(model, vocab, sequences, PROMPTS)]
    logits.append(native_models.logits_of(model, vocab, sequences, [[7]] * len(PROMPTS)))
    return torch.cat(logits), native_models.answers_of(model)


def on_all(name: str, models: Sequence[Any]) -> list[tuple[torch.Tensor, list[list[int]]]]:
    vocab = native_models.whole(name)[1].vocab
    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(lambda model: computed(model, vocab), models))


@pytest.mark.parametrize(
    ("name", "hosts"),
    [("llama", [0, 1]), ("llama", [0, 0, 1, 1]), ("olmo2", [0, 1, 0]), ("gptj", [0, 1]), ("qwen3_moe", [0, 1])],
    ids=str,
)
def test_several_hosts_have_the_bits_of_one(name: str, hosts: list[int]) -> None:
    """olmo2 exchanges sums of squares too, gptj two parts of a layer at once."""
    (expected, answers), *_ = on_all(name, ranks(name, [0] * len(hosts)))
    for logits, tokens in on_all(name, ranks(name, hosts)):
        assert torch.equal(logits, expected)
        assert tokens == answers


@pytest.mark.parametrize(
    ("name", "sockets", "two_levels"),
    [
        ("llama", [0, 0, 1, 1], True),
        ("llama", [5, 3, 5, 3], True),
        ("olmo2", [0, 0, 1, 1], True),
        ("gptj", [0, 0, 1, 1], True),
        ("llama", [0, 1, 2, 3], False),
        ("llama", [0, 0, 0, 1], False),
        ("llama", [0, 0, 1, -1], False),
    ],
    ids=str,
)
def test_ranks_of_a_socket_add_their_own_deltas_first(name: str, sockets: list[int], two_levels: bool) -> None:
    """That rounds in another order; all ranks have the same bits. olmo2 norms the sums, gptj adds two parts."""
    (expected, answers), *_ = on_all(name, ranks(name, [0] * 4))
    results = on_all(name, ranks(name, [0] * 4, sockets, threads=2))
    for logits, tokens in results:
        assert torch.equal(logits, results[0][0])
        assert torch.equal(logits, expected) != two_levels
        assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-5
        assert tokens == answers


def test_what_rank_0_says_goes_to_all() -> None:
    models = ranks("llama", [0, 0, 1])
    for value in (2**64 - 1, 5, 0):
        with ThreadPoolExecutor(len(models)) as pool:
            told = list(pool.map(lambda model, own: model.shared(own), models, (value, 7, 8)))
        assert told == [value] * 3
    assert native_models.native("llama").shared(2**64 - 1) == 2**64 - 1


def test_the_smallest_cache_limits_all_ranks() -> None:
    """Else one rank would refuse what the others begin with."""
    models = [
        native_models.rank_of("llama", rank, 2, cache_limit=limit) for rank, limit in enumerate((1 << 26, 1 << 20))
    ]
    page = models[1].cache_bytes_per_token() * 64
    connected(models, [0, 1])
    assert [model.cache_limit_bytes for model in models] == [(1 << 20) // page * page, 1 << 20]


def test_a_host_that_leaves() -> None:
    vocab = native_models.whole("llama")[1].vocab
    models = [native_models.rank_of("llama", rank, 3) for rank in range(3)]
    connected(models, [0, 1, 1])
    del models[1:]
    with pytest.raises(PeerLostError, match=r"^ranks 1, 2 on \S+ ended or left: the connection was closed"):
        native_models.logits_of(models[0], vocab, [models[0].create()], [[5]])


def test_where_other_hosts_reach_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert addresses_for_others() == ["127.0.0.1"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothere0, nothere1")
    with pytest.raises(CommError, match="GLOO_SOCKET_IFNAME=nothere0, nothere1: there is no such interface"):
        addresses_for_others()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert addresses_for_others() == ["127.0.0.1"]
