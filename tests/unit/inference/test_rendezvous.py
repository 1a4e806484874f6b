# SPDX-License-Identifier: Apache-2.0
"""How ranks connect: whose error is raised where, told through any exchange."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from anyaccel.errors import ModelError
from anyaccel.inference.native.rendezvous import OtherRankError, connect_ranks
from anyaccel.inference.spec.mapping import Unsupported


class Model:
    """What is asked of a native model."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def create_segment(
        self,
        timeout: float,
        anonymous: bool,
        hosts: list[int],
        addresses: list[str],
        wire: str,
        between: str,
        socket: int,
    ) -> str:
        self.calls.append((anonymous, hosts, bool(addresses)))
        return "mine"

    def connect(self, names: list[str], pids: list[int]) -> None:
        self.calls.append((names, pids))

    def unlink(self) -> None:
        self.calls.append("unlink")


class Native:
    def __init__(self, **config: Any) -> None:
        self.model = Model()
        self.config = config


def with_other(*told: Any) -> Any:
    """An exchange with a rank 1 that tells these."""
    left = list(told)
    return lambda mine: [mine, left.pop(0)]


def refuse(error: Exception) -> Any:
    def work() -> Any:
        raise error

    return work


def other(error: str = "", lacking: str = "", **more: Any) -> dict[str, Any]:
    """What rank 1 says of itself."""
    return {"segment": "theirs", "pid": 7, "pid_namespace": "", "files": {}, "transport": ""} | more | {
        "error": error, "lacking": lacking,
    }  # fmt: skip


def test_ranks_learn_names_and_the_pids_that_mean_something() -> None:
    space = os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    for there, pid in ((space, 7), ("pid:[1]", 0)):
        native: Any = Native()
        exchange = with_other(other(pid_namespace=there), "")
        assert connect_ranks(exchange, lambda native=native: native) is native
        assert native.model.calls == [(False, [], False), (["mine", "theirs"], [os.getpid(), pid]), "unlink"]


def test_an_error_of_one_rank_is_the_error_of_all() -> None:
    with pytest.raises(OtherRankError, match="rank 1: no such weights"):
        connect_ranks(with_other(other("no such weights")), Native)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="mine") as caught:
        connect_ranks(with_other(other("theirs")), refuse(ModelError("mine")))
    assert not isinstance(caught.value, OtherRankError)
    with pytest.raises(OtherRankError, match="rank 1: cannot be mapped"):
        connect_ranks(with_other(other(), "cannot be mapped"), Native)  # type: ignore[arg-type]


def test_what_one_rank_cannot_run_natively_none_does_unless_there_is_an_error() -> None:
    with pytest.raises(Unsupported) as caught:
        connect_ranks(with_other(other("the native runtime has no x", "x")), Native)  # type: ignore[arg-type]
    assert caught.value.feature == "x"
    with pytest.raises(OtherRankError, match="rank 1: damaged"):
        connect_ranks(with_other(other("damaged")), Native)  # type: ignore[arg-type]
    with pytest.raises(Unsupported):
        connect_ranks(with_other(other()), refuse(Unsupported("y")))
    with pytest.raises(Unsupported):  # its own; the other rank has an error and raises that
        connect_ranks(with_other(other("damaged")), refuse(Unsupported("y")))


def copy(folder: Path, values: bytes = b"some values", theta: int = 1, note: str = "") -> Path:
    """A host's copy of a model, whose config it answers with."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(values)
    (folder / "training_args.bin").write_text(str(folder))  # nothing that is loaded
    (folder / "config.json").write_text(json.dumps({"theta": theta, "transformers_version": note}))
    return folder


def told_by(folder: Path, other: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a rank tells that loads this folder, beside one on another host that tells the same or `other`."""
    native: Any = Native(**json.loads((folder / "config.json").read_text()))
    told: list[Any] = []

    def exchange(mine: Any) -> list[Any]:
        told.append(mine)
        return [mine if other is None or len(told) > 1 else other, mine]

    assert connect_ranks(exchange, lambda: native, hosts=["a", "b"], source=folder) is native
    return dict(told[0])


def test_hosts_with_parts_of_other_models_are_refused(tmp_path: Path) -> None:
    first = told_by(copy(tmp_path / "first"))
    told_by(copy(tmp_path / "same", note="5.0"), first)
    others: dict[str, dict[str, Any]] = {"model.safetensors": {"values": b"SOME values"}, "config.json": {"theta": 2}}
    for name, change in others.items():
        with pytest.raises(ModelError, match=f"{name} on the host of rank 1 is another file than on that of rank 0"):
            told_by(copy(tmp_path / f"other-{name}", **change), first)
