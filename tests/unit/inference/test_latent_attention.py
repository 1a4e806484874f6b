# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention: long queries, whose keys are made of latents, and few tokens, which see the latents."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import decoder_reference
import family_cases
from anyaccel.inference.families.registry import family_of
from anyaccel.inference.native.runtime import load_native
from anyaccel.inference.options import ModelOptions

_LENGTH = 1100  # three tiles of latents
_NAMES = ["deepseek_v2", "deepseek_v3", "deepseek_v32", "minicpm3"]


def _native(model: Any, **more: Any) -> Any:
    return load_native(copy.deepcopy(model), ModelOptions("fp32", cache_bytes=1 << 26, **more)).model


def _forward(model: Any, vocab: int, sequence: int, ids: Any) -> Any:
    out = torch.full((len(ids), vocab), float("nan"))
    model.forward([sequence], [len(ids)], ids.data_ptr(), out.data_ptr(), list(range(len(ids))))
    return out


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", _NAMES)
def test_long_contexts_are_those_of_the_definition(name: str, threads: int) -> None:
    """A long prompt, a second one behind it, few tokens, and one."""
    whole = family_cases.build(name, positions=2048)
    family = family_of(whole.config.to_dict())
    spec = family.spec(whole.config.to_dict())
    vocab = spec.vocab
    ids = torch.randint(3, vocab, (_LENGTH + 200 + 7 + 1,), generator=torch.Generator().manual_seed(2))
    reference = decoder_reference.Reference(spec, decoder_reference.assemble(family, spec, whole.state_dict()))
    state = reference.start()
    model = _native(whole, threads=threads)
    sequence, at = model.create(), 0
    for count in (_LENGTH, 200, 7, 1):
        part = ids[at : at + count]
        wanted = reference.step(state, part.tolist())
        found = _forward(model, vocab, sequence, part)
        assert (found - wanted).abs().max() / wanted.abs().max() < 1e-4
        at += count


def test_a_token_takes_a_latent_of_the_cache() -> None:
    """Not the keys and values of all heads."""
    whole = family_cases.build("deepseek_v2")
    spec = family_of(whole.config.to_dict()).spec(whole.config.to_dict())
    mla = spec.layers[0].attention.mla
    values = 2 * mla.kv_rank + mla.rope_dim + 3 + 15  # with the padding of keys and values
    assert _native(whole).cache_bytes_per_token() <= len(spec.layers) * values * 4
