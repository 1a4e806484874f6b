# SPDX-License-Identifier: Apache-2.0
"""Native encoders beside transformers' own, for texts of different lengths in one call."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import encoder_models
from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.encoders.model import Encoder
from anyaccel.inference.native.runtime import load_native
from anyaccel.inference.options import ModelOptions
from anyaccel.inference.spec.mapping import Unsupported

FP32 = ModelOptions(dtype="fp32", threads=2)
# A single token, few (gemv), pages of the cache and their ends, more than a run of few tokens has.
LENGTHS = (1, 7, 200, 33, 64, 5, 65, 16)


def texts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    random.seed(1)
    return [[random.randrange(5, encoder_models.VOCABULARY) for _ in range(length)] for length in lengths]


def theirs(model: Any, ids: Sequence[Sequence[int]], **more: Any) -> list[Any]:
    with torch.no_grad():
        return [model(torch.tensor([each]), **more) for each in ids]


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    def save(case: str, kind: str = "AutoModel", **more: Any) -> Any:
        model = encoder_models.build(case, kind, **more)
        model.save_pretrained(tmp_path)
        return model

    return save


@pytest.mark.parametrize("case", encoder_models.CASES)
def test_hidden_states_are_those_of_transformers(case: str, saved: Any, tmp_path: Path) -> None:
    model = saved(case)
    wanted = numpy.concatenate([each.last_hidden_state[0].numpy() for each in theirs(model, texts())])
    for source in (tmp_path, model):
        encoder = Encoder(source, FP32)
        numpy.testing.assert_allclose(encoder.encode(texts()), wanted, atol=1e-4)
        few = texts()[:2]  # alone: few tokens are multiplied in another way
        numpy.testing.assert_allclose(encoder.encode(few), wanted[:8], atol=1e-4)


@pytest.mark.parametrize(("dtype", "worst"), [("bf16", 0.05), ("int8", 0.1), ("int4", 0.45)])
@pytest.mark.parametrize("case", ["bert", "mpnet", "deberta-v3", "modernbert", "nomic_bert"])
def test_fewer_bits_cost_little(case: str, dtype: str, worst: float, saved: Any, tmp_path: Path) -> None:
    model = saved(case)
    wanted = numpy.concatenate([each.last_hidden_state[0].numpy() for each in theirs(model, texts())])
    found = Encoder(tmp_path, ModelOptions(dtype=dtype, threads=1)).encode(texts())
    assert numpy.linalg.norm(found - wanted) < worst * numpy.linalg.norm(wanted)


@pytest.mark.parametrize("case", [each for each in encoder_models.CASES if each not in ("eurobert", "embedding gemma")])
def test_logits_are_those_of_sequence_classification(case: str, saved: Any, tmp_path: Path) -> None:
    model = saved(case, "AutoModelForSequenceClassification")
    wanted = numpy.concatenate([each.logits.numpy() for each in theirs(model, texts())])
    for source in (tmp_path, model):
        encoder = Encoder(source, FP32, head=True)
        numpy.testing.assert_allclose(encoder.logits(texts()), wanted, atol=1e-4)


@pytest.mark.parametrize("case", ["bert", "nomic_bert"])
def test_tokens_of_a_second_text_have_a_type_of_their_own(case: str, saved: Any, tmp_path: Path) -> None:
    model = saved(case)
    (text,) = texts([20])
    kinds = [0] * 12 + [1] * 8
    (wanted,) = theirs(model, [text], token_type_ids=torch.tensor([kinds]))
    encoder = Encoder(tmp_path, FP32)
    found = encoder.encode([text], [kinds])
    numpy.testing.assert_allclose(found, wanted.last_hidden_state[0].numpy(), atol=1e-4)
    assert numpy.abs(found - encoder.encode([text])).max() > 0.1  # they count


@pytest.mark.slow  # native tests compare the kernels of each
@pytest.mark.parametrize("case", ["modernbert", "deberta-v3"])
def test_each_instruction_set_computes_the_same(case: str, saved: Any, tmp_path: Path) -> None:
    model = saved(case)
    wanted = numpy.concatenate([each.last_hidden_state[0].numpy() for each in theirs(model, texts())])
    script = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "import numpy, test_encoders as t\n"
        "numpy.save(sys.argv[4], t.Encoder(sys.argv[3], t.FP32).encode(t.texts()))"
    )
    helpers = Path(encoder_models.__file__).parent
    for isa in ("scalar", "portable"):
        file = tmp_path / f"{isa}.npy"
        arguments = (str(Path(__file__).parent), str(helpers), str(tmp_path), str(file))
        environment = {**os.environ, "ANYACCEL_ISA": isa}
        subprocess.run([sys.executable, "-c", script, *arguments], env=environment, check=True, timeout=300)
        numpy.testing.assert_allclose(numpy.load(file), wanted, atol=1e-4)


@pytest.mark.parametrize("case", ["modernbert", "deberta-v3"])
def test_a_text_longer_than_a_run(case: str, saved: Any, tmp_path: Path) -> None:
    values = dict(encoder_models.CASES[case], max_position_embeddings=2000)
    encoder_models.CASES["longer"] = values
    try:
        model = saved("longer")
    finally:
        del encoder_models.CASES["longer"]
    (text,) = texts([1500])
    encoder = Encoder(tmp_path, FP32)
    (wanted,) = theirs(model, [text])
    numpy.testing.assert_allclose(encoder.encode([text]), wanted.last_hidden_state[0].numpy(), atol=1e-4)


def test_what_cannot_be_encoded(saved: Any, tmp_path: Path) -> None:
    saved("bert")
    encoder = Encoder(tmp_path, FP32)
    assert encoder.encode([]).shape == (0, 64)
    for wrong, message in (
        ([[5], []], "text 1 has no tokens"),
        ([[5] * 301], "text 0 has 301 tokens, this model takes 300"),
        ([[5, 99]], "token 99 at position 1"),
    ):
        with pytest.raises(UsageError, match=message):
            encoder.encode(wrong)
    with pytest.raises(UsageError, match="type 2, this model knows 2"):
        encoder.encode([[5, 6]], [[0, 2]])
    with pytest.raises(UsageError, match="no head for sequence classification"):
        encoder.logits([[5]])
    model = encoder.native.model
    with pytest.raises(UsageError, match="encoder, which predicts no next token"):
        model.forward([model.create()], [1], numpy.array([5]).ctypes.data, 0, [])
    numpy.testing.assert_array_equal(encoder.encode([[5, 6]]), encoder.encode([[5, 6]]))  # nothing is left of it


def test_what_is_refused(saved: Any, tmp_path: Path) -> None:
    model = saved("bert")
    with pytest.raises(ModelError, match="encoder without a head"):
        load_native(tmp_path, FP32)
    with pytest.raises(UsageError, match="one process"):
        Encoder(tmp_path, ModelOptions(tp=2))
    model.config.is_decoder = True
    model.config.save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="is_decoder=True"):
        Encoder(tmp_path, FP32)


def test_what_is_refused_of_deberta(saved: Any, tmp_path: Path) -> None:
    model = saved("deberta-v3")
    with pytest.raises(UsageError, match="kv_cache of int8 or int4"):
        Encoder(tmp_path, ModelOptions(dtype="fp32", kv_cache="int8"))
    file = tmp_path / "config.json"
    for change, message in (
        ({"conv_kernel_size": 3}, "conv_kernel_size"),
        ({"share_att_key": False}, "share_att_key=False"),
        ({"embedding_size": 32}, "embedding_size"),
        ({"attention_head_size": 32}, "attention_head_size"),
        ({"position_buckets": 64, "max_relative_positions": 16}, "position_buckets=64 with max_relative_positions=16"),
        ({"position_buckets": 1}, "position_buckets=1"),
        ({"position_buckets": -1, "max_relative_positions": 1}, "max_relative_positions=1"),
    ):
        file.write_text(json.dumps(model.config.to_dict() | change))
        with pytest.raises(Unsupported, match=message):
            Encoder(tmp_path, FP32)


def test_packed_weights_are_kept_apart_from_a_decoders(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYACCEL_PACKED_CACHE_BYTES", str(1 << 30))
    monkeypatch.setenv("ANYACCEL_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    encoder_models.build("mpnet").save_pretrained(folder)
    first, second = Encoder(folder, FP32), Encoder(folder, FP32)
    assert not first.native.cached
    assert second.native.cached
    numpy.testing.assert_array_equal(first.encode(texts()), second.encode(texts()))
    with pytest.raises(ModelError):
        load_native(folder, FP32)
