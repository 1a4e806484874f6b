# SPDX-License-Identifier: Apache-2.0
"""Train with the optimizer in host memory: the accelerator holds bf16 weights and gradients, the host all the rest.

    python examples/offload_adam.py --steps 60

Of the 16 bytes a parameter that AdamW needs in mixed precision, the device keeps 4: weight and gradient in bf16. The
float32 master weight and the two moments are in host memory, where `CPUAdam` updates them and rounds the new weight to
bf16 in the same pass. On a CPU "device" and "host" are the same memory, and the loop is the same.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import anyaccel
from anyaccel.ops.adam import CPUAdam


def main() -> None:
    parser = argparse.ArgumentParser(description="CPUAdam with weights on the accelerator")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    accelerator = anyaccel.get_accelerator()
    device = accelerator.current_device_name()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1)).to(device, torch.bfloat16)

    # What the optimizer sees: a copy of each parameter in page-locked host memory.
    host = [nn.Parameter(accelerator.pin_memory(param.detach().cpu().clone())) for param in model.parameters()]
    for copy in host:
        copy.grad = accelerator.pin_memory(torch.zeros_like(copy))
    optimizer = CPUAdam(host, lr=1e-2, master_weights=True)

    x = torch.randn(512, 64, device=device, dtype=torch.bfloat16)
    y = x[:, :1] * x[:, 1:2]
    for step in range(options.steps):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        with torch.no_grad():
            for copy, param in zip(host, model.parameters(), strict=True):
                copy.grad.copy_(param.grad, non_blocking=True)
                param.grad = None
            accelerator.synchronize()  # all gradients have arrived
            optimizer.step()
            for copy, param in zip(host, model.parameters(), strict=True):
                param.copy_(copy, non_blocking=True)
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step:3}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
