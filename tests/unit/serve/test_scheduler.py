# SPDX-License-Identifier: Apache-2.0
"""The scheduler alone, on a decoder that only keeps books: every request ends once, nothing starves, the cache never
holds more than it may, keys have equal shares.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyaccel.inference.spec.decoder import PAGE
from anyaccel.serve.engine.rates import Rates
from anyaccel.serve.engine.scheduler import ScheduledRequest, Scheduler, SchedulerLimits
from anyaccel.serve.engine.step import StepPlan
from anyaccel.serve.interface import EngineFullError, TooLongError

END = 1


@dataclass
class Decoder:
    """What the native side does with plans, in numbers: each page's content, and how many pages there are."""

    pages: int
    prompts: dict[int, list[int]] = field(default_factory=dict)  # all tokens
    cached: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)  # id -> its tokens in the cache, by page
    shared: dict[int, list[int]] = field(default_factory=dict)  # id -> its pages' numbers
    state_pages: int = 0
    keeps: dict[int, int] = field(default_factory=dict)  # id -> the tokens behind which its state is kept
    next_page: int = 0

    def apply(self, plan: StepPlan) -> None:
        for change in plan.changes:
            match change:
                case ("start" | "share", number, tokens, source):
                    assert not self.shared.get(number)
                    self.shared[number], self.cached[number] = [], []
                    if tokens:
                        assert tokens % PAGE == 0
                        assert not self.state_pages or self.keeps[source] == tokens
                        count = tokens // PAGE
                        self.shared[number] = self.shared[source][:count]
                        self.cached[number] = self.cached[source][:count]
                        assert len(self.cached[number]) == count
                        held = [token for page in self.cached[number] for token in page]
                        assert held == self.prompts[number][:tokens] and tokens < len(self.prompts[number])
                case ("shrink", number, tokens, _):
                    self._shrink(number, tokens)
                    if self.keeps.get(number, 0) > tokens:
                        del self.keeps[number]
                case ("keep", number, tokens, _):
                    assert number not in self.keeps and self.state_pages
                    assert sum(map(len, self.cached[number])) < tokens <= len(self.prompts[number])
                    self.keeps[number] = tokens
                case ("drop", number, _, _):
                    del self.shared[number], self.cached[number]
                    self.keeps.pop(number, None)
        for number, count in plan.run.items():
            self._extend(number, count)
        assert self.used() <= self.pages

    def _shrink(self, number: int, tokens: int) -> None:
        held = [token for page in self.cached[number] for token in page]
        assert tokens <= len(held)
        count = -(-tokens // PAGE)
        self.shared[number] = self.shared[number][:count]
        self.cached[number] = [tuple(held[:tokens][first * PAGE :][:PAGE]) for first in range(count)]

    def _extend(self, number: int, count: int) -> None:
        held = [token for page in self.cached[number] for token in page]
        new = self.prompts[number][len(held) : len(held) + count]
        assert len(new) == count > 0
        held += new
        pages = -(-len(held) // PAGE)
        while len(self.shared[number]) < pages:
            self.shared[number].append(self.next_page)
            self.next_page += 1
        self.cached[number] = [tuple(held[first * PAGE :][:PAGE]) for first in range(pages)]

    def used(self) -> int:
        return len({page for pages in self.shared.values() for page in pages}) + self.state_pages * len(self.keeps)


class Machine:
    """A scheduler and its decoder; a step takes a second."""

    def __init__(self, seed: int = 0, **limits: Any) -> None:
        self.limits = SchedulerLimits(**({"max_batch": 8, "max_waiting": 1000, "cache_pages": 64} | limits))
        self.scheduler = Scheduler(self.limits, Rates(longest_step_s=1.0, most=256))
        self.decoder = Decoder(self.limits.cache_pages, state_pages=self.limits.state_pages)
        self.random = random.Random(seed)
        self.ended: dict[int, str] = {}
        self.answers: dict[int, list[int]] = {}
        self.requests: dict[int, ScheduledRequest] = {}
        self.now = 0.0
        self.next_id = 0

    def submit(self, prompt: list[int], max_tokens: int, **options: Any) -> int:
        request = ScheduledRequest(self.next_id, list(prompt), len(prompt), max_tokens, **options)
        self.scheduler.submit(request)
        self.requests[request.id] = request
        self.answers[request.id] = []
        self.decoder.prompts[request.id] = request.tokens
        self.next_id += 1
        return request.id

    def step(self) -> StepPlan:
        plan = self.scheduler.plan(self.now)
        self._note(plan.ended)
        assert plan.decodes <= sum(self.requests[number].is_decoding for number in plan.run)
        self.decoder.apply(plan)
        # What has been put back gets the bits of the first time: nothing of its answer passes with its prompt, or comes
        # from others, who may have had it in their prompts.
        for change in plan.changes:
            assert change.kind != "share" or change.tokens <= self.requests[change.id].prompt
        tokens = []
        for number, count in plan.run.items():
            request = self.requests[number]
            assert request.sequence.cached >= request.prompt or request.sequence.cached + count <= request.prompt
            whole = request.left == count
            tokens.append(self._token(request) if whole and request.max_tokens else -2)
        self.now += 1
        if plan.run:
            for number, token in zip(plan.run, tokens, strict=True):
                self.answers[number] += [token] if token >= 0 else []
            self._note(self.scheduler.done(plan, tokens, 1.0, self.now))
        assert self.decoder.used() >= self.scheduler.pages.used  # those that have ended are dropped with the next plan
        return plan

    def _token(self, request: ScheduledRequest) -> int:
        return hash((tuple(request.tokens[:8]), len(request.tokens))) % 50 + 2

    def _note(self, ended: list[tuple[int, Any]]) -> None:
        for number, why in ended:
            assert number not in self.ended
            self.ended[number] = why

    def run(self, steps: int = 10_000) -> None:
        for _ in range(steps):
            if not self.step().run:
                break
        assert not self.scheduler.open and not self.scheduler.waiting


def _prompt(machine: Machine, count: int, system: int = 0) -> list[int]:
    return [7] * system + [machine.random.randrange(2, 1000) for _ in range(count)]


def test_answers_go_on_in_every_step_while_prompts_pass_in_parts() -> None:
    machine = Machine(max_batch=4)
    first = machine.submit(_prompt(machine, 10), 50)
    machine.step()
    machine.scheduler.rates.add(160, 1, 1.0)
    long = machine.submit(_prompt(machine, 900), 2)
    plans = [machine.step() for _ in range(8)]
    assert all(plan.run.get(first) == 1 for plan in plans)
    parts = [plan.run[long] for plan in plans if plan.run.get(long, 1) > 1]
    assert sum(parts) == 900 and len(parts) > 3
    assert all(part <= machine.scheduler.rates.prompt_tokens(1) or part <= 256 for part in parts)
    machine.run()
    assert machine.ended == {first: "length", long: "length"}
    assert [len(machine.answers[number]) for number in (first, long)] == [50, 2]


def test_a_second_turn_and_a_shared_beginning_cost_only_what_is_new() -> None:
    machine = Machine()
    prompt = _prompt(machine, 200)
    one = machine.submit(prompt, 30)
    machine.run()
    longer = prompt + machine.answers[one] + _prompt(machine, 20)
    plan_tokens = machine.scheduler.stats(1).prompt_tokens
    two = machine.submit(longer, 5)
    machine.step()
    assert machine.requests[two].cached == 192  # 229 tokens are there: three pages
    machine.run()
    assert machine.scheduler.stats(1).prompt_tokens - plan_tokens == len(longer) - 192
    # Alike and at once: the first one computes for all.
    prompt = _prompt(machine, 300)
    several = [machine.submit(prompt, 3) for _ in range(5)]
    before = machine.scheduler.stats(1).prompt_tokens
    machine.run()
    assert machine.scheduler.stats(1).prompt_tokens - before == 300 + 4 * (300 - 256)
    assert {machine.ended[number] for number in several} == {"length"}
    alone = machine.submit(prompt, 3, shares=False)
    machine.run()
    assert machine.requests[alone].cached == 0


def test_recurrent_states_are_kept_where_the_next_turn_goes_on() -> None:
    machine = Machine(cache_pages=40, state_pages=6)
    prompt = _prompt(machine, 200)
    one = machine.submit(prompt, 100)
    machine.run()
    two = machine.submit(prompt + machine.answers[one] + _prompt(machine, 20), 5)
    other = machine.submit(prompt[:150] + _prompt(machine, 80), 5)  # begins alike, but there is no state of that
    machine.run()
    assert [machine.requests[number].cached for number in (two, other)] == [192, 0]
    # Alike and at once: the first one computes for all.
    prompt = _prompt(machine, 300)
    several = [machine.submit(prompt, 3) for _ in range(5)]
    before = machine.scheduler.stats(1).prompt_tokens
    machine.run()
    assert machine.scheduler.stats(1).prompt_tokens - before == 300 + 4 * (300 - 256)
    assert {machine.ended[number] for number in several} == {"length"}


@pytest.mark.parametrize("seed", range(3))
def test_states_never_take_more_than_there_is(seed: int) -> None:
    machine = Machine(seed, max_batch=4, cache_pages=48, state_pages=5)
    turns = [_prompt(machine, machine.random.randrange(1, 300)) for _ in range(6)]
    for _ in range(6):
        numbers = [machine.submit(turn, machine.random.randrange(1, 120)) for turn in turns]
        machine.run()
        assert all(machine.ended[number] == "length" for number in numbers)
        turns = [
            (turn + machine.answers[number] + _prompt(machine, 9))[:700]
            for turn, number in zip(turns, numbers, strict=True)
        ]
        turns[machine.random.randrange(6)] = _prompt(machine, 100)
    assert machine.scheduler.stats(1).prefix_hits > 0


def test_nothing_is_kept_without_the_prefix_cache() -> None:
    machine = Machine(keep=False)
    prompt = _prompt(machine, 200)
    for _ in range(2):
        machine.submit(prompt, 3)
    machine.run()
    machine.submit(prompt, 3)
    machine.run()
    machine.step()
    assert machine.scheduler.pages.used == machine.decoder.used() == 0
    assert machine.scheduler.stats(1).prefix_hits == 0


def test_a_full_cache_puts_the_youngest_back_and_none_fails() -> None:
    machine = Machine(max_batch=8, cache_pages=8)
    numbers = [machine.submit(_prompt(machine, 60), 200) for _ in range(6)]
    machine.run()
    assert machine.ended == dict.fromkeys(numbers, "length")
    assert machine.scheduler.stats(1).preemptions > 0
    expected = []
    for number in numbers:
        prompt = machine.requests[number].tokens[:60]
        expected.append([hash((tuple(prompt[:8]), 60 + count)) % 50 + 2 for count in range(200)])
    assert [machine.answers[number] for number in numbers] == expected
    # The oldest was never put back: it ended first.
    assert next(iter(machine.ended)) == numbers[0]


def test_an_answer_that_was_put_back_takes_nothing_of_it_from_others() -> None:
    machine = Machine(max_batch=1, cache_pages=10)
    number = machine.submit(_prompt(machine, 60), 150, key="much")
    while len(machine.answers[number]) < 100:
        machine.step()
    result = list(machine.requests[number].tokens)
    plan = StepPlan()
    machine.scheduler._preempt(machine.requests[number], plan)
    assert machine.scheduler._make_room(10, plan)  # all that it had is forgotten
    machine.decoder.apply(plan)
    turn = machine.submit([*result, 9], 1, key="little")
    machine.scheduler._queue.count("much", 1)  # so that it comes later
    machine.run()
    assert machine.ended == {turn: "length", number: "length"}
    assert list(machine.ended) == [turn, number]
    assert machine.requests[turn].cached == 0
    assert machine.answers[number][:100] == result[60:]


def test_prompts_that_fill_the_cache_together_do_not_wait_for_each_other() -> None:
    machine = Machine(cache_pages=10)
    numbers = [machine.submit(_prompt(machine, 500), 100) for _ in range(4)]
    machine.run()
    assert machine.ended == dict.fromkeys(numbers, "length")


def test_what_can_never_be_answered_is_refused() -> None:
    machine = Machine(cache_pages=4, context=1000)
    with pytest.raises(TooLongError, match="context of 1000"):
        machine.submit(_prompt(machine, 900), 101)
    with pytest.raises(TooLongError, match="room for 256"):
        machine.submit(_prompt(machine, 200), 57)
    number = machine.submit(_prompt(machine, 200), 56)
    machine.run()
    assert machine.ended[number] == "length"


def test_asking_the_same_again_leaves_nothing_more_behind() -> None:
    machine = Machine()
    prompt = _prompt(machine, 200)
    known = []
    for number in range(40):
        machine.submit(prompt + [2 + number] * 10, 2)
        if number % 2:  # two at once
            machine.run()
            machine.step()
            known.append((machine.scheduler.pages.idle, len(machine.decoder.cached), machine.scheduler.pages.used))
    assert known[0] == known[-1] == (1, 1, 3)
    assert machine.scheduler.stats(1).prefix_hits >= 39 * 192


def test_a_full_queue_says_when_to_come_again_and_leaves_room_for_other_keys() -> None:
    machine = Machine(max_batch=1, max_waiting=4)
    for _ in range(4):
        machine.submit([5], 3, key="many")
    with pytest.raises(EngineFullError) as full:
        machine.submit([5], 3, key="many")
    assert 1 <= full.value.retry_after_s <= 60
    for _ in range(2):
        machine.submit([5], 3, key="one")
    with pytest.raises(EngineFullError):
        machine.submit([5], 3, key="one")
    machine.run()
    assert len(machine.ended) == 6


def test_ends_are_told_once_whatever_causes_them() -> None:
    machine = Machine(max_batch=2)
    cancelled, late, whole, waiting = (
        machine.submit(_prompt(machine, 100), 20, deadline=deadline) for deadline in (1e9, 4.0, 1e9, 2.0)
    )
    machine.step()
    machine.scheduler.cancel(cancelled)
    machine.scheduler.cancel(cancelled)
    machine.run()
    machine.scheduler.cancel(cancelled)
    expected = {cancelled: "cancelled", late: "deadline", whole: "length", waiting: "deadline"}
    assert machine.ended == expected


def test_an_end_token_ends_an_answer() -> None:
    machine = Machine()
    prompt = _prompt(machine, 10)
    ends = frozenset({hash((tuple(prompt[:8]), 12)) % 50 + 2})
    number = machine.submit(prompt, 9, ends=ends)
    machine.run()
    assert machine.ended[number] == "stop"
    assert machine.answers[number][-1] in ends


def test_a_prompt_without_an_answer_ends_with_its_last_part() -> None:
    machine = Machine()
    number = machine.submit(_prompt(machine, 700), 0)
    machine.run()
    assert machine.ended[number] == "length"
    assert machine.answers[number] == []


def test_a_request_that_cannot_be_computed_ends_alone() -> None:
    machine = Machine()
    good, bad = (machine.submit(_prompt(machine, 100), 3) for _ in range(2))
    plan = machine.scheduler.plan(0.0)
    machine.decoder.apply(plan)
    machine.decoder._shrink(bad, 0)
    machine._note(machine.scheduler.done(plan, [9, -2], 1.0, 1.0, failed={bad}))
    assert machine.ended == {bad: "error"}
    assert machine.scheduler.open == [good]


def test_keys_share_the_machine_equally() -> None:
    machine = Machine(max_batch=4, max_waiting=1000)
    many = [machine.submit(_prompt(machine, 50), 20, key="many") for _ in range(60)]
    few = [machine.submit(_prompt(machine, 50), 20, key="few") for _ in range(10)]
    while len(machine.ended) < 20:
        machine.step()
    done = list(machine.ended)
    assert sum(number in few for number in done) >= 8
    machine.run()
    assert [number for number in machine.ended if number in many] == many  # of one key in the order of coming


@settings(max_examples=40)
@given(st.data())
def test_every_request_ends_once_and_the_cache_keeps_its_limit(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**32))
    machine = Machine(
        seed,
        max_batch=data.draw(st.integers(1, 6)),
        cache_pages=data.draw(st.integers(3, 12)),
        keep=data.draw(st.booleans()),
    )
    machine.scheduler.rates.add(data.draw(st.integers(16, 300)), 0, 1.0)
    room = machine.limits.cache_pages * PAGE
    generator = random.Random(seed)
    submitted = []
    for _ in range(generator.randrange(1, 25)):
        system = generator.choice([0, 64, 100, 130])
        count = generator.randrange(1, 200)
        answer = generator.randrange(0, 60)
        if system + count + answer > room:
            continue
        submitted.append(
            machine.submit(
                _prompt(machine, count, system),
                answer,
                key=generator.choice("abc"),
                shares=generator.random() < 0.9,
                ends=frozenset({5}),
            )
        )
        for _ in range(generator.randrange(3)):
            machine.step()
        if generator.random() < 0.2:
            machine.scheduler.cancel(generator.choice(submitted))
    machine.run(5_000)
    assert sorted(machine.ended) == submitted
    for number, why in machine.ended.items():
        request = machine.requests[number]
        if why == "length":
            assert len(machine.answers[number]) == request.max_tokens
        assert request.tokens[request.prompt :] == machine.answers[number]
    machine.step()  # what has ended is dropped
    assert machine.decoder.used() == machine.scheduler.pages.used
    assert set(machine.decoder.shared) == {each.id for each in machine.scheduler.pages._idle}


def test_rates_follow_what_was_measured() -> None:
    rates = Rates()
    assert rates.prompt_tokens(0) == 1024
    for _ in range(50):
        rates.add(0, 4, 0.05)
        rates.add(128, 4, 0.05 + 128 / 400)
    assert rates.prompt_rate == pytest.approx(400, rel=0.01)
    # Four times the step without prompts: 0.15 s beside the answers' own 0.05.
    assert rates.prompt_tokens(4) == pytest.approx(400 * 0.15, abs=16)
    # Never so few tokens that reading the weights for them is most of the work, where the machine is fast enough.
    assert Rates(longest_step_s=1e-9).prompt_tokens(3) == 64
    slow = Rates(longest_step_s=1e-9)
    slow.add(64, 0, 1.0)
    assert slow.prompt_tokens(3) == 32
    slow.add(64, 0, 8.0)  # now 53 a second
    assert slow.prompt_tokens(3) == 16
    # More answers than ever before: what they take is not taken for the prompts' time.
    rates.add(64, 8, 0.1 + 64 / 400)
    assert rates.prompt_rate == pytest.approx(400, rel=0.02)
    # And what they took is known from then on, though no step without prompts had so many: not twice that of 4.
    assert rates.decode_seconds(16) == pytest.approx(0.2, rel=0.01)  # at most
    rates.add(64, 16, 0.08 + 64 / 400)
    assert rates.decode_seconds(16) == pytest.approx(0.08, rel=0.05)
    assert rates.decode_seconds(12) == pytest.approx(0.08, rel=0.05)
    assert rates.decode_seconds(32) == pytest.approx(0.16, rel=0.05)
    rates.add(64, 16, 9.0)
    assert rates.decode_seconds(16) == pytest.approx(0.2, rel=0.01)  # never more than in proportion
    rates.add(0, 16, 0.07)
    assert rates.decode_seconds(16) == pytest.approx(0.07)
