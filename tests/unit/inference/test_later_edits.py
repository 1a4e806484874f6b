# SPDX-License-Identifier: Apache-2.0
"""What somebody does to a model after it has been packed counts, or is an error: it is never nothing."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.models.llama.modeling_llama import LlamaMLP

import anyaccel
import family_cases
from anyaccel.errors import UsageError
from anyaccel.inference import InferenceEngine
from anyaccel.inference.hf import native_generate

IDS = torch.tensor([[5, 17, 99, 3, 64]])
CASES = ("llama", "mixtral", "gpt2")  # linears, stacked experts, Conv1D and a tied head


@pytest.fixture(scope="module", params=CASES)
def engine(request: pytest.FixtureRequest) -> InferenceEngine:
    engine = anyaccel.init_inference(family_cases.build(request.param), dtype="fp32", runtime="native")
    assert engine.native is not None
    return engine


def _inner(model: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if name]


def _weights(model: Any) -> list[Any]:
    return [*model.parameters(), *model.buffers()]


def _hook(*_: Any) -> None:
    pass


Undo = Callable[[], object]


def _kept(module: nn.Module, do: Callable[[], object]) -> Undo:
    """Edit a module, and return what puts all that it holds back as it was."""
    before = {name: type(value)(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
    do()

    def undo() -> None:
        vars(module).clear()
        vars(module).update(before)

    return undo


def _another_module(model: Any) -> Iterator[Callable[[], Undo]]:
    for name, _ in _inner(model):
        above, _, short = name.rpartition(".")
        parent = model.get_submodule(above)
        edits = (
            lambda parent=parent, short=short: setattr(parent, short, nn.Identity()),
            lambda parent=parent, short=short: delattr(parent, short),
            lambda parent=parent, short=short: parent.add_module(short, nn.Identity()),
        )
        for edit in edits:
            yield lambda parent=parent, edit=edit: _kept(parent, edit)


def _lists(model: Any) -> Iterator[Callable[[], Undo]]:
    for _, module in _inner(model):
        if isinstance(module, nn.ModuleList):
            for do in (
                lambda m: m.append(nn.Identity()),
                lambda m: m.insert(0, nn.Identity()),
                lambda m: m.pop(0),
                lambda m: m.__delitem__(slice(0, 1)),
            ):
                yield lambda do=do, module=module: _kept(module, lambda do=do, module=module: do(module))


def _another_weight(model: Any) -> Iterator[Callable[[], Undo]]:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                new = nn.Parameter(torch.ones(parameter.shape))
                for value in (new, None):
                    do = functools.partial(setattr, module, name, value)
                    yield lambda module=module, do=do: _kept(module, do)


def _values(model: Any) -> Iterator[Callable[[], Undo]]:
    """Numbers and functions that the modules of this architecture have."""
    for _, module in _inner(model):
        for name, value in list(vars(module).items()):
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield lambda module=module, name=name, value=value: _kept(
                    module, lambda: setattr(module, name, value + 1)
                )
        yield lambda module=module: _kept(module, lambda: setattr(module, "forward", _hook))


def _hooks(model: Any) -> Iterator[Callable[[], Undo]]:
    for _, module in _inner(model):
        yield lambda module=module: module.register_forward_hook(_hook).remove
        yield lambda module=module: module.register_forward_pre_hook(_hook).remove


EDITS = [_another_module, _lists, _another_weight, _values, _hooks]
READS: dict[str, Callable[[Any], object]] = {
    "in place": lambda w: w.mul_(2),
    "data in place": lambda w: w.data.copy_(torch.ones(w.shape)),
    "data": lambda w: setattr(w, "data", torch.ones(w.shape)),
    "sum": lambda w: w.sum(),
    "list": lambda w: w.tolist(),
    "array": lambda w: w.numpy(),
    "copy": lambda w: w.clone(),
    "initialise": nn.init.zeros_,
}


def _logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", EDITS)
def test_the_first_call_after_an_edit_is_an_error_until_it_is_undone(kind: Any, engine: InferenceEngine) -> None:
    before, shown = _logits(engine), repr(engine.module)
    edits = list(kind(engine.module))
    assert edits
    for edit in edits:
        undo = edit()
        with pytest.raises(UsageError, match="was changed after the native runtime had packed the model"):
            _logits(engine)
        with pytest.raises(UsageError, match="was changed after the native runtime had packed the model"):
            engine.generate(IDS, max_new_tokens=1)
        undo()
    assert torch.equal(_logits(engine), before)
    assert repr(engine.module) == shown


@pytest.mark.parametrize("kind", READS)
def test_values_of_weights_can_be_neither_read_nor_changed(kind: str, engine: InferenceEngine) -> None:
    before = _logits(engine)
    for weight in _weights(engine.module):
        with torch.no_grad(), pytest.raises(UsageError, match="packed"):
            READS[kind](weight)
    assert torch.equal(_logits(engine), before)


def test_parts_of_the_model_cannot_be_called_or_copied(engine: InferenceEngine) -> None:
    for _, module in _inner(engine.module):
        if any(True for _ in module.parameters()):
            for do in (copy.deepcopy, pickle.dumps, lambda m: m.half()):
                with pytest.raises(UsageError, match="packed"):
                    do(module)
    with pytest.raises(UsageError, match=r"embed_tokens\.weight|wte\.weight"):
        next(iter(engine.module.children()))(IDS)


@pytest.mark.parametrize(
    "do",
    [
        lambda m, _: m.state_dict(),
        lambda m, _: m.load_state_dict({}),
        lambda m, folder: m.save_pretrained(folder),
        lambda m, folder: torch.save(m, folder / "model.pt"),
        lambda m, _: torch.save(m.state_dict(), io.BytesIO()),
        lambda m, _: copy.deepcopy(m),
        lambda m, _: m.resize_token_embeddings(7),
        lambda m, _: m.train(),
        lambda m, _: m.half(),
        lambda m, _: m.to_empty(device="cpu"),
    ],
)
def test_what_reads_or_writes_all_weights_is_an_error(do: Any, engine: InferenceEngine, tmp_path: Path) -> None:
    for model in (engine.module, engine):
        with pytest.raises(UsageError, match="packed"):
            do(model, tmp_path)
    assert _logits(engine).isfinite().all()
    assert not list(tmp_path.glob("*.safetensors"))


def test_what_does_not_want_values_works(engine: InferenceEngine) -> None:
    model: Any = engine.module
    plain = family_cases.build({"LlamaForCausalLM": "llama", "MixtralForCausalLM": "mixtral"}.get(
        type(model).__name__, "gpt2"
    ))  # fmt: skip
    assert model.num_parameters() == plain.num_parameters()
    assert [(n, p.shape) for n, p in model.named_parameters()] == [(n, p.shape) for n, p in plain.named_parameters()]
    assert [type(m).__name__ for m in model.modules()] == [type(m).__name__ for m in plain.modules()]
    assert all(isinstance(mine, type(theirs)) for mine, theirs in zip(model.modules(), plain.modules(), strict=True)
               if theirs is not plain)  # fmt: skip
    model.eval()
    model.requires_grad_(False)
    model.apply(lambda module: None)
    model.get_input_embeddings().somebodys_note = 3
    assert model.get_input_embeddings().weight.shape[0] == 131
    assert str(model.get_output_embeddings().weight)
    assert model.get_memory_footprint() > 0
    assert [len(each) for _, each in _inner(model) if isinstance(each, nn.ModuleList)][:1] == [2]
    assert _logits(engine).isfinite().all()


@pytest.fixture
def llama() -> Any:
    return anyaccel.init_inference(family_cases.build("llama"), dtype="fp32", runtime="native").module


GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


def _tokens(model: Any) -> list[int]:
    return model.generate(IDS, **GREEDY)[0, 5:].tolist()  # type: ignore[no-any-return]


class _Only(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -1e9).index_fill_(-1, torch.tensor([7]), 0.0)


def _only(*_args: Any, **_kwargs: Any) -> LogitsProcessorList:
    return LogitsProcessorList([_Only()])


def _seven(output: Any) -> Any:
    output.logits[:] = -1e9
    output.logits[..., 7] = 0.0
    return output


@pytest.mark.parametrize("name", ["generate", "_get_logits_processor"])
def test_methods_of_generation_of_the_model_itself_run(name: str, llama: Any, caplog: pytest.LogCaptureFixture) -> None:
    native_generate._warned_of.clear()
    usual = _tokens(llama)
    assert usual != [7] * 6
    own = {
        "generate": lambda inputs, **_: torch.cat([inputs, torch.full((1, 6), 7)], 1),
        "_get_logits_processor": _only,
    }
    setattr(llama, name, own[name])
    assert _tokens(llama) == [7] * 6
    assert name == "generate" or name in caplog.text
    delattr(llama, name)
    assert _tokens(llama) == usual


def test_processors_that_are_passed_run(llama: Any) -> None:
    assert llama.generate(IDS, logits_processor=_only(), **GREEDY)[0, 5:].tolist() == [7] * 6
    llama.generation_config.suppress_tokens = [each for each in range(131) if each != 9]
    assert _tokens(llama) == [9] * 6


def test_hooks_and_a_forward_of_the_model_itself_count(llama: Any) -> None:
    usual = _tokens(llama)
    handle = llama.register_forward_hook(lambda _module, _inputs, output: _seven(output))
    assert _tokens(llama) == [7] * 6
    assert llama(IDS).logits[0, -1].argmax() == 7
    handle.remove()
    assert _tokens(llama) == usual
    everywhere = nn.modules.module.register_module_forward_hook(
        lambda module, _inputs, output: _seven(output) if module is llama else None
    )
    assert _tokens(llama) == [7] * 6
    everywhere.remove()
    forward = llama.forward
    llama.forward = lambda *args, **kwargs: _seven(forward(*args, **kwargs))
    assert _tokens(llama) == [7] * 6
    del llama.forward
    assert _tokens(llama) == usual


def test_a_compiled_forward_stays_in_the_native_loop(llama: Any, caplog: pytest.LogCaptureFixture) -> None:
    usual = _tokens(llama)
    llama.forward = torch.compile(llama.forward, backend="eager")
    assert _tokens(llama) == usual
    assert "native loop" not in caplog.text


def test_code_of_layers_that_is_replaced_has_no_effect_on_files(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/inference.md says; of a model in memory it counts where it was replaced before."""
    monkeypatch.setenv("ANYACCEL_CACHE_DIR", str(tmp_path / "cache"))
    family_cases.build("llama").save_pretrained(tmp_path / "model")
    usual = _tokens(llama)
    monkeypatch.setattr(LlamaMLP, "forward", _hook)
    assert _tokens(llama) == usual
    assert _tokens(anyaccel.init_inference(tmp_path / "model", dtype="fp32").module) == usual


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("llama", "num_hidden_layers", 1),
        ("llama", "rms_norm_eps", 0.5),
        ("mistral", "sliding_window", 3),
        ("gemma2", "final_logit_softcapping", 0.2),
        ("gpt2", "n_head", 1000),  # which no such model can have
    ],
)
def test_a_value_of_the_configuration_counts_or_is_an_error(family: str, name: str, value: Any) -> None:
    engine = anyaccel.init_inference(family_cases.build(family), dtype="fp32", runtime="native")
    config: Any = engine.module.config
    before = engine(IDS).logits
    usual = getattr(config, name)
    setattr(config, name, value)
    for call in (lambda: engine(IDS), lambda: engine.generate(IDS, max_new_tokens=2)):
        with pytest.raises(UsageError, match=r"^config: a value that the model is computed with was changed"):
            call()
    setattr(config, name, usual)
    config.use_cache, config.pad_token_id = False, 1  # of the loop, and not of the model
    assert torch.equal(engine(IDS).logits, before)
