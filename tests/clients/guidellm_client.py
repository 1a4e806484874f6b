# SPDX-License-Identifier: Apache-2.0
"""Measures a server with guidellm, as its command does: `python guidellm_client.py URL`, in an empty folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Three conversations, one after another."""
    Path("prompts.jsonl").write_text('{"prompt": "hello"}\n' * 3)
    command = [
        str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console",
        "--backend", f"kind=openai_http,target={sys.argv[1]},model=fake,api_key=sesame",
        "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3",
        "--data", "kind=json_file,path=prompts.jsonl", "--output", "kind=json,path=out.json",
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=300)
    (measured,) = json.loads(Path("out.json").read_text())["benchmarks"]
    done = measured["requests"]
    assert len(done["successful"]) == 3 and not done["errored"] and not done["incomplete"]
    assert {each["output"] for each in done["successful"]} == {"You said: hello"}
    print("did: answer stream")


if __name__ == "__main__":
    main()
