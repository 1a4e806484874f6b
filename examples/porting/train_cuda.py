# SPDX-License-Identifier: Apache-2.0
"""Train a small classifier on an NVIDIA GPU; `anyaccel port --write` ports it.

python train_cuda.py [--steps 40]
"""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.cuda.amp import autocast

WIDTH, CLASSES = 16, 4


class Net(nn.Module):
    """Vectors (batch, WIDTH) to logits (batch, CLASSES)."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x):
        return self.head(self.body(x))


def batches(steps, generator):
    """Points of four clouds, with the cloud that each is from."""
    centres = torch.randn(CLASSES, WIDTH, generator=generator)
    for _ in range(steps):
        labels = torch.randint(CLASSES, (32,), generator=generator)
        yield centres[labels] + 0.5 * torch.randn(32, WIDTH, generator=generator), labels


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--amp", action="store_true", help="compute in half precision")
    args = parser.parse_args()

    if not torch.cuda.is_available():
        raise SystemExit("this script needs a GPU")
    gpu = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(gpu)
    device = torch.device("cuda", gpu)
    torch.manual_seed(0)
    torch.cuda.manual_seed_all(0)

    model = Net().cuda(gpu)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    copies = torch.cuda.Stream()
    start.record()
    for step, (x, y) in enumerate(batches(args.steps, torch.Generator().manual_seed(1))):
        with torch.cuda.stream(copies):
            x = x.pin_memory().cuda(gpu, non_blocking=True)
            y = y.to(f"cuda:{gpu}", non_blocking=True)
        torch.cuda.current_stream().wait_stream(copies)
        assert x.is_cuda
        with autocast(enabled=args.amp):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}  on {device.type}")
    end.record()
    torch.cuda.synchronize()
    seconds = start.elapsed_time(end) / 1000
    print(f"{seconds:.2f} s, peak memory {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB")
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, "net.pt")


if __name__ == "__main__":
    main()
