# SPDX-License-Identifier: Apache-2.0
"""Train a tiny transformer to copy a sequence backwards, on whatever device there is.

python train_transformer.py [--steps 100]
"""

import argparse

# [script]
import torch
from torch import nn

from anyaccel import get_accelerator

VOCABULARY, LENGTH, WIDTH = 8, 4, 32


class Reverser(nn.Module):
    """Tokens (batch, LENGTH) to logits (batch, LENGTH, VOCABULARY)."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=64, dropout=0.02, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.layers(self.token(tokens) + self.place)))


def train(steps: int) -> None:
    accelerator = get_accelerator()
    device = accelerator.current_device_name()
    torch.manual_seed(0)
    model = Reverser().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    start, end = (accelerator.Event(enable_timing=True) for _ in range(2))
    start.record()
    for step in range(steps + 1):
        tokens = torch.randint(VOCABULARY, (32, LENGTH), device=device)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flip(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:3}  loss {loss.item():.3f}  on {device}")
    end.record()
    accelerator.synchronize()
    print(f"{start.elapsed_time(end) / 1000:.1f} s, peak memory {accelerator.max_memory_allocated() / 2**20:.1f} MiB")


# [/script]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    train(parser.parse_args().steps)
