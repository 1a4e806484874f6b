# SPDX-License-Identifier: Apache-2.0
"""The report as data and as text."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from anyaccel import _native
from anyaccel.accelerator import select
from anyaccel.accelerator.backends.cpu import CpuAccelerator
from anyaccel.errors import CapabilityError
from anyaccel.report.collect import collect
from anyaccel.report.render import render
from anyaccel.topology import read_machine


@pytest.fixture(autouse=True)
def _undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DS_ACCELERATOR", "LOCAL_RANK", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(select, "_accelerator", None)
    monkeypatch.setattr(select, "_detection", None)


def test_without_torch() -> None:
    report = collect(with_torch=False)
    assert report["accelerator"] is None
    assert report["versions"]["torch"]
    assert report["cpu"] == {"isa": _native.isa(), "features": _native.cpu_features()}
    assert report["topology"]["summary"] == read_machine().summary()
    assert "not looked at (--no-torch)" in render(report)


def test_the_whole_cascade(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    report = collect()
    assert json.loads(json.dumps(report)) == report
    accelerator = report["accelerator"]
    assert (accelerator["name"], accelerator["forced"]) == ("cpu", "cpu")
    assert [row["name"] for row in accelerator["candidates"]][-3:] == ["cuda", "xla", "cpu"]
    assert len(accelerator["candidates"]) >= 13
    assert [row["name"] for row in accelerator["candidates"] if row["chosen"]] == ["cpu"]
    assert all(isinstance(row["available"], bool) for row in accelerator["candidates"])
    assert accelerator["total_memory_bytes"] >= accelerator["available_memory_bytes"] > 0
    assert accelerator["dtypes"][0] == "float32"
    text = render(report)
    assert re.search(r"^  \* cpu +available", text, re.MULTILINE)
    assert "cpu: DS_ACCELERATOR=cpu is set" in text
    assert read_machine().summary() in text
    assert not text.endswith("\n")


def test_a_choice_that_fails_is_still_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "warp")
    report = collect()
    assert report["accelerator"]["name"] is None
    assert "'warp' is not known" in report["accelerator"]["error"]
    assert {row["name"] for row in report["accelerator"]["candidates"]} >= {"npu", "xpu.native", "cuda", "cpu"}
    assert "chosen  none" in render(report)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CapabilityError("cpu", "memory_size", "not told"), "accelerator 'cpu' does not have 'memory_size': not told"),
        (RuntimeError("no driver\n  was found"), "RuntimeError: no driver was found"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_what_the_device_does_not_tell_is_unknown_for_a_reason(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, reason: str
) -> None:
    def fail(*_args: Any) -> Any:
        raise error

    questions = {
        "device": "current_device_name",
        "device_count": "device_count",
        "total_memory_bytes": "total_memory",
        "available_memory_bytes": "available_memory",
        "dtypes": "supported_dtypes",
        "communication_backend": "communication_backend_name",
    }
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for method in questions.values():
        monkeypatch.setattr(CpuAccelerator, method, fail)
    report = collect()
    assert [report["accelerator"][name] for name in questions] == [None] * len(questions)
    assert report["accelerator"]["unknown"] == dict.fromkeys(questions, reason)
    assert json.loads(json.dumps(report)) == report
    assert render(report).count(f"unknown ({reason})") == len(questions)


def test_one_figure_that_is_unknown_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(CpuAccelerator, "total_memory", lambda *_args: 1 // 0)
    report = collect()
    assert list(report["accelerator"]["unknown"]) == ["total_memory_bytes"]
    assert "unknown (ZeroDivisionError: " in render(report)
    assert " GiB free" in render(report)


def test_columns_are_aligned() -> None:
    lines = render(collect(with_torch=False)).split("\n\n")[0].splitlines()[1:]
    starts = {line.index(line.split(maxsplit=1)[1]) for line in lines}
    assert len(starts) == 1
