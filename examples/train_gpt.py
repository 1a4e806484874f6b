# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT on text, on whatever accelerator there is, with one process or many.

    anyaccel run --num_accelerators 2 --bind_cores_to_rank examples/train_gpt.py --parallel ddp --steps 40
    anyaccel run --num_accelerators 2 --bind_cores_to_rank examples/train_gpt.py --parallel fsdp --steps 40
    python examples/train_gpt.py --steps 40 --text my.txt

No line names a device: the accelerator gives the device, the dtype that it computes in and the collectives' backend.
The text is this repository's own documentation unless --text gives another; a token is a byte.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import anyaccel
from anyaccel import comm

WIDTH, HEADS, LAYERS, CONTEXT, BYTES = 64, 4, 2, 64, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x_BTW: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x_BTW)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed_BHTD = scaled_dot_product_attention(*qkv, is_causal=True)
        x_BTW = x_BTW + self.out(mixed_BHTD.transpose(1, 2).flatten(-2))
        return x_BTW + self.mlp(self.norm2(x_BTW))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(BYTES, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, BYTES)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        x = self.token(ids_BT) + self.place.weight[: ids_BT.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(0, 1))


def distribute(model: nn.Module, how: str, dtype: torch.dtype) -> nn.Module:
    """The model with its gradients averaged (ddp), or with parameters, gradients and state divided too (fsdp)."""
    if comm.get_world_size() == 1:
        return model
    if how == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(anyaccel.get_accelerator().device_name(), (comm.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def read_text(path: str | None) -> torch.Tensor:
    folder = Path(__file__).resolve().parents[1] / "docs"
    files = [Path(path)] if path else sorted(folder.rglob("*.md"))
    text = b"\n".join(file.read_bytes() for file in files)
    if len(text) <= CONTEXT:
        raise SystemExit(f"{path or folder} has {len(text)} bytes of text; give a file of more with --text")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def main() -> None:
    parser = argparse.ArgumentParser(description="train a small GPT")
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="samples a rank and step")
    parser.add_argument("--text", help="file; default: this repository's documentation")
    parser.add_argument("--local_rank", type=int, help="given by the launcher; not needed")
    options = parser.parse_args()

    anyaccel.init_distributed()  # one process when nobody launched a job
    accelerator = anyaccel.get_accelerator()
    rank = comm.get_rank()
    if accelerator.device_count() > comm.get_local_rank():
        accelerator.set_device(comm.get_local_rank())
    device = accelerator.current_device_name()
    dtype = torch.bfloat16 if accelerator.is_bf16_supported() else torch.float32

    text = read_text(options.text).to(device)
    torch.manual_seed(0)  # the same model everywhere ...
    model = distribute(GPT().to(device), options.parallel, dtype)
    torch.manual_seed(rank)  # ... and other samples on each rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step in range(options.steps):
        starts = torch.randint(len(text) - CONTEXT, (options.batch,)).tolist()
        ids = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        with torch.autocast(accelerator.device(0).type, dtype=dtype):
            loss = cross_entropy(model(ids[:, :-1]).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == options.steps - 1:
            mean = loss.detach().clone()
            comm.all_reduce(mean)  # every rank must take part
            if rank == 0:
                print(f"step {step:4}  loss {mean.item() / comm.get_world_size():.3f}", flush=True)
    comm.destroy_process_group()


if __name__ == "__main__":
    main()
