# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer, by accelerate, on backend `shm`: started by the program, or by `ddp_backend="shm"`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ranks
from anyaccel import comm, errors


def train(way: str, port: str, folder: str) -> Any:
    """The losses of a few steps, and a number that tells weights apart."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    os.environ["MASTER_PORT"] = port
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    backend: dict[str, Any] = {}
    if way == "first":
        dist.init_process_group("shm")
    elif way == "named":
        with pytest.raises(ValueError, match="shm is not available"):  # accelerate alone
            PartialState(cpu=True, backend="shm")
        AcceleratorState._reset_state(reset_partial_state=True)
        comm.support_accelerate()
        comm.support_accelerate()  # once is enough
        backend = {"ddp_backend": "shm"}
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **backend,
    )
    assert dist.get_backend() == ("gloo" if way == "gloo" else "shm")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    texts = torch.randint(0, 64, (32, 8), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in texts]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:6])
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    losses.append(trainer.evaluate()["eval_loss"])
    weights = sum(float(parameter.double().abs().sum()) for parameter in model.parameters())
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, weights)
    assert of_ranks == [weights] * len(of_ranks)
    dist.destroy_process_group()
    return losses


def ways(ports: tuple[str, ...], folder: str) -> None:
    port = os.environ["MASTER_PORT"]
    dist.destroy_process_group()
    found = {way: train(way, ports[place], folder) for place, way in enumerate(("gloo", "first", "named"))}
    assert len(found["gloo"]) == 4
    assert found["first"] == pytest.approx(found["gloo"], rel=1e-4)
    assert found["named"] == found["first"]
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo")  # that the test ends with


@pytest.mark.slow  # it trains three times
def test_the_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    ports = tuple(str(ranks.free_port()) for _ in range(3))
    ranks.run(ways, 2, ports, str(tmp_path))


def test_what_accelerate_is_told() -> None:
    state = pytest.importorskip("accelerate.state")
    ranks.run(told, 1)
    assert not hasattr(state.PartialState._prepare_backend, "_anyaccel_takes_shm")  # only on request


def told() -> None:
    from accelerate.state import DistributedType, PartialState

    prepare: Any = PartialState._prepare_backend
    comm.support_accelerate()
    taking: Any = PartialState._prepare_backend
    for cpu in (True, False):
        for backend in (None, "gloo"):
            assert taking(None, cpu, False, backend) == prepare(None, cpu, False, backend)
        assert taking(None, cpu, False, "shm") == ("shm", DistributedType.MULTI_CPU)
    del os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]
    assert taking(None, True, False, "shm") == ("shm", DistributedType.NO)
    del PartialState._prepare_backend
    with pytest.raises(errors.CommError, match="init_process_group"):
        comm.support_accelerate()
