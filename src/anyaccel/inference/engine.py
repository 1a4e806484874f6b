# SPDX-License-Identifier: Apache-2.0
"""`init_inference`: an unmodified causal LM, divided among ranks, in the dtype that was asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from anyaccel import comm
from anyaccel.accelerator import get_accelerator
from anyaccel.errors import UsageError
from anyaccel.inference.config import InferenceConfig
from anyaccel.inference.loading import model_folder, skeleton, weights_for
from anyaccel.inference.tp.apply import LoadedWeights, WeightSource, apply
from anyaccel.inference.tp.plan import TensorParallelPlan, make_plan

logger = logging.getLogger(__name__)

# Tensor-parallel groups of this rank by tp_size, for each default group: engines share them.
_groups: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()

Progress = Callable[[int, int], object]


class InferenceEngine(nn.Module):
    """A model that is ready for inference on this rank; call it as the Hugging Face model.

    Attributes:
        module: the Hugging Face model, holding this rank's shards.
        plan: which parts those are.
        dtype: of the weights.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: TensorParallelPlan,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.module = module
        self.plan = plan
        self.dtype = dtype
        self.group = group

    @property
    def tp_size(self) -> int:
        """Ranks that share this model."""
        return self.plan.size

    @property
    def tp_rank(self) -> int:
        """This rank's place among them."""
        return self.plan.rank

    @property
    def config(self) -> Any:
        """The Hugging Face configuration, unchanged."""
        return self.module.config

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.module.parameters()).device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own forward; every rank of the group must call it with the same input."""
        return self.module(*args, **kwargs)

    @torch.inference_mode()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own `generate`; every rank must call it with the same arguments and gets the same tokens.

        Rank 0's random state and scores are used by all, so that sampling cannot drift apart.
        """
        if self.tp_size > 1:
            if kwargs.get("max_time") is not None:
                raise UsageError("max_time ends each rank at another token: use max_new_tokens with tensor parallelism")
            from transformers import LogitsProcessorList

            accelerator = get_accelerator()
            state = accelerator.get_rng_state().to(self.device)
            accelerator.set_rng_state(comm.inference_broadcast(state, group=self.group).cpu())
            processors = LogitsProcessorList(kwargs.pop("logits_processor", None) or [])
            processors.append(lambda _ids, scores: comm.inference_broadcast(scores, group=self.group))
            kwargs["logits_processor"] = processors
        return self.module.generate(*args, **kwargs)  # type: ignore[operator]


def init_inference(
    model: nn.Module | str | Path,
    config: Mapping[str, object] | None = None,
    *,
    progress: Progress | None = None,
    **options: object,
) -> InferenceEngine:
    """Make a causal LM ready for inference, tensor-parallel over the ranks of this job.

    Args:
        model: a Hugging Face causal LM, or the path of a model folder or `.gguf` file. From a path each rank reads only
            its own shards; a model in memory is cut down to them.
        config: options as a dict; keyword arguments go before it.
        progress: called with (bytes loaded, bytes in all) of this rank while weights load.
        dtype: of weights and arithmetic: torch.bfloat16 (default), torch.float16, torch.float32, or a name.
        tensor_parallel: `{"tp_size": n}`; consecutive ranks form a group of n. Default 1.

    Returns:
        The engine; `engine(input_ids, ...)` and `engine.generate(...)` are the model's own.

    Raises:
        UsageError: an option is wrong, or there are fewer ranks than tp_size.
        ModelError: the model cannot be read or divided.
    """
    settings = InferenceConfig.from_options({**(config or {}), **options})
    tp_size = settings.tensor_parallel.tp_size
    group, rank = _tp_group(tp_size)
    source: WeightSource
    if isinstance(model, nn.Module):
        module, source = model.eval(), LoadedWeights(model)
        if any(p.is_meta for p in model.parameters()):
            raise UsageError("the model is on the meta device: give init_inference the path of its checkpoint instead")
    else:
        folder = model_folder(model)
        module = skeleton(folder, settings.dtype)
        source = weights_for(module, folder)
    plan = make_plan(module, rank, tp_size)
    for name, why in plan.whole.items():
        logger.info("%s stays whole on every rank: %s", name, why)
    total = sum(_local_bytes(plan, name, p, settings.dtype) for name, p in module.named_parameters())
    done = 0

    def report(loaded: int) -> None:
        nonlocal done
        done += loaded
        if progress is not None:
            progress(done, total)

    apply(module, plan, source, settings.dtype, get_accelerator().device(), group, report)
    return InferenceEngine(module, plan, settings.dtype, group)


def _local_bytes(plan: TensorParallelPlan, name: str, parameter: nn.Parameter, dtype: torch.dtype) -> int:
    part = plan.slices.get(name)
    count = parameter.numel()
    if part is not None:
        count = count // parameter.shape[part.dim] * len(part)
    return count * (dtype.itemsize if parameter.is_floating_point() else parameter.element_size())


def _tp_group(tp_size: int) -> tuple[dist.ProcessGroup | None, int]:
    """The group of consecutive ranks that this rank belongs to, and its place in it."""
    accelerator = get_accelerator()
    accelerator.set_device(comm.get_local_rank())
    if tp_size == 1:
        return None, 0
    comm.init_distributed()
    world = comm.get_world_size()
    if world % tp_size:
        raise UsageError(
            f"tensor_parallel tp_size={tp_size} does not divide the {world} ranks of this job; start it with "
            f"`anyaccel run --num_accelerators {tp_size} ...`"
        )
    everyone = dist.group.WORLD
    if world == tp_size or everyone is None:
        return everyone, comm.get_rank()
    groups = _groups.setdefault(everyone, {})
    if tp_size not in groups:
        for first in range(0, world, tp_size):  # every rank takes part in making every group
            made = comm.new_group(list(range(first, first + tp_size)))
            if first <= comm.get_rank() < first + tp_size:
                groups[tp_size] = made
    return groups[tp_size], comm.get_rank() % tp_size
