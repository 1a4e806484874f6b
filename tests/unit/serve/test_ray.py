# SPDX-License-Identifier: Apache-2.0
"""What of the Ray application needs no Ray; the rest is in e2e/test_serve_ray.py."""

from __future__ import annotations

import inspect
import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from anyaccel.errors import AnyAccelError, CapabilityError, ModelError, UsageError
from anyaccel.serve import interface
from anyaccel.serve.engine.replicas import Routes
from anyaccel.serve.ray import ServeOptions, app
from anyaccel.serve.ray.calls import ReplicaCall, portable


def test_options_are_what_the_command_line_of_ray_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANYACCEL_API_KEY", raising=False)
    file = tmp_path / "small.gguf"
    file.touch()
    said = {"model": str(file), "num_cpus": "4", "group_size": "64", "prefix_cache": "false", "api_key": "sesame"}
    options = ServeOptions.model_validate(said | {"served_model_name": "small", "max_waiting": "8"})
    assert (options.cpus, options.group_size, options.prefix_cache) == (4, 64, False)
    assert [key.get_secret_value() for key in options.api_key] == ["sesame"] and "sesame" not in repr(options)
    assert (options.names, options.admitted) == (["small"], 40)
    engine = options.engine_settings()
    assert (engine.max_waiting, engine.prefix_cache, engine.replicas) == (40, False, 1)
    assert (options.path(), options.model_options().group_size) == (file, 64)
    assert options.aliases == []
    assert (ServeOptions(model=str(file)).names, ServeOptions(model=str(file)).aliases) == (["small"], [str(file)])
    assert pickle.loads(pickle.dumps(options)) == options


def test_a_key_of_the_environment_is_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYACCEL_API_KEY", "sesame")
    assert [key.get_secret_value() for key in ServeOptions().api_key] == ["sesame"]
    assert ServeOptions().cpus >= 1


def test_ray_finds_the_options_by_the_annotation_of_the_builder() -> None:
    (parameter,) = inspect.signature(app).parameters.values()
    assert parameter.annotation is ServeOptions


@pytest.mark.parametrize("wrong", [{"modle": "x"}, {"num_cpus": -1}, {"dtype": "fp8"}, {"replicas": 0}])
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        ServeOptions.model_validate(wrong)


def test_without_ray_it_says_what_to_install() -> None:
    if find_spec("ray") is not None:
        pytest.skip("ray is installed here")
    with pytest.raises(AnyAccelError, match=r"pip install 'anyaccel\[ray\]'"):
        app(ServeOptions())


@pytest.mark.parametrize(
    "error",
    [
        interface.EngineStoppedError("a"),
        interface.DeadlineError("b"),
        interface.TooLongError("c"),
        ModelError("d"),
        UsageError("e=1: f"),
        AnyAccelError("g"),
        interface.GrammarError("regex", "h"),
        interface.EngineFullError("i", 3.5),
    ],
)
def test_errors_come_as_they_were(error: AnyAccelError) -> None:
    again = pickle.loads(pickle.dumps(portable(error)))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_an_error_of_another_kind_comes_as_its_base() -> None:
    error = portable(CapabilityError("cpu", "streams", "none"))
    assert (type(error), str(error)) == (AnyAccelError, "accelerator 'cpu' does not have 'streams': none")


def test_a_call_takes_only_its_request_along() -> None:
    call = ReplicaCall(interface.GenerationRequest([1, 2], 3), [1, 2, 7], {"one"}, "two")
    again = pickle.loads(pickle.dumps(call))
    assert again == ReplicaCall(interface.GenerationRequest([1, 2], 3))


def test_the_next_best_replica_comes_next_and_a_busy_one_last() -> None:
    routes: Routes[str] = Routes()
    prompt = list(range(200))
    routes.note("b", prompt, 8)
    routes.note("c", prompt[:64], 8)
    assert routes.order(prompt, {"a": 0, "b": 4, "c": 1}) == ["b", "c", "a"]
    assert routes.order(prompt, {"a": 0, "b": 5, "c": 1}) == ["c", "a", "b"]
    assert routes.order([1], {"a": 2, "b": 1}) == ["b", "a"]
    routes.forget("b")
    assert routes.known() == ["c"]
    assert routes.order(prompt, {"a": 1, "b": 0}) == ["b", "a"]
    assert routes.order(prompt, {}) == []
