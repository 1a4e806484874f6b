# SPDX-License-Identifier: Apache-2.0
"""The native model as a Hugging Face one: outputs, its cache under their names, what it refuses."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import anyaccel
import family_cases
from anyaccel import _native
from anyaccel.errors import UsageError
from anyaccel.inference import InferenceEngine, optimize
from anyaccel.inference.hf.cache import NativeCache

IDS = torch.tensor([[5, 17, 99, 3, 64], [11, 12, 7, 8, 9]])
LEFT = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
RIGHT = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


@pytest.fixture(scope="module")
def reference() -> Any:
    return family_cases.build("llama")


@pytest.fixture(scope="module")
def engine() -> InferenceEngine:
    return anyaccel.init_inference(family_cases.build("llama"), dtype="fp32", runtime="native")


@pytest.fixture(autouse=True)
def _no_sequence_is_left(engine: InferenceEngine) -> Any:
    yield
    gc.collect()
    assert engine.native is not None
    assert engine.native.model.cache_used_bytes == 0


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mask", [None, LEFT, RIGHT], ids=["none", "left", "right"])
def test_logits_with_and_without_padding(mask: torch.Tensor | None, engine: InferenceEngine, reference: Any) -> None:
    output = engine(IDS, attention_mask=mask)
    assert output.logits.shape == (2, 5, 131)
    assert output.logits.dtype == torch.float32
    assert output.past_key_values.get_seq_length() == 5
    shown = torch.ones(2, 5, dtype=torch.bool) if mask is None else mask.bool()
    for row in range(2):
        alone = reference(IDS[row : row + 1, shown[row]]).logits[0]
        close(output.logits[row, shown[row]], alone)
    assert not output.logits[~shown].any()


def test_steps_through_the_cache_give_the_logits_of_the_whole(engine: InferenceEngine, reference: Any) -> None:
    more = torch.tensor([[1, 2, 3], [4, 5, 6]])
    mask = torch.cat([LEFT, torch.ones_like(more)], 1)
    want = reference(torch.cat([IDS, more], 1), attention_mask=mask).logits
    cache = engine(IDS, attention_mask=LEFT).past_key_values
    one = engine(more[:, :1], attention_mask=mask[:, :6], past_key_values=cache)
    two = engine(more[:, 1:], attention_mask=mask, past_key_values=cache)
    assert one.past_key_values is cache
    assert cache.get_seq_length() == 8
    close(torch.cat([one.logits, two.logits], 1), want[:, 5:])


def test_cache_of_another_class_becomes_a_native_one_while_it_is_empty(engine: InferenceEngine, reference: Any) -> None:
    cache = DynamicCache()
    engine(IDS[:1, :3], past_key_values=cache)
    assert isinstance(cache, NativeCache)
    assert cache.get_seq_length() == 3
    close(engine(IDS[:1, 3:], past_key_values=cache).logits, reference(IDS[:1]).logits[:, 3:])
    theirs = DynamicCache()
    reference(IDS, past_key_values=theirs)
    with pytest.raises(UsageError, match="tokens of another model"):
        engine(IDS, past_key_values=theirs)


def test_crop_and_go_on(engine: InferenceEngine, reference: Any) -> None:
    want = reference(IDS).logits
    cache = engine(IDS, use_cache=True).past_key_values
    cache.crop(-2)
    assert cache.get_seq_length() == 3
    close(engine(IDS[:, 3:], past_key_values=cache).logits, want[:, 3:])
    cache.crop(4)
    close(engine(IDS[:, 4:], past_key_values=cache).logits, want[:, 4:])
    cache.crop(0)
    assert cache.get_seq_length() == 5
    with pytest.raises(UsageError, match="crop"):
        cache.crop(-6)


def test_rows_are_reordered_repeated_and_chosen(engine: InferenceEngine, reference: Any) -> None:
    next_token = torch.tensor([[33]])

    def last(row: int) -> torch.Tensor:
        return reference(torch.cat([IDS[row : row + 1], next_token], 1)).logits[0, -1]  # type: ignore[no-any-return]

    cache = engine(IDS).past_key_values
    cache.reorder_cache(torch.tensor([1, 1]))
    both = engine(next_token.expand(2, 1), past_key_values=cache).logits[:, -1]
    close(both[0], last(1))
    close(both[1], last(1))

    cache = engine(IDS).past_key_values
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    four = engine(next_token.expand(4, 1), past_key_values=cache).logits[:, -1]
    for row in range(4):
        close(four[row], last(row // 2))

    cache = engine(IDS).past_key_values
    cache.batch_select_indices(torch.tensor([1]))
    close(engine(next_token, past_key_values=cache).logits[0, -1], last(1))


def test_copy_of_a_cache_goes_its_own_way(engine: InferenceEngine, reference: Any) -> None:
    prompt = engine(IDS[:1, :4]).past_key_values
    for token in (3, 9):
        ids = torch.cat([IDS[:1, :4], torch.tensor([[token]])], 1)
        mine = copy.deepcopy(prompt)
        close(engine(ids[:, 4:], past_key_values=mine).logits[:, -1], reference(ids).logits[:, -1])
    assert prompt.get_seq_length() == 4


@pytest.mark.parametrize("keep", [1, 2, torch.tensor([1, 3]), torch.tensor([4, 0])])
def test_logits_to_keep(keep: Any, engine: InferenceEngine, reference: Any) -> None:
    want = reference(IDS).logits
    want = want[:, -keep:] if isinstance(keep, int) else want[:, keep]
    close(engine(IDS, logits_to_keep=keep).logits, want)


def test_loss_and_tuples(engine: InferenceEngine, reference: Any) -> None:
    labels = IDS.masked_fill(LEFT == 0, -100)
    want = reference(IDS, labels=labels)
    got = engine(IDS, labels=labels)
    close(got.loss, want.loss)
    loss, logits, _cache = engine(IDS, labels=labels, return_dict=False)
    close(loss, want.loss)
    close(logits, want.logits)


def test_the_loss_of_padded_rows_is_that_of_the_same_rows_alone(engine: InferenceEngine, reference: Any) -> None:
    """The first token of a row with padding on the left follows a hidden position, where nothing predicts it."""
    labels = IDS.masked_fill(LEFT == 0, -100)
    predicted = LEFT.sum(1) - 1
    alone = [
        reference(ids[keep][None], labels=ids[keep][None]).loss for ids, keep in zip(IDS, LEFT.bool(), strict=True)
    ]
    want = (torch.stack(alone) * predicted).sum() / predicted.sum()
    close(engine(IDS, attention_mask=LEFT, labels=labels).loss, want)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    close(engine(IDS, attention_mask=LEFT, labels=labels, shift_labels=shifted).loss, want)


def test_there_are_no_gradients_and_the_loss_says_so(engine: InferenceEngine) -> None:
    with torch.enable_grad():
        loss = engine(IDS, labels=IDS).loss
        with pytest.raises(UsageError, match="no gradients"):
            loss.backward()
    with torch.no_grad():
        assert not engine(IDS, labels=IDS).loss.requires_grad


def test_without_cache_nothing_stays(engine: InferenceEngine) -> None:
    output = engine(IDS, use_cache=False)
    assert output.past_key_values is None
    assert engine.native is not None
    gc.collect()
    assert engine.native.model.cache_used_bytes == 0


def test_natural_positions_are_accepted_and_others_refused(engine: InferenceEngine, reference: Any) -> None:
    positions = (LEFT.cumsum(1) - 1).clamp(min=0)
    want = reference(IDS, attention_mask=LEFT, position_ids=positions).logits
    close(engine(IDS, attention_mask=LEFT, position_ids=positions).logits[LEFT.bool()], want[LEFT.bool()])
    engine(IDS, position_ids=torch.arange(5)[None])
    with pytest.raises(UsageError, match="position_ids"):
        engine(IDS, position_ids=torch.arange(1, 6)[None])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"output_attentions": True}, "output_attentions"),
        ({"inputs_embeds": torch.zeros(1, 2, 48)}, "inputs_embeds"),
        ({"attention_mask": torch.ones(2, 4)}, "attention_mask of shape"),
        ({"attention_mask": torch.ones(2, 1, 5, 5)}, "attention_mask of shape"),
        ({"input_ids": torch.tensor([[131]])}, "token 131 is outside"),
        ({"input_ids": torch.ones(1, 65, dtype=torch.int64)}, "exceed the model's context of 64"),
        ({"input_ids": torch.tensor([3])}, "input_ids of shape"),
    ],
)
def test_what_it_cannot_do_is_said(options: dict[str, Any], text: str, engine: InferenceEngine) -> None:
    with pytest.raises(UsageError, match=text):
        engine(**{"input_ids": IDS, **options})


def test_mask_that_contradicts_the_cache(engine: InferenceEngine) -> None:
    cache = engine(IDS, attention_mask=LEFT).past_key_values
    with pytest.raises(UsageError, match="differs from the earlier one"):
        engine(IDS[:, :1], attention_mask=torch.ones(2, 6), past_key_values=cache)
    with pytest.raises(UsageError, match="2 rows"):
        engine(IDS[:1, :1], past_key_values=cache)


def test_parts_of_the_model_and_changes_of_it_are_refused(engine: InferenceEngine, reference: Any) -> None:
    model = engine.module
    assert model.device == torch.device("cpu")
    assert model.to("cpu") is model
    assert model.to(torch.float32) is model
    assert model.eval() is model
    for change in (model.half, model.train, lambda: model.save_pretrained("x"), lambda: copy.deepcopy(model)):
        with pytest.raises(UsageError, match="packed"):
            change()
    with pytest.raises(UsageError, match="native runtime"):
        model.model(IDS)  # type: ignore[operator]


def test_an_engine_is_moved_as_its_model_is(engine: InferenceEngine) -> None:
    assert engine.cpu() is engine.to(torch.float32) is engine.float() is engine
    for change in (engine.half, engine.bfloat16, engine.double, engine.module.double, lambda: engine.to("meta")):
        with pytest.raises(UsageError, match="packed for the native runtime"):
            change()
    with pytest.raises(UsageError, match=r"model.embed_tokens.weight: its values are packed for the native runtime"):
        engine.module.get_input_embeddings()(IDS)  # type: ignore[operator]


def test_torch_compile_leaves_it_as_it_is(engine: InferenceEngine) -> None:
    want = engine(IDS).logits
    assert torch.equal(torch.compile(engine, backend="eager")(IDS).logits, want)
    assert torch.equal(torch.compile(engine.module, backend="eager")(IDS).logits, want)


def test_weights_in_memory_are_taken_over() -> None:
    """About 90 MiB in fp32, packed to half of it: at no time is there much more than the model itself.

    One of its layers is copied to try it before anything is taken.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    from anyaccel.host_memory import RESIDENT_SET

    config = LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=512, num_hidden_layers=8, num_attention_heads=8
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    size = sum(parameter.numel() for parameter in model.parameters()) * 4
    optimize(family_cases.build("llama"), dtype="bf16")  # what the first model of a process brings along
    gc.collect()
    _native.release_free_memory()  # what other tests have left in the heap would be packed into
    RESIDENT_SET.reset_peak()
    before = RESIDENT_SET.current()
    engine = anyaccel.init_inference(model, dtype="bf16", runtime="native")
    assert engine.module is model
    assert all(parameter.is_meta for parameter in model.parameters())
    assert RESIDENT_SET.peak() - before < 0.2 * size
    assert RESIDENT_SET.current() - before < -0.3 * size


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "int8"])
def test_logits_have_the_dtype_of_the_model(dtype: str, reference: Any) -> None:
    model = optimize(family_cases.build("llama"), dtype=dtype)
    logits = model(IDS).logits.detach()
    assert logits.dtype == model.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    want = reference(IDS).logits.detach()
    assert float((logits.float() - want).abs().max() / want.abs().max()) < 0.05


def test_pipeline_runs_on_it(reference: Any) -> None:
    """transformers' pipelines look models up by their class's name and move them about."""
    model = optimize(family_cases.build("llama"), dtype="fp32")
    assert type(model).__name__ == type(reference).__name__
    assert model.can_generate()
