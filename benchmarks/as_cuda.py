# SPDX-License-Identifier: Apache-2.0
"""What `import anyaccel.cuda` costs: a training step of a GPT of 10 M parameters, its calls, and the import.

    .venv/bin/python benchmarks/as_cuda.py

The program for CUDA runs in the mode; beside it the same program with its devices changed to the CPU by hand and
without the mode. Each round runs both in fresh processes, in turns; the losses must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

from _common import machine, median, table

STEP = """
import json, time, timeit
started = time.perf_counter()
import torch
imported = time.perf_counter()
{mode}
ready = time.perf_counter()
from torch import nn
DEVICE = {device!r}
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (each.view(B, T, self.heads, -1).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.norm2(x))

class GPT(nn.Module):
    def __init__(self, vocab=512, width=320, layers=8, heads=8, context=128):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks, self.norm = nn.Sequential(*(Block(width, heads) for _ in range(layers))), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))

model = GPT().to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
times, losses = [], []
for step in range({steps}):
    begun = time.perf_counter()
    batch = torch.randint(0, 512, (4, 65), generator=torch.Generator().manual_seed(step)).to(DEVICE, non_blocking=True)
    logits = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    times.append(time.perf_counter() - begun)
x = torch.ones(4)
calls = {{
    "torch.zeros(4, device=)": lambda: torch.zeros(4, device=DEVICE),
    "x.to(device)": lambda: x.to(DEVICE),
    "x.is_cuda": lambda: x.is_cuda,
}}
micro = {{name: min(timeit.repeat(call, number=2000, repeat=5)) / 2000 * 1e6 for name, call in calls.items()}}
print(json.dumps({{
    "step": sorted(times[3:])[len(times[3:]) // 2], "losses": losses,
    "parameters": sum(p.numel() for p in model.parameters()),
    "import": ready - imported, "calls": micro,
}}))
"""


def run(in_mode: bool, steps: int) -> dict[str, object]:
    code = STEP.format(mode="import anyaccel.cuda" if in_mode else "", device="cuda" if in_mode else "cpu", steps=steps)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    result: dict[str, object] = json.loads(done.stdout)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=25)
    arguments = parser.parse_args()
    rounds = [(run(True, arguments.steps), run(False, arguments.steps)) for _ in range(arguments.rounds)]
    print(machine())
    first, second = rounds[0]
    same = all(mode["losses"] == plain["losses"] == second["losses"] for mode, plain in rounds)
    print(f"{first['parameters']} parameters; losses equal: {same}")

    def row(name: str, unit: str, scale: float, of: object) -> list[str]:
        mode, plain = ([of(each[side]) * scale for each in rounds] for side in (0, 1))  # type: ignore[operator]
        ratios = [a / b for a, b in zip(mode, plain, strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        return [name, f"{median(mode):.2f} {unit}", f"{median(plain):.2f} {unit}", f"{median(ratios):.3f}", spread]

    rows = [row("a training step", "ms", 1e3, lambda each: each["step"])]
    for call in first["calls"]:  # type: ignore[attr-defined]
        rows.append(row(call, "µs", 1, lambda each, call=call: each["calls"][call]))
    print(table(["", "in the mode", "by hand", "ratio", "spread"], rows))
    print(f"the import: {median([each[0]['import'] for each in rounds]) * 1e3:.0f} ms")  # type: ignore[misc, operator]
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
