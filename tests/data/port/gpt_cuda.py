# SPDX-License-Identifier: Apache-2.0
"""Trains a small transformer as scripts for CUDA do: the kind of device is taken from its name, batches are pinned."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

device = "cuda"
dtype = "float32"
VOCABULARY, CONTEXT, WIDTH = 17, 8, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        wide = 2 * WIDTH
        self.mix = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH))

    def forward(self, x):
        q, k, v = self.attend(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.mix(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.embed(tokens) + self.place(places)))


def batch(device_type, generator):
    start = torch.randint(VOCABULARY, (16, 1), generator=generator)
    text = (start + 3 * torch.arange(CONTEXT + 1)) % VOCABULARY
    x, y = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    if device_type == "cuda":  # asynchronously, from pinned memory
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x.to(device), y.to(device)


def main():
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    device_type = "cuda" if "cuda" in device else "cpu"
    compute = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    context = nullcontext() if device_type == "cpu" else torch.amp.autocast(device_type=device_type, dtype=compute)
    model = Model()
    model.to(device)
    scaler = torch.cuda.amp.GradScaler(enabled=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for step in range(31):
        x, y = batch(device_type, generator)
        with context if compute != torch.float32 else nullcontext():
            logits = model(x)
            loss = F.cross_entropy(logits.view(-1, VOCABULARY), y.view(-1))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            print(f"step {step}  loss {loss.item():.4f}  on {device_type}")


if __name__ == "__main__":
    main()
