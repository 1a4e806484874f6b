# SPDX-License-Identifier: Apache-2.0
"""Models that run their own code behind the server's engine: batches, chunks of prompts, prefixes; what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from anyaccel.errors import UsageError
from anyaccel.inference.options import ModelOptions
from anyaccel.serve.engine.decoders import open_decoder
from anyaccel.serve.engine.settings import EngineSettings
from serving import answer, engine

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.anyio

VOCAB = 300
PROMPTS = ([5, 6, 7] * 40, [40, 41], list(range(100, 200)))


class Quiet:
    """A reporter."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, done: int, total: int) -> None:
        pass


@pytest.fixture(scope="module", params=["LlamaConfig", "DiffLlamaConfig"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A folder, and the answers of transformers."""
    torch.manual_seed(0)
    config = getattr(transformers, request.param)(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        eos_token_id=299,
    )
    module = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3)
    folder = tmp_path_factory.mktemp(request.param)
    module.save_pretrained(folder)
    answers = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            out = module.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        answers.append([int(token) for token in out[0, len(prompt) :] if token != 299])
    return folder, answers


async def test_answers_are_those_of_transformers(model: tuple[Path, list[list[int]]]) -> None:
    folder, expected = model
    screen = Quiet()
    settings = EngineSettings(cache_bytes=1 << 24)
    options = ModelOptions("fp32", runtime="torch")

    async with engine(lambda check: open_decoder(folder, options, screen, settings, check=check)) as made:
        answers = await asyncio.gather(*(answer(made, prompt, 12, ends=frozenset({299})) for prompt in PROMPTS))
        again = await answer(made, [*PROMPTS[0], 9], 2)
    assert [each.tokens for each in answers] == expected
    assert again.cached > 0
    how = "together" if "Llama" in str(folder.name) and "Diff" not in folder.name else "one after another"
    assert any(how in line for line in screen.lines), screen.lines


def test_a_model_on_its_own_code_is_not_divided(model: tuple[Path, list[list[int]]]) -> None:
    options = ModelOptions("fp32", runtime="torch", tp=2)
    with pytest.raises(UsageError, match="--runtime torch: anyaccel serve divides"):
        open_decoder(model[0], options, Quiet(), EngineSettings())
