# SPDX-License-Identifier: Apache-2.0
"""Several steps in one call: the same tokens, told as they come, and ended by whatever comes in."""

from __future__ import annotations

import asyncio
import select
import threading
from typing import Any

import pytest

import native_models
from anyaccel import _llm
from anyaccel.errors import ModelError
from anyaccel.serve.engine.delivery import Delivery, ResultStream, Subscriber
from anyaccel.serve.engine.settings import EngineSettings
from anyaccel.serve.engine.step import MultiStep
from anyaccel.serve.interface import Chunk, GenerationRequest
from serving import GREEDY, answer, decoder_of, engine, native

pytest.importorskip("transformers")

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def llama() -> Any:
    return native()


def _request(model: Any, prompt: list[int], count: int, **more: Any) -> _llm.Request:
    return _llm.Request(model.model, prompt, {"max_new_tokens": count, "ignore_end": True} | more)


def _readable(feed: _llm.TokenFeed) -> bool:
    return bool(select.select([feed.fileno()], [], [], 0)[0])


def test_steps_are_those_of_single_calls(llama: Any) -> None:
    model, feed = llama.model, _llm.TokenFeed()
    alone = [_request(llama, prompt, 9) for prompt in ([5, 6, 7], [8] * 70)]
    expected = [model.step(alone, exact=True) for _ in range(9)]
    together = [_request(llama, prompt, 9) for prompt in ([5, 6, 7], [8] * 70)]
    assert model.step(together, exact=True) == expected[0]
    tokens, fed = model.steps(together, 5, feed, 7)
    assert (tokens, fed) == (expected[1:6], 4)
    assert _readable(feed)
    assert feed.take() == [(7, each) for each in expected[1:5]]
    assert not _readable(feed)
    assert feed.take() == []
    tokens, fed = model.steps(together, 50, feed, 8)  # until both are complete
    assert (tokens, fed) == (expected[6:], 2)
    assert [each.finished for each in together] == ["length", "length"]


def test_one_that_ends_ends_the_call(llama: Any) -> None:
    model, feed = llama.model, _llm.TokenFeed()
    first = _request(llama, [5, 6, 7], 20)
    result = [model.step([first], exact=True)[0] for _ in range(6)]
    end = next(token for token in result[2:] if token not in result[:2])
    place = result.index(end)
    short = _llm.Request(model, [5, 6, 7], {"max_new_tokens": 20, "end_tokens": [end]})
    long = _request(llama, [9, 9], 20)
    model.step([short, long], exact=True)
    tokens, fed = model.steps([short, long], 15, feed, 1)
    assert [each[0] for each in tokens] == result[1 : place + 1]
    assert fed == place - 1
    assert (short.finished, long.finished) == ("end", "")


def test_a_feed_that_is_told_to_stop_ends_the_call_after_a_step(llama: Any) -> None:
    model, feed = llama.model, _llm.TokenFeed()
    request = _request(llama, [5, 6, 7], 400)
    feed.stop()
    assert model.steps([request], 50, feed, 1)[1] == 0
    feed.stop(False)
    assert model.steps([request], 3, feed, 1)[1] == 2
    feed.take()
    # While it runs: from the thread that takes. On a busy machine that may come after the last step, so it tries again.
    fed = most = 300
    while fed >= most - 1:
        feed.stop(False)
        request = _request(llama, [5, 6, 7], 400)
        taken: list[tuple[int, list[int]]] = []
        taker = threading.Thread(target=_take_and_stop, args=(feed, taken))
        taker.start()
        tokens, fed = model.steps([request], most, feed, 2)
        taker.join()
        taken.extend(feed.take())
        assert fed == len(tokens) - 1
        assert [each for _, each in taken] == tokens[:-1]


def _take_and_stop(feed: Any, taken: list[tuple[int, list[int]]]) -> None:
    select.select([feed.fileno()], [], [], 60)
    feed.stop()
    taken.extend(feed.take())


def test_a_step_that_fails_loses_nothing_of_those_before(llama: Any) -> None:
    whole = _request(llama, [5, 6, 7], 20)
    result = [llama.model.step([whole], exact=True)[0] for _ in range(20)]
    place = next(place for place in range(3, 20) if result[place] not in (*result[:place], 5, 6, 7))
    # What follows this token is not a number.
    _, spec, values = native_models.whole("llama", 1024)
    embedding = values["embed"].clone()
    embedding[result[place]] = float("nan")
    damaged = native_models.fill(native_models.empty(spec), spec, {**values, "embed": embedding})
    request, feed = _llm.Request(damaged, [5, 6, 7], {"max_new_tokens": 50, "ignore_end": True}), _llm.TokenFeed()
    damaged.step([request], exact=True)
    tokens, fed = damaged.steps([request], 30, feed, 1)
    assert [each[0] for each in tokens] == result[1 : place + 1]
    assert fed == len(tokens) == len(feed.take())
    with pytest.raises(ModelError, match="NaN"):
        damaged.steps([request], 30, feed, 1)
    assert feed.take() == []


async def test_an_answer_is_told_token_by_token_and_others_join_at_once(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anyaccel.serve.engine.engine.LONGEST_CALL_S", 1e9)  # however slow this machine is just now
    calls: list[tuple[int, int]] = []  # steps of a call, requests

    def load(_check: object) -> Any:
        decoder = decoder_of(llama, EngineSettings())
        apply = decoder.apply

        def counted(step: Any, multi_step: MultiStep | None = None) -> Any:
            output = apply(step, multi_step)
            calls.append((len(output.before) + 1, len(step.run)))
            return output

        decoder.apply = counted
        return decoder

    async def one_round(alone: list[list[int]]) -> None:
        async with engine(load) as made:
            chunks: list[tuple[int, ...]] = []

            async def first() -> None:
                async for chunk in made.generate(GenerationRequest([5, 6, 0], 60, GREEDY, ignore_end=True)):
                    chunks.append(chunk.tokens)

            asking = asyncio.create_task(first())
            while sum(map(len, chunks)) < 10:
                await asyncio.sleep(0)
            others = await asyncio.gather(*(answer(made, [5, 6, n], 60, ignore_end=True) for n in (1, 2)))
            await asking
            assert [token for each in chunks for token in each] == alone[0]
            assert [each.tokens for each in others] == alone[1:]
            assert made.stats().steps == sum(count for count, requests in calls if requests)
        assert max(count for count, _ in calls) > 4
        calls.clear()

    async with engine(llama) as made:
        alone = [(await answer(made, [5, 6, number], 60, ignore_end=True)).tokens for number in range(3)]
    for _ in range(5):  # the two roads that tokens take meet in another order each time
        await one_round(alone)


async def test_batches_and_the_feed_keep_their_order(llama: Any) -> None:
    request = _request(llama, [5, 6, 7], 20)
    first = llama.model.step([request], exact=True)

    delivery, stream = Delivery(), ResultStream()
    delivery.attach()
    delivery.add(stream, Chunk(tuple(first)))
    delivery.send()  # it has not arrived when the next call's tokens can be taken
    call = delivery.start_call(4, [Subscriber(stream, 0, 0.0)])
    tokens, fed = llama.model.steps([request], call.most, call.feed, call.tag)
    delivery.finish_call(call)
    delivery.read_feed()
    delivery.add(stream, Chunk(tuple(tokens[-1])))
    delivery.close()  # loses nothing of what is on its way
    delivery.send()
    result: list[int] = []
    while len(result) < 1 + len(tokens):
        result += (await asyncio.wait_for(stream.next(), 60)).tokens  # type: ignore[union-attr]
    assert (result, fed) == ([*first, *(each[0] for each in tokens)], 3)
