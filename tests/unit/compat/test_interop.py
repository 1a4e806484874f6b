# SPDX-License-Identifier: Apache-2.0
"""Our accelerator in a real DeepSpeed, where one is installed, and the errors where none is."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from anyaccel import compat, interop
from anyaccel.errors import CompatError

# A folder with DeepSpeed and what it needs, for those who do not want it among their packages: `make bench-peers`
# makes one.
_PEERS = sorted((Path(__file__).parents[3] / ".venv-bench" / "lib").glob("python3.*/site-packages/deepspeed"))
FOLDER = os.environ.get("DEEPSPEED_FOLDER", str(_PEERS[0].parent) if _PEERS else "")

TRAINING = """
import os, socket
import anyaccel.interop
ours = anyaccel.interop.use_in_deepspeed()
import deepspeed, torch
from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator, is_current_accelerator_supported
assert get_accelerator() is ours and isinstance(ours, DeepSpeedAccelerator), get_accelerator()
assert is_current_accelerator_supported()
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
    "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
})
assert type(engine.optimizer.optimizer).__name__ == "FusedAdam"
x = torch.randn(4, 8, dtype=torch.bfloat16)
losses = []
for _ in range(8):
    loss = engine(x).pow(2).mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 2, losses
assert type(get_accelerator().create_op_builder("CPUAdamBuilder")).__module__.startswith("anyaccel.")
assert torch.distributed.get_backend() == "shm"
assert os.listdir(os.environ["TORCH_EXTENSIONS_DIR"]) == [], "DeepSpeed has compiled an op of its own"
deepspeed.comm.destroy_process_group()
print("trained with", type(get_accelerator()).__name__)
"""


def skip_without_deepspeed():
    spec = importlib.util.find_spec("deepspeed")
    if not FOLDER and (spec is None or compat._is_alias(spec.origin or "")):
        pytest.skip("DeepSpeed is not installed: make bench-peers, or DEEPSPEED_FOLDER=/folder/that/has/it")


def test_the_real_deepspeed_trains_with_zero_on_our_cpu_backend(tmp_path):
    skip_without_deepspeed()
    variables = {"PYTHONPATH": FOLDER, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", TRAINING], env={**os.environ, **variables}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "trained with CpuAccelerator"


OPTIMIZERS = """
import os, sys
import deepspeed, torch  # before ours: its modules have its own builders by now
from deepspeed.ops.adam import cpu_adam
own = cpu_adam.CPUAdamBuilder
import anyaccel.interop
anyaccel.interop.use_in_deepspeed()
from deepspeed.ops.adagrad import cpu_adagrad
from deepspeed.ops.lion import cpu_lion, fused_lion
from deepspeed.runtime.swap_tensor import partitioned_optimizer_swapper as swapper
assert own.__module__.startswith("deepspeed."), own
for kind in (cpu_adam.CPUAdamBuilder, cpu_adagrad.CPUAdagradBuilder, cpu_lion.CPULionBuilder,
             fused_lion.FusedLionBuilder, swapper.AsyncIOBuilder, deepspeed.ops.op_builder.FusedAdamBuilder):
    assert kind.__module__.startswith("anyaccel."), kind
deepspeed.init_distributed()
x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

def losses(step, model):
    found = []
    for _ in range(8):
        loss = model(x).pow(2).mean()
        step(loss)
        found.append(loss.item())
    return found

def network(width):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

def by_torch(kind, width=32, lr=1e-2):
    from anyaccel.ops.lion import CPULion
    model = network(width)
    lr = {"lr": lr}
    optimizer = {
        "AdamW": lambda: torch.optim.AdamW(model.parameters(), weight_decay=0.0, **lr),
        "Adam": lambda: torch.optim.AdamW(model.parameters(), weight_decay=0.0, **lr),
        "Lion": lambda: CPULion(model.parameters(), **lr),
        "Adagrad": lambda: torch.optim.Adagrad(model.parameters(), **lr),
    }[kind]()
    def step(loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses(step, model)

def by_deepspeed(kind, place, width=32, lr=1e-2):
    files = {"device": place, "nvme_path": os.getcwd()}
    zero = {"stage": 3 if place == "nvme" else 2}
    if place != "none":
        zero["offload_optimizer"] = files
    if place == "nvme":
        zero |= {"offload_param": {**files, "buffer_size": 1 << 20}, "sub_group_size": 1 << 19}
    model = network(width)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": zero,
        "optimizer": {"type": kind, "params": {"lr": lr}},
    })
    def step(loss):
        engine.backward(loss)
        engine.step()
    return losses(step, engine)

for kind in ("AdamW", "Adam", "Lion", "Adagrad"):
    for place in ("none", "cpu"):
        got, expected = by_deepspeed(kind, place), by_torch(kind)
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5, msg=lambda text: f"{kind} {place}: {text}")
wide = {"width": 1 << 16, "lr": 1e-6}  # it leaves tensors below 1 MiB in memory
got, expected = by_deepspeed("AdamW", "nvme", **wide), by_torch("AdamW", **wide)
assert got[-1] < got[0] * 0.9, got
torch.testing.assert_close(got, expected, rtol=2e-2, atol=1e-3)  # parameters in files are bfloat16
assert any(name.endswith(".swp") for _, _, names in os.walk(os.getcwd()) for name in names), "nothing is in files"
extensions = os.environ["TORCH_EXTENSIONS_DIR"]
assert os.listdir(extensions) == [], "DeepSpeed has compiled an op of its own"
deepspeed.comm.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_its_optimizers_and_its_offload_to_files_use_our_kernels(tmp_path):
    skip_without_deepspeed()
    extensions = tmp_path / "extensions"
    extensions.mkdir()
    (tmp_path / "optimizers.py").write_text(OPTIMIZERS)
    variables = {"PYTHONPATH": FOLDER, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(extensions)}
    done = subprocess.run(
        [sys.executable, "-m", "anyaccel", "run", "--no_local_rank", "--num_accelerators", "1", "optimizers.py"],
        env={**os.environ, **variables}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


CANNOT = """
import pathlib
import anyaccel.interop
ours = anyaccel.interop.use_in_deepspeed()
import deepspeed, torch

def error(begin):
    try:
        begin()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("there was no error")

def initialize(**config):
    model = torch.nn.Linear(8, 8)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}, **config}
    return lambda: deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

def zero(**more):
    return initialize(zero_optimization={"stage": 3, **more})

deepspeed.init_distributed()
pathlib.Path("file").touch()
for begin, wanted in (
    (initialize(optimizer={"type": "Lamb"}), "neither DeepSpeed nor anyaccel has the op FusedLamb for cpu"),
    (initialize(optimizer={"type": "OneBitAdam"}), "OneBitAdam is not a supported DeepSpeed Optimizer"),
    (zero(zero_quantized_weights=True), "neither DeepSpeed nor anyaccel has the op Quantizer for cpu"),
    (zero(offload_optimizer={"device": "nvme", "nvme_path": "file"}), "Not a directory: 'file/"),
    (zero(offload_optimizer={"device": "cpu", "super_offload": True}), "SuperOffload only supports NVIDIA CUDA GPUs"),
    (initialize(sparse_attention={"mode": "fixed"}), "Sparse Attention has been removed"),
    (lambda: deepspeed.ops.op_builder.DeepCompileBuilder().load(), "has the op DeepCompile for cpu"),
):
    assert wanted in (got := error(begin)), got
if not ours.is_fp16_supported():
    assert "fp16 is not supported" in (got := error(initialize(fp16={"enabled": True}))), got
deepspeed.comm.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_cannot_work_says_so_before_the_first_step(tmp_path):
    skip_without_deepspeed()
    (tmp_path / "cannot.py").write_text(CANNOT)
    variables = {"PYTHONPATH": FOLDER, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "anyaccel", "run", "--no_local_rank", "--num_accelerators", "1", "cannot.py"],
        env={**os.environ, **variables}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


STAGES = """
import json, os, pathlib, sys
import anyaccel.interop
anyaccel.interop.use_in_deepspeed()
import anyaccel.comm, deepspeed, torch, torch.distributed as dist
deepspeed.init_distributed(dist_backend=sys.argv[1])
losses = {}
for stage in range(4):
    for bf16 in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
            "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": bf16}, "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        })
        torch.manual_seed(dist.get_rank())
        x = torch.randn(4, 8, dtype=torch.bfloat16 if bf16 else torch.float32)
        for _ in range(8):
            loss = engine(x).pow(2).mean()
            engine.backward(loss)
            engine.step()
            losses.setdefault(f"stage {stage}, {x.dtype}", []).append(loss.item())
summed = deepspeed.comm.inference_all_reduce(torch.full((5,), dist.get_rank() + 1.0, dtype=torch.bfloat16))
assert summed.tolist() == [3.0] * 5, summed
pathlib.Path(f"{sys.argv[1]}{dist.get_rank()}").write_text(json.dumps(losses))
deepspeed.comm.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_stage_of_zero_on_two_ranks_gives_the_losses_of_gloo(tmp_path):
    skip_without_deepspeed()
    (tmp_path / "stages.py").write_text(STAGES)
    variables = {"PYTHONPATH": FOLDER, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    run_ranks = [sys.executable, "-m", "anyaccel", "run", "--no_local_rank", "--num_accelerators", "2", "stages.py"]
    for backend in ("gloo", "shm"):
        done = subprocess.run(
            [*run_ranks, backend], env={**os.environ, **variables}, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        losses = json.loads((tmp_path / f"shm{rank}").read_text())
        assert len(losses) == 8
        assert losses == json.loads((tmp_path / f"gloo{rank}").read_text())
        assert all(found[-1] < found[0] / 2 for found in losses.values())


def run(tmp_path, **variables):
    code = "import anyaccel.interop as i\ntry: i.use_in_deepspeed()\nexcept Exception as e: print(type(e).__name__, e)"
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", **variables}
    return subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout


def test_the_alias_is_not_the_real_one(tmp_path):
    said = run(tmp_path, **compat.job_environment({}))
    assert said.startswith("CompatError deepspeed is anyaccel's alias here (")


def test_a_deepspeed_that_cannot_be_imported_is_named(tmp_path):
    (tmp_path / "deepspeed.py").write_text("raise RuntimeError('no compiler')")
    assert run(tmp_path, PYTHONPATH=str(tmp_path)) == (
        "CompatError DeepSpeed cannot be imported: RuntimeError: no compiler\n"
    )
    (tmp_path / "deepspeed.py").write_text("import hjson_that_is_missing")
    assert "No module named 'hjson_that_is_missing'" in run(tmp_path, PYTHONPATH=str(tmp_path))


def test_without_deepspeed_it_says_what_to_install(monkeypatch):
    real = importlib.import_module

    def missing(name, *rest):
        if name == "deepspeed":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest)

    monkeypatch.setattr(interop.importlib, "import_module", missing)
    with pytest.raises(CompatError, match=r"pip install deepspeed; or use `anyaccel compat install`"):
        interop.use_in_deepspeed()


def test_the_repository_has_no_deepspeed_of_its_own():
    """The alias's folder is on sys.path only for those who ask."""
    assert str(compat.ALIAS_ROOT) not in sys.path
    assert sorted(path.name for path in Path(compat.ALIAS_ROOT).iterdir() if path.name != "__pycache__") == [
        "__init__.py",
        "deepspeed",
    ]
