# SPDX-License-Identifier: Apache-2.0
"""What somebody does to a model after it has been packed counts, or is an error: it is never nothing."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList, MinLengthLogitsProcessor
from transformers.generation.utils import GenerationMixin
from transformers.models.llama.modeling_llama import LlamaMLP

import anyaccel
import family_cases
from anyaccel.errors import UsageError
from anyaccel.inference import InferenceEngine
from anyaccel.inference.hf import native_generate
from anyaccel.inference.hf.generate_code import replaced

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


def _each_module(do: Callable[[Any], object]) -> Callable[[Any], Iterator[Callable[[], object]]]:
    def edits(model: Any) -> Iterator[Callable[[], object]]:
        for _, module in _inner(model):
            yield lambda module=module: do(module)

    return edits


def _each_weight(do: Callable[[Any], object]) -> Callable[[Any], Iterator[Callable[[], object]]]:
    def edits(model: Any) -> Iterator[Callable[[], object]]:
        for weight in _weights(model):
            yield lambda weight=weight: do(weight)

    return edits


def _another_module(model: Any) -> Iterator[Callable[[], object]]:
    for name, _ in _inner(model):
        above, _, short = name.rpartition(".")
        parent = model.get_submodule(above)
        yield lambda parent=parent, short=short: setattr(parent, short, nn.Identity())
        yield lambda parent=parent, short=short: parent.__setitem__(0, nn.Identity()) if short == "0" else _raise()
        yield lambda parent=parent, short=short: delattr(parent, short)
        yield lambda parent=parent, short=short: parent.add_module(short, nn.Identity())
        yield lambda parent=parent, short=short: parent._modules.pop(short)


def _raise() -> None:
    raise UsageError("a change here: not of this module")


def _lists(model: Any) -> Iterator[Callable[[], object]]:
    for _, module in _inner(model):
        if isinstance(module, nn.ModuleList):
            for do in (
                lambda m: m.append(nn.Identity()),
                lambda m: m.insert(0, nn.Identity()),
                lambda m: m.extend([nn.Identity()]),
                lambda m: m.pop(0),
                lambda m: m.__delitem__(slice(0, 1)),
            ):
                yield lambda do=do, module=module: do(module)


def _another_weight(model: Any) -> Iterator[Callable[[], object]]:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                new = nn.Parameter(torch.ones(parameter.shape))
                yield lambda module=module, name=name, new=new: setattr(module, name, new)
                yield lambda module=module, name=name, new=new: module.register_parameter(name, new)
                yield lambda module=module, name=name: setattr(module, name, None)


def _values(model: Any) -> Iterator[Callable[[], object]]:
    """Numbers and functions that the modules of this architecture have."""
    for _, module in _inner(model):
        for name, value in list(vars(module).items()):
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield lambda module=module, name=name, value=value: setattr(module, name, value + 1)
        yield lambda module=module: setattr(module, "forward", _hook)
        yield lambda module=module: setattr(module, "__class__", nn.Identity)


EDITS: dict[str, Callable[[Any], Iterator[Callable[[], object]]]] = {
    "another module": _another_module,
    "lists": _lists,
    "another weight": _another_weight,
    "values": _values,
    "forward hook": _each_module(lambda m: m.register_forward_hook(_hook)),
    "forward pre-hook": _each_module(lambda m: m.register_forward_pre_hook(_hook)),
    "call": _each_module(lambda m: m(IDS)),
    "forward": _each_module(lambda m: m.forward(IDS)),
    "state dict of a part": _each_module(lambda m: m.state_dict()),
    "load into a part": _each_module(lambda m: m.load_state_dict({})),
    "copy of a part": _each_module(copy.deepcopy),
    "pickle of a part": _each_module(pickle.dumps),
    "other dtype of a part": _each_module(lambda m: m.half() if next(m.parameters(), None) is not None else _raise()),
    "in place": _each_weight(lambda w: w.mul_(2)),
    "data in place": _each_weight(lambda w: w.data.copy_(torch.ones(w.shape))),
    "data": _each_weight(lambda w: setattr(w, "data", torch.ones(w.shape))),
    "sum": _each_weight(lambda w: w.sum()),
    "list": _each_weight(lambda w: w.tolist()),
    "array": _each_weight(lambda w: w.numpy()),
    "copy": _each_weight(lambda w: w.clone()),
    "initialise": _each_weight(nn.init.zeros_),
}


_TOLD = r"a change here|packed|run in the native runtime"


def _logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", EDITS)
def test_an_edit_below_the_model_is_an_error_and_changes_nothing(kind: str, engine: InferenceEngine) -> None:
    before, shown = _logits(engine), repr(engine.module)
    edits = list(EDITS[kind](engine.module))
    assert edits
    for edit in edits:
        with torch.no_grad(), pytest.raises(UsageError, match=_TOLD):
            edit()
    assert torch.equal(_logits(engine), before)
    assert repr(engine.module) == shown


@pytest.mark.parametrize(
    "do",
    [
        lambda m, _: m.state_dict(),
        lambda m, _: m.load_state_dict({}),
        lambda m, folder: m.save_pretrained(folder),
        lambda m, folder: torch.save(m, folder / "model.pt"),
        lambda m, _: torch.save(m.state_dict(), io.BytesIO()),
        lambda m, _: copy.deepcopy(m),
        lambda m, _: m.enable_input_require_grads(),
        lambda m, _: m.resize_token_embeddings(7),
        lambda m, _: m.set_input_embeddings(nn.Embedding(131, 48)),
        lambda m, _: m.set_output_embeddings(nn.Linear(48, 131)),
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


def _own_sample(self: Any, input_ids: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.cat([input_ids, torch.full((len(input_ids), 6), 7)], 1)


def _own_generate(self: Any, inputs: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return _own_sample(self, inputs)


def _own_inputs(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
    raise NotImplementedError("these inputs")


def _the_models_own_class(model: Any) -> Any:
    return type(model).__bases__[1]


@pytest.mark.parametrize(
    ("name", "new"), [("_sample", _own_sample), ("generate", _own_generate), ("_get_logits_processor", _only)]
)
@pytest.mark.parametrize("place", [lambda _: GenerationMixin, _the_models_own_class, None], ids=["all", "kind", "one"])
def test_methods_of_generation_that_are_replaced_count(
    name: str, new: Any, place: Any, llama: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    native_generate._warned_of.clear()
    usual = _tokens(llama)
    assert usual != [7] * 6
    if place is None:
        monkeypatch.setitem(vars(llama), name, new.__get__(llama))
    else:
        monkeypatch.setattr(place(llama), name, new, raising=False)
    # transformers does not look for the loop itself in an instance.
    assert _tokens(llama) == (usual if place is None and name == "_sample" else [7] * 6)
    assert place is None or name in caplog.text
    monkeypatch.undo()
    assert _tokens(llama) == usual


def test_prepared_inputs_count(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_the_models_own_class(llama), "prepare_inputs_for_generation", _own_inputs, raising=False)
    with pytest.raises(NotImplementedError, match="these inputs"):
        _tokens(llama)


def test_a_processor_that_is_replaced_counts(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_new_tokens": 6, "min_length": 11, "do_sample": False}
    usual = llama.generate(IDS, **options)
    monkeypatch.setattr(MinLengthLogitsProcessor, "__call__", _Only.__call__)
    got = llama.generate(IDS, **options)
    assert got[0, 5:].tolist() == [7] * 6
    assert got.tolist() != usual.tolist()


def test_another_function_of_transformers_under_the_name_counts(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = _the_models_own_class(llama)
    assert replaced(llama, kind) == ""
    monkeypatch.setattr(GenerationMixin, "_sample", GenerationMixin._beam_search)
    assert replaced(llama, kind) == "LlamaForCausalLM._sample, which was replaced,"


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


def test_code_of_layers_that_is_replaced_afterwards_is_an_error(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, cache = _tokens(llama), llama(IDS).past_key_values
    for kind in (LlamaMLP, nn.Linear, _the_models_own_class(llama)):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", _hook)
            with pytest.raises(UsageError, match=f"{kind.__name__}.forward was replaced after"):
                llama(IDS)
            with pytest.raises(UsageError, match=f"{kind.__name__}.forward was replaced after"):
                _tokens(llama)
            llama(IDS[:, :1], past_key_values=cache)  # steps are not slowed down
    assert _tokens(llama) == usual


def test_code_of_layers_that_was_replaced_before_a_model_is_read_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYACCEL_CACHE_DIR", str(tmp_path / "cache"))
    family_cases.build("llama").save_pretrained(tmp_path / "model")
    usual = _logits(anyaccel.init_inference(tmp_path / "model", dtype="fp32"))
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: 2 * forward(self, x))
    expected = _logits(anyaccel.init_inference(tmp_path / "model", dtype="fp32", runtime="plain"))
    assert not torch.allclose(expected, usual, rtol=1e-2, atol=1e-2)
    engine = anyaccel.init_inference(tmp_path / "model", dtype="fp32")
    assert engine.why == "code for transformers.models.llama.modeling_llama.LlamaMLP.forward, which was replaced"
    torch.testing.assert_close(_logits(engine), expected, rtol=1e-3, atol=1e-3)


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
