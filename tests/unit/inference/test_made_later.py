# SPDX-License-Identifier: Apache-2.0
"""Engines of a path in a process that has not imported transformers' models: they make theirs when it is asked for."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anyaccel
import family_cases
from anyaccel.errors import UsageError
from anyaccel.inference import InferenceEngine, generate_tokens

PROMPT = torch.tensor([5, 17, 99, 3, 64])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("later") / "model"
    family_cases.build("llama").save_pretrained(path)
    return path


def _engine(folder: Path) -> InferenceEngine:
    return anyaccel.init_inference(folder, dtype="fp32", runtime="native")


@pytest.fixture
def engine(folder: Path) -> InferenceEngine:
    made = _engine(folder)
    assert made.is_lazy
    return made


def test_native_tokens_do_not_need_the_model(engine: InferenceEngine) -> None:
    tokens = list(generate_tokens(engine, PROMPT, max_new_tokens=6))
    assert engine.is_lazy
    with pytest.raises(UsageError, match="outside the model's vocabulary"):
        generate_tokens(engine, torch.tensor([1 << 30]), max_new_tokens=1)
    assert engine.is_lazy
    at_once = anyaccel.init_inference(family_cases.build("llama"), dtype="fp32", runtime="native")
    assert not at_once.is_lazy
    assert list(generate_tokens(at_once, PROMPT, max_new_tokens=6)) == tokens
    assert engine.generate(PROMPT[None], max_new_tokens=6)[0, 5:].tolist() == tokens
    assert not engine.is_lazy


@pytest.mark.parametrize(
    "ask",
    [
        lambda engine: engine.module,
        lambda engine: engine.config,
        lambda engine: engine.generation_config,
        lambda engine: engine(PROMPT[None]),
        lambda engine: list(engine.parameters()),
        lambda engine: engine.eval(),
        lambda engine: repr(engine),
        lambda engine: dir(engine),
        lambda engine: engine.can_generate(),
        lambda engine: hasattr(engine, "no_such_name"),
        lambda engine: copy.copy(engine),
        lambda engine: engine.to("cpu"),
    ],
)
def test_what_needs_the_model_makes_it(engine: InferenceEngine, ask: Any) -> None:
    assert isinstance(engine, nn.Module) and isinstance(engine, InferenceEngine)
    assert type(engine).__name__ == "LlamaForCausalLM"
    ask(engine)
    assert not engine.is_lazy
    assert type(engine) is type(anyaccel.init_inference(family_cases.build("llama"), dtype="fp32", runtime="native"))
    assert dict(engine.named_children()) == {"module": engine.module}
    assert engine.generation_config is engine.module.generation_config


def test_the_folder_counts_as_it_was_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model under the same name, none, or another working directory: the engine's is the one it has packed."""
    shutil.copytree(folder, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    waiting = [_engine(Path("model")) for _ in range(3)]
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"num_hidden_layers": 5, "eos_token_id": 7}))
    assert waiting[0].config.num_hidden_layers == config["num_hidden_layers"] == len(waiting[0].model.layers)
    assert waiting[0].config.eos_token_id == config["eos_token_id"]
    monkeypatch.chdir("/")
    assert waiting[1].config.to_dict() == waiting[0].config.to_dict()
    shutil.rmtree(tmp_path / "model")
    assert waiting[2].generate(PROMPT[None], max_new_tokens=3).shape == (1, 8)
    assert waiting[2].name_or_path == waiting[2].config.name_or_path == "model"


@pytest.mark.parametrize("asked", [False, True])
def test_what_is_put_on_an_engine_counts(engine: InferenceEngine, asked: bool) -> None:
    if asked:
        assert engine.config
    engine.note = 3
    head = engine.lm_head
    engine.lm_head = nn.Linear(48, 131)
    with pytest.raises(UsageError, match=r"^lm_head was changed after"):
        engine.generate(PROMPT[None], max_new_tokens=3)
    engine.lm_head = head
    calls = []
    prepare = engine.prepare_inputs_for_generation
    engine.prepare_inputs_for_generation = lambda *given, **named: (calls.append(1), prepare(*given, **named))[1]
    engine.generate(PROMPT[None], max_new_tokens=3)
    assert len(calls) == 3 and engine.note == 3 and not hasattr(engine.module, "note")


@pytest.mark.parametrize("asked", [False, True])
def test_another_module_in_the_place_of_the_model_stays(engine: InferenceEngine, asked: bool) -> None:
    if asked:
        assert engine.config
    other = nn.Identity()
    engine.module = other
    assert engine.module is other and dict(engine.named_children()) == {"module": other}
    assert engine(PROMPT) is PROMPT


def test_ends_that_the_caller_gives_count(engine: InferenceEngine) -> None:
    first = next(generate_tokens(engine, PROMPT, max_new_tokens=6))
    engine.generation_config.eos_token_id = first
    assert list(generate_tokens(engine, PROMPT, max_new_tokens=6)) == [first]


def test_the_model_is_made_outside_of_inference_mode(engine: InferenceEngine) -> None:
    with torch.inference_mode():
        made: Any = engine.module
    assert not any(parameter.is_inference() for parameter in made.parameters())


FIRST_TOKEN = """
import sys
import torch
import anyaccel
from anyaccel.inference import generate_tokens

engine = anyaccel.init_inference(sys.argv[1], dtype="fp32")
next(generate_tokens(engine, torch.tensor([1, 2, 3]), max_new_tokens=1))
assert "transformers" not in sys.modules
assert type(engine.config).__name__ == "LlamaConfig"
"""


@pytest.mark.slow
def test_a_first_token_imports_no_transformers(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", FIRST_TOKEN, str(folder)], check=True, timeout=300)
