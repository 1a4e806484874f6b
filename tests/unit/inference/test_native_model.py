# SPDX-License-Identifier: Apache-2.0
"""The native decoder through its bindings: requests and their batches, errors, memory, single matrices."""

from __future__ import annotations

import gc
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import native_models
from anyaccel import _llm
from anyaccel.errors import AnyAccelError, ModelError, UsageError

pytest.importorskip("transformers")

VOCAB = 131


@pytest.fixture(scope="module")
def llama() -> Any:
    return native_models.native("llama")


def _run(model: Any, prompt: list[int], **options: Any) -> list[int]:
    request = _llm.Request(model, prompt, options)
    while not request.finished:
        model.step([request])
    return request.tokens


def _prompt(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(3, VOCAB) for _ in range(count)]


def test_a_greedy_answer_is_that_of_transformers(llama: Any) -> None:
    model, _, _ = native_models.whole("llama")
    prompt = [5, 17, 99, 3, 64, 28, 101]
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert _run(llama, prompt, max_new_tokens=20) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("weight", ["bf16", "f16"])
def test_formats_of_16_bits_are_near(weight: str) -> None:
    tokens = list(range(3, 40))
    exact, rounded = (
        native_models.logits_of(model, VOCAB, [model.create()], [tokens])
        for model in (native_models.native("llama"), native_models.native("llama", weight=weight, cache="bf16"))
    )
    assert 0 < float((exact - rounded).abs().max() / exact.abs().max()) < 0.05


def test_requests_in_random_batches_answer_as_alone(llama: Any) -> None:
    """200 requests of random lengths that come and go; a third has a common beginning, and half is sampled."""
    generator = random.Random(1)
    shared = _prompt(generator, 20)
    first = _llm.Request(llama, [*shared, 7], {"max_new_tokens": 1})
    llama.step([first])
    waiting = []
    for index in range(200):
        prompt = (shared if index % 3 == 0 else []) + _prompt(generator, generator.randint(1, 25))
        options = {"max_new_tokens": generator.randint(1, 8), "do_sample": index % 2 == 0, "seed": index}
        options |= {"top_k": 20, "temperature": 0.8, "end_tokens": [generator.randrange(VOCAB)]}
        waiting.append((prompt, options))
    expected = [_run(llama, prompt, **options) for prompt, options in waiting]
    answers: dict[int, Any] = {}
    running: list[tuple[int, Any]] = []
    while len(answers) < len(waiting):
        started = len(answers) + len(running)
        for index in range(started, min(started + generator.randint(0, 12), len(waiting))):
            prompt, options = waiting[index]
            running.append((index, _llm.Request(llama, prompt, options, first if index % 3 == 0 else None)))
        generator.shuffle(running)
        for (_, request), token in zip(running, llama.step([each for _, each in running]), strict=True):
            assert request.tokens[-1] == token
        for index, request in running:
            if request.finished:
                answers[index] = request.tokens
        running = [(index, request) for index, request in running if not request.finished]
    assert [answers[index] for index in range(len(waiting))] == expected
    del first, request, running
    gc.collect()
    assert llama.cache_used_bytes == 0


def test_requests_that_share_a_prompt_compute_it_once(llama: Any) -> None:
    prompt = _prompt(random.Random(2), 60)
    first = _llm.Request(llama, prompt, {"max_new_tokens": 2})
    others = [_llm.Request(llama, prompt, {"max_new_tokens": 2}, first) for _ in range(7)]
    llama.step([*others, first])
    # The page that they write to is each one's own; 64 tokens of 8 prompts.
    assert llama.cache_used_bytes <= 8 * 64 * llama.cache_bytes_per_token()
    llama.step([*others, first])
    assert {tuple(request.tokens) for request in [*others, first]} == {tuple(_run(llama, prompt, max_new_tokens=2))}


def test_a_request_goes_on_with_more_prompt(llama: Any) -> None:
    request = _llm.Request(llama, [5, 6, 7], {"max_new_tokens": 3})
    while not request.finished:
        llama.step([request])
    assert request.finished == "length"
    assert llama.step([request]) == [-1]
    so_far = [5, 6, 7, *request.tokens]
    request.extend([8, 9], max_new_tokens=5)
    assert (request.tokens, request.prompt_length, request.finished) == ([], 8, "")
    while not request.finished:
        llama.step([request])
    assert request.tokens == _run(llama, [*so_far, 8, 9], max_new_tokens=5)


def test_end_tokens(llama: Any) -> None:
    free = _run(llama, [5, 6, 7], max_new_tokens=6)
    end = free[2]
    count = free.index(end) + 1
    request = _llm.Request(llama, [5, 6, 7], {"max_new_tokens": 6, "end_tokens": [end]})
    while not request.finished:
        llama.step([request])
    assert (request.finished, request.tokens) == ("end", free[:count])
    assert _run(llama, [5, 6, 7], max_new_tokens=6, end_tokens=[end], ignore_end=True) == free
    later = _run(llama, [5, 6, 7], max_new_tokens=6, end_tokens=[end], min_new_tokens=6)
    assert len(later) == 6
    assert end not in later


def test_logits_of_a_step(llama: Any) -> None:
    request = _llm.Request(llama, [5, 6, 7], {"max_new_tokens": 6}, keep_logits=True)
    (token,) = llama.step([request])
    logits = torch.empty(VOCAB)
    request.copy_logits(logits.data_ptr())
    assert int(logits.argmax()) == token
    sequence = llama.create()
    assert torch.equal(native_models.logits_of(llama, VOCAB, [sequence], [[5, 6, 7]])[2], logits)
    llama.destroy(sequence)


@pytest.mark.parametrize(
    ("prompt", "options", "text"),
    [
        ([], {}, "empty"),
        ([1, VOCAB], {}, "vocabulary of 131"),
        ([1] * 64, {}, "context has 64"),
        ([1], {"temperature": 0.0, "do_sample": True}, "temperature"),
        ([1], {"top_p": 1.5}, "top_p"),
        ([1], {"beams": 4}, "no option 'beams'"),
        ([1], {"top_k": "many"}, "top_k"),
    ],
)
def test_impossible_requests(llama: Any, prompt: list[int], options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        _llm.Request(llama, prompt, options)


def test_the_context_ends_an_answer(llama: Any) -> None:
    request = _llm.Request(llama, [5] * 60, {"max_new_tokens": 100})
    while not request.finished:
        llama.step([request])
    assert (request.finished, len(request.tokens)) == ("length", 4)
    with pytest.raises(UsageError, match="context has 64"):
        request.extend([5], 1)


def test_a_batch_that_does_not_fit_the_cache() -> None:
    model = native_models.native("llama", cache_limit=1 << 17)
    per_page = 64 * model.cache_bytes_per_token()
    count = model.cache_limit_bytes // per_page + 1
    requests = [_llm.Request(model, [5, 6, 7 + index], {"max_new_tokens": 1}) for index in range(count)]
    with pytest.raises(ModelError, match=r"cache needs \d+ MiB"):
        model.step(requests)
    assert model.cache_used_bytes == 0
    assert model.step(requests[:1]) == _run(native_models.native("llama"), [5, 6, 7], max_new_tokens=1)


def test_weights_that_are_missing_or_wrong(llama: Any) -> None:
    _, spec, values = native_models.whole("llama")
    model = native_models.empty(spec)
    with pytest.raises(ModelError, match="were not set"):
        model.finish()
    with pytest.raises(UsageError, match=r"finish\(\) comes first"):
        model.step([])
    with pytest.raises(UsageError, match="no matrix 'nobody'"):
        model.set_rows("nobody", 0, 1, 1, "f32", 4)
    with pytest.raises(UsageError, match=r"131 rows, not 130 \+ 2"):
        model.set_rows("embed", 130, 2, values["embed"].data_ptr(), "f32", 4 * spec.hidden)
    with pytest.raises(UsageError, match="type 'f8'"):
        model.set_rows("embed", 0, 1, values["embed"].data_ptr(), "f8", 4 * spec.hidden)
    with pytest.raises(UsageError, match="before finish"):
        llama.set_vector("final_norm.weight", 0, 1, values["embed"].data_ptr(), "f32")


def test_lists_of_weights_that_do_not_fit() -> None:
    import dataclasses

    from anyaccel.inference.spec.decoder import weights

    _, spec, _ = native_models.whole("llama")
    matrices, vectors = weights(spec)
    lists = [dataclasses.replace(each, format="f32").entry() for each in matrices]
    counts = [(each.name, each.count) for each in vectors]

    def make(matrices: Any, vectors: Any = counts, spec: Any = spec, cache: str = "f32") -> None:
        _llm.DecoderModel(spec, matrices, vectors, 1, cache, 1 << 20)

    for wrong, text in [
        (lists[1:], "'embed' is missing"),
        ([*lists, ("more", 1, 1, "f32", 0, False, "halves")], "'more' is not one"),
        ([*lists, lists[0]], "listed twice"),
        ([("embed", 131, 47, "f32", 0, False, "halves"), *lists[1:]], "131 x 47"),
        ([("embed", 131, 48, "i4", 7, False, "halves"), *lists[1:]], "'embed'"),
        ([("embed", 131, 48, "i7", 0, False, "halves"), *lists[1:]], "format 'i7'"),
        ([("embed", 131, 48, "f32", 0, False, "thirds"), *lists[1:]], "scales 'thirds'"),
    ]:
        with pytest.raises(UsageError, match=text):
            make(wrong)
    with pytest.raises(UsageError, match="cache format"):
        make(lists, cache="f8")
    with pytest.raises(UsageError, match="hidden is 0"):
        make(lists, spec=dataclasses.replace(spec, hidden=0))
    with pytest.raises(UsageError, match="head_dim"):
        wide: Any = "wide"
        attention = dataclasses.replace(spec.layers[0].attention, head_dim=wide)
        layers = (dataclasses.replace(spec.layers[0], attention=attention), *spec.layers[1:])
        _llm.DecoderModel(dataclasses.replace(spec, layers=layers), lists, counts, 1, "f32", 1 << 20)


def test_packed_weights_through_a_file(llama: Any) -> None:
    _, spec, _ = native_models.whole("llama")
    with tempfile.TemporaryFile() as file:
        done: list[int] = []
        checksums = llama.write(file.fileno(), 4096, done.append)
        assert done[-1] == llama.weight_bytes
        assert os.fstat(file.fileno()).st_size == 4096 + llama.weight_bytes
        copy = native_models.empty(spec)
        assert copy.read(file.fileno(), 4096, checksums)
        assert not native_models.empty(spec).read(file.fileno(), 4096, [checksums[0] ^ 1])
        copy.finish()
        assert _run(copy, [5, 6, 7], max_new_tokens=8) == _run(llama, [5, 6, 7], max_new_tokens=8)

        def refuse(count: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            native_models.empty(spec).read(file.fileno(), 4096, checksums, refuse)
        with pytest.raises(OSError, match="ends too early"):
            native_models.empty(spec).read(file.fileno(), 8192, checksums)


def test_a_forked_process_is_told(llama: Any) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llama.create()
        except AnyAccelError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert "forked" in pipe.read()
    assert _run(llama, [5], max_new_tokens=1)


def test_several_threads_share_a_model(llama: Any) -> None:
    prompts = [_prompt(random.Random(seed), 12) for seed in range(6)]
    expected = [_run(llama, prompt, max_new_tokens=10) for prompt in prompts]
    answers: dict[int, list[int]] = {}
    threads = [
        threading.Thread(
            target=lambda index=index: answers.update({index: _run(llama, prompts[index], max_new_tokens=10)})
        )
        for index in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[index] for index in range(6)] == expected


def test_ctrl_c_ends_a_long_prompt_and_nothing_is_left() -> None:
    """Between two runs of a prompt's tokens."""
    model = native_models.native("llama", positions=1 << 18, cache_limit=1 << 30)
    request = _llm.Request(model, [5] * 250_000, {"max_new_tokens": 1})  # minutes of work
    main = threading.main_thread().ident
    assert main is not None
    clock = time.pthread_getcpuclockid(main)
    before = time.clock_gettime(clock)
    over = threading.Event()

    def interrupt() -> None:
        # Only the step takes that much of the processor.
        while time.clock_gettime(clock) < before + 0.2 and not over.wait(0.01):
            pass
        if not over.is_set():
            signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.start()
            model.step([request])
    finally:
        over.set()
        thread.join()
    assert request.tokens == []
    assert model.cache_used_bytes == 0


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_models_come_and_go_without_growth() -> None:
    def one() -> None:
        model = native_models.native("llama")
        request = _llm.Request(model, list(range(3, 40)), {"max_new_tokens": 2})
        model.step([request])

    for _ in range(20):
        one()
    gc.collect()
    before = _resident()
    for _ in range(200):
        one()
    gc.collect()
    assert _resident() - before < 8 << 20


@pytest.mark.parametrize("length", [1_500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_long_answer_does_not_grow(length: int) -> None:
    """All tokens in one sequence."""
    model = native_models.native("llama", positions=1 << 18, cache="bf16", cache_limit=1 << 30)
    request = _llm.Request(model, [5, 6, 7], {"max_new_tokens": length, "do_sample": True})
    for _ in range(500):
        model.step([request])
    before = _resident() - model.cache_reserved_bytes
    while not request.finished:
        model.step([request])
    assert len(request.tokens) == length
    assert _resident() - model.cache_reserved_bytes - before < (length - 500) * 1600  # bytes a token
    prompt = [5, 6, 7, *request.tokens[:-1]]
    assert model.cache_used_bytes <= (len(prompt) + 64) * model.cache_bytes_per_token()


def test_profile(llama: Any) -> None:
    llama.profile(True)
    _run(llama, [5, 6, 7], max_new_tokens=3)
    kinds = llama.profile(False)
    assert {"norm", "qkv", "attend", "out", "gate_up", "down", "head"} <= kinds.keys()
    assert all(seconds >= 0 and calls > 0 for seconds, calls in kinds.values())
    _run(llama, [5, 6, 7], max_new_tokens=3)
    assert llama.profile(False) == {}


# --- single matrices


_TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@pytest.mark.parametrize("tokens", [0, 1, 5, 16, 17, 100, 1100])
@pytest.mark.parametrize("kind", _TYPES)
def test_linear(kind: str, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    weight = torch.randn(70, 52, generator=generator)
    bias = torch.randn(70, generator=generator)
    x = torch.randn(tokens, 52, generator=generator).to(_TYPES[kind])
    linear = _llm.Linear(70, 52, "f32")
    linear.set_rows(0, 70, weight.data_ptr(), "f32", 4 * 52)
    y = torch.empty(tokens, 70, dtype=_TYPES[kind])
    linear.multiply(x.data_ptr(), y.data_ptr(), tokens, kind, bias.data_ptr())
    expected = torch.nn.functional.linear(x.float(), weight, bias)
    torch.testing.assert_close(y.float(), expected, rtol=1e-2 if kind != "f32" else 1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("form", "group", "minimum", "cols", "block"),
    [
        ("f32", 0, False, 52, 16 * 64 * 4),
        ("f16", 0, False, 52, 16 * 64 * 2),
        ("bf16", 0, False, 64, 16 * 64 * 2),
        ("bf16", 0, False, 65, 16 * 96 * 2),
        ("i8", 0, False, 65, 16 * 128 + 16 * 4),
        ("i8", 32, False, 65, 16 * 96 + 128),  # 3 groups of 16 halves are 96 bytes: two cache lines
        ("i4", 32, False, 33, 16 * 64 // 2 + 64),
        ("i4", 64, True, 65, 16 * 128 // 2 + 128),
        ("i4", 128, False, 128, 16 * 128 // 2 + 64),
    ],
)
def test_a_packed_matrix_has_the_size_of_its_layout(
    form: str, group: int, minimum: bool, cols: int, block: int
) -> None:
    """csrc/llm/pack/matrix.h and grouped.h: blocks of 16 rows, columns to what a kernel reads at once, then scales."""
    for rows, blocks in ((1, 1), (16, 1), (70, 5)):
        assert _llm.Linear(rows, cols, form, group, minimum).bytes == blocks * block


@pytest.mark.parametrize("kind", _TYPES)
def test_rms_norm(kind: str) -> None:
    x = torch.randn(300, 96).to(_TYPES[kind])
    weight = torch.randn(96)
    y = torch.empty_like(x)
    _llm.rms_norm(x.data_ptr(), y.data_ptr(), 300, 96, kind, weight.data_ptr(), 1e-6)
    expected = torch.nn.functional.rms_norm(x.float(), (96,), weight, 1e-6)
    torch.testing.assert_close(y.float(), expected, rtol=1e-2 if kind != "f32" else 1e-5, atol=1e-5)


def test_linear_in_a_forked_process() -> None:
    weight, x = torch.randn(32, 64), torch.randn(3, 64)
    linear = _llm.Linear(32, 64, "f32")
    linear.set_rows(0, 32, weight.data_ptr(), "f32", 256)
    here, there = torch.empty(3, 32), torch.empty(3, 32).share_memory_()
    linear.multiply(x.data_ptr(), here.data_ptr(), 3, "f32")
    child = os.fork()
    if child == 0:
        linear.multiply(x.data_ptr(), there.data_ptr(), 3, "f32")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(here, there)


def test_a_product_that_cannot_be() -> None:
    linear = _llm.Linear(32, 64, "f32")
    with pytest.raises(UsageError, match="type 'i8'"):
        linear.multiply(0, 0, 0, "i8")
    with pytest.raises(UsageError):
        _llm.Linear(0, 64, "f32")
