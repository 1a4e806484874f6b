# SPDX-License-Identifier: Apache-2.0
"""Trains a small convolution as examples for CUDA do: --no-cuda, guards with a way for the CPU, checkpoints."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3), nn.Linear(8, 2)

    def forward(self, x):
        x = F.relu(self.second(F.relu(self.first(x))))
        return self.head(x.mean(dim=(2, 3)))


def accuracy(scores, labels):
    if scores.is_cuda:
        scores, labels = scores.cpu(), labels.cpu()
    return (scores.argmax(dim=1).numpy() == labels.numpy()).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-cuda", action="store_true")
    args = parser.parse_args()
    args.cuda = not args.no_cuda and torch.cuda.is_available()
    torch.manual_seed(0)
    if args.cuda:
        torch.cuda.manual_seed(0)
    images = torch.randn(96, 1, 8, 8)
    labels = (images[:, 0, :, :4].mean(dim=(1, 2)) > images[:, 0, :, 4:].mean(dim=(1, 2))).long()
    images[labels == 1] += 0.5
    loader = DataLoader(TensorDataset(images, labels), batch_size=32, pin_memory=torch.cuda.is_available())
    model = Net()
    if args.cuda:
        model.cuda()
    device = torch.device("cuda:0" if args.cuda else "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(8):
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            scores = model(x)
            loss = F.cross_entropy(scores, y)
            loss.backward()
            optimizer.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if epoch % 2 == 0:
            print(f"step {epoch}  loss {loss.item():.4f}  on {device.type}  right {accuracy(scores, y):.2f}")
    torch.save(model.state_dict(), "net.pt")
    weights = torch.load("net.pt", map_location=lambda storage, location: storage)
    assert all(
        torch.equal(a.cpu(), b.cpu()) for a, b in zip(weights.values(), model.state_dict().values(), strict=True)
    )


if __name__ == "__main__":
    main()
