#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small Llama with the real DeepSpeed in many settings, on our parts and on DeepSpeed's own, and compares.

python tools/deepspeed_matrix.py                         all settings, 1, 2 and 4 ranks, into docs/data/deepspeed.json
python tools/deepspeed_matrix.py --ranks 4 --missing    those of them that the file has not
python tools/deepspeed_matrix.py --ranks 2 --only zero-2 --folder /tmp/m    one of them; nothing is written

Run it with a Python that has DeepSpeed beside anyaccel (`make bench-peers` makes .venv-bench). DeepSpeed's own side is
its CPU accelerator, gloo, and its optimizers, which it compiles once (minutes). Where ours offloads to files, its own
offloads to memory, which needs no libaio. `tools/pages.py support` makes the table. A run with --ranks replaces those
columns only.

A rank is one process that forks another for each setting, so that one that fails or hangs leaves the others alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "data" / "deepspeed.json"
SIDES = ("ours", "theirs")
STEPS = 20
SEQUENCE = 32
GLOBAL_BATCH = 8  # sequences of a step, divided among the ranks that work on different data
LIMIT = 300  # seconds that one setting may take
PIECE = 8  # settings that the same processes run, after which the cells are written


@dataclass(frozen=True)
class Setting:
    """One row of the table.

    Attributes:
        says: what it is, in the table.
        config: DeepSpeed's, beside optimizer and batch size.
        run: the function that trains and gives the losses.
        bf16: train in bf16.
        limit: the largest relative difference of a loss that rounding explains.
        wide: tensors above 1 MiB, below which DeepSpeed leaves them in memory.
        ranks: numbers of ranks that it makes sense on.
    """

    says: str
    config: dict[str, Any] = field(default_factory=dict)
    run: Callable[[Setting, Path], list[float]] = lambda setting, folder: train(setting)
    bf16: bool = False
    limit: float = 1e-5
    wide: bool = False
    ranks: tuple[int, ...] = (1, 2, 4)
    extra: dict[str, Any] = field(default_factory=dict)


def zero(stage: int, **more: Any) -> dict[str, Any]:
    # Without the threshold, stage 3 would keep all parameters of a small model whole on every rank.
    parameters = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {"zero_optimization": {"stage": stage, **parameters, **more}}


# Training ---------------------------------------------------------------------------------------------------


def llama(wide: bool = False, **more: Any) -> Any:
    from transformers import LlamaConfig

    sizes = (256, 1024, 4096) if wide else (64, 176, 512)
    return LlamaConfig(
        hidden_size=sizes[0], intermediate_size=sizes[1], vocab_size=sizes[2], num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, use_cache=False, **more,
    )  # fmt: skip


def new_model(setting: Setting) -> Any:
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(llama(setting.wide))
    if setting.extra.get("checkpointing"):
        import deepspeed

        deepspeed.checkpointing.configure(None, num_checkpoints=len(model.model.layers))
        for layer in model.model.layers:
            inner = layer.forward
            layer.forward = lambda hidden, inner=inner, **options: deepspeed.checkpointing.checkpoint(
                lambda states: inner(states, **options), hidden
            )
    return model


def batch(step: int, size: int, vocabulary: int, part: int = 0, parts: int = 1) -> Any:
    """This part of the sequences of a step: the same for every number of ranks."""
    import torch

    generator = torch.Generator().manual_seed(1000 + step)
    # Half of the tokens repeat, so that there is something to learn.
    whole = torch.randint(0, vocabulary // 8, (size, SEQUENCE // 2), generator=generator).repeat_interleave(2, 1)
    return whole.chunk(parts)[part]


def full_config(setting: Setting, parts: int) -> dict[str, Any]:
    accumulation = setting.config.get("gradient_accumulation_steps", 1)
    config = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // parts // accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "steps_per_print": 1 << 30,
        **setting.config,
    }
    return config | ({"bf16": {"enabled": True}} if setting.bf16 else {})


def initialize(setting: Setting, model: Any, parts: int, **more: Any) -> Any:
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=full_config(setting, parts), **more
    )
    return engine


def mean_loss(loss: Any) -> float:
    """Over all ranks, added in rank order."""
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, loss.item())
    return math.fsum(found) / len(found)


def steps(engine: Any, setting: Setting, numbers: range, part: int, parts: int) -> list[float]:
    vocabulary = llama(setting.wide).vocab_size
    accumulation = engine.gradient_accumulation_steps()
    losses = []
    for step in numbers:
        own = batch(step, GLOBAL_BATCH, vocabulary, part, parts)
        found = 0.0
        for micro in own.chunk(accumulation):
            loss = engine(input_ids=micro, labels=micro).loss
            engine.backward(loss)
            engine.step()
            found += mean_loss(loss) / accumulation
        losses.append(found)
    return losses


def train(setting: Setting) -> list[float]:
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    engine = initialize(setting, new_model(setting), size)
    return steps(engine, setting, range(STEPS), rank, size)


def train_tensor_parallel(setting: Setting, folder: Path) -> list[float]:
    """AutoTP over all ranks: each has the same data."""
    import torch.distributed as dist

    setting.config["tensor_parallel"] = {"autotp_size": dist.get_world_size()}
    engine = initialize(setting, new_model(setting), 1)
    return steps(engine, setting, range(STEPS), 0, 1)


def train_ulysses(setting: Setting, folder: Path) -> list[float]:
    """Each rank has a part of every sequence; attention exchanges heads for positions."""
    import torch
    import torch.distributed as dist
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers import LlamaForCausalLM

    rank, size = dist.get_rank(), dist.get_world_size()
    setting.config["sequence_parallel_size"] = size
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama(attn_implementation="sdpa"))
    groups = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=size,
        micro_batch_size=GLOBAL_BATCH, seq_length=SEQUENCE, seq_length_is_variable=True,
    )  # fmt: skip
    if groups is not None:  # it registers what the next model will ask for
        torch.manual_seed(0)
        model = LlamaForCausalLM(llama(attn_implementation="sdpa"))
    engine = initialize(setting, model, 1, mpu=groups)
    losses = []
    for step in range(STEPS):
        whole = batch(step, GLOBAL_BATCH, 512)
        labels = torch.nn.functional.pad(whole[:, 1:], (0, 1), value=-100)
        positions = torch.arange(SEQUENCE).expand(GLOBAL_BATCH, SEQUENCE)
        own, own_labels, own_positions = (tensor.chunk(size, 1)[rank] for tensor in (whole, labels, positions))
        logits = engine(input_ids=own, position_ids=own_positions).logits
        summed = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), own_labels.flatten(), ignore_index=-100, reduction="sum"
        )
        summed = torch.distributed.nn.functional.all_reduce(summed) if size > 1 else summed
        loss = summed / int((labels != -100).sum())
        engine.backward(loss)
        engine.step()
        losses.append(mean_loss(loss))
    return losses


def pipeline_layers(stages: int) -> Any:
    import torch
    from deepspeed.pipe import LayerSpec, PipelineModule
    from torch.nn.functional import cross_entropy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

    config = llama(attn_implementation="sdpa")

    class Block(torch.nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.layer, self.rotary = LlamaDecoderLayer(config, number), LlamaRotaryEmbedding(config)

        def forward(self, hidden: Any) -> Any:
            turns = self.rotary(hidden, torch.arange(hidden.shape[1])[None])
            out = self.layer(hidden, position_embeddings=turns, attention_mask=None)
            return out[0] if isinstance(out, tuple) else out

    def loss(logits: Any, labels: Any) -> Any:
        return cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())

    torch.manual_seed(0)
    return PipelineModule(
        [
            LayerSpec(torch.nn.Embedding, config.vocab_size, config.hidden_size),
            *(LayerSpec(Block, number) for number in range(config.num_hidden_layers)),
            LayerSpec(LlamaRMSNorm, config.hidden_size, eps=config.rms_norm_eps),
            LayerSpec(torch.nn.Linear, config.hidden_size, config.vocab_size, bias=False),
        ],
        num_stages=stages, loss_fn=loss, partition_method="uniform", base_seed=0, seed_layers=True,
    )  # fmt: skip


def train_pipeline(setting: Setting, folder: Path) -> list[float]:
    """Two stages, and data parallelism over what is left of the ranks."""
    import deepspeed
    import torch.distributed as dist

    size = dist.get_world_size()
    stages = min(size, 2)
    replicas = size // stages
    model = pipeline_layers(stages)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        config=full_config(setting, replicas),
    )  # fmt: skip
    replica = engine.grid.get_data_parallel_rank()

    def micro_batches() -> Iterator[Any]:
        for step in range(STEPS):
            own = batch(step, GLOBAL_BATCH, 512, replica, replicas)
            for micro in own.chunk(engine.gradient_accumulation_steps()):
                yield micro, micro

    data = micro_batches()
    return [mean_loss(engine.train_batch(data)) for _ in range(STEPS)]


def train_before(setting: Setting, folder: Path) -> list[float]:
    """Half of the steps, a checkpoint, and that made universal."""
    import deepspeed.comm as dist
    from deepspeed.checkpoint.ds_to_universal import main as convert

    engine = initialize(setting, new_model(setting), dist.get_world_size())
    losses = steps(engine, setting, range(STEPS // 2), dist.get_rank(), dist.get_world_size())
    state = {"universal_checkpoint_info": {}, "iteration": STEPS // 2}
    engine.save_checkpoint(str(folder), tag="half", client_state=state)
    dist.barrier()
    if dist.get_rank() == 0:
        convert(
            argparse.Namespace(
                input_folder=str(folder / "half"), output_folder=str(folder / "half_universal"), num_extract_workers=1,
                num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=False,
            )
        )  # fmt: skip
    dist.barrier()
    return losses


def train_after(setting: Setting, folder: Path) -> list[float]:
    """The other half, from the universal checkpoint."""
    import torch.distributed as dist

    setting.config["checkpoint"] = {"load_universal": True}
    engine = initialize(setting, new_model(setting), dist.get_world_size())
    engine.load_checkpoint(str(folder), tag="half_universal")
    return steps(engine, setting, range(STEPS // 2, STEPS), dist.get_rank(), dist.get_world_size())


# The rows ---------------------------------------------------------------------------------------------------

MEMORY = {"device": "cpu"}
FILES = {"device": "nvme", "nvme_path": "FOLDER"}
PARAMETER_FILES = {**FILES, "buffer_size": 2 << 20, "buffer_count": 8}
# Name -> what is done, on which part of the ranks: two phases, of which the second goes on from the first.
RESUMED = {"fewer": (1.0, 0.5), "more": (0.5, 1.0)}

SETTINGS: dict[str, Setting] = {
    **{f"zero-{stage}": Setting(f"ZeRO {stage}", zero(stage)) for stage in range(4)},
    **{f"zero-{stage}-bf16": Setting(f"ZeRO {stage}, bf16", zero(stage), bf16=True) for stage in range(4)},
    **{
        f"zero-{stage}-optimizer-cpu": Setting(
            f"ZeRO {stage}, optimizer offloaded to memory", zero(stage, offload_optimizer=MEMORY)
        )
        for stage in (1, 2, 3)
    },
    "zero-3-all-cpu": Setting(
        "ZeRO 3, optimizer and parameters offloaded to memory",
        zero(3, offload_optimizer=MEMORY, offload_param=MEMORY),
    ),
    "zero-3-bf16-all-cpu": Setting(
        "ZeRO 3, bf16, optimizer and parameters offloaded to memory",
        zero(3, offload_optimizer=MEMORY, offload_param=MEMORY),
        bf16=True,
    ),
    "zero-3-optimizer-files": Setting(
        "ZeRO 3, optimizer offloaded to files", zero(3, offload_optimizer=FILES), wide=True
    ),
    "zero-3-bf16-all-files": Setting(
        "ZeRO 3, bf16, optimizer and parameters offloaded to files",
        zero(3, offload_optimizer=FILES, offload_param=PARAMETER_FILES),
        bf16=True,
        wide=True,
    ),
    **{
        f"zero-{stage}-accumulation": Setting(
            f"ZeRO {stage}, gradients of 2 micro batches accumulated",
            {**zero(stage), "gradient_accumulation_steps": 2},
        )
        for stage in (2, 3)
    },
    **{
        f"zero-{stage}-clipping": Setting(
            f"ZeRO {stage}, gradients clipped", {**zero(stage), "gradient_clipping": 0.1}
        )
        for stage in (2, 3)
    },
    **{
        f"zero-{stage}-checkpointing": Setting(
            f"ZeRO {stage}, activation checkpointing", zero(stage), extra={"checkpointing": True}
        )
        for stage in (1, 3)
    },
    **{
        f"zero-2-{name.lower()}": Setting(
            f"ZeRO 2, {name}", {**zero(2), "optimizer": {"type": name, "params": {"lr": 1e-3}}}
        )
        for name in ("Adam", "Adagrad")
    },
    **{
        f"zero-2-{name.lower()}-cpu": Setting(
            f"ZeRO 2, {name}, optimizer offloaded to memory",
            {**zero(2, offload_optimizer=MEMORY), "optimizer": {"type": name, "params": {"lr": rate}}},
            limit=limit,
        )
        # Lion's step is a sign, which rounding may turn where a direction is near zero.
        for name, rate, limit in (("Lion", 1e-4, 1e-4), ("Adagrad", 1e-3, 1e-5))
    },
    "pipeline": Setting("pipeline of 2 stages", {"gradient_accumulation_steps": 2}, train_pipeline),
    "pipeline-zero-1": Setting(
        "pipeline of 2 stages, ZeRO 1", {**zero(1), "gradient_accumulation_steps": 2}, train_pipeline
    ),
    **{
        f"autotp-zero-{stage}": Setting(f"AutoTP, ZeRO {stage}", zero(stage), train_tensor_parallel, ranks=(2, 4))
        for stage in (0, 1)
    },
    **{
        f"ulysses-zero-{stage}": Setting(f"Ulysses, ZeRO {stage}", zero(stage), train_ulysses, ranks=(2, 4))
        for stage in (1, 3)
    },
    **{
        f"universal-zero-{stage}-{name}": Setting(
            f"ZeRO {stage}, universal checkpoint, resumed on {name} ranks", zero(stage), ranks=(2, 4),
            extra={"phases": phases},
        )
        for stage in (1, 2, 3)
        for name, phases in RESUMED.items()
    },
}  # fmt: skip


# A rank -----------------------------------------------------------------------------------------------------


def phases_of(setting: Setting) -> list[tuple[Callable[[Setting, Path], list[float]], float]]:
    """What is run in turn, each on this share of the ranks."""
    if "phases" not in setting.extra:
        return [(setting.run, 1.0)]
    return list(zip((train_before, train_after), setting.extra["phases"], strict=True))


def worker(order: dict[str, Any]) -> None:
    """One rank: every setting in a process of its own, with its losses or its error in a file."""
    import torch

    torch.set_num_threads(1)
    if order["side"] == "ours":
        import anyaccel.interop

        anyaccel.interop.use_in_deepspeed()
    import deepspeed  # what every setting needs, once
    import deepspeed.pipe
    import transformers.models.llama.modeling_llama  # noqa: F401

    if order["side"] == "theirs":
        # Its op for inference_all_reduce takes minutes to compile, and training has no use for it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = Path(order["folder"])
    for name, ports in order["ports"].items():
        losses: list[float] = []
        answer: dict[str, Any] = {}
        for (run, share), port in zip(phases_of(SETTINGS[name]), ports, strict=True):
            ranks = max(1, round(size * share))
            if rank < ranks and not answer.get("error"):
                variables = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
                answer = forked(order["side"], name, run, folder / name, variables)
                losses += answer.get("losses", [])
        (folder / f"{name}.{rank}.json").write_text(json.dumps(answer | {"losses": losses}))


def forked(side: str, name: str, run: Any, folder: Path, variables: dict[str, int]) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.environ.update({key: str(value) for key, value in variables.items()})
        os.environ |= {"LOCAL_SIZE": os.environ["WORLD_SIZE"], "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
        with os.fdopen(writing, "w") as out:
            json.dump(attempt(side, name, run, folder), out)
        os._exit(0)
    os.close(writing)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.alarm(LIMIT)
    with os.fdopen(reading) as out:
        text = out.read()
    signal.alarm(0)
    os.waitpid(child, 0)
    return dict(json.loads(text)) if text else {"error": f"ended, or took more than {LIMIT} s"}


def attempt(side: str, name: str, run: Any, folder: Path) -> dict[str, Any]:
    import deepspeed

    setting = SETTINGS[name]
    sections = setting.config.get("zero_optimization", {})
    for section, place in sections.items():
        if isinstance(place, dict) and place.get("nvme_path"):
            sections[section] = {**place, "nvme_path": str(folder)} if side == "ours" else MEMORY
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    try:
        deepspeed.init_distributed(dist_backend=os.environ["MATRIX_BACKEND"])
        losses = run(setting, folder)
        deepspeed.comm.destroy_process_group()
    except BaseException as error:  # noqa: BLE001  # whatever a setting raises is its result
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
    return {"losses": losses, "seconds": round(time.perf_counter() - begin, 1)}


# The whole --------------------------------------------------------------------------------------------------


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


# Compiled before the ranks start, in the cache of torch.utils.cpp_extension: two ranks that compile wait for a lock.
BUILD = """
from deepspeed.ops import op_builder
for name in ("CPUAdam", "CPUAdagrad", "CPULion", "FusedAdam"):
    getattr(op_builder, f"{name}Builder")().load(verbose=False)
"""


def build_their_ops() -> None:
    subprocess.run([sys.executable, "-c", BUILD], env=os.environ | {"DS_ACCELERATOR": "cpu"}, check=True, timeout=1800)


def launch(side: str, ranks: int, names: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Run these settings; each one's losses or error."""
    folder.mkdir(parents=True)
    ports = {name: free_ports(len(phases_of(SETTINGS[name]))) for name in names}
    order = folder / "order.json"
    order.write_text(json.dumps({"side": side, "ports": ports, "folder": str(folder)}))
    command = [sys.executable, "-m", "anyaccel", "run", "--no_local_rank", "--num_accelerators", str(ranks)]
    variables = {"DS_ACCELERATOR": "cpu", "MATRIX_BACKEND": "shm" if side == "ours" else "gloo"}
    with (folder / "log").open("w") as log:
        subprocess.run(
            [*command, __file__, "--worker", str(order)],
            env=os.environ | variables, stdout=log, stderr=subprocess.STDOUT, check=False,
            timeout=LIMIT * len(names),
        )  # fmt: skip
    found = {}
    for name in names:
        answers = [
            json.loads(file.read_text()) if file.exists() else {"error": f"see {folder / 'log'}"}
            for file in (folder / f"{name}.{rank}.json" for rank in range(ranks))
        ]
        # All ranks have the same losses, but for those that did not take part in a phase; of errors the first counts.
        failed = [answer for answer in answers if "error" in answer]
        found[name] = failed[0] if failed else max(answers, key=lambda answer: len(answer["losses"]))
    return found


def cells() -> dict[str, Any]:
    return dict(json.loads(RESULTS.read_text())["settings"]) if RESULTS.exists() else {}


def write(table: dict[str, dict[str, Any]]) -> None:
    """Into the file that the page is made of; columns that were not run stay."""
    from importlib.metadata import version

    known = cells()
    settings = {
        name: {
            "says": setting.says,
            "limit": 1e-3 if setting.bf16 else setting.limit,
            "ranks": {**known.get(name, {}).get("ranks", {}), **table.get(name, {})},
        }
        for name, setting in SETTINGS.items()
    }
    versions = {"deepspeed": version("deepspeed"), "torch": version("torch")}
    RESULTS.write_text(json.dumps({"versions": versions, "settings": settings}, indent=1) + "\n")


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """What the table says of one setting with one number of ranks."""
    if "error" in ours or "error" in theirs:
        return {side: found["error"] for side, found in (("ours", ours), ("theirs", theirs)) if "error" in found}
    if not len(ours["losses"]) == len(theirs["losses"]) == STEPS:
        return {"ours": f"{len(ours['losses'])} steps, and theirs {len(theirs['losses'])}"}
    difference = max(abs(a - b) / abs(b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    return {
        "difference": float(f"{difference:.2g}"),
        "first": round(ours["losses"][0], 4),
        "last": round(ours["losses"][-1], 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--missing", action="store_true", help="only what the table lacks")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=SETTINGS, help="these settings; writes nothing")
    parser.add_argument("--folder", type=Path, help="where files of the runs are left")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(json.loads(Path(options.worker).read_text()))
        return 0
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        table: dict[str, dict[str, Any]] = {}
        build_their_ops()
        for ranks in options.ranks:
            known = cells() if options.missing else {}
            names = [
                name
                for name in options.only or SETTINGS
                if ranks in SETTINGS[name].ranks and str(ranks) not in known.get(name, {}).get("ranks", {})
            ]
            for piece in (names[at : at + PIECE] for at in range(0, len(names), PIECE)):
                place = folder / f"{ranks}-{piece[0]}"
                found = {side: launch(side, ranks, piece, place / side) for side in SIDES}
                for name in piece:
                    row = compare(found["ours"][name], found["theirs"][name])
                    table.setdefault(name, {})[str(ranks)] = row
                    print(f"{name} on {ranks}: {row}", flush=True)
                if not options.only:
                    write(table)
    return int(any("ours" in cell for row in table.values() for cell in row.values()))


if __name__ == "__main__":
    sys.exit(main())
