# SPDX-License-Identifier: Apache-2.0
"""A child of fork() makes a model of its own, whatever its parent has made and computed before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import family_cases

_SCRIPT = """
import multiprocessing, sys
import torch, anyaccel, family_cases
IDS = torch.tensor([[5, 17, 99, 3, 64]])

def answer(runtime, model):
    engine = anyaccel.init_inference(model or family_cases.build("llama"), dtype="fp32", runtime=runtime)
    return engine.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()

def child(queue, *arguments):
    queue.put(answer(*arguments))

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    want = answer("native", "")
    for case in (("native", sys.argv[1]), ("torch", ""), ("device", "")):
        queue = context.SimpleQueue()
        process = context.Process(target=child, args=(queue, *case))
        process.start()
        process.join(60)
        if process.is_alive():
            process.kill()
            sys.exit(f"{case}: the child hangs")
        assert process.exitcode == 0, (case, process.exitcode)
        assert queue.get() == want, case
"""


@pytest.mark.slow  # four models in as many processes
def test_a_child_makes_models_while_its_parent_has_one(tmp_path: Path) -> None:
    family_cases.build("llama").save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path)],
        cwd=Path(family_cases.__file__).parent,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
