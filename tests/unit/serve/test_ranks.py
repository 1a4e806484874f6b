# SPDX-License-Identifier: Apache-2.0
"""What the engine's side of the ranks does with ranks that say nothing; the ranks are sockets, and no processes."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anyaccel.errors import UsageError
from anyaccel.inference.options import ModelOptions
from anyaccel.inference.ranks import control
from anyaccel.inference.ranks.channel import Channel
from anyaccel.inference.ranks.control import RankError, StepDeadline
from anyaccel.serve.engine import ranks
from anyaccel.serve.engine.settings import EngineSettings
from anyaccel.serve.engine.step import StepInput, StepOutput

READY = {
    "kind": "ready", "context": 64, "vocabulary": 131, "hidden": 32, "ends": [2], "page_bytes": 1024, "cache_pages": 8,
    "state_pages": 0, "shares": True, "threads": 1, "weight_bytes": 1, "cache_bytes": 1,
}  # fmt: skip
STEP = StepInput(run={0: 1})


class Sockets:
    """In place of RankProcesses: what the ranks say is written before it is waited for."""

    def __init__(self, *_: object) -> None:
        self.peers = []
        self.channels = []
        self.names = ["rank 0", "rank 1"]
        self.ended = False
        for _ in range(2):
            near, far = socket.socketpair()
            self.peers.append(far)
            self.channels.append(Channel(near.detach(), 60))
            self.say(-1, READY)

    def say(self, rank: int, message: dict[str, Any]) -> None:
        self.peers[rank].sendall(json.dumps(message).encode() + b"\n")

    def code(self) -> None:
        return None

    def end(self, _timeout: float) -> None:
        self.ended = True
        for channel in self.channels:
            channel.close()
        for peer in self.peers:
            peer.close()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Sockets]:
    """The ranks of each decoder."""
    made: list[Sockets] = []
    monkeypatch.setattr(ranks, "plan_ranks", lambda *_: (None, ""))
    monkeypatch.setattr(ranks, "RankProcesses", lambda *_: made.append(Sockets()) or made[-1])
    return made


def test_ranks_that_take_no_step_are_given_up(made: list[Sockets], monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = ranks.RanksDecoder(Path("model"), ModelOptions(tp=2), None, EngineSettings())  # type: ignore[arg-type]
    try:
        for token in (7, 8):
            made[0].say(0, {"kind": "output", "output": StepOutput(tokens=[token]).to_message()})
            assert decoder.apply(STEP).tokens == [token]
        assert not decoder.late()
        monkeypatch.setattr(StepDeadline, "seconds", lambda _self, _tokens: 0.01)
        monkeypatch.setattr(control, "_LATE_LEAST_S", -1e9)
        with pytest.raises(RankError, match="a rank hangs: no step has ended within 0 s"):
            decoder.apply(STEP)
        assert decoder.late()  # until there is another decoder
    finally:
        decoder.close()
    assert made[0].ended


def test_a_cache_without_room_for_a_page_is_refused(made: list[Sockets], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READY, "cache_pages", 0)
    with pytest.raises(UsageError, match="has no room for a single page, 64 tokens of 2048 bytes"):
        ranks.RanksDecoder(Path("model"), ModelOptions(tp=2), None, EngineSettings())  # type: ignore[arg-type]
    assert made[0].ended


def test_a_step_is_late_long_before_it_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(control, "time", SimpleNamespace(monotonic=lambda: now[0]))
    deadline = StepDeadline()
    for tokens, took, late in ((64, 2, 5 + 4 * 16), (64, 1, 5 + 4 * 2), (128, 4, 5 + 4 * 4), (1, 1, 5 + 4 * 4)):
        before = now[0]
        with deadline.step(tokens) as hangs:
            now[0] = before + late - 0.5
            assert not deadline.late()
            now[0] = before + late + 0.5
            assert deadline.late() and late < hangs
            now[0] = before + took
        assert not deadline.late()


def test_deadlines_grow_with_what_steps_take() -> None:
    deadline = StepDeadline()
    assert deadline.seconds(1024) > 3600  # before anything is known: a model may be large, and a machine slow
    deadline.took(512, 0.5)
    assert 60 < deadline.seconds(1) < 120
    assert deadline.seconds(1024) - 60 == 2 * (deadline.seconds(512) - 60)
    deadline.took(1, 30.0)  # its memory was elsewhere
    assert deadline.seconds(1) >= 600
    before = deadline.seconds(64)
    deadline.took(1, 0.01)
    assert deadline.seconds(64) == before
