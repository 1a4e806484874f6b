# SPDX-License-Identifier: Apache-2.0
"""What --dtype is where it is not given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fuzz_models
from anyaccel.cli._model_options import usual_dtype
from anyaccel.cli.generate import main
from anyaccel.inference.checkpoints.gguf_file import GgufFile
from anyaccel.inference.checkpoints.model_path import default_model_file


@pytest.mark.parametrize(
    ("quantised", "beside", "expected"),
    [
        ({}, {}, "bf16"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, {}, "auto"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, {}, "auto"),
        ({}, {"quant_config.json": {"w_bit": 4, "q_group_size": 128}}, "auto"),
    ],
)
def test_a_folder_says_whether_its_weights_are_quantised(
    quantised: dict[str, object], beside: dict[str, object], expected: str, tmp_path: Path
) -> None:
    for name, said in {"config.json": {"model_type": "llama", **quantised}, **beside}.items():
        (tmp_path / name).write_text(json.dumps(said))
    assert usual_dtype(tmp_path) == expected
    assert usual_dtype(tmp_path, "torch") == "bf16"  # the model's own code computes in one precision


def test_a_file_says_it_by_its_tensors(tmp_path: Path) -> None:
    floats = tmp_path / "floats.gguf"
    floats.write_bytes(fuzz_models.healthy_gguf("llama").content())
    types = {info.type for info in GgufFile(floats).infos.values()}
    assert usual_dtype(floats) == ("bf16" if types <= {"f32", "f16", "bf16"} else "auto")
    assert usual_dtype(default_model_file()) == "auto"
    assert usual_dtype(tmp_path / "nothing.gguf") == "bf16"  # opening it says what is wrong


def test_the_default_model_runs_as_it_is_stored(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["Hi", "--max-new-tokens", "1", "--json", "-q"]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "auto"
