# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of FSDP2 through anyaccel.io: saved while training goes on, by ranks that are killed, read by fewer."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ranks
from anyaccel.io import FileSystemReader, FileSystemWriter, checkpoints
from anyaccel.ops.adam import CPUAdam
from waiting import wait_for

BATCH = 12  # of all ranks together


@pytest.fixture
def folder() -> Iterator[Path]:
    """On a disk: tmp_path may be in memory."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="io-test-") as name:
        yield Path(name)


class Training:
    """A model that FSDP2 has divided, and where it stands."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        # Seven rows: the ranks' parts differ.
        self.net = nn.Sequential(nn.Linear(16, 7), nn.GELU(), nn.Linear(7, 64), nn.GELU(), nn.Linear(64, 8))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (self.net[0], self.net[2], self.net[4]):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)
        self.optimizer = CPUAdam(self.net.parameters(), lr=1e-2)
        self.number = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer, "number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.net, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.number = state["number"]

    def steps(self, count: int) -> list[float]:
        """The losses over the batches of all ranks."""
        losses = []
        for _ in range(count):
            generator = torch.Generator().manual_seed(self.number)
            source, wanted = torch.randn(BATCH, 16, generator=generator), torch.randn(BATCH, 8, generator=generator)
            own = slice(dist.get_rank(), None, dist.get_world_size())
            loss = (self.net(source[own]) - wanted[own]).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
            self.number += 1
        return losses


def train(folder: Path | None) -> list[float]:
    """The losses of 8 steps, where they began, and the state after 4 is saved during the next ones."""
    training = Training()
    losses = training.steps(4)
    if folder is not None:
        writer = FileSystemWriter(folder, cache_staged_state_dict=True)
        # A group of its own, since the collectives of training go on meanwhile.
        saved: Any = dcp.async_save({"training": training}, storage_writer=writer, process_group=dist.new_group())
    losses += training.steps(4)
    if folder is not None:
        saved.result()
        writer.close()
    return losses


def go_on(folder: Path, reader: Any) -> list[float]:
    training = Training()
    dcp.load({"training": training}, storage_reader=reader(folder))
    assert training.number == 4
    return training.steps(4)


def killed(folder: Path) -> None:
    """A save after 6 steps, in the middle of which the second rank is killed."""
    training = Training()
    dcp.load({"training": training}, storage_reader=FileSystemReader(folder))
    training.steps(2)
    archive = checkpoints._archive

    def archive_or_die(*given: Any) -> Any:
        if dist.get_rank() == 1:
            wait_for(lambda: len(list(folder.glob("*.distcp"))) == 4, "both ranks have not begun to save")
            os.kill(os.getpid(), signal.SIGKILL)
        return archive(*given)

    checkpoints._archive = archive_or_die
    dcp.save({"training": training}, storage_writer=FileSystemWriter(folder))


@pytest.mark.slow
def test_saved_while_training_goes_on(folder: Path) -> None:
    wanted, *_ = ranks.run(train, 2, None, TEST_BACKEND="shm")
    found, *_ = ranks.run(train, 2, folder, TEST_BACKEND="shm")
    assert found == wanted
    for number, reader in ((2, dcp.FileSystemReader), (1, FileSystemReader), (3, FileSystemReader)):
        for losses in ranks.run(go_on, number, folder, reader, TEST_BACKEND="shm"):
            assert losses == pytest.approx(wanted[4:], rel=1e-5)


@pytest.mark.slow
def test_a_rank_killed_while_it_saves_leaves_the_checkpoint_before(folder: Path) -> None:
    wanted, *_ = ranks.run(train, 2, folder, TEST_BACKEND="shm")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(ranks.RankFailed, match=r"(?s)rank 0: exit code 1.*PeerLostError.*rank 1: exit code -9"):
        ranks.run(killed, 2, folder, TEST_BACKEND="shm")
    assert before.items() < {file.name: file.read_bytes() for file in folder.iterdir()}.items()
    (losses,) = ranks.run(go_on, 1, folder, FileSystemReader, TEST_BACKEND="shm")
    assert losses == pytest.approx(wanted[4:], rel=1e-5)
    # The next save removes what the killed one has left.
    ranks.run(train, 1, folder, TEST_BACKEND="shm")
    assert len(list(folder.iterdir())) == 2
