# SPDX-License-Identifier: Apache-2.0
"""Evaluates a server with lm-evaluation-harness' command: `python lm_eval_client.py URL`, in an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TASK = """\
task: says
dataset_path: json
dataset_kwargs:
  data_files: {test: questions.jsonl}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: [";"], max_gen_toks: 30}
metric_list:
  - metric: exact_match
"""


def main() -> None:
    """A task of two questions."""
    Path("says.yaml").write_text(TASK)
    asked = ("hello", "again")
    lines = [json.dumps({"question": each, "answer": f"You said: {each}"}) for each in asked]
    Path("questions.jsonl").write_text("\n".join(lines) + "\n")
    address = f"model=fake,base_url={sys.argv[1]}/v1/chat/completions,num_concurrent=2"
    command = [
        str(Path(sys.executable).with_name("lm_eval")), "--model", "local-chat-completions", "--model_args", address,
        "--tasks", "says", "--include_path", ".", "--apply_chat_template", "--output_path", "out",
    ]  # fmt: skip
    off = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": "cache"}
    subprocess.run(command, check=True, timeout=300, env={**os.environ, **off, "OPENAI_API_KEY": "sesame"})
    (written,) = Path("out").rglob("results*.json")
    assert json.loads(written.read_text())["results"]["says"]["exact_match,none"] == 1.0
    print("did: answer")


if __name__ == "__main__":
    main()
