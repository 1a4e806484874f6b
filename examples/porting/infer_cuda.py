# SPDX-License-Identifier: Apache-2.0
"""Classify with what train_cuda.py has saved, on an NVIDIA GPU; `anyaccel port --write` ports it."""

import torch
import torch.nn.functional as F
from train_cuda import CLASSES, Net, batches


def load(path):
    """The trained net on the GPU."""
    model = Net().cuda()
    model.load_state_dict(torch.load(path, map_location="cuda:0"))
    return model.eval()


@torch.no_grad()
def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load("net.pt")
    right = torch.cuda.LongTensor([0])
    total = loss = 0
    torch.cuda.nvtx.range_push("inference")
    for x, y in batches(8, torch.Generator().manual_seed(1)):
        logits = model(x.to(device))
        labels = y.cuda()
        right += (logits.argmax(1) == labels).sum()
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        total += len(y)
    torch.cuda.nvtx.range_pop()
    free = torch.cuda.mem_get_info()[0]
    assert 0 < free <= torch.cuda.get_device_properties(device).total_memory
    print(f"{CLASSES} classes, {right.item()} of {total} right, mean loss {loss / total:.4f}, on {device.type}")


if __name__ == "__main__":
    main()
