# SPDX-License-Identifier: Apache-2.0
"""A training step of a Llama on two ranks, each bound to a core: DeepSpeed's ZeRO-2, and torch's FSDP2, in float32.

With ZeRO-2, `use_in_deepspeed()` (backend shm, our Adam) stands beside DeepSpeed as it is on a CPU (gloo, its Adam);
with FSDP2, shm and our Adam beside gloo and the fused AdamW of torch, since DeepSpeed's takes no DTensors. Ours also
calls `use_onednn_matmul()`, unless --torch-matmul leaves that out. Each contender has processes of its own, which all
wait while one trains; a figure is the median over the rounds, in which they take turns. The losses of all must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from _common import emit_json, machine, median, note, table

ENGINES = ("ZeRO-2", "FSDP2")
SIDES = ("ours", "theirs")
RANKS = 2
Step = Callable[[Any], Any]  # token ids -> the loss


# A rank -----------------------------------------------------------------------------------------------------


def llama(width: int, layers: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers, num_attention_heads=width // 64,
        num_key_value_heads=width // 64, vocab_size=32000, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def zero_2(side: str, model: Any) -> Step:
    if side == "ours":
        import anyaccel.interop

        anyaccel.interop.use_in_deepspeed()
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference, and it takes minutes to compile
    deepspeed.init_distributed(dist_backend="shm" if side == "ours" else "gloo", verbose=False)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "steps_per_print": 1 << 30,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        },
    )  # fmt: skip

    def step(tokens: Any) -> Any:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


def fsdp2(side: str, model: Any) -> Step:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import anyaccel.comm  # noqa: F401  # registers the backend
    from anyaccel.ops.adam import CPUAdam

    dist.init_process_group("shm" if side == "ours" else "gloo")
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    settings: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
    adam = CPUAdam if side == "ours" else torch.optim.AdamW
    optimizer = adam(model.parameters(), **settings, **({} if side == "ours" else {"fused": True}))

    def step(tokens: Any) -> Any:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def worker(engine: str, side: str, options: argparse.Namespace) -> None:
    """Answers each line of the standard input, a number of steps, with their seconds and the last loss."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    if side == "ours" and not options.torch_matmul:
        from anyaccel.ops import use_onednn_matmul

        use_onednn_matmul()
    model = llama(options.width, options.layers)
    step = (zero_2 if engine == "ZeRO-2" else fsdp2)(side, model)
    generator = torch.Generator().manual_seed(rank)
    for line in sys.stdin:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(int(line)):
            loss = step(torch.randint(0, 32000, (1, options.tokens), generator=generator))
        dist.barrier()
        seconds = (time.perf_counter() - begin) / int(line)
        print(json.dumps({"seconds": seconds, "loss": loss.item()}), file=answers, flush=True)
    os._exit(0)  # DeepSpeed leaves threads that abort a normal exit


# The whole --------------------------------------------------------------------------------------------------


def start(engine: str, side: str) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {
        "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "LOCAL_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": 1,
    }  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, *sys.argv, "--worker", engine, side],
            env=os.environ | {name: str(value) for name, value in (job | {"RANK": rank, "LOCAL_RANK": rank}).items()},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip


def ask(ranks: list[subprocess.Popen[str]], steps: int) -> dict[str, float]:
    for rank in ranks:
        print(steps, file=rank.stdin, flush=True)
    lines = [rank.stdout.readline() for rank in ranks]  # type: ignore[union-attr]
    if not all(lines):
        raise SystemExit("a rank has ended; see its error above")
    return dict(json.loads(lines[0]))


def measure(engine: str, rounds: int, steps: int) -> dict[str, Any]:
    jobs = {side: start(engine, side) for side in SIDES}
    try:
        found = {side: [ask(jobs[side], 1)] for side in SIDES}  # the first step allocates
        for number in range(rounds):
            for side in SIDES if number % 2 else SIDES[::-1]:
                found[side].append(ask(jobs[side], steps))
    finally:
        for rank in (rank for job in jobs.values() for rank in job):
            rank.kill()
            rank.wait()
    ours, theirs = ([answer["seconds"] for answer in found[side][1:]] for side in SIDES)
    losses = [[answer["loss"] for answer in found[side]] for side in SIDES]
    return {
        "engine": engine,
        "seconds": {"ours": median(ours), "theirs": median(theirs)},
        "times faster": median([b / a for a, b in zip(ours, theirs, strict=True)]),
        "difference of losses": max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, help="only this one")
    parser.add_argument("--width", type=int, default=768, help="hidden size; 12 layers of 768 have 110 M parameters")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=256, help="of each rank in a step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    parser.add_argument("--torch-matmul", action="store_true", help="without our choice of torch's library")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker, options)
        return 0
    found = [measure(engine, options.rounds, options.steps) for engine in ENGINES if options.engine in (None, engine)]
    if options.json:
        emit_json({"machine": machine(), "rows": found})
    else:
        note(machine())
        rows = [
            [
                each["engine"], *(f"{each['seconds'][side]:.2f}" for side in SIDES), f"{each['times faster']:.2f}",
                f"{each['difference of losses']:.1e}",
            ]
            for each in found
        ]  # fmt: skip
        print(table(("engine", "ours, s", "theirs, s", "times faster", "difference of losses"), rows))
    return int(any(each["difference of losses"] > 1e-4 for each in found))


if __name__ == "__main__":
    sys.exit(main())
