# SPDX-License-Identifier: Apache-2.0
"""One optimizer step on the CPU: ours against torch's (default, foreach, fused), DeepSpeed's, and a copy of memory.

All take turns within each round and work on the same tensors, moments included; a figure is the median over the rounds
of the peer's time over ours in the same round. GB/s counts each byte that a step must read or write once.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from _common import emit_json, machine, note, table

from anyaccel.ops.adagrad import CPUAdagrad
from anyaccel.ops.adam import CPUAdam
from anyaccel.ops.lion import CPULion

TORCH = {
    "torch default": {"foreach": False, "fused": False},
    "torch foreach": {"foreach": True},
    "torch fused": {"fused": True},
}
OURS, DEEPSPEED, COPY = "anyaccel", "DeepSpeed", "copy"
PEERS = (*TORCH, DEEPSPEED)
MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "adagrad": ("sum",), "lion": ("exp_avg",)}
KINDS = {"adam": (CPUAdam, torch.optim.AdamW), "adagrad": (CPUAdagrad, torch.optim.Adagrad), "lion": (CPULion, None)}
SMALLEST_RUN = 4e-3  # seconds: quicker steps are repeated


@dataclass
class Case:
    name: str
    sizes: list[int]
    optimizer: str = "adam"
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    threads: int = 0
    slow: bool = True  # with torch's default and foreach too

    def num_bytes(self) -> int:
        element = self.dtype.itemsize
        return sum(self.sizes) * (3 * element + 2 * self.state_dtype.itemsize * len(MOMENTS[self.optimizer]))


@dataclass
class Result:
    case: Case
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def rate(self, who: str) -> float:
        return self.case.num_bytes() / statistics.median(self.seconds[who]) / 1e9

    def ratio(self, who: str) -> float:
        return statistics.median(
            theirs / ours for theirs, ours in zip(self.seconds[who], self.seconds[OURS], strict=True)
        )


def small_sizes(count: int) -> list[int]:
    """1,000 to 100,000 elements, evenly on a logarithmic scale, in a mixed order."""
    sizes = [round(1000 * 100 ** (i / (count - 1))) for i in range(count)]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    return [sizes[i] for i in order]


def cases(large: int) -> list[Case]:
    bf16 = torch.bfloat16
    name = f"{large / 1e6:g} M"
    return [
        Case(f"AdamW fp32, {name}", [large]),
        Case(f"AdamW all bf16, {name}", [large], dtype=bf16, state_dtype=bf16, slow=False),
        Case(f"AdamW bf16, fp32 moments, {name}", [large], dtype=bf16),
        Case("AdamW fp32, 1,000 small tensors", small_sizes(1000)),
        Case("AdamW fp32, 64 K (L2)", [1 << 16]),
        Case("AdamW fp32, 1 M (L3)", [1 << 20]),
        Case(f"AdamW fp32, {name}, one thread", [large], threads=1, slow=False),
        Case("AdamW fp32, 64 K, one thread", [1 << 16], threads=1, slow=False),
        Case(f"AdamW all bf16, {name}, one thread", [large], dtype=bf16, state_dtype=bf16, threads=1, slow=False),
        Case(f"Adagrad fp32, {name}", [large], "adagrad", slow=False),
        Case(f"Lion fp32, {name}", [large], "lion"),
    ]


def deepspeed() -> dict[str, Any]:
    """DeepSpeed's optimizers by ours' names; none when it is not installed."""
    try:
        logging.disable(logging.WARNING)
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from deepspeed.ops.lion import DeepSpeedCPULion
    except ImportError as error:
        note(f"DeepSpeed is left out: {error}")
        return {}
    return {"adam": DeepSpeedCPUAdam, "adagrad": DeepSpeedCPUAdagrad, "lion": DeepSpeedCPULion}


def contenders(case: Case, theirs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """Name -> a step; all on the same tensors."""
    generator = torch.Generator().manual_seed(0)

    def tensors(dtype: torch.dtype, scale: float) -> list[torch.Tensor]:
        return [(torch.randn(size, generator=generator) * scale).to(dtype) for size in case.sizes]

    params = [torch.nn.Parameter(tensor) for tensor in tensors(case.dtype, 1.0)]
    for param, grad in zip(params, tensors(case.dtype, 0.1), strict=True):
        param.grad = grad
    shared = {
        name: [tensor.square_() if name != "exp_avg" else tensor for tensor in tensors(case.state_dtype, 0.1)]
        for name in MOMENTS[case.optimizer]
    }
    ours, torchs = KINDS[case.optimizer]
    settings = {"lr": 1e-5, "weight_decay": 0.01}
    made: dict[str, Any] = {OURS: ours(params, state_dtype=case.state_dtype, **settings)}
    if torchs is not None and case.state_dtype == case.dtype:
        for name, options in TORCH.items():
            if case.slow or name == "torch fused":
                made[name] = torchs(params, **settings, **options)
    if case.optimizer in theirs:
        made[DEEPSPEED] = theirs[case.optimizer](
            params, fp32_optimizer_states=case.state_dtype == torch.float32, **settings
        )
    for name, optimizer in made.items():
        for index, param in enumerate(params):
            state = optimizer.state[param]
            if name == DEEPSPEED:
                state["step"] = 1
                for theirs_name in ("exp_avg", "exp_avg_sq"):
                    state[theirs_name] = shared[next(iter(shared))][index]
                if case.optimizer == "adagrad":
                    state["exp_avg_sq"] = shared["sum"][index]
            else:
                state["step"] = torch.tensor(1.0)
            for moment in shared if not (name == DEEPSPEED and case.optimizer == "adagrad") else ():
                state[moment] = shared[moment][index]
    steps = {name: optimizer.step for name, optimizer in made.items()}
    half = torch.empty(case.num_bytes() // 2, dtype=torch.uint8)
    source = torch.zeros_like(half)
    steps[COPY] = lambda: half.copy_(source)
    return steps


def measure(case: Case, rounds: int, theirs: dict[str, Any]) -> Result:
    before = torch.get_num_threads()
    torch.set_num_threads(case.threads or before)
    steps = contenders(case, theirs)
    repeats = {}
    for name, step in steps.items():
        step()
        start = time.perf_counter()
        step()
        repeats[name] = max(1, round(SMALLEST_RUN / (time.perf_counter() - start)))
    result = Result(case, {name: [] for name in steps})
    order = list(steps)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)  # nobody is always behind the same one
        for name in order:
            step, times = steps[name], repeats[name]
            if times > 1:
                step()  # what fits the caches is to be there
            start = time.perf_counter()
            for _ in range(times):
                step()
            result.seconds[name].append((time.perf_counter() - start) / times)
    torch.set_num_threads(before)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--large", type=float, default=50e6, help="parameters in the large cases")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    theirs = deepspeed()
    results = []
    for case in cases(int(options.large)):
        if options.only in case.name:
            note(case.name)
            results.append(measure(case, options.rounds, theirs))
    if options.json:
        emit_json(
            [{"case": result.case.name, "bytes": result.case.num_bytes(), **result.seconds} for result in results]
        )
        return
    print(machine())
    rows = []
    for result in results:
        cells = [
            f"{result.rate(peer):.1f} ({result.ratio(peer):.2f})" if peer in result.seconds else "" for peer in PEERS
        ]
        rows.append([result.case.name, f"{result.rate(OURS):.1f}", *cells, f"{result.rate(COPY):.1f}"])
    print("GB/s of each; in brackets the time of that peer over ours: above 1 we are faster")
    print(table(("step", OURS, *PEERS, COPY), rows))


if __name__ == "__main__":
    main()
