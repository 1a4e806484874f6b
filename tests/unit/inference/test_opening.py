# SPDX-License-Identifier: Apache-2.0
"""Which runtime a model gets, and what is said where that is not what was asked for."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from anyaccel.cli._model_options import naming_options
from anyaccel.errors import AnyAccelError, UsageError
from anyaccel.inference.native.runtime import Callbacks, RankPlace
from anyaccel.inference.opening import OwnCode, choose_runtime, open_model
from anyaccel.inference.options import ModelOptions
from anyaccel.inference.ranks.control import RankError
from anyaccel.inference.spec.mapping import Unsupported


@pytest.mark.parametrize(
    ("options", "on_cpu", "runtime"),
    [
        (ModelOptions(), True, "native"),
        (ModelOptions(), False, "device"),
        (ModelOptions(runtime="device"), True, "device"),
        (ModelOptions(runtime="torch"), True, "torch"),
        (ModelOptions(runtime="plain"), False, "plain"),
        (ModelOptions(pp=2), True, "native"),
    ],
)
def test_the_runtime_to_try(options: ModelOptions, on_cpu: bool, runtime: str) -> None:
    assert choose_runtime(options, on_cpu) == runtime


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (ModelOptions(runtime="native"), "runtime='native' runs on the host's own processor"),
        (ModelOptions(runtime="torch"), "runtime='torch' runs on the host's own processor"),
        (ModelOptions(pp=2), "pp=2: only the native runtime has it, which runs on the CPU"),
        (ModelOptions(draft="small"), "draft='small': only the native runtime has drafts, which runs on the CPU"),
    ],
)
def test_what_other_accelerators_than_the_cpu_do_not_have(options: ModelOptions, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        choose_runtime(options, on_cpu=False)


@pytest.fixture
def rwkv(tmp_path: Path) -> Path:
    """A model that neither runtime has."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "rwkv", "architectures": ["RwkvForCausalLM"]}))
    save_file({"x": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_model_that_the_runtime_lacks_runs_its_own_code(rwkv: Path) -> None:
    found = open_model(rwkv, ModelOptions(), RankPlace(), Callbacks())
    assert isinstance(found, OwnCode) and (found.runtime, found.lacking) == ("torch", "native")
    assert str(found) == f"runtime: the model's own code with packed linears; the native one has no {found.feature}"
    found = open_model(rwkv, ModelOptions(), RankPlace(on_cpu=False), Callbacks())
    assert isinstance(found, OwnCode) and (found.runtime, found.lacking) == ("plain", "device")


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        (ModelOptions(runtime="native"), Unsupported, "native runtime has no .*; runtime=auto runs the model's own"),
        (ModelOptions(runtime="device"), Unsupported, "device runtime has no .*; runtime=auto runs the model's own"),
        (ModelOptions(draft="small"), UsageError, "draft='small': only the native runtime has drafts, which has no"),
    ],
)
def test_own_code_that_was_not_asked_for_is_an_error(
    rwkv: Path, options: ModelOptions, kind: type[AnyAccelError], text: str
) -> None:
    with pytest.raises(kind, match=text):
        open_model(rwkv, options, RankPlace(), Callbacks())


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (UsageError("runtime='native' runs on the CPU"), "^--runtime native runs on the CPU$"),
        (UsageError("max_context=1: too few"), "^--max-context 1: too few$"),
        (RankError("pp=2: only the native runtime has it", 2), "^--pp 2: only the native runtime has it$"),
        (UsageError("other=1: is no option"), "^other=1: is no option$"),
        (RankError("pp=2: is a failure", 1), "^pp=2: is a failure$"),
    ],
)
def test_a_command_names_its_options(error: AnyAccelError, text: str) -> None:
    options = argparse.Namespace(runtime="native", max_context=1, pp=2)
    with (
        pytest.raises(type(error) if text.startswith("^other") else AnyAccelError, match=text),
        naming_options(options),
    ):
        raise error
