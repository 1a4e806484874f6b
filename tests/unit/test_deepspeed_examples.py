# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's examples: what tools/deepspeed_examples.py runs, and that ours runs what DeepSpeed runs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from generators import examples

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("deepspeed_examples", ROOT / "tools" / "deepspeed_examples.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded  # dataclasses look themselves up
    spec.loader.exec_module(loaded)
    return loaded


def test_what_runs_on_deepspeed_runs_with_our_parts(tool: ModuleType) -> None:
    found = json.loads(examples.FOUND.read_text())["examples"]
    assert len(found) >= 20
    assert found.keys() <= {each.name for each in tool.EXAMPLES}
    lost = [name for name, sides in found.items() if sides["deepspeed"] == "runs" != sides["ours"]]
    assert lost == []


def test_where_the_alias_is_what_stops_an_example_it_says_so(tool: ModuleType) -> None:
    """It runs, or ends as DeepSpeed itself does, or the alias says what is missing and what there is instead."""
    found = json.loads(examples.FOUND.read_text())["examples"]
    unclear = {
        name: sides["alias"]
        for name, sides in found.items()
        if "alias of DeepSpeed" not in sides["alias"]
        and not sides["alias"].endswith("No package metadata was found for deepspeed")  # transformers asks for it
        and sides["alias"] not in ("runs", sides["deepspeed"], sides["ours"])
    }
    assert unclear == {}


def test_the_reason_is_the_first_error_of_an_output(tool: ModuleType) -> None:
    output = "[rank0]: ValueError: no /tmp/x1/y/z.json\nTraceback\nRuntimeError: later\n"
    assert tool.reason(output, 1, 9) == "ValueError: no z.json"
    assert tool.reason("", 0, 9) == "ends with exit code 0, and without its result"
    assert tool.reason(output, None, 9) == "does not end in 9 s"


@pytest.mark.slow
def test_an_example_runs_in_its_own_folder_with_what_it_looks_for(tool: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "checkout" / "training" / "small"
    folder.mkdir(parents=True)
    (folder / "beside.py").write_text("NUMBER = 7\n")
    (folder / "train.py").write_text(
        "import argparse, beside, deepspeed\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--local_rank', type=int)\n"
        "parser.add_argument('--add', type=int)\n"
        "print(f'sum {beside.NUMBER + parser.parse_args().add} {open(\"model/weights\").read()}')\n"
        "deepspeed.initialize\n"
    )
    (tmp_path / "models" / "stand-in").mkdir(parents=True)
    (tmp_path / "models" / "stand-in" / "weights").write_text("small")
    example = tool.Example("training/small/train.py", "--add 5", r"sum \d+ small", 1, {"model": "stand-in"})
    run = [example, "alias", Path(sys.executable), tmp_path / "checkout", tmp_path / "models", 60]
    ends, output = tool.run(*run)
    assert "sum 12 small" in output
    assert ends.startswith("anyaccel.errors.NotCoveredAttributeError: deepspeed.initialize is not part")
    script = folder / "train.py"
    script.write_text(script.read_text().replace("deepspeed.initialize\n", ""))
    assert tool.run(*run)[0] == "runs"
