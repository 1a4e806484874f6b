# SPDX-License-Identifier: Apache-2.0
"""Trains a small transformer as scripts for CUDA do: pinned batches, and CUDA's own autocast and scaler."""

import torch
import torch.nn.functional as F
from torch import nn

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


def batch(device, generator):
    start = torch.randint(VOCABULARY, (16, 1), generator=generator)
    text = (start + 3 * torch.arange(CONTEXT + 1)) % VOCABULARY
    x, y = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)


def main():
    torch.manual_seed(0)
    torch.cuda.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    model = Model()
    model.to(device)
    scaler = torch.cuda.amp.GradScaler(enabled=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for step in range(31):
        x, y = batch(device, generator)
        with torch.cuda.amp.autocast(enabled=False):
            logits = model(x)
            loss = F.cross_entropy(logits.view(-1, VOCABULARY), y.view(-1))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            torch.cuda.synchronize()
            print(f"step {step}  loss {loss.item():.4f}  on {logits.device.type}")


if __name__ == "__main__":
    main()
