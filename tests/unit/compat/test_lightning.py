# SPDX-License-Identifier: Apache-2.0
"""Lightning's Fabric and Trainer on our accelerator and strategy, where Lightning is installed, and the error else.

`LIGHTNING_FOLDER=/path/of/site-packages` names a folder that has it, for those who do not want it among their packages.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from anyaccel import interop, lightning
from anyaccel.errors import CompatError

FOLDER = os.environ.get("LIGHTNING_FOLDER", "")
SCRIPT = """
import json, pathlib, sys
import torch, torch.distributed as dist
import lightning as L
from anyaccel.interop import use_in_lightning
use_in_lightning()
use_in_lightning()  # once is enough
way, count, precision, ours = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "ours"
chosen = {"accelerator": "anyaccel", "strategy": "anyaccel"} if ours else {"accelerator": "cpu", "strategy": "ddp"}
chosen |= {"devices": count, "precision": precision}
rows = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
losses, dtypes = [], set()

def loss_of(model, batch):
    found = model(batch)
    dtypes.add(str(network[0](batch).dtype))
    return (found.float() - batch.float().sum(1, keepdim=True)).square().mean()

if way == "fabric":
    fabric = L.Fabric(**chosen)
    fabric.launch()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    model, optimizer = fabric.setup(network, optimizer)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(rows, batch_size=4))
    for batch in loader:
        with fabric.autocast():
            loss = loss_of(model, batch)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach()).item())
    assert fabric.device == torch.device("cpu"), fabric.device
else:
    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network
        def training_step(self, batch):
            loss = loss_of(self.network, batch)
            losses.append(self.trainer.strategy.reduce(loss.detach(), reduce_op="mean").item())
            return loss
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)
    trainer = L.Trainer(**chosen, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False)
    trainer.fit(Module(), torch.utils.data.DataLoader(rows, batch_size=4))
result = {"losses": losses, "dtypes": sorted(dtypes), "backend": dist.get_backend(), "size": dist.get_world_size()}
pathlib.Path(f"{way}-{sys.argv[4]}-{dist.get_rank()}.json").write_text(json.dumps(result))
"""


def skip_without_lightning() -> None:
    if not FOLDER and importlib.util.find_spec("lightning") is None:
        pytest.skip("Lightning is not installed: LIGHTNING_FOLDER=/folder/that/has/it")


def train(folder: Path, way: str, count: int, precision: str, whose: str, launch: bool) -> dict[str, object]:
    (folder / "train.py").write_text(SCRIPT)
    launcher = ["-m", "anyaccel", "run", "--no_local_rank", "--num_accelerators", str(count)] if launch else []
    done = subprocess.run(
        [sys.executable, *launcher, "train.py", way, str(count), precision, whose], cwd=folder,
        env={**os.environ, "PYTHONPATH": FOLDER, "DS_ACCELERATOR": "cpu"}, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, object] = json.loads((folder / f"{way}-{whose}-0.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["fabric", "trainer"])
def test_two_ranks_of_ours_give_the_losses_of_gloo(way: str, tmp_path: Path) -> None:
    skip_without_lightning()
    ours = train(tmp_path, way, 2, "32-true", "ours", launch=True)
    theirs = train(tmp_path, way, 2, "32-true", "theirs", launch=True)
    assert (ours["backend"], theirs["backend"]) == ("shm", "gloo")
    assert ours["size"] == theirs["size"] == 2
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    assert ours["losses"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["fabric", "trainer"])
def test_it_starts_ranks_itself_and_mixed_precision_is_that_of_the_device(way: str, tmp_path: Path) -> None:
    skip_without_lightning()
    found = train(tmp_path, way, 2, "bf16-mixed", "ours", launch=False)
    assert (found["size"], found["backend"]) == (2, "shm")
    assert found["dtypes"] == ["torch.bfloat16"]


def test_without_lightning_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

    monkeypatch.setattr(lightning.importlib, "import_module", missing)
    with pytest.raises(CompatError, match="pip install lightning"):
        interop.use_in_lightning()


def test_a_lightning_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'torchmetrics'", name="torchmetrics")

    monkeypatch.setattr(lightning.importlib, "import_module", missing)
    with pytest.raises(CompatError, match=r"lightning\.fabric cannot be imported: No module named 'torchmetrics'"):
        interop.use_in_lightning()
