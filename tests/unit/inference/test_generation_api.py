# SPDX-License-Identifier: Apache-2.0
"""`generate` in the native loop against Hugging Face's own on the same small random model in fp32."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import anyaccel
import family_cases
from anyaccel.errors import ModelError, UsageError
from anyaccel.inference import InferenceEngine, generate_tokens, optimize
from anyaccel.inference.hf import native_generate

IDS = torch.tensor([[5, 17, 99, 3, 64], [0, 0, 7, 8, 9]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
PADDED: dict[str, Any] = {"attention_mask": MASK, "pad_token_id": 0}


@pytest.fixture(scope="module")
def reference() -> Any:
    return family_cases.build("llama")


@pytest.fixture(scope="module")
def engine() -> InferenceEngine:
    engine = anyaccel.init_inference(family_cases.build("llama"), dtype="fp32", runtime="native")
    assert engine.runtime == "native"
    return engine


@pytest.fixture(autouse=True)
def _told_once_a_test() -> Iterator[None]:
    native_generate._warned_of.clear()
    yield
    native_generate._warned_of.clear()


class Text:
    """A tokenizer of one character a token."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(200 + token) for token in tokens)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 12},
        {"max_length": 11},
        {"max_new_tokens": 1},
        {},
        {"max_new_tokens": 10, "min_new_tokens": 10},
        {"max_length": 16, "min_length": 14},
        {"max_new_tokens": 12, "repetition_penalty": 1.4},
        {"max_new_tokens": 12, "no_repeat_ngram_size": 2},
        {"max_new_tokens": 12, "no_repeat_ngram_size": 1, "repetition_penalty": 0.7},
        {"max_new_tokens": 8, "eos_token_id": None},
        {"max_new_tokens": 12, "do_sample": True, "top_k": 1},
    ],
)
@pytest.mark.parametrize("rows", [1, 2])
def test_greedy_gives_the_ids_of_transformers(
    options: dict[str, Any], rows: int, engine: InferenceEngine, reference: Any
) -> None:
    arguments = {**PADDED, "attention_mask": MASK[:rows], **options}
    with pytest.warns(UserWarning, match="max_length") if not options else _no_context():
        want = reference.generate(IDS[:rows], **arguments)
    got = engine.generate(IDS[:rows], **arguments)
    assert got.dtype == want.dtype
    assert got.tolist() == want.tolist()


def _no_context() -> Any:
    import contextlib

    return contextlib.nullcontext()


def test_rows_end_at_different_tokens(engine: InferenceEngine, reference: Any) -> None:
    """Finished rows are padded, and leave the batch."""
    free = reference.generate(IDS, **PADDED, max_new_tokens=16, eos_token_id=None)[:, 5:].tolist()
    # A token that ends one row early and the other later or never.
    end = next(token for token in free[0] if token not in free[1] or free[1].index(token) > free[0].index(token))
    for ends in (end, [end, 130]):
        options = {**PADDED, "max_new_tokens": 16, "eos_token_id": ends}
        want = reference.generate(IDS, **options)
        got = engine.generate(IDS, **options)
        assert got.tolist() == want.tolist()
        assert got[0].tolist()[-1] == 0


def test_padding_without_a_mask_is_found_as_transformers_does(engine: InferenceEngine, reference: Any) -> None:
    want = reference.generate(IDS, pad_token_id=0, max_new_tokens=6)
    assert engine.generate(IDS, pad_token_id=0, max_new_tokens=6).tolist() == want.tolist()


def test_right_padding_is_no_part_of_the_text(engine: InferenceEngine, reference: Any) -> None:
    ids, mask = torch.tensor([[7, 8, 9, 0, 0]]), torch.tensor([[1, 1, 1, 0, 0]])
    want = reference.generate(ids[:, :3], max_new_tokens=6, pad_token_id=0)[0, 3:]
    got = engine.generate(ids, attention_mask=mask, max_new_tokens=6, pad_token_id=0)[0, 5:]
    assert got.tolist() == want.tolist()


def test_a_dict_has_the_cache_to_go_on_with(engine: InferenceEngine, reference: Any) -> None:
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}

    def twice(model: Any) -> torch.Tensor:
        first = model.generate(IDS, attention_mask=MASK, return_dict_in_generate=True, **options)
        assert first.past_key_values.get_seq_length() == first.sequences.shape[1] - 1
        more = torch.cat([first.sequences, IDS[:, :2]], dim=1)
        mask = torch.cat([MASK, torch.ones(2, more.shape[1] - MASK.shape[1], dtype=MASK.dtype)], dim=1)
        cache = first.past_key_values
        return model.generate(more, attention_mask=mask, past_key_values=cache, **options)  # type: ignore[no-any-return]

    model = engine.native.model
    before = model.cache_used_bytes
    assert torch.equal(twice(engine), twice(reference))
    assert model.cache_used_bytes == before
    without = engine.generate(IDS, attention_mask=MASK, return_dict_in_generate=True, use_cache=False, **options)
    assert without.past_key_values is None
    unused = engine.generate(IDS, attention_mask=MASK, return_dict_in_generate=True, **options).past_key_values
    assert model.cache_used_bytes == before  # nothing is run until it is used
    unused.crop(-2)
    assert unused.get_seq_length() == IDS.shape[1] + 1


def test_logits_are_those_of_transformers(engine: InferenceEngine, reference: Any) -> None:
    options = {**PADDED, "max_new_tokens": 5, "min_new_tokens": 5, "return_dict_in_generate": True}
    want = reference.generate(IDS, **options, output_logits=True)
    got = engine.generate(IDS, **options, output_logits=True)
    assert got.sequences.tolist() == want.sequences.tolist()
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=1e-4, atol=1e-4)
    assert got.scores is None
    plain = {**PADDED, "max_new_tokens": 3, "return_dict_in_generate": True, "output_scores": True}
    want, got = reference.generate(IDS, **plain), engine.generate(IDS, **plain)
    torch.testing.assert_close(torch.stack(got.scores), torch.stack(want.scores), rtol=1e-4, atol=1e-4)


def test_several_answers_to_each_prompt(engine: InferenceEngine) -> None:
    got = engine.generate(IDS, **PADDED, max_new_tokens=6, do_sample=True, num_return_sequences=3, seed=1)
    assert got.shape == (6, 11)
    assert got[:, :5].tolist() == IDS.repeat_interleave(3, 0).tolist()
    assert len({tuple(row) for row in got.tolist()}) == 6
    same = engine.generate(IDS, **PADDED, max_new_tokens=6, do_sample=True, num_return_sequences=3, top_k=1)
    assert same[0].tolist() == same[1].tolist() == same[2].tolist()
    assert same[0].tolist() == engine.generate(IDS[:1], max_new_tokens=6, pad_token_id=0)[0].tolist()


def test_seed_generator_and_torch_state_make_sampling_repeatable(engine: InferenceEngine) -> None:
    options = {**PADDED, "max_new_tokens": 12, "do_sample": True, "temperature": 1.5}

    def sample(**more: Any) -> list[list[int]]:
        return engine.generate(IDS, **options, **more).tolist()

    assert sample(seed=3) == sample(seed=3)
    assert sample(seed=3) != sample(seed=4)
    first = sample(generator=torch.Generator().manual_seed(5))
    assert first == sample(generator=torch.Generator().manual_seed(5))
    torch.manual_seed(9)
    ours = [sample(), sample()]
    torch.manual_seed(9)
    assert ours == [sample(), sample()]
    assert ours[0] != ours[1]
    assert sample(seed=-1) == sample(seed=2**64 - 1)
    with pytest.raises(UsageError, match="seed"):
        sample(seed=2**64)


def test_sampling_follows_the_distribution(engine: InferenceEngine, reference: Any) -> None:
    """First tokens of many samples against the probabilities that transformers' warpers leave, by chi-squared."""
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    ids, count = IDS[:1], 2000
    with torch.inference_mode():
        scores = reference(ids).logits[:, -1]
    for warp in (TemperatureLogitsWarper(0.8), TopKLogitsWarper(10), TopPLogitsWarper(0.9)):
        scores = warp(ids, scores)
    expected = torch.softmax(scores[0], 0) * count
    got = engine.generate(
        ids,
        max_new_tokens=1,
        do_sample=True,
        temperature=0.8,
        top_k=10,
        top_p=0.9,
        num_return_sequences=count,
        seed=11,
        pad_token_id=0,
    )
    seen = Counter(got[:, -1].tolist())
    assert all(expected[token] > 0 for token in seen)
    kept = [token for token in range(len(expected)) if expected[token] > 0]
    statistic = sum((seen[token] - float(expected[token])) ** 2 / float(expected[token]) for token in kept)
    # 9 degrees of freedom at most: 40 is exceeded once in 100,000 runs, and the seed is fixed.
    assert statistic < 40


def test_stop_strings(engine: InferenceEngine, reference: Any) -> None:
    free = reference.generate(IDS, **PADDED, max_new_tokens=12, eos_token_id=None)
    text = Text().decode(free[0, 5:].tolist())
    stop = text[3:6]
    got = engine.generate(IDS, **PADDED, max_new_tokens=12, stop_strings=[stop, "no such"], tokenizer=Text())
    place = text.index(stop)
    assert got[0, 5 : 5 + place + 3].tolist() == free[0, 5 : 5 + place + 3].tolist()
    assert set(got[0, 5 + place + 3 :].tolist()) <= {0}
    with pytest.raises(UsageError, match="tokenizer"):
        engine.generate(IDS, **PADDED, max_new_tokens=12, stop_strings="x")


def test_stop_strings_may_begin_in_the_prompt(engine: InferenceEngine, reference: Any) -> None:
    free = reference.generate(IDS[:1], max_new_tokens=4, pad_token_id=0, eos_token_id=None)[0].tolist()
    stop = Text().decode(free[4:6])
    got = engine.generate(IDS[:1], max_new_tokens=4, stop_strings=stop, tokenizer=Text(), pad_token_id=0)
    assert got[0].tolist() == free[:6]


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.tolist())

    def end(self) -> None:
        self.seen.append("end")


def test_streamer_gets_what_transformers_gives_it(engine: InferenceEngine, reference: Any) -> None:
    ours, theirs = Recorder(), Recorder()
    reference.generate(IDS, **PADDED, max_new_tokens=5, streamer=theirs)
    engine.generate(IDS, **PADDED, max_new_tokens=5, streamer=ours)
    assert ours.seen == theirs.seen


class After(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


def test_stopping_criteria_of_the_caller(engine: InferenceEngine, reference: Any) -> None:
    want = reference.generate(IDS, **PADDED, max_new_tokens=12, stopping_criteria=[After(9)])
    got = engine.generate(IDS, **PADDED, max_new_tokens=12, stopping_criteria=[After(9)])
    assert got.tolist() == want.tolist()
    assert got.shape[1] == 9


def test_generation_config_and_the_model_s_own_defaults(engine: InferenceEngine, reference: Any) -> None:
    config = GenerationConfig(max_new_tokens=4, pad_token_id=0, repetition_penalty=1.5)
    want = reference.generate(IDS, attention_mask=MASK, generation_config=config)
    assert engine.generate(IDS, attention_mask=MASK, generation_config=config).tolist() == want.tolist()
    saved = engine.generation_config.max_new_tokens
    engine.generation_config.max_new_tokens = 3
    try:
        assert engine.generate(IDS, **PADDED).shape[1] == 8
    finally:
        engine.generation_config.max_new_tokens = saved


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_beams": 3}, "num_beams"),
        ({"num_beams": 2, "num_return_sequences": 2}, "num_beams"),
        ({"bad_words_ids": [[5], [17, 3]]}, "bad_words_ids"),
        ({"suppress_tokens": [3, 4]}, "suppress_tokens"),
        ({"use_cache": False}, "use_cache"),
        ({"logits_processor": [lambda _ids, scores: -scores]}, "logits_processor"),
    ],
)
def test_other_arguments_go_through_transformers_with_a_note(
    options: dict[str, Any],
    name: str,
    engine: InferenceEngine,
    reference: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "anyaccel"):
        for _ in range(2):
            got = engine.generate(IDS, **PADDED, max_new_tokens=8, **options)
    assert got.tolist() == reference.generate(IDS, **PADDED, max_new_tokens=8, **options).tolist()
    assert [record.args for record in caplog.records if record.name.endswith("native_generate")] == [(name,)]


def test_drafts_from_the_prompt(engine: InferenceEngine, reference: Any) -> None:
    ids = torch.tensor([[5, 17, 99, 3, 5, 17, 99]])
    want = reference.generate(ids, max_new_tokens=9, prompt_lookup_num_tokens=3, pad_token_id=0)
    got = engine.generate(ids, max_new_tokens=9, prompt_lookup_num_tokens=3, pad_token_id=0)
    assert got.tolist() == want.tolist()


def test_optimized_model_generates_by_itself(reference: Any) -> None:
    model = family_cases.build("llama")
    fast = optimize(model, dtype="fp32")
    assert fast is model
    assert isinstance(fast, type(reference))
    want = reference.generate(IDS, **PADDED, max_new_tokens=7)
    assert fast.generate(IDS, **PADDED, max_new_tokens=7).tolist() == want.tolist()
    assert fast.generate(inputs=IDS, **PADDED, max_new_tokens=7).tolist() == want.tolist()
    assert fast.generate(input_ids=IDS, **PADDED, max_new_tokens=7).tolist() == want.tolist()


@pytest.mark.parametrize(
    ("ids", "options", "text"),
    [
        ([[]], {}, "prompt is empty"),
        ([[1, 500]], {}, "token 500 is outside the model's vocabulary of 131"),
        ([[1, -3]], {}, "token -3 is outside"),
        ([[1, 2]], {"max_new_tokens": 63}, "2 prompt tokens and 63 new ones exceed the model's context of 64"),
        ([[1, 2]], {"max_new_tokens": 0}, "max_new_tokens"),
        ([[1, 2]], {"max_length": 2, "max_new_tokens": None}, "max_length=2"),
        ([[1, 2]], {"attention_mask": torch.zeros(1, 2)}, "row 0 is empty"),
        ([[1, 2]], {"attention_mask": torch.ones(1, 3)}, "attention_mask has shape"),
        ([[1, 2]], {"do_sample": True, "temperature": 0.0}, "temperature=0.0"),
        ([[1, 2]], {"do_sample": True, "top_p": 1.5}, "top_p=1.5"),
        ([[1, 2]], {"do_sample": True, "min_p": -0.1}, "min_p=-0.1"),
        ([[1, 2]], {"repetition_penalty": -1.0}, "repetition_penalty=-1.0"),
        ([[1, 2]], {"stop_strings": [""], "tokenizer": Text()}, "stop_strings"),
        ([[1, 2]], {"no_such_argument": 1}, "no_such_argument"),
    ],
)
def test_what_is_wrong_is_said_and_the_engine_stays_usable(
    ids: list[list[int]], options: dict[str, Any], text: str, engine: InferenceEngine
) -> None:
    arguments = {"max_new_tokens": 4, "pad_token_id": 0, **options}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    with pytest.raises(ValueError, match=text):
        engine.generate(torch.tensor(ids, dtype=torch.int64), **arguments)
    assert engine.generate(IDS[:1], max_new_tokens=2, pad_token_id=0).shape == (1, 7)


def test_batch_that_does_not_fit_says_how_much_it_needs() -> None:
    engine = anyaccel.init_inference(family_cases.build("llama"), dtype="fp32", runtime="native", cache_bytes=1 << 20)
    assert engine.native is not None
    per_token = engine.native.model.cache_bytes_per_token()
    rows = (1 << 20) // (64 * per_token) + 1
    with pytest.raises(UsageError, match=rf"\({rows * 64 * per_token} bytes\), its limit is 1 MiB"):
        engine.generate(torch.ones(rows, 4, dtype=torch.int64), max_new_tokens=60, pad_token_id=0)
    assert engine.native.model.cache_used_bytes == 0
    assert engine.generate(IDS[:1], max_new_tokens=3, pad_token_id=0).shape[1] == 8


def test_nan_logits_are_an_error() -> None:
    model = family_cases.build("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    engine = anyaccel.init_inference(model, dtype="fp32", runtime="native")
    for _ in range(2):
        with pytest.raises(ModelError, match="NaN"):
            engine.generate(IDS[:1], max_new_tokens=3, pad_token_id=0)
        with pytest.raises(ModelError, match="NaN"):
            list(generate_tokens(engine, IDS[0], max_new_tokens=3))


class Interrupt(Recorder):
    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if len(self.seen) == 4:
            raise KeyboardInterrupt


def test_ctrl_c_between_steps_frees_the_cache(engine: InferenceEngine, reference: Any) -> None:
    assert engine.native is not None
    before = engine.native.model.cache_used_bytes
    with pytest.raises(KeyboardInterrupt):
        engine.generate(IDS, **PADDED, max_new_tokens=9, streamer=Interrupt())
    assert engine.native.model.cache_used_bytes == before
    tokens = generate_tokens(engine, IDS[0], max_new_tokens=9)
    next(tokens)
    tokens.close()  # type: ignore[attr-defined]
    assert engine.native.model.cache_used_bytes == before
    want = reference.generate(IDS, **PADDED, max_new_tokens=6)
    assert engine.generate(IDS, **PADDED, max_new_tokens=6).tolist() == want.tolist()


def test_token_iterator_gives_the_ids_of_generate(engine: InferenceEngine) -> None:
    want = engine.generate(IDS[:1], max_new_tokens=9, pad_token_id=0)[0, 5:].tolist()
    assert list(generate_tokens(engine, IDS[0], max_new_tokens=9)) == want
    sampled = {"temperature": 1.3, "top_p": 0.9, "seed": 5}
    one = list(generate_tokens(engine, IDS[0], max_new_tokens=9, **sampled))  # type: ignore[arg-type]
    two = engine.generate(
        IDS[:1], max_new_tokens=9, do_sample=True, temperature=1.3, top_p=0.9, top_k=0, seed=5, pad_token_id=0
    )
    assert one == two[0, 5:].tolist()


_WHOLE = ("top_k", "no_repeat_ngram_size", "max_new_tokens", "min_new_tokens", "max_length", "min_length")


@pytest.mark.parametrize("value", [1.5, 2.0, True, "2"])
@pytest.mark.parametrize("name", [*_WHOLE, "num_return_sequences"])
def test_counts_that_are_not_whole_are_refused(name: str, value: object, engine: InferenceEngine) -> None:
    options: dict[str, Any] = {"max_new_tokens": 4} if name not in ("max_new_tokens", "max_length") else {}
    # Some are refused by transformers before we see them, in its own words.
    with pytest.raises((UsageError, ValueError, TypeError), match=rf"{name}|must be|not supported"):
        engine.generate(IDS[:1], do_sample=True, **options, **{name: value})


def test_counts_of_other_whole_types_are_taken(engine: InferenceEngine) -> None:
    numpy = pytest.importorskip("numpy")
    options = {"do_sample": True, "seed": 3}
    want = engine.generate(IDS[:1], max_new_tokens=4, top_k=5, temperature=0.5, **options)
    got = engine.generate(
        IDS[:1], max_new_tokens=numpy.int64(4), top_k=numpy.int32(5), temperature=numpy.float32(0.5), **options
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bool])
@pytest.mark.parametrize("runtime", ["native", "torch"])
def test_tokens_that_are_not_whole_are_refused(dtype: torch.dtype, runtime: str, engine: InferenceEngine) -> None:
    if runtime == "torch":  # a tied embedding is packed; transformers' own refuses such tokens, too
        engine = anyaccel.init_inference(family_cases.build("gpt2"), dtype="fp32", runtime="torch")
    ids = IDS[:1].to(dtype)
    with pytest.raises(UsageError, match=r"input_ids of dtype torch.*: must be whole numbers"):
        engine(ids)
    with pytest.raises(UsageError, match=r"input_ids of dtype torch.*: must be whole numbers"):
        engine.generate(ids, max_new_tokens=2, do_sample=False, attention_mask=torch.ones(1, 5), pad_token_id=0)
    with pytest.raises(UsageError, match=r"a token of the prompt=.*: must be a whole number"):
        list(generate_tokens(engine, ids[0], max_new_tokens=2))


def test_positions_that_are_not_whole_are_refused(engine: InferenceEngine) -> None:
    with pytest.raises(UsageError, match=r"position_ids of dtype torch.float32: must be whole numbers"):
        engine(IDS[:1], position_ids=torch.arange(5.0)[None] + 0.4)


@pytest.mark.parametrize(
    "options", [{"top_k": 1.5}, {"seed": 1.0}, {"max_new_tokens": 2.5}, {"temperature": "1"}, {"top_p": True}]
)
def test_options_of_generate_tokens_have_their_types(options: dict[str, Any], engine: InferenceEngine) -> None:
    with pytest.raises(UsageError, match=rf"{next(iter(options))}=.*: must be a"):
        list(generate_tokens(engine, IDS[0], **({"max_new_tokens": 2} | options)))


@pytest.mark.parametrize("runtime", ["native", "torch"])
def test_an_engine_passes_for_its_model(runtime: str, reference: Any) -> None:
    """As an assistant, of transformers' own model or of an engine, and in a pipeline."""
    import copy

    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    engine = anyaccel.init_inference(family_cases.build("llama"), dtype="fp32", runtime=runtime)
    draft = anyaccel.init_inference(family_cases.build("llama"), dtype="fp32", runtime=runtime)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(IDS[:1])}
    want = reference.generate(IDS[:1], **options)
    for model in (reference, engine, engine.module):
        for assistant in (draft, draft.module):
            assert torch.equal(model.generate(IDS[:1], assistant_model=assistant, **options), want)

    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(131)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")
    texts = [
        pipeline("text-generation", model=model, tokenizer=tokenizer)(
            "w5 w17 w99", max_new_tokens=4, do_sample=False, return_full_text=False
        )
        for model in (reference, engine)
    ]
    assert texts[0] == texts[1]

    assert engine.get_input_embeddings() is engine.module.get_input_embeddings()
    assert engine.can_generate() and engine.name_or_path == engine.module.name_or_path
    engine.generation_config = copy.deepcopy(engine.generation_config)
    assert engine.module.generation_config is engine.generation_config
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = engine.nothing_of_this_name
    with pytest.raises(AttributeError):
        _ = InferenceEngine.__new__(InferenceEngine).module
