# SPDX-License-Identifier: Apache-2.0
"""A worker that answers with the embedded model on all ranks of the job, and prints what it found as a line of JSON.

generating.py [--tokens N] [--rounds N] [--warm FOLDER] [--die RANK] [--pp N] [--batch N] [--prompt N]

With --warm, it writes FOLDER/rankN once it has answered, then goes on until its rounds are over.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import socket
import time
from itertools import cycle, islice
from pathlib import Path

import torch

import anyaccel
from anyaccel import comm
from anyaccel.inference.checkpoints.model_path import default_model_file

PROMPT = list(range(200, 240))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--warm", type=Path)
    parser.add_argument("--die", type=int)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=len(PROMPT))
    parser.add_argument("--local_rank", type=int)
    given = parser.parse_args()
    comm.init_distributed()
    rank, size = comm.get_rank(), comm.get_world_size()
    engine = anyaccel.init_inference(
        default_model_file(),
        dtype="bf16",
        runtime="native",
        threads=1,
        tensor_parallel={"tp_size": size // given.pp},
        pipeline_parallel={"size": given.pp},
    )
    prompt = [token + row for row in range(given.batch) for token in islice(cycle(PROMPT), given.prompt)]
    ids = torch.tensor(prompt).view(given.batch, given.prompt)
    greedy = engine.generate(ids, max_new_tokens=given.tokens, min_new_tokens=given.tokens, do_sample=False)
    sampled = engine.generate(ids, max_new_tokens=given.tokens, do_sample=True, seed=7)
    prompt_seconds = []
    for _ in range(3 if given.rounds > 1 else 1):
        begin = time.monotonic()
        logits = engine(ids, logits_to_keep=1).logits
        prompt_seconds.append(time.monotonic() - begin)
    if given.warm:
        (given.warm / f"rank{rank}").write_text(str(os.getpid()))
    seconds = []
    for _ in range(given.rounds):
        if given.die == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        engine.generate(ids, max_new_tokens=given.tokens, min_new_tokens=given.tokens, do_sample=False)
        seconds.append(time.monotonic() - begin)
    line = {
        "rank": rank,
        "host": socket.gethostname(),
        "runtime": engine.runtime,
        "greedy": greedy[:, given.prompt :].tolist(),
        "sampled": sampled[:, given.prompt :].tolist(),
        "some_logits": logits.float().flatten()[:: logits.numel() // 100].tolist(),
        "logits": hashlib.sha256(logits.float().numpy().tobytes()).hexdigest(),
        "rate": given.batch * given.tokens / min(seconds) if seconds else 0,
        "prompt_rate": given.batch * given.prompt / min(prompt_seconds),
    }
    os.write(1, (json.dumps(line) + "\n").encode())


if __name__ == "__main__":
    main()
